"""Profiles of heads: what they make of a budget, and what is refused of their files."""

from __future__ import annotations

import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstream.config import EngineConfig, EngineOptions, KVBudget, ParallelConfig
from snapstream.config.kv import LEAST_PART, HeadProfile, Shares
from snapstream.config.values import Registry, format_bytes, parse_bandwidth, parse_bytes

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
def test_heads_tile_a_row(weights: list[int], num_topk: int) -> None:
    slots = HeadProfile(shares=shares_of(weights), model="").slots(KVBudget(num_topk=num_topk, num_recent=7), 5000)
    spans = [
        (start, start + budget.capacity)
        for starts, budgets in zip(slots.starts, slots.budgets, strict=True)
        for start, budget in zip(starts, budgets, strict=True)
    ]
    assert spans[0][0] == 0 and spans[-1][1] == slots.row_slots
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert slots.widest.capacity == max(b - a for a, b in spans) <= slots.longest <= slots.row_slots
    assert slots.mean_visible(1) == 1 and slots.mean_visible(10**6) == slots.row_slots // 6


@given(
    weights=weights,
    num_topk=st.integers(1, 90),
    own=st.integers(0, 90),
    other=st.integers(1, 99),
    prompt=st.integers(1, 300),
    max_model_len=st.integers(1, 5000),
)
def test_the_row_of_a_request_fits_into_a_row(
    weights: list[int], num_topk: int, own: int, other: int, prompt: int, max_model_len: int
) -> None:
    budget = KVBudget(num_topk=num_topk, num_recent=40)
    topk = min(own, num_topk)
    asked = KVBudget(num_sink=0, num_topk=topk, num_recent=min(other, budget.capacity - topk))
    slots = HeadProfile(shares=shares_of(weights), model="").slots(budget, max_model_len)
    row = slots.of(asked, prompt)
    flat = [own for layer in row.budgets for own in layer]
    assert row.row_slots <= slots.row_slots and row.longest <= slots.longest
    if prompt <= asked.capacity:
        assert set(flat) == {asked}
    else:
        assert sum(own.capacity for own in flat) == 6 * asked.capacity and max(own.capacity for own in flat) <= prompt
        for one in flat:
            larger = max(one.capacity, asked.capacity)
            assert one.num_recent == asked.num_recent * larger // asked.capacity
    assert slots.of(budget, max_model_len) == slots
    longer = HeadProfile(shares=shares_of(weights), model="").slots(budget, max_model_len + 1000)
    if prompt <= max_model_len:
        assert longer.of(asked, prompt) == row, "an engine that takes longer prompts divides this one alike"


@given(
    weights=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1000)), min_size=16, max_size=16).filter(any),
    num_topk=st.integers(1, 90),
    own=st.integers(0, 90),
    prompt=st.integers(1, 600),
    max_model_len=st.integers(1, 5000),
    num_ranks=st.sampled_from([2, 4, 8]),
)
def test_ranks_have_the_heads_of_one_device_and_room_for_them(
    weights: list[int], num_topk: int, own: int, prompt: int, max_model_len: int, num_ranks: int
) -> None:
    """Four kv heads, of which eight ranks have one twice. Counters are those of the widest head of all ranks."""
    total = sum(weights)
    shares = tuple(tuple(weight / total for weight in weights[i : i + 4]) for i in range(0, 16, 4))
    budget = KVBudget(num_topk=num_topk, num_recent=20)
    slots = HeadProfile(shares=shares, model="").slots(budget, max_model_len)
    topk = min(own, num_topk)
    for asked in (budget, KVBudget(num_sink=0, num_topk=topk, num_recent=budget.capacity - topk)):
        whole = slots.of(asked, prompt)
        for rank in range(num_ranks):
            held = slots.of_rank(rank, num_ranks)
            row, first = held.of(asked, prompt), rank * 4 // num_ranks
            assert row.budgets == tuple(layer[first : first + max(4 // num_ranks, 1)] for layer in whole.budgets)
            assert (row.widest, row.distinct, row.longest) == (whole.widest, whole.distinct, whole.longest)
            assert sum(own.capacity for layer in row.budgets for own in layer) <= held.row_slots
            assert row.longest <= held.longest <= held.row_slots


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
        (json.dumps(GOOD | {"shares": [[0.5], [0.25, 0.25]]}), "different numbers"),
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


# What a user may say about an engine: checked at once, and one field at a time.


def test_single_fields_take_the_place_of_those_of_the_options() -> None:
    options = EngineOptions(budget=1024, max_rows=3)
    assert EngineOptions.of(options, {"max_rows": "auto"}) == EngineOptions(budget=1024, max_rows="auto")
    assert EngineOptions.of(None, {}) == EngineOptions()


def test_an_unknown_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match="budgets is not a setting of an engine; the settings are .*budget, .*max_rows"):
        EngineOptions.of(None, {"budgets": 5})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("budget", "half", "budget is 'half'; it must be a KVBudget, a number of slots or 'full'"),
        ("budget", 0, "budget is 0"),
        ("selector", "best", "selector is 'best'; it must be one of snapkv, hops"),
        ("dtype", "int8", "dtype is 'int8'; it must be one of float32"),
        ("kv_dtype", "int3", "kv_dtype is 'int3'; it must be auto, float32, bfloat16, fp8"),
        ("executor", "fast", "executor is 'fast'; it must be one of eager, graph"),
        ("max_rows", "all", "max_rows is 'all'"),
        ("max_rows", 0, "max_rows is 0"),
        ("max_model_len", 0, "max_model_len is 0"),
        ("chunk_len", 1.5, "chunk_len is 1.5"),
        ("prefill_quantum", -1, "prefill_quantum is -1"),
        ("prefill_attention", "mine", "prefill_attention is 'mine'; it must be one of auto"),
        ("max_waiting", -1, "max_waiting is -1"),
        ("tensor_parallel", 0, "tensor_parallel is 0"),
        ("tensor_parallel", 1.5, "tensor_parallel is 1.5"),
        ("attention", "a2a", "attention is 'a2a'; it must be one of tp, dp"),
        ("attention", "dp", "attention is 'dp' and experts 'tp', and there is one rank"),
        ("experts", "ep", "and there is one rank to compute them; give tensor_parallel"),
    ],
)
def test_what_no_engine_could_be_is_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineOptions(**{name: value})  # type: ignore[arg-type]


