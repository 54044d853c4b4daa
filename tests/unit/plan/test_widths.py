"""Which width follows from what the user said, what the checkpoint stores, the dtype, the device and the executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from snapstream.config import EngineOptions, KVBudget, ModelConfig, StoredWeights
from snapstream.plan.fit import engine_config

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, intermediate_size=160, max_position=64, stored=StoredWeights(dtype="bfloat16"),
)  # fmt: skip


def width(model: ModelConfig = MODEL, device: str = "cpu", **options: Any) -> str:
    config = engine_config(model, EngineOptions(**options), KVBudget.full(64), 64, device=device)
    assert config.weights is not None
    return config.weights.describe()


def test_auto_keeps_what_is_stored_where_nothing_is_lost() -> None:
    assert width() == "bfloat16"
    assert width(replace(MODEL, stored=StoredWeights(dtype="float16"))) == "float16"
    assert width(replace(MODEL, stored=StoredWeights(dtype="float32"))) == "float32"
    assert width(replace(MODEL, stored=StoredWeights())) == "float32"  # nobody said


def test_auto_is_the_dtype_elsewhere() -> None:
    assert width(dtype="float16") == "float16"
    assert width(executor="graph") == "float32"
    assert width(device="cuda") == "float32"
    assert width(device="cuda", dtype="bfloat16") == "bfloat16"


def test_a_width_that_was_asked_for() -> None:
    assert width(weights="float32") == "float32"
    assert width(weights="float16") == "float16"
    assert width(weights="int8", activations="dtype") == "int8 in groups of 32"
    assert width(weights="int8") == "int8 in groups of 32; inputs int8 in decode"
    assert width(weights="int4", activations="dtype") == (
        "int4 in groups of 32, attention, embedding and head int8 in groups of 32"
    )
    assert width(weights="int4", dtype="bfloat16", device="cuda").startswith("int4")


def test_inputs_are_rounded_where_looped_steps_could_run() -> None:
    rounded = "; inputs int8 in decode"
    for options in ({}, {"executor": "eager"}, {"activations": "int8"}):
        assert width(weights="int8", **options).endswith(rounded)
    for options in ({"device": "cuda"}, {"dtype": "bfloat16"}, {"activations": "dtype"}):
        assert not width(weights="int8", **options).endswith(rounded)
    assert width(activations="auto") == "bfloat16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": "int4"}, "activations is 'int4'; it must be one of auto, dtype, int8"),
        (
            {"activations": "int8"},
            "activations is 'int8': weights are bfloat16; products of whole numbers need int8 or",
        ),
        ({"activations": "int8", "weights": "int8", "device": "cuda"}, "activations is 'int8': device is 'cuda'; loop"),
        ({"weights": "int2"}, "weights is 'int2'; it must be one of auto, float32, bfloat16, float16, int8, int4"),
        ({"weights": 8}, "weights is 8; it must be one of auto"),
        ({"weights": "float32", "dtype": "bfloat16"}, "weights is 'float32' and dtype 'bfloat16'; weights must be bf"),
        ({"weights": "float16", "dtype": "bfloat16"}, "weights must be bfloat16, int8, int4 or auto"),
        ({"weights": "int8", "executor": "graph"}, "weights are int8 in groups of 32; executor 'graph' on a CPU comp"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        width(**options)


def test_rows_that_are_no_whole_groups() -> None:
    with pytest.raises(ValueError, match="the rows of down have 170 numbers, which must be a multiple of 32"):
        width(replace(MODEL, intermediate_size=170), weights="int4")
