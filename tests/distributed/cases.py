"""What ranks are told to do: functions that ``pool.py`` calls in every one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.distributed.group import Group, ReduceOp


def reduced(group: Group, dtype: torch.dtype, op: ReduceOp) -> tuple[int, Tensor, Tensor]:
    """The rank, its numbers before and after."""
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
    return group.rank, x.clone(), group.all_reduce(x, op)


def reduced_view(group: Group) -> Tensor:
    """Of a tensor whose numbers do not lie one after the other."""
    return group.all_reduce((torch.arange(6.0).view(2, 3) + group.rank).t())


def gathered(group: Group, dim: int) -> Tensor:
    """Numbers that name rank and place."""
    return group.all_gather(100.0 * group.rank + torch.arange(6.0).view(2, 3), dim)
