"""The counters on the device agree with the integer arithmetic of the layout."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.cache import layout
from snapstream.config import KVBudget
from snapstream.runner.rows import Rows

budgets = st.builds(KVBudget, num_sink=st.integers(0, 5), num_topk=st.integers(0, 7), num_recent=st.integers(1, 7))


def admit(rows: Rows, row: int, prompt_len: int, next_position: int, budget: KVBudget) -> None:
    rows.admit(torch.tensor([row]), torch.tensor([rows.entry(prompt_len, next_position, budget)]))


@settings(max_examples=200, deadline=None)
@given(owners=st.lists(st.tuples(budgets, st.integers(1, 40)), min_size=3, max_size=3), fed=st.integers(1, 30))
def test_slots_and_lengths_follow_the_layout(owners: list[tuple[KVBudget, int]], fed: int) -> None:
    rows = Rows(3, "cpu")
    for row, (budget, prompt_len) in enumerate(owners):
        admit(rows, row, prompt_len, prompt_len, budget)
    batch = torch.tensor([2, 0, 1])
    for step in range(fed):
        slots, lengths = rows.slots(batch).tolist(), rows.lengths(batch).tolist()
        for i, row in enumerate(batch.tolist()):
            budget, prompt_len = owners[row]
            ordinal = prompt_len + step
            start = layout.ring_start(budget, prompt_len)
            assert slots[i] == layout.slot_of(ordinal, start, budget.capacity)
            assert lengths[i] == layout.num_visible(ordinal + 1, budget.capacity)
        rows.advance(batch, torch.tensor([7, 8, 9]))
    assert rows.last_token.tolist() == [8, 9, 7, 0]


def test_a_step_leaves_other_rows_alone() -> None:
    rows = Rows(2, "cpu")
    budget = KVBudget(num_sink=1, num_topk=2, num_recent=3)
    admit(rows, 0, 10, 12, budget)
    admit(rows, 1, 4, 4, budget)
    rows.advance(torch.tensor([0]), torch.tensor([5]))
    assert rows.num_tokens.tolist() == [11, 4, 0]
    assert rows.next_position.tolist() == [13, 4, 0]  # position and ordinal of a trimmed prompt go their own ways


def test_the_padding_row_may_stand_more_than_once() -> None:
    rows = Rows(1, "cpu")
    batch = torch.tensor([1, 1, 1])
    for _ in range(5):
        assert all(0 <= slot < 1 for slot in rows.slots(batch).tolist())
        assert rows.lengths(batch).tolist() == [1, 1, 1]
        rows.advance(batch, torch.tensor([3, 3, 3]))


def test_every_row_has_a_visible_slot_even_one_that_nobody_owns() -> None:
    """Kernels need a length of at least 1; unused entries of a batch point at the padding row."""
    rows = Rows(3, "cpu")
    assert rows.lengths(torch.arange(4)).tolist() == [1, 1, 1, 1]
