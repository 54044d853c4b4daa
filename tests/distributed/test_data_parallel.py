"""A whole engine whose rows of latents are distributed to two ranks answers as one device does.

Ranks compare their drawn tokens after every step, so a difference between them fails at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.config import PrefixStoreConfig, WeightFormat, WeightFormats
from snapstream.distributed.group import Alone
from snapstream.exec.parallel import ParallelRunner
from snapstream.exec.runner import ModelRunner
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.plan.memory import engine_memory
from tests.distributed import cases
from tests.distributed.cases import Asked
from tests.distributed.pool import Pool
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.parity.test_latents import narrowed

SETTINGS: dict[str, Any] = {
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8),
    "max_model_len": 160, "chunk_len": 32, "progress": False, "max_rows": 5, "executor": "eager",
    "prefix_store": PrefixStoreConfig(num_bytes=2**22, block_len=8, min_tokens=16),
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
    they begin in the prefix store. Rows fill up and wrap.
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
    whole, own = one.cache.num_bytes, two.rank_0.runner.cache.num_bytes
    assert whole * 4 == own * 6
    planned = engine_memory(pair[1].model_config, pair[1].config)
    assert planned.dp_size == 2 and 4 * planned.row_bytes == own


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"executor": "graph"}, "executor 'graph': it captures CUDA graphs"),
        ({"tensor_parallel": 3}, "it cannot be split over 3 ranks"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LLM(folder, **(SETTINGS | RANKS | settings))


# Rows of latents distributed to two ranks: the tokens of one device, of split heads too, in half of the rows' bytes.

TOLERANCE = 5e-5  # of logits of order 1, up to 5


@pytest.fixture(scope="module", params=["deepseek-v3", "deepseek-v2-lite"])
def latent_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With queries projected in two steps and in one."""
    return save(make_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("experts", "budget"), [("tp", 40), ("ep", 40), ("tp", None)])
def test_distributed_rows_answer_as_one_device(
    two: Pool, latent_folder: Path, experts: str, budget: int | None
) -> None:
    alone = cases.answered(Alone(), Asked(latent_folder, budget=budget))
    split = two.run(cases.answered, Asked(latent_folder, experts=experts, budget=budget))
    distributed = two.run(cases.answered, Asked(latent_folder, experts=experts, attention="dp", budget=budget))
    assert alone.logits.std() > 0.1, "logits too small for the tolerance to mean anything"
    for rank in distributed:
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=TOLERANCE)
        assert torch.equal(rank.logits, distributed[0].logits)
        assert rank.tokens == alone.tokens == split[0].tokens
        assert rank.kept == alone.kept and rank.row_bytes == alone.row_bytes
        assert rank.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
    row = alone.own_bytes[1] // 3  # two rows and a padding row
    assert [rank.own_bytes[1] for rank in split] == [3 * row] * 2
    assert [rank.own_bytes[1] for rank in distributed] == [2 * row] * 2  # one row and a padding row


def test_prompts_are_read_with_parts_of_widened_matrices(two: Pool, tmp_path: Path) -> None:
    """FP8 blocks: decode multiplies with the whole matrices as they are stored, a prompt with a rank's heads of the
    widened ones.
    """
    sizes = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 64,
             "moe_intermediate_size": 256, "intermediate_size": 256}  # fmt: skip
    latent_folder, _ = narrowed(save(make_model("deepseek-v3", **sizes), tmp_path / "source"), tmp_path)
    blocks = WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="float32"))
    alone = cases.answered(Alone(), Asked(latent_folder, budget=40, formats=blocks))
    for rank in two.run(cases.answered, Asked(latent_folder, attention="dp", budget=40, formats=blocks)):
        # Of this size two forms of the same numbers on one device, FP8 and widened, are as far apart.
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=TOLERANCE * float(alone.logits.std()))
        assert rank.tokens == alone.tokens and rank.kept == alone.kept
