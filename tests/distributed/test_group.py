"""Groups of ranks: what collectives return, alone, pretended and between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from snapstream.distributed.group import Alone, Group, Pretend, Ranks, ReduceOp
from tests.distributed import cases
from tests.distributed.pool import Pool


def test_alone_and_pretend_communicate_nothing() -> None:
    x = torch.arange(6.0).view(2, 3)
    one: Group = Alone()
    assert (one.rank, one.size) == (0, 1)
    assert one.all_reduce(x) is x and one.all_gather(x, 1) is x and one.broadcast(x, 0) is x
    third: Group = Pretend(2, 4)
    assert (third.rank, third.size) == (2, 4)
    assert third.all_reduce(x, "max") is x and third.broadcast(x, 1) is x
    assert torch.equal(third.all_gather(x, 1), x.repeat(1, 4))
    assert third.all_gather(x, 0).shape == (8, 3)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_is_one_of_its_group(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}; it must be from 0 to 3"):
        Pretend(rank, 4)


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_hold_the_same_bits_after_a_reduction(two: Pool, dtype: torch.dtype, op: ReduceOp) -> None:
    answers = two.run(cases.reduced, dtype, op)
    assert [rank for rank, _, _ in answers] == [0, 1]
    both = [before for _, before, _ in answers]
    assert not torch.equal(*both)
    wanted = both[0] + both[1] if op == "sum" else torch.maximum(*both)
    for _, _, after in answers:
        assert after.dtype == dtype and torch.equal(after, wanted)


def test_ranks_reduce_what_is_not_contiguous(two: Pool) -> None:
    for after in two.run(cases.reduced_view):
        assert torch.equal(after, (2 * torch.arange(6.0).view(2, 3) + 1).t())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_ranks_gather_in_the_order_of_ranks(two: Pool, dim: int) -> None:
    first = torch.arange(6.0).view(2, 3)
    for after in two.run(cases.gathered, dim):
        assert torch.equal(after, torch.cat((first, first + 100), dim))


@pytest.mark.parametrize("source", [0, 1])
def test_ranks_have_what_one_of_them_had(two: Pool, source: int) -> None:
    for after in two.run(cases.broadcast, source):
        assert torch.equal(after, (torch.arange(6.0).view(2, 3) + 100 * source).t())


@pytest.mark.parametrize(("device", "wanted"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", None)])
def test_a_gpu_joins_by_its_number(device: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses a GPU without one."""
    asked: dict[str, Any] = {}

    def init(**given: Any) -> None:
        asked.update(given)
        raise InterruptedError  # nobody is there to meet

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(InterruptedError):
        Ranks.join(0, 2, "file:///nowhere", device, 1.0)
    assert asked["device_id"] == (None if wanted is None else torch.device(wanted))
    assert asked["backend"] == ("gloo" if wanted is None else "nccl")
