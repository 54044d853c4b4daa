"""As ``checks.py``, for the kernels that read and write rows in FP8 and of integers: the same bits stored, the same
attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.config import KVDType, RopeConfig
from snapstream.config.values import row_formats
from snapstream.kernels import reference
from snapstream.kernels.formats import ENCODINGS, FP8, FP8_MAX, Scales
from snapstream.kernels.interface import HeadNorm, bind
from snapstream.kernels.rows import LayerRows, RowPlaces
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


def rows_of_codes(
    kv_dtype: KVDType, num_rows: int, num_kv_heads: int, capacity: int, head_dim: int, device: str
) -> LayerRows:
    """Two layers of rows in which every number and scale is NaN, or as far from 0 as a code can be."""
    tensors, scales = [], []
    for form in row_formats("float32", kv_dtype):
        encoding, shape = ENCODINGS[form.name], (2, num_rows + 1, num_kv_heads, capacity)
        tensors.append(
            torch.full((*shape, encoding.width(head_dim)), 127, dtype=torch.uint8, device=device).view(encoding.dtype)
        )
        scales.append(torch.full(shape, float("nan"), device=device) if form.scales else None)
    return LayerRows(tensors[0], tensors[1], 1, scales[0], scales[1])


def same_rows(got: LayerRows, want: LayerRows) -> None:
    """All bytes and scales of both layers."""
    same_bytes((got.keys, got.values), (want.keys, want.values))
    for one, other in ((got.key_scales, want.key_scales), (got.value_scales, want.value_scales)):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one.view(torch.int32), other.view(torch.int32))


def check_rows_of_codes(
    kv_dtype: KVDType, num_heads: int, num_kv_heads: int, head_dim: int, lengths: list[int], capacity: int,
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    """A step stores the bytes of its two halves, one after the other, and attends as the reference does.

    Rows hold NaN behind their lengths, and their keys have an outlier channel.
    """
    torch.manual_seed(head_dim + capacity)
    batch = len(lengths)
    got, want = (rows_of_codes(kv_dtype, batch, num_kv_heads, capacity, head_dim, device) for _ in range(2))
    for row, length in enumerate(lengths):
        keys, values = torch.randn(2, num_kv_heads, length, head_dim, device=device).to(dtype)
        keys[..., 1] *= 20.0
        index = torch.arange(length, device=device).expand(num_kv_heads, -1)
        bind(device, "triton").gather_rows(got, [row], keys, values, index)
        reference.gather_rows(want, [row], keys, values, index)
    heads = torch.randn(batch, num_heads + 2 * num_kv_heads, head_dim, device=device)
    heads[0, -1] = 0.0
    heads[-1, -2, 3:] *= 1e-30
    heads = heads.to(dtype)
    positions = torch.arange(batch, device=device) * 7
    rope = Rope(RopeConfig(), head_dim, device).angles(positions, positions + 1)
    rows = torch.arange(batch, device=device).flip(0)
    slots = torch.tensor(lengths, device=device).flip(0) % capacity
    norm = HeadNorm(None, 1e-6, torch.randn(num_heads, device=device), 30.0)
    kept: list[Tensor] = []
    places = RowPlaces(rows, slots, torch.tensor(lengths, device=device).flip(0).add(1).clamp(max=capacity))
    out = bind(device, "triton").attend_rows(heads, norm, rope, got, places, kept.append)
    qk = bind(device, "triton").norm_rope(heads, norm, rope, num_kv_heads)
    q = qk[:, :num_heads]
    assert len(kept) == 1 and torch.equal(kept[0], q)
    reference.write_slots(qk[:, num_heads:], heads[:, -num_kv_heads:], want, rows, slots)
    same_rows(got, want)
    expected = reference.decode_attention(q.float(), want, rows, places.lengths, norm.sinks, norm.cap)
    assert out.dtype == dtype
    assert_near(out, expected, dtype, 2.0)  # rotated queries and numbers of int4 are rounded to it, too


def check_codes_of_no_number(kv_dtype: KVDType, device: str) -> None:
    """A token with a number that is not finite is read as NaN, its neighbors are not."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        cache = rows_of_codes(kv_dtype, 1, 2, 4, 64, device)
        heads = torch.randn(2, 6, 64, device=device)
        heads[1, 2:, 5] = bad
        rope = Rope(RopeConfig(), 64, device).angles(*(torch.zeros(2, dtype=torch.int64, device=device),) * 2)
        at = torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([1, 2], device=device)
        bind(device, "triton").attend_rows(heads, HeadNorm(None, 1e-6), rope, cache, RowPlaces(*at, at[0] + 1), None)
        forms = row_formats("float32", kv_dtype)
        for form, stored, scale in zip(forms, (cache.k, cache.v), cache.scales, strict=True):
            own = None if scale is None else scale[0, :, 1:3]
            found = ENCODINGS[form.name].decode(stored[0, :, 1:3], own)
            assert found[:, 0].isfinite().all() and found[:, 1].isnan().any(-1).all()
