"""Queries, keys and values as an engine passes them, for the trials of prefill kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.kernels.prefill.versions import Case

_BEFORE, _AFTER = 16, 16  # tokens of others in the pool


def random_chunk(
    case: Case, num_queries: int, num_keys: int, *, num_kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """``q [T, H, E]`` and a range of a pool, ``k, v [G, N, E]``: the same numbers every time."""
    generator = torch.Generator(case.device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=case.device).to(case.dtype)

    pool = numbers(2, num_kv_heads, _BEFORE + num_keys + _AFTER, case.head_dim)
    k, v = pool[:, :, _BEFORE : _BEFORE + num_keys]
    return numbers(num_queries, num_kv_heads * case.group_size, case.head_dim), k, v
