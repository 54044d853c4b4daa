"""Rows whose kv heads have slots of their own, over ranks: each has those of its heads, and answers as one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapstream import LLM, SamplingParams
from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import EngineConfig, KVBudget, ParallelConfig
from snapstream.config.heads import HeadProfile
from snapstream.distributed.group import Alone
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.models.fingerprint import fingerprint
from snapstream.models.registry import read_model_config
from snapstream.plan.memory import engine_memory
from tests.distributed import cases
from tests.distributed.cases import PROMPTS, UNLIKE, Asked
from tests.distributed.pairs import Pair
from tests.distributed.pool import Pool
from tests.distributed.test_tensor_parallel import Checkpoint, check, checkpoint

__all__ = ["checkpoint"]  # a fixture
SHARED = HeadProfile(shares=((0.5,), (0.1,), (0.4,)), model="")


def asked(folder: Path, profile: HeadProfile = UNLIKE, **more: object) -> Asked:
    return Asked(folder, budget=24, heads=profile, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize(("name", "profile"), [("llama-gqa-tied", UNLIKE), ("qwen3", UNLIKE), ("qwen2", SHARED)])
def test_heads_of_each_rank(two: Pool, checkpoint: Checkpoint, name: str, profile: HeadProfile, executor: str) -> None:
    """A kv head on each rank, or one on both."""
    if executor == "looped" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    budgets = profile.slots(KVBudget.of(24, observation_len=8), 100).budgets
    sizes = [own.capacity for layer in budgets for own in layer]
    assert min(sizes) < len(PROMPTS[1]) < max(sizes) < len(PROMPTS[0])
    given = asked(checkpoint(name), profile, executor=executor)
    plain = cases.answered(Alone(), Asked(given.folder, budget=24))
    assert cases.answered(Alone(), given).logits.ne(plain.logits).any(), "the profile matters"
    check_rows(two, given)


def check_rows(pool: Pool, given: Asked) -> None:
    """Tokens and logits of one device; ranks have the rows of their heads, and none has more than ``plan`` says."""
    check(pool, given)
    size = len(rows := [rank.own_bytes[1] for rank in pool.run(cases.answered, given)])
    model, budget = read_model_config(given.folder), KVBudget.of(24, observation_len=8)
    assert given.heads is not None
    heads = given.heads.slots(budget, 100)
    config = EngineConfig(budget=budget, max_model_len=100, max_rows=2, heads=heads, selector=given.selector,
                          parallel=ParallelConfig(size=size))  # fmt: skip
    token = 4 * 2 * model.head_dim  # fp32, key and value
    assert rows == [3 * heads.of_rank(rank, size).row_slots * token for rank in range(size)]
    planned = 3 * engine_memory(model, config).row_bytes
    assert max(rows) <= planned <= max(rows) + 3 * model.num_layers * model.num_kv_heads * token


def test_a_whole_engine_tells_what_each_head_kept(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3")
    heads = HeadProfile(shares=UNLIKE.shares, model=fingerprint(folder))
    settings = {"budget": KVBudget.of(24, observation_len=8), "selector": SnapKV(observation_len=8), "heads": heads,
                "max_rows": 2, "max_model_len": 128, "executor": "eager", "progress": False}  # fmt: skip
    with LLM(folder, **settings) as one, LLM(folder, **settings, tensor_parallel=2) as two:
        for way in (True, "bitmap"):
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, return_kept=way)
            [output, _] = Pair(one, two).same([[7 * i % 190 + 3 for i in range(70)], list(range(5, 25))], params)
            assert output.compression is not None
            kept = output.compression.kept_positions
            assert (kept is None) == (way == "bitmap")
            assert kept is None or len({len(head) for layer in kept for head in layer}) > 1, "heads keep unlike numbers"
