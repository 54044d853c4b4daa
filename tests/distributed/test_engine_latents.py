"""A whole engine of latents and experts over two ranks: rows dealt out, experts whole, answers those of one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import PrefixStoreConfig
from tests.distributed.pairs import Pair, ids
from tests.parity.checkpoints import make_model, save

SETTINGS: dict[str, Any] = {
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8), "max_rows": 5,
    "max_model_len": 256, "chunk_len": 16, "executor": "eager", "progress": False,
    "prefix_store": PrefixStoreConfig(num_bytes=2**22, block_len=8, min_tokens=16),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = save(make_model("deepseek-v3"), tmp_path_factory.mktemp("latents"))
    dealt = {"tensor_parallel": 2, "attention": "dp", "experts": "ep"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
        with LLM(folder, **SETTINGS) as one, LLM(folder, **SETTINGS, **dealt) as two:
            yield Pair(one, two)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.8, seed=6, n=3, top_k=20, logprobs=3),
        SamplingParams(max_tokens=12, temperature=0.0, return_kept=True, prompt_logprobs=1, repetition_penalty=1.3),
    ],
    ids=["greedy", "n", "kept"],
)
def test_rows_that_are_dealt_out_are_answered_alike(pair: Pair, params: SamplingParams) -> None:
    """More rows than one rank has, prompts below and above the budget, beginnings that are stored."""
    prompts = [ids(count, seed, 199) for count, seed in ((5, 1), (31, 2), (90, 3), (150, 4), (40, 5))]
    pair.same(prompts, params)
    pair.same([prompts[3] + [7, 8, 9]], params)
    assert pair.stored_tokens()[0] == pair.stored_tokens()[1] > 0
