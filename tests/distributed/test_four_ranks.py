"""Whole engines over four ranks answer as one device does: heads split, experts dealt out, rows dealt out.

Processes over gloo, which compare their drawn tokens after every step. Most of the time is their start, so there are
two engines; what else engines can do is tested with two ranks, and other splits over four without an engine
(``test_tensor_parallel.py``). Here two ranks share a kv head, and neither of the model's sizes is a rank's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.cache.selectors.snapkv import SnapKV
from tests.distributed.pairs import assert_same, ids
from tests.parity.checkpoints import VOCAB, make_model, save

SETTINGS: dict[str, Any] = {
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8),
    "max_model_len": 128, "chunk_len": 32, "progress": False, "max_rows": 5, "executor": "eager",
}  # fmt: skip
PROMPTS = [ids(length, seed=length, vocab=VOCAB) for length in (70, 5, 40)]  # above and below the budget
REQUESTS = [
    SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, return_kept=True, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.8, seed=5, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.9, seed=1, n=2, ignore_eos=True),
]


@pytest.mark.parametrize(
    ("name", "split"),
    [("llama-gqa-tied", {}), ("deepseek-v3", {"experts": "ep", "attention": "dp"})],
    ids=["llama", "latents, experts and rows dealt out"],
)
def test_answers_are_those_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: dict[str, Any]
) -> None:
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    folder = save(make_model(name), tmp_path)
    with LLM(folder, **SETTINGS) as one:
        wanted = one.generate(PROMPTS, REQUESTS)
    with LLM(folder, **SETTINGS, tensor_parallel=4, **split) as four:
        found = four.generate(PROMPTS, REQUESTS)
        assert four.engine.rows_free == 5
    for ours, theirs in zip(wanted, found, strict=True):
        assert_same(ours, theirs)
