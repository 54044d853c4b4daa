"""What a user may say about an engine: checked at once, and one field at a time."""

from __future__ import annotations

import pickle

import pytest

from snapstream.config import EngineConfig, EngineOptions, KVBudget


def test_single_fields_take_the_place_of_those_of_the_options() -> None:
    options = EngineOptions(budget=1024, max_rows=3)
    assert EngineOptions.of(options, {"max_rows": "auto"}) == EngineOptions(budget=1024, max_rows="auto")
    assert EngineOptions.of(None, {}) == EngineOptions()


def test_an_unknown_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match="budgets is no setting of an engine; the settings are .*budget, .*max_rows"):
        EngineOptions.of(None, {"budgets": 5})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("budget", "half", "budget is 'half'; it must be a KVBudget, a number of slots or 'full'"),
        ("budget", 0, "budget is 0"),
        ("selector", "best", "selector is 'best'; it must be one of snapkv, hops"),
        ("dtype", "int8", "dtype is 'int8'; it must be one of float32"),
        ("kv_dtype", "int4", "kv_dtype is 'int4'; it must be auto, bfloat16, fp8 or int8"),
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
    with pytest.raises(ValueError, match="kv_dtype is 'int4'; it must be auto, bfloat16, fp8 or int8"):
        EngineConfig(budget=KVBudget.of(64), max_model_len=64, kv_dtype="int4")  # type: ignore[arg-type]
