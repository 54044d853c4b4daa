"""Prefill attention through fused kernels equals the reference (on a CPU through the same calls, other kernels)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snapstream.kernels import reference, sdpa


def by_flash_of_the_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    repeated = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *repeated, 0.0, is_causal)
    return out, lse


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 40), (7, 7), (7, 40), (39, 40), (40, 40)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_both_ways_equal_the_reference(num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_queries, num_heads, 16)
    pool = torch.randn(2, num_kv_heads, num_keys + 9, 16)
    k, v = pool[:, :, 5 : 5 + num_keys]  # as a range of the staging pool
    expected = reference.prefill_attention(q, k, v)
    torch.testing.assert_close(sdpa.prefill_attention(q, k, v), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sdpa.split(q, k, v, by_flash_of_the_cpu), expected, rtol=1e-5, atol=1e-5)
