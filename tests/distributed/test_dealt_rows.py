"""Rows of latents dealt out to two ranks: the tokens of one device, of split heads too, in half of the rows' bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snapstream.distributed.group import Alone
from tests.distributed import cases
from tests.distributed.cases import Asked
from tests.distributed.pool import Pool
from tests.parity.checkpoints import make_model, save

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
