"""Profiles of heads: what they make of a budget, and what is refused of their files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstream.config import EngineConfig, EngineOptions, KVBudget, RescoringConfig
from snapstream.config.heads import LEAST_PART, HeadProfile, Shares
from snapstream.config.parallel import ParallelConfig

PROFILE = HeadProfile(shares=((0.1, 0.4), (0.0, 0.5)), model="of this", made_by="hand")
weights = st.lists(st.integers(0, 1000), min_size=6, max_size=6).filter(any)


def shares_of(given: list[int]) -> Shares:
    total = sum(given)
    return tuple(tuple(weight / total for weight in given[i : i + 2]) for i in range(0, len(given), 2))


@given(weights=weights, num_topk=st.integers(1, 400), num_recent=st.integers(1, 90), more=st.integers(0, 3000))
def test_slots_are_shared_out_to_the_last(weights: list[int], num_topk: int, num_recent: int, more: int) -> None:
    """As many as equal heads have, none below the least part or above what a head can fill, larger shares first."""
    budget = KVBudget(num_topk=num_topk, num_recent=num_recent)
    max_model_len = budget.capacity + more
    slots = HeadProfile(shares=shares_of(weights), model="").slots(budget, max_model_len)
    flat = [num for layer in slots.topk for num in layer]
    assert sum(flat) == 6 * num_topk and slots.row_slots == 6 * budget.capacity
    assert min(flat) >= num_topk // LEAST_PART and max(flat) <= max_model_len - budget.num_sink - num_recent
    for a, own in zip(weights, flat, strict=True):
        assert all(own <= other + 1 for b, other in zip(weights, flat, strict=True) if a < b)


@given(weights=weights, num_topk=st.integers(1, 100))
def test_heads_tile_a_row_and_the_widest_is_last(weights: list[int], num_topk: int) -> None:
    slots = HeadProfile(shares=shares_of(weights), model="").slots(KVBudget(num_topk=num_topk, num_recent=7), 5000)
    spans = sorted(
        (start, start + budget.capacity)
        for starts, budgets in zip(slots.starts, slots.budgets, strict=True)
        for start, budget in zip(starts, budgets, strict=True)
    )
    assert spans[0][0] == 0 and spans[-1][1] == slots.row_slots
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] - spans[-1][0] == slots.widest.capacity == max(b - a for a, b in spans)
    assert slots.least == min(b - a for a, b in spans)
    assert slots.mean_visible(1) == 1 and slots.mean_visible(10**6) == slots.row_slots // 6


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    PROFILE.write(path)
    assert EngineOptions(heads=str(path)).heads == PROFILE == EngineOptions(heads=PROFILE).heads
    assert EngineOptions().heads is None


GOOD: dict[str, Any] = {"format": 1, "model": "m", "made_by": "", "shares": [[0.5, 0.5]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no profile"),
        ("{", "holds no profile"),
        ("[" * 100_000, "holds no profile"),
        ("[]", "must be a dict"),
        (json.dumps(GOOD | {"format": 2}), "format is 2; this version reads 1"),
        (json.dumps({"format": 1, "shares": [[1.0]]}), "which model"),
        (json.dumps(GOOD | {"shares": "half"}), "no lists by layer and head"),
        (json.dumps(GOOD | {"shares": [0.5, 0.5]}), "no lists by layer and head"),
        (json.dumps(GOOD | {"shares": []}), "without shares"),
        (json.dumps(GOOD | {"shares": [[], []]}), "without shares"),
        (json.dumps(GOOD | {"shares": [[0.5], [0.25, 0.25]]}), "unlike numbers"),
        (json.dumps(GOOD | {"shares": [[1.5, -0.5]]}), "a share is 1.5; it must be a number from 0 to 1"),
        (json.dumps(GOOD | {"shares": [[math.nan, 1.0]]}), "a share is nan"),
        (json.dumps(GOOD | {"shares": [["1", 0.0]]}), "a share is '1'"),
        (json.dumps(GOOD | {"shares": [[0.5, 0.4]]}), "sum to 0.9"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "heads.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as refused:
        EngineOptions(heads=str(path))
    assert str(path) in str(refused.value)


def test_missing_and_huge_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no profile"):
        EngineOptions(heads=str(tmp_path / "none.json"))
    (tmp_path / "huge").write_bytes(bytes(2**24 + 1))
    with pytest.raises(ValueError, match="more than 16777216 bytes"):
        EngineOptions(heads=str(tmp_path / "huge"))
    with pytest.raises(TypeError, match="must be a path"):
        EngineOptions(heads=3)  # type: ignore[arg-type]


def test_such_rows_do_not_choose_again_over_ranks() -> None:
    """Ranks that share a kv head would have to meet at moments that differ from head to head."""
    budget = KVBudget(num_topk=40, num_recent=40)
    settings: dict[str, Any] = {"budget": budget, "heads": PROFILE.slots(budget, 5000), "max_model_len": 5000}
    rescoring = RescoringConfig(every=4, num_queries=4)
    assert EngineConfig(rescoring=rescoring, **settings).heads is not None
    with pytest.raises(ValueError, match="rescore on one device; tensor_parallel is 2"):
        EngineConfig(rescoring=rescoring, parallel=ParallelConfig(size=2), **settings)
