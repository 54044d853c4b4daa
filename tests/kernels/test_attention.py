"""Every version of attention equals its reference, and the reference equals PyTorch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from snapstream.cache.kv_cache import KVCache
from snapstream.cache.spec import KVSpec
from snapstream.config import DType, ModelConfig
from snapstream.kernels import reference
from snapstream.kernels.cpu import attention as cpu
from tests.kernels.layers import one_layer

HEADS = [(4, 4), (4, 2), (8, 1), (6, 2)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 50), (7, 7), (16, 80), (33, 34), (80, 80)])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_prefill_attention(num_heads: int, num_kv_heads: int, num_queries: int, num_keys: int, head_dim: int) -> None:
    torch.manual_seed(num_keys)
    q = torch.randn(num_queries, num_heads, head_dim)
    pool_k, pool_v = torch.randn(2, num_kv_heads, num_keys + 9, head_dim)
    k, v = pool_k[:, 5 : 5 + num_keys], pool_v[:, 5 : 5 + num_keys]  # a range of a larger pool, as in staging
    want = reference.prefill_attention(q, k, v)
    torch.testing.assert_close(cpu.prefill_attention(q, k, v), want, atol=2e-6, rtol=2e-5)
    group = num_heads // num_kv_heads
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    known = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=mask
    )
    torch.testing.assert_close(want, known.transpose(0, 1), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([0], [1]),
        ([2, 0, 1], [5, 9, 1]),
        ([0, 1, 2, 3], [12, 11, 10, 12]),
        ([0, 1, 2, 3], [12, 11, 2, 3]),
        ([0, 1, 2, 3], [12, 12, 12, 12]),
        ([1, 2, 4, 4], [7, 7, 1, 1]),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_decode_attention(
    num_heads: int, num_kv_heads: int, rows: list[int], lengths: list[int], head_dim: int
) -> None:
    torch.manual_seed(len(rows))
    q = torch.randn(len(rows), num_heads, head_dim)
    k, v = torch.full((2, 5, num_kv_heads, 12, head_dim), 1e30)  # slots past a row's length must not leak
    for row, length in zip(rows, lengths, strict=True):
        k[row, :, :length] = torch.randn(num_kv_heads, length, head_dim)
        v[row, :, :length] = torch.randn(num_kv_heads, length, head_dim)
    args = (q, one_layer(k, v), torch.tensor(rows), torch.tensor(lengths))
    want = reference.decode_attention(*args)
    assert want.isfinite().all()
    torch.testing.assert_close(cpu.decode_attention(*args), want, atol=2e-6, rtol=2e-5)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        alone = reference.prefill_attention(q[i : i + 1], k[row, :, :length], v[row, :, :length])
        torch.testing.assert_close(want[i : i + 1], alone, atol=2e-6, rtol=2e-5)


def test_decode_attention_in_half_precision_is_as_good_as_its_storage() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16), torch.randn(3, 2, 40, 16), torch.randn(3, 2, 40, 16)
    rows, lengths = torch.tensor([0, 2]), torch.tensor([40, 13])
    want = reference.decode_attention(q, one_layer(k, v), rows, lengths)
    got = cpu.decode_attention(q.bfloat16(), one_layer(k.bfloat16(), v.bfloat16()), rows, lengths)
    error = (got.float() - want).norm() / want.norm()
    assert got.dtype == torch.bfloat16 and error < 2e-2


def test_write_slots_touches_one_slot_per_row() -> None:
    k_cache, v_cache = torch.zeros(2, 4, 2, 6, 3)
    k, v = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    reference.write_slots(k, v, one_layer(k_cache, v_cache), torch.tensor([2, 0]), torch.tensor([5, 1]))
    assert torch.equal(k_cache[2, :, 5], k[0]) and torch.equal(v_cache[0, :, 1], v[1])
    assert k_cache.count_nonzero() == k.numel() and v_cache.count_nonzero() == v.numel()


def test_rows_share_a_call_only_at_little_waste() -> None:
    def runs(rows: list[int], lengths: list[int]) -> list[tuple[int, int, int, bool]]:
        return [(run.row, run.num_rows, run.longest, run.is_even) for run in cpu.runs(rows, lengths)]

    assert runs([3, 4, 5], [8, 8, 8]) == [(3, 3, 8, True)]
    assert runs([3, 4, 5], [8, 7, 8]) == [(3, 3, 8, False)]
    assert runs([3, 5, 6], [8, 8, 8]) == [(3, 1, 8, True), (5, 2, 8, True)]
    assert runs([0, 1, 2], [100, 10, 10]) == [(0, 1, 100, True), (1, 2, 10, True)]
    assert runs([0, 1], [10, 100]) == [(0, 1, 10, True), (1, 1, 100, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_earlier_owner_left_past_a_rows_end_is_silent(dtype: torch.dtype) -> None:
    """NaN with weight 0 is NaN; the row whose own slots hold NaN keeps it."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(4, 4, 8, generator=generator).to(dtype)
    k, v = (torch.randn(5, 2, 20, 8, generator=generator).to(dtype) for _ in "kv")
    rows, lengths = torch.arange(4), torch.tensor([20, 17, 20, 18])
    want = cpu.decode_attention(q, one_layer(k, v), rows, lengths)
    for cache in (k, v):
        cache[1, :, 17:] = torch.nan
        cache[3, :, 18:] = torch.inf
    torch.testing.assert_close(cpu.decode_attention(q, one_layer(k, v), rows, lengths), want)
    v[2, :, 5] = torch.nan
    got = cpu.decode_attention(q, one_layer(k, v), rows, lengths)
    assert got[2].isnan().all()
    torch.testing.assert_close(got[[0, 1, 3]], want[[0, 1, 3]])
    assert want.isfinite().all()


def test_rows_begin_as_zeros_that_cost_nothing() -> None:
    model = ModelConfig(
        architecture="x", vocab_size=8, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64,
        intermediate_size=8, max_position=8,
    )  # fmt: skip
    dtypes: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for name, dtype in dtypes.items():
        cache = KVCache(KVSpec.of(model, name), num_rows=3, capacity=50, device="cpu")
        assert cache.k.shape == (2, 4, 2, 50, 64) and cache.k.dtype == dtype and cache.k.is_contiguous()
        assert not cache.k.any() and not cache.v.any()
        cache.k[1, 2] = 1.0
        assert cache.k.sum() == 2 * 50 * 64
