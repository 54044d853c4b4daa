"""Slot arithmetic against the list-based program, and the paper's own worked example."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapstream.cache import layout
from snapstream.cache.spec import KVSpec
from snapstream.config import KVBudget, ModelConfig
from tests.unit.cache.row_by_lists import feed, frozen_positions, row_after_prefill

budgets = st.builds(
    KVBudget,
    num_sink=st.integers(0, 6),
    num_topk=st.integers(0, 9),
    num_window=st.integers(0, 5),
    num_recent=st.integers(1, 9),
)


@settings(max_examples=500)
@given(budget=budgets, prompt_len=st.integers(1, 60), fed=st.integers(0, 40))
@example(budget=KVBudget(num_sink=2, num_topk=3, num_recent=4), prompt_len=9, fed=9)  # N = C
@example(budget=KVBudget(num_sink=2, num_topk=3, num_recent=4), prompt_len=10, fed=9)  # N = C + 1
@example(budget=KVBudget(num_sink=6, num_topk=3, num_recent=1), prompt_len=1, fed=30)  # N < S, R = 1
@example(budget=KVBudget(num_sink=0, num_topk=0, num_recent=1), prompt_len=3, fed=5)
@example(budget=KVBudget(num_sink=2, num_topk=3, num_window=4, num_recent=1), prompt_len=5, fed=9)  # N < S + W
@example(budget=KVBudget(num_sink=2, num_topk=3, num_window=4, num_recent=3), prompt_len=12, fed=9)  # N = C, W > R
@example(budget=KVBudget(num_sink=2, num_topk=3, num_window=4, num_recent=3), prompt_len=13, fed=9)  # N = C + 1
def test_slots_of_a_row_equal_the_list_based_program(budget: KVBudget, prompt_len: int, fed: int) -> None:
    selected = list(layout.candidates(budget, prompt_len))[: budget.num_topk]
    parts = (budget.num_sink, budget.num_topk, budget.num_window, budget.num_recent)
    want = row_after_prefill(prompt_len, *parts, selected)
    if layout.is_compressed(budget, prompt_len):
        window = list(range(prompt_len - budget.num_window, prompt_len))
        got = list(range(budget.num_sink)) + selected + window + layout.ring_positions(budget, prompt_len)
    else:
        got = [None] * budget.capacity
        for slot, part in layout.uncompressed_parts(budget, prompt_len):
            got[slot : slot + len(part)] = part
    assert got == want

    start = layout.ring_start(budget, prompt_len)
    for step in range(fed):
        ordinal = prompt_len + step
        got[layout.slot_of(ordinal, start, budget.capacity)] = ordinal
        visible = layout.num_visible(ordinal + 1, budget.capacity)
        assert None not in got[:visible] and all(p is None for p in got[visible:])
    frozen = frozen_positions(prompt_len, *parts, selected)
    if prompt_len < budget.num_sink:  # output tokens complete the sinks
        frozen = range(budget.num_sink)
    want, _ = feed(want, frozen, prompt_len, fed)
    assert got == want


def test_without_a_window_region_a_prompt_that_fits_is_one_part_in_order() -> None:
    budget = KVBudget(num_sink=2, num_topk=3, num_recent=4)
    assert layout.uncompressed_parts(budget, 8) == [(0, range(8))]
    assert layout.uncompressed_parts(KVBudget(num_sink=2, num_topk=3, num_window=2, num_recent=4), 8) == [
        (0, range(2)), (2, range(6, 8)), (4, range(2, 6)),
    ]  # fmt: skip


def test_ring_of_the_papers_example() -> None:
    """S=1, R=4: after 26 tokens the ring holds 25, 26, 23, 24 (counted from 1) and token 27 replaces 23."""
    budget = KVBudget(num_sink=1, num_topk=0, num_recent=4)
    ring = {layout.slot_of(p, 1, budget.capacity): p for p in range(1, 27)}
    assert [ring[slot] for slot in (1, 2, 3, 4)] == [25, 26, 23, 24]
    assert layout.slot_of(27, 1, budget.capacity) == 3


def test_candidates_are_what_neither_sinks_nor_ring_hold() -> None:
    budget = KVBudget(num_sink=4, num_topk=8, num_recent=16)
    assert layout.candidates(budget, 28) == range(0)  # fits
    assert layout.candidates(budget, 29) == range(4, 13)
    assert layout.candidates(KVBudget(num_sink=4, num_topk=8, num_window=5, num_recent=11), 29) == range(4, 13)
    assert layout.candidates(KVBudget(num_sink=4, num_topk=0, num_recent=16), 100) == range(0)


def test_bytes_of_a_row() -> None:
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=8, hidden_size=64, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=64, max_position=8,
    )  # fmt: skip
    spec = KVSpec.of(model, "bfloat16")
    assert spec.token_bytes() == 128 * 1024  # Llama-3.1-8B in bf16: 128 KiB per token
    assert spec.row_bytes(8192) == 2**30


def test_slots_for_the_window_come_out_of_the_ring() -> None:
    assert KVBudget.of(256) == KVBudget(num_sink=4, num_topk=188, num_recent=64)
    assert KVBudget.of(256, num_window=48) == KVBudget(num_sink=4, num_topk=188, num_window=48, num_recent=16)


@pytest.mark.parametrize("field", ["num_sink", "num_topk", "num_window", "num_recent"])
def test_negative_or_empty_regions_are_refused(field: str) -> None:
    sizes = {"num_sink": 4, "num_topk": 8, "num_window": 2, "num_recent": 8, field: -1}
    with pytest.raises(ValueError, match=f"{field} is -1"):
        KVBudget(**sizes)
    with pytest.raises(ValueError, match="num_recent is 0"):
        KVBudget(num_topk=3, num_recent=0)
    with pytest.raises(ValueError, match="num_window is 64; it must be a whole number from 0 to 63"):
        KVBudget.of(256, num_window=64)
    with pytest.raises(ValueError, match=r"35 slots is smaller than sinks \+ observation_len \(4 \+ 32 = 36\)"):
        KVBudget.of(35)
