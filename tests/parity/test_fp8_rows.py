"""Rows in FP8: executors, kernels, chunks and neighbours agree on them as they do on others; the answers stay right."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.chat import Chat
from evals.score import found
from evals.tasks import make_items
from snapstream.assets import TINY_MODEL
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget
from snapstream.kernels.bound import bind
from snapstream.kernels.cpu.native import find_compiler
from snapstream.layers.sampling_state import SamplingNeeds
from snapstream.llm import LLM
from snapstream.request import RequestOutput, SamplingParams
from snapstream.runner.executors import make_graph
from snapstream.start.build import build_runner
from tests.kernels.triton import interpreter
from tests.parity.checkpoints import VOCAB, make_model, save

SETTINGS: dict[str, Any] = {
    "executor": "eager",
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8),
    "max_model_len": 160, "progress": False, "kv_dtype": "fp8",
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of keys and values, and of latents, which have one scale for both."""
    return save(make_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 5, 33, 100)]


def answers(folder: Path, prompts: list[list[int]], params: SamplingParams = PARAMS, **changes: Any) -> Any:
    with LLM(folder, **SETTINGS | changes) as llm:
        return llm.generate(prompts, params)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_graph_equals_eager(folder: Path, prompts: list[list[int]]) -> None:
    one = partial(make_graph, buckets=(3,), samplers=(SamplingNeeds(),))  # compiling is slow
    eager = answers(folder, prompts, max_rows=3)
    graph = answers(folder, prompts, max_rows=3, make_runner=partial(build_runner, make_decode=one))
    assert tokens(eager) == tokens(graph)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(interpreter.why_not() is not None, reason=str(interpreter.why_not()))
def test_triton_equals_plain(folder: Path, prompts: list[list[int]]) -> None:
    interpreter.mend()
    short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    some = [prompts[1], prompts[2]]
    want = tokens(answers(folder, some, short, max_rows=2, max_model_len=48))
    by_triton = partial(build_runner, kernels=bind("cpu", "triton"))
    assert tokens(answers(folder, some, short, max_rows=2, max_model_len=48, make_runner=by_triton)) == want


def test_chunks_and_neighbours_change_nothing(folder: Path, prompts: list[list[int]]) -> None:
    together = tokens(answers(folder, prompts, max_rows=4, chunk_len=16))
    alone = [tokens(answers(folder, [prompt], max_rows=1, chunk_len=64))[0] for prompt in prompts]
    assert together == alone


def test_the_response_counts_a_quarter_of_the_bytes(folder: Path, prompts: list[list[int]]) -> None:
    wide, narrow = (answers(folder, prompts[:1], max_rows=1, kv_dtype=kind)[0].compression for kind in ("auto", "fp8"))
    assert wide is not None and narrow is not None
    with LLM(folder, max_rows=1, **SETTINGS) as llm:
        model, cache = llm.model_config, llm.engine.runner.cache  # type: ignore[attr-defined]
        assert cache.k.dtype == torch.float8_e4m3fn and cache.num_bytes == 2 * narrow.row_bytes
    scales = (2 if model.latent is None else 1) * model.num_layers * model.num_kv_heads * 4
    assert narrow.row_bytes == wide.row_bytes // 4 + scales and narrow.full_bytes == wide.full_bytes // 4 + scales


@pytest.mark.parametrize("family", ["single_words", "kv"])
def test_the_shipped_model_still_answers_from_a_quarter(family: str) -> None:
    items = make_items(Chat(TINY_MODEL), family, 12, 1024, seed=7)
    with LLM(TINY_MODEL, budget=256, kv_dtype="fp8", max_rows=12, max_model_len=1056, progress=False) as llm:
        outputs = llm.generate([item.prompt_ids for item in items], SamplingParams(max_tokens=24, temperature=0.0))
    right = sum(all(found(o.text, item.references)) for o, item in zip(outputs, items, strict=True))
    assert right >= 11
