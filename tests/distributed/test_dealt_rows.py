"""Rows of latents dealt out to two ranks: the tokens of one device, of split heads too, in half of the rows' bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snapstream.config import RescoringConfig, WeightForm, WeightForms
from snapstream.distributed.group import Alone
from tests.distributed import cases
from tests.distributed.cases import Asked
from tests.distributed.pool import Pool
from tests.parity.checkpoints import make_model, save
from tests.parity.test_fp8_blocks import narrowed

TOLERANCE = 2e-5  # of logits of order 1


@pytest.fixture(scope="module", params=["deepseek-v3", "deepseek-v2-lite"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With queries projected in two steps and in one."""
    return save(make_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("experts", "budget"), [("tp", 40), ("ep", 40), ("tp", None)])
def test_dealt_rows_answer_as_one_device(two: Pool, folder: Path, experts: str, budget: int | None) -> None:
    alone = cases.answered(Alone(), Asked(folder, budget=budget))
    split = two.run(cases.answered, Asked(folder, experts=experts, budget=budget))
    dealt = two.run(cases.answered, Asked(folder, experts=experts, attention="dp", budget=budget))
    assert alone.logits.std() > 0.1, "logits too small for the tolerance to mean anything"
    for rank in dealt:
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=TOLERANCE)
        assert torch.equal(rank.logits, dealt[0].logits)
        assert rank.tokens == alone.tokens == split[0].tokens
        assert rank.kept == alone.kept and rank.row_bytes == alone.row_bytes
        assert rank.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
    row = alone.own_bytes[1] // 3  # two rows and a padding row
    assert [rank.own_bytes[1] for rank in split] == [3 * row] * 2
    assert [rank.own_bytes[1] for rank in dealt] == [2 * row] * 2  # one row and a padding row


def test_dealt_rows_choose_again(two: Pool, folder: Path) -> None:
    """Each rank refreshes its own, with the queries of all heads."""
    asked = Asked(folder, budget=40, rescoring=RescoringConfig(every=8, num_queries=2))
    alone, plain = cases.answered(Alone(), asked), cases.answered(Alone(), Asked(folder, budget=40))
    assert (alone.logits - plain.logits).abs().max() > 100 * TOLERANCE, "rows keep other tokens after a refresh"
    for rank in two.run(cases.answered, replace(asked, attention="dp")):
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=TOLERANCE)
        assert rank.tokens == alone.tokens and rank.kept == alone.kept


def test_prompts_are_read_with_parts_of_widened_matrices(two: Pool, tmp_path: Path) -> None:
    """FP8 blocks: decode multiplies with the whole matrices as they are stored, a prompt with a rank's heads of the
    widened ones.
    """
    sizes = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 64,
             "moe_intermediate_size": 256, "intermediate_size": 256}  # fmt: skip
    folder, _ = narrowed(save(make_model("deepseek-v3", **sizes), tmp_path / "source"), tmp_path)
    blocks = WeightForms(layers=WeightForm(width="fp8"), tables=WeightForm(width="float32"))
    alone = cases.answered(Alone(), Asked(folder, budget=40, forms=blocks))
    for rank in two.run(cases.answered, Asked(folder, attention="dp", budget=40, forms=blocks)):
        # Of this size two forms of the same numbers on one device, FP8 and widened, are as far apart.
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=TOLERANCE * float(alone.logits.std()))
        assert rank.tokens == alone.tokens and rank.kept == alone.kept
