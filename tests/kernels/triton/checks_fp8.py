"""As ``checks.py``, for the kernels that read and write rows in FP8: the same bits stored, the same attention."""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.config import RopeConfig
from snapstream.kernels import reference
from snapstream.kernels.formats import FP8, FP8_MAX, Scales
from snapstream.kernels.interface import HeadNorm, bind
from snapstream.models.rope import Rope
from tests.kernels.layers import one_layer
from tests.kernels.triton.checks import assert_near, decode_attention, norm_rope_write


def rows_of(num_rows: int, num_kv_heads: int, capacity: int, head_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """An empty pair of rows ``[rows+1, G, C, E]`` in which every byte is NaN."""
    shape = (num_rows + 1, num_kv_heads, capacity, head_dim)
    return tuple(torch.full(shape, 127, dtype=torch.uint8, device=device).view(FP8.dtype) for _ in "kv")  # type: ignore[return-value]


def scales_of(num_rows: int, num_kv_heads: int, device: str) -> Scales:
    """Powers of two, all different from their neighbours."""
    powers = torch.arange((num_rows + 1) * num_kv_heads, device=device).view(-1, num_kv_heads) % 5 - 3.0
    return powers.exp2(), powers.neg().exp2()


def same_bytes(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check_decode_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, capacity: int, lengths: list[int], dtype: torch.dtype, device: str
) -> None:
    """Equal to the reference; slots past the length hold NaN."""
    torch.manual_seed(capacity)
    batch = len(lengths)
    k, v = rows_of(batch, num_kv_heads, capacity, head_dim, device)
    scales = scales_of(batch, num_kv_heads, device)
    for row, length in enumerate(lengths):
        for cache, scale in zip((k, v), scales, strict=True):
            numbers = torch.randn(num_kv_heads, length, head_dim, device=device)
            cache[row, :, :length] = FP8.encode(numbers, scale[row, :, None, None])
    q = torch.randn(batch, num_heads, head_dim, device=device).to(dtype)
    rows, length = torch.arange(batch, device=device).flip(0), torch.tensor(lengths, device=device).flip(0)
    got = decode_attention(q, one_layer(k, v, scales), rows, length)
    wide = one_layer(k.float().nan_to_num(), v.float().nan_to_num(), scales)
    assert got.dtype == dtype
    assert_near(got, reference.decode_attention(q.float(), wide, rows, length), dtype)


def new_tokens(batch: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """Projected heads ``[B, H+2G, E]``; some numbers are far beyond every scale, some far below."""
    heads = torch.randn(batch, num_heads + 2 * num_kv_heads, head_dim, device=device)
    heads[:, :, ::7] *= 6000.0
    heads[:, :, 3::7] *= 1e-4
    return heads.to(dtype)


def check_norm_rope_write(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype, device: str
) -> None:
    """q and the bytes in the rows are those of its two halves, one after the other."""
    torch.manual_seed(head_dim)
    heads = new_tokens(3, num_heads, num_kv_heads, head_dim, dtype, device)
    norm = torch.rand(num_heads + num_kv_heads, head_dim, device=device).to(dtype) * 900 if has_norm else None
    positions = torch.tensor([5, 900, 70], device=device)
    rope = Rope(RopeConfig(), head_dim, device).angles(positions, positions + 1)
    rows, slots = torch.tensor([1, 2, 0], device=device), torch.tensor([3, 0, 2], device=device)
    scales = scales_of(2, num_kv_heads, device)
    got, want = (rows_of(2, num_kv_heads, 5, head_dim, device) for _ in range(2))
    own = HeadNorm(norm, 1e-6)
    q = norm_rope_write(heads, own, rope, one_layer(*got, scales), rows, slots)
    qk = bind(device, "triton").norm_rope(heads, own, rope, num_kv_heads)
    assert torch.equal(q, qk[:, :num_heads])
    reference.write_slots(qk[:, num_heads:], heads[:, -num_kv_heads:], one_layer(*want, scales), rows, slots)
    same_bytes(got, want)
    assert (got[1][rows, :, slots].float().abs() == FP8_MAX).any()  # something was saturated, and is a number


def check_gather_rows(num_kv_heads: int, head_dim: int, num_tokens: int, dtype: torch.dtype, device: str) -> None:
    """Byte for byte, in two rows with scales of their own."""
    torch.manual_seed(num_tokens)
    keys, values = torch.randn(2, num_kv_heads, num_tokens, head_dim, device=device).to(dtype) * 200
    kept = [torch.randperm(num_tokens)[: num_tokens // 2].sort().values for _ in range(num_kv_heads)]
    index = torch.stack(kept).to(device)
    scales = scales_of(3, num_kv_heads, device)
    got, want = (rows_of(3, num_kv_heads, num_tokens, head_dim, device) for _ in range(2))
    bind(device, "triton").gather_rows(one_layer(*got, scales), [0, 2], keys, values, index)
    reference.gather_rows(one_layer(*want, scales), [0, 2], keys, values, index)
    same_bytes(got, want)
