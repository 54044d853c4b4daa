"""A whole engine whose rows of latents are dealt out to two ranks answers as one device does.

Ranks compare their drawn tokens after every step, so a difference between them fails at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import PrefixStoreConfig, RescoringConfig
from snapstream.plan.memory import engine_memory
from snapstream.runner.model_runner import ModelRunner
from snapstream.runner.parallel import ParallelRunner
from tests.parity.checkpoints import VOCAB, make_model, save

SETTINGS: dict[str, Any] = {
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8),
    "max_model_len": 160, "chunk_len": 32, "progress": False, "max_rows": 5, "executor": "eager",
    "prefix_store": PrefixStoreConfig(num_bytes=2**22, block_len=8, min_tokens=16),
    "rescoring": RescoringConfig(every=5, num_queries=5),
}  # fmt: skip
RANKS: dict[str, Any] = {"tensor_parallel": 2, "attention": "dp"}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("deepseek-v3"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[LLM, LLM]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
        with LLM(folder, **SETTINGS) as one, LLM(folder, **SETTINGS, **RANKS) as two:
            yield one, two


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    drawn = random.Random(3)
    return [[drawn.randrange(3, VOCAB) for _ in range(n)] for n in (70, 5, 110, 40, 33, 90, 12)]


PENALTIES = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}}


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, temperature=0.8, seed=5, top_p=0.9),
        replace(GREEDY, max_tokens=8, temperature=0.9, seed=1, n=3),
        replace(GREEDY, return_kept=True, **PENALTIES),
    ],
    ids=["greedy", "seeded", "three samples", "penalties, kept tokens"],
)
def test_answers_are_those_of_one_device(
    pair: tuple[LLM, LLM], prompts: list[list[int]], params: SamplingParams
) -> None:
    """More prompts than rows, so that rows are given back and taken again on both ranks; asked twice, the second time
    they begin in the prefix store. Rows fill up and choose again.
    """
    for _ in range(2):
        wanted, found = (llm.generate(prompts, params) for llm in pair)
        for one, two in zip(wanted, found, strict=True):
            assert [s.token_ids for s in two.samples] == [s.token_ids for s in one.samples]
            assert one.compression is not None and two.compression is not None
            assert two.compression.kept_positions == one.compression.kept_positions
            assert two.compression.row_bytes == one.compression.row_bytes
        assert pair[1].engine.rows_free == 5


def test_a_rank_holds_its_own_rows(pair: tuple[LLM, LLM]) -> None:
    """Of five rows three, two on the other rank; each has a padding row. ``plan`` counts so."""
    one, two = (llm.engine.runner for llm in pair)
    assert isinstance(one, ModelRunner) and isinstance(two, ParallelRunner)
    whole, own = one.cache.num_bytes, two.leader.runner.cache.num_bytes
    assert whole * 4 == own * 6
    planned, rescorer = engine_memory(pair[1].model_config, pair[1].config), two.leader.runner.rescorer
    assert rescorer is not None
    assert planned.dealt_to == 2 and 4 * planned.row_bytes == own + rescorer.num_bytes


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"executor": "graph"}, "executor is 'graph'"),
        ({"tensor_parallel": 3}, "it cannot be split over 3 ranks"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LLM(folder, **(SETTINGS | RANKS | settings))
