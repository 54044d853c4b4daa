"""Engines over narrow weights answer as those over the same numbers widened, and read the checkpoint's own width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snapstream.config import EngineOptions, WeightForms
from snapstream.llm import LLM
from snapstream.models.loader import load_weights
from snapstream.models.registry import read_model_config
from snapstream.models.shapes import widening_bytes
from snapstream.models.widening import WideBuffer
from snapstream.request import SamplingParams
from tests.live import LiveBytes
from tests.parity.checkpoints import make_model, save

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + 7 * i % 190 for i in range(90)], [3, 1, 4, 1, 5]]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def checkpoint(folder: Path, dtype: torch.dtype, name: str = "qwen3") -> Path:
    return save(make_model(name, **SIZES).to(dtype), folder)


def answers(folder: Path, weights: str) -> list[list[int]]:
    options = EngineOptions(budget=48, chunk_len=16, max_model_len=120, weights=weights, activations="dtype")
    with LLM(folder, options, progress=False) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("weights", ["float16", "bfloat16", "int8", "int4"])
def test_as_over_the_same_numbers_widened(weights: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "own", torch.float32)
    narrow = load_weights(folder, read_model_config(folder), torch.float32, "cpu", False, WeightForms.of(weights))
    model = make_model("qwen3", **SIZES)
    model.load_state_dict(narrow.checkpoint())
    widened = answers(save(model, tmp_path / "wide"), "float32")
    assert answers(folder, weights) == widened
    if weights == "int4":
        assert widened != answers(folder, "float32")  # the comparison can fail


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_keeps_16_bits_and_loses_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, dtype)
    assert read_model_config(folder).stored.dtype == str(dtype).removeprefix("torch.")
    with LLM(folder, max_model_len=120, activations="dtype", progress=False) as llm:
        assert llm.config.weights == WeightForms.of(str(dtype).removeprefix("torch."))
    assert answers(folder, "auto") == answers(folder, "float32")


def test_a_layer_is_widened_once_per_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """90 tokens in chunks of 16 and a short prompt beside them: three layers, as often as passes change layers."""
    held: list[int] = []
    hold = WideBuffer.hold

    def counted(self: WideBuffer, layer: int) -> None:
        if not held or held[-1] != layer:
            held.append(layer)
        hold(self, layer)

    monkeypatch.setattr(WideBuffer, "hold", counted)
    folder = checkpoint(tmp_path, torch.bfloat16)
    options = EngineOptions(budget=48, chunk_len=16, max_model_len=120, executor="eager")  # looped widens no layer
    with LLM(folder, options, progress=False) as llm:
        llm.generate(PROMPTS[0], GREEDY)
    assert held == [0, 1, 2]


def test_loading_holds_no_more_than_the_model_and_a_block(tmp_path: Path) -> None:
    """Beside two tensors of the file at most, the last and the next, which are mapped."""
    model = make_model("llama-mha", hidden_size=256, intermediate_size=1024, vocab_size=8192)
    folder = save(model, tmp_path)
    config = read_model_config(folder)
    with LiveBytes("cpu") as live:
        weights = load_weights(folder, config, torch.float32, "cpu", False, WeightForms.of("int4"))
        assert weights.wide is not None
        kept = weights.num_bytes + weights.wide.num_bytes
    table, block = 4 * 8192 * 256, widening_bytes(config, "float32", WeightForms.of("int4"), "cpu")
    assert block < table  # of which no copy is made as a whole
    assert kept < live.peak <= kept + 2 * table + block