def test_they_cross_the_border_of_a_process() -> None:
    options = EngineOptions(budget=KVBudget.of(64), executor="eager")
    assert pickle.loads(pickle.dumps(options)) == options


def test_an_engine_checks_what_it_was_decided_to_be() -> None:
    with pytest.raises(ValueError, match="kv_dtype is 'int3'; it must be auto, float32, bfloat16, fp8"):
        EngineConfig(budget=KVBudget.of(64), max_model_len=64, kv_dtype="int3")  # type: ignore[arg-type]


# Settings of several ranks.


def test_one_rank_is_the_default() -> None:
    assert ParallelConfig() == ParallelConfig(size=1, attention="tp", experts="tp")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "size is 0; it must be a whole number >= 1"),
        ({"size": "two"}, "size is 'two'"),
        ({"attention": "ep"}, "attention is 'ep'; it must be one of tp, dp"),
        ({"experts": "dp"}, "experts is 'dp'; it must be one of tp, ep"),
        ({"size": 2, "num_local": 3}, "local_ranks is 3; tensor_parallel is 2"),
        ({"size": 2, "num_local": 1}, "local_ranks is 1 of tensor_parallel 2, and master_addr is ''"),
        ({"size": 2, "num_local": 2, "address": "h:1"}, "ranks on other machines need both, and others neither"),
        ({"size": 2, "address": "h:1"}, "local_ranks is 0 of tensor_parallel 2, and master_addr is 'h:1'"),
    ],
)
def test_other_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**given)


# Names that a user chooses from: known, imported when asked for, and open to additions.


def test_an_entry_given_as_text_is_imported_when_asked_for() -> None:
    shelf: Registry[type] = Registry("thing", {"plain": int, "late": "wsgiref.types:InputStream"})
    sys.modules.pop("wsgiref.types", None)
    assert shelf.names == ("plain", "late") and "late" in shelf and shelf.get("plain") is int
    assert "wsgiref.types" not in sys.modules
    assert shelf.get("late").__name__ == "InputStream"
    assert shelf.get("late") is shelf.get("late")


@pytest.mark.parametrize("name", ["other", "", None, 5, ["plain"]])
def test_an_unknown_name_is_refused_with_the_known_ones(name: object) -> None:
    shelf: Registry[type] = Registry("thing", {"plain": int, "round": float})
    with pytest.raises(ValueError, match=r"thing is .*; it must be one of plain, round"):
        shelf.check(name)
    assert name not in shelf


def test_entries_come_and_go_and_none_is_replaced() -> None:
    shelf: Registry[type] = Registry("thing", {"plain": int})
    shelf.add("own", str)
    assert shelf.get("own") is str and shelf.names == ("plain", "own")
    with pytest.raises(ValueError, match="thing 'plain' is there already"):
        shelf.add("plain", str)
    shelf.remove("own")
    assert shelf.names == ("plain",) and shelf.get("plain") is int


def test_a_registry_does_not_share_the_dictionary_it_was_made_of() -> None:
    entries: dict[str, type | str] = {"plain": int}
    Registry("thing", entries).add("own", str)
    assert entries == {"plain": int}


# Sizes as people write them.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("24GB", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("512M", 512 * 10**6),
        ("4ki", 4096),
        ("123 B", 123),
        ("7B", 7),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "lots", "-1GB", "0", "0.0GiB", "1e9", "10 GiBs", "5 XB", "nan", "GB", "80", "3.35"]
)
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_parse_bandwidth() -> None:
    assert parse_bandwidth("3.35TB/s") == parse_bandwidth("3350 GB") == 3_350_000_000_000
    with pytest.raises(ValueError, match="'fast' is not a bandwidth"):
        parse_bandwidth("fast")
    with pytest.raises(ValueError, match=r"'3.35' is not a bandwidth; write a number > 0 and a unit, such as 3.35TB/s"):
        parse_bandwidth("3.35")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (128 * 2**10, "128 KiB"),
     (1.53 * 2**30, "1.53 GiB"), (20.25 * 2**20, "20.2 MiB"), (5000 * 2**40, "5000 TiB")],
)  # fmt: skip
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text
