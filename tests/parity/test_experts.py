"""Mixtures of experts through the whole engine; transformers' answers are held by the files that go through all models.

A first dense layer, groups, corrections and shared experts are all in ``glm4-moe``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget
from snapstream.kernels.cpu.native import find_compiler
from snapstream.llm import LLM
from snapstream.request import SamplingParams
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.lists_engine import ListsEngine
from tests.parity.test_graph import graph

LENGTHS = (70, 5, 90, 33, 1)
BUDGET, SELECTOR = KVBudget(num_sink=2, num_topk=14, num_recent=16), SnapKV(observation_len=8)
SETTINGS: dict[str, Any] = {"budget": BUDGET, "selector": SELECTOR, "max_model_len": 128, "executor": "eager",
                            "progress": False}  # fmt: skip
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("glm4-moe"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]


def answers(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    with LLM(folder, **{**SETTINGS, **settings}) as llm:
        return [output.token_ids for output in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt by itself, in one chunk."""
    return [answers(folder, [prompt], max_rows=1, chunk_len=128)[0] for prompt in prompts]


@pytest.mark.parametrize(("chunk_len", "max_rows"), [(1, 3), (7, 5), (32, 2), (128, 5)])
def test_neighbours_change_nothing(
    folder: Path, prompts: list[list[int]], alone: list[list[int]], chunk_len: int, max_rows: int
) -> None:
    """No expert has a capacity: tokens of other prompts and rows that choose the same one take nothing away."""
    assert answers(folder, prompts, chunk_len=chunk_len, max_rows=max_rows) == alone


def test_above_the_budget(folder: Path, prompts: list[list[int]]) -> None:
    with LLM(folder, max_rows=3, chunk_len=16, **SETTINGS) as llm:
        outputs = llm.generate(prompts, PARAMS)
        decoder = llm.engine.runner.decoder  # type: ignore[attr-defined]
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, logprobs = ListsEngine(decoder, BUDGET, SELECTOR).generate(prompt, PARAMS.max_tokens)
        assert output.token_ids == tokens
        assert [entry.logprob for entry in output.logprobs or []] == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_the_compiled_step_is_eager(folder: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    assert answers(folder, prompts, max_rows=3, make_runner=graph(buckets=(3,), samplers=())) == alone


def test_a_model_in_half_precision_routes_in_fp32(folder: Path) -> None:
    with LLM(folder, dtype="bfloat16", **SETTINGS) as llm:
        weights = llm.engine.runner.decoder.weights  # type: ignore[attr-defined]
        assert {name: weights.vectors[name].dtype for name in ("router", "router_bias", "input_norm")} == {
            "router": torch.float32, "router_bias": torch.float32, "input_norm": torch.bfloat16,
        }  # fmt: skip
        (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.token_ids) == 5
