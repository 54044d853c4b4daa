"""What a request can ask of a model that keeps latents: samples, grammars, kept tokens, rescoring, a compiled step."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.selectors import Variant
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget, RescoringConfig
from snapstream.kernels.cpu.native import find_compiler
from snapstream.llm import LLM
from snapstream.models.decoder import Decoder
from snapstream.models.loader import load_weights
from snapstream.models.registry import read_model_config
from snapstream.request import SamplingParams
from snapstream.runner.executors import make_graph
from snapstream.spec_prefill.lookahead import token_scores
from snapstream.spec_prefill.settings import ScoringSettings
from snapstream.start.build import build_runner
from tests.parity.checkpoints import VOCAB, make_model, save

BUDGET = KVBudget(num_sink=2, num_topk=14, num_recent=16)
SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": SnapKV(observation_len=8), "max_model_len": 160, "progress": False, "max_rows": 3,
    "executor": "eager",
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("deepseek-v3"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 5, 110, 40)]


def test_one_selection_per_layer_is_reported(folder: Path, prompts: list[list[int]]) -> None:
    """All heads of a layer keep the same tokens, so a report has one list per layer; two samples have equal rows."""
    with LLM(folder, **SETTINGS) as llm:
        both = llm.generate([prompts[2]], replace(GREEDY, n=2, return_kept=True))[0]
        kept = both.compression
        assert kept is not None and kept.kept_positions is not None and kept.evicted_tokens == 110 - 32
        assert [len(layer) for layer in kept.kept_positions] == [1, 1, 1]
        assert both.samples[0].token_ids == both.samples[1].token_ids
        largest = Variant(observation_len=8, group_reduce="max")
        other = llm.generate([prompts[2]], replace(GREEDY, return_kept=True), selector=largest)[0].compression
    assert other is not None and other.kept_positions != kept.kept_positions


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_compiled_step_equals_plain_calls(folder: Path, prompts: list[list[int]]) -> None:
    """Experts and attention over latents, both in C++; a rescored row keeps queries of the step."""
    wanted = [
        GREEDY,
        replace(GREEDY, temperature=0.8, seed=1),
        GREEDY,
        replace(GREEDY, top_k=5, temperature=0.7, seed=2),
    ]
    rescoring = RescoringConfig(every=5, num_queries=5)
    graph = partial(build_runner, make_decode=partial(make_graph, buckets=(3,)))
    answers = []
    for parts in ({}, {"make_runner": graph}):
        with LLM(folder, rescoring=rescoring, **SETTINGS, **parts) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, wanted)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("look_ahead", [0, 4])
def test_a_draft_may_keep_latents(folder: Path, prompts: list[list[int]], look_ahead: int) -> None:
    """From rows of all layers and from staging, layer by layer, the same scores."""
    config = read_model_config(folder)
    decoder = Decoder(config, load_weights(folder, config, torch.float32, "cpu", progress=False))
    first, second = (
        token_scores(decoder, prompts[0], ScoringSettings(look_ahead=look_ahead, keys=keys, prefill_len=32))
        for keys in ("all_layers", "one_layer")
    )
    assert first.shape == (70,) and first.isfinite().all() and first.std() > 0
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
