"""One check per Triton kernel: random inputs, the kernel, its plain reference in fp32. Any device, any size.

``test_interpreted.py`` runs them small on CPU tensors under the interpreter, ``tests/gpu/test_triton_kernels.py`` at
real sizes on the device. Places that a kernel must not read hold NaN, places it must write hold NaN before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from snapstream.config import RopeConfig
from snapstream.kernels import ops, reference
from snapstream.layers.rope import Rope
from tests.live import LiveBytes

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the norm
NAN = float("nan")


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Relative distance in norm; NaN never passes."""
    assert got.shape == want.shape
    error = ((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)).item()
    assert error <= TOLERANCE[dtype] * factor, f"relative error {error:.2e}"


def filled_rows(
    num_rows: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    lengths: dict[int, int],
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor]:
    """Layer 1 of a three-layer cache ``[rows+1, G, C, E]``: NaN but for the visible slots."""
    k, v = torch.full((2, 3, num_rows + 1, num_kv_heads, capacity, head_dim), NAN, dtype=dtype, device=device)
    for row, length in lengths.items():
        for cache in (k, v):
            cache[1, row, :, :length] = torch.randn(num_kv_heads, length, head_dim, device=device).to(dtype)
    return k[1], v[1]


def check_decode_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, capacity: int, rows: Sequence[int], lengths: Sequence[int],
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    """Equal to the reference; and a row alone gives bit for bit what it gives in the batch."""
    torch.manual_seed(capacity)
    k, v = filled_rows(
        max(rows), num_kv_heads, capacity, head_dim, dict(zip(rows, lengths, strict=True)), dtype, device
    )
    q = torch.randn(len(rows), num_heads, head_dim, device=device).to(dtype)
    index, length = torch.tensor(rows, device=device), torch.tensor(lengths, device=device)
    got = ops.decode_attention(q, k, v, index, length)
    assert got.dtype == dtype and got.is_contiguous()
    want = reference.decode_attention(q.float(), k.nan_to_num().float(), v.nan_to_num().float(), index, length)
    assert_near(got, want, dtype)
    for i in {0, len(rows) - 1}:
        alone = ops.decode_attention(q[i : i + 1], k, v, index[i : i + 1], length[i : i + 1])
        assert torch.equal(alone, got[i : i + 1])


def check_decode_attention_strides(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """As with tensors of their own; the cache of one layer of ``[slot, row, head]``."""
    torch.manual_seed(head_dim)
    wide = torch.randn(3, num_heads + 2 * num_kv_heads, head_dim + 8, device=device).to(dtype)
    q = wide[:, 1 : 1 + num_heads, :head_dim]
    caches = torch.randn(2, 200, 4, num_kv_heads, head_dim, device=device).to(dtype).permute(0, 2, 3, 1, 4)
    rows, lengths = torch.tensor([3, 0, 1], device=device), torch.tensor([200, 1, 131], device=device)
    got = ops.decode_attention(q, *caches, rows, lengths)
    assert torch.equal(got, ops.decode_attention(q.contiguous(), *caches.contiguous(), rows, lengths))
    assert_near(got, reference.decode_attention(q.float(), *caches.float(), rows, lengths), dtype)


def check_refusals(device: str) -> None:
    """Kernels that would read the wrong numbers say so instead."""
    heads = torch.randn(3, 8, 32, device=device)
    odd, caches = heads[..., ::2], torch.randn(2, 4, 2, 40, 16, device=device)
    odd_caches = torch.randn(2, 4, 2, 40, 32, device=device)[..., ::2]
    index, angles = torch.zeros(3, dtype=torch.int64, device=device), torch.randn(3, 1, 16, device=device)
    even = heads[..., :16].contiguous()
    kept = torch.zeros(2, 5, dtype=torch.int64, device=device)
    calls: list[Callable[[], object]] = [
        lambda: ops.decode_attention(odd[:, :4], *caches, index, index + 1),
        lambda: ops.decode_attention(even[:, :4], *odd_caches, index, index + 1),
        lambda: ops.norm_rope_write(odd, None, 1e-6, angles, angles, *caches, index, index),
        lambda: ops.norm_rope_write(even, None, 1e-6, angles, angles, *odd_caches, index, index),
        lambda: ops.norm_rope(heads[:, :, :16], None, 1e-6, angles, angles, 2),  # heads of a token lie apart
        lambda: ops.write_slots(*odd_caches, even[:, 4:6], even[:, 6:], index, index),
        lambda: ops.write_slots(*caches, odd[:, 4:6], odd[:, 6:], index, index),
        lambda: ops.rms_norm(odd[:, 0], torch.ones(16, device=device), 1e-6),
        lambda: ops.add_rms_norm(odd[:, 0], even[:, 0], torch.ones(16, device=device), 1e-6),
        lambda: ops.swiglu(odd[:, 0]),
        lambda: ops.snapkv_scores(even[:, :4], odd_caches[0, 0], 37, 0, 30, False, False),
        lambda: ops.gather_rows(*odd_caches, [0], *caches[:, 0], kept),
        lambda: ops.gather_rows(*caches, [0], *odd_caches[:, 0], kept),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="contiguous"):
            call()


def check_norm_rope_write(
    num_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int, has_norm: bool, dtype: torch.dtype, device: str
) -> None:
    """q, the written slots, and nothing else; projected heads may be a slice of something wider."""
    torch.manual_seed(head_dim)
    num_projected = num_heads + 2 * num_kv_heads
    wide = torch.randn(num_tokens, num_projected * head_dim + 32, device=device).to(dtype)
    heads = wide[:, : num_projected * head_dim].view(num_tokens, num_projected, head_dim)
    norm = torch.rand(num_heads + num_kv_heads, head_dim, device=device).to(dtype) + 0.5 if has_norm else None
    positions = torch.arange(num_tokens, device=device) * 37 + 5
    cos, sin = Rope(RopeConfig(), head_dim, device).angles(positions, positions + 1)
    rows = torch.arange(num_tokens, device=device).flip(0) % 5
    slots = torch.arange(num_tokens, device=device) // 5 + 2
    shape = (2, 5, num_kv_heads, num_tokens // 5 + 4, head_dim)
    k, v = torch.full((2, *shape), NAN, dtype=dtype, device=device)
    want_k, want_v = torch.full(shape[1:], NAN, device=device), torch.full(shape[1:], NAN, device=device)
    got = ops.norm_rope_write(heads, norm, 1e-6, cos, sin, k[1], v[1], rows, slots)
    wide_norm = None if norm is None else norm.float()
    want = reference.norm_rope_write(heads.float(), wide_norm, 1e-6, cos, sin, want_k, want_v, rows, slots)
    assert got.dtype == dtype and got.is_contiguous()
    assert_near(got, want, dtype)
    for cache, expected in ((k, want_k), (v, want_v)):
        assert torch.equal(cache[1].isnan(), expected.isnan()) and cache[0].isnan().all()
        assert_near(cache[1].nan_to_num(), expected.nan_to_num(), dtype)
    assert torch.equal(v[1, rows, :, slots], heads[:, -num_kv_heads:])
    unused = rows.clone().fill_(4)  # entries of the padding row meet in one slot; nobody else's slot is touched
    padded = torch.full((2, *shape[1:]), NAN, dtype=dtype, device=device)
    q = ops.norm_rope_write(heads, norm, 1e-6, cos, sin, *padded, unused, slots.clone().fill_(1))
    assert torch.equal(q, got) and not padded[:, 4, :, 1].isnan().any()
    assert padded.isnan().sum() == padded.numel() - padded[:, 4, :, 1].numel()
    qk = ops.norm_rope(heads, norm, 1e-6, cos, sin, num_kv_heads)  # the two halves: the same, bit for bit
    assert torch.equal(qk[:, :num_heads], got)
    halves = torch.full((2, *shape[1:]), NAN, dtype=dtype, device=device)
    ops.write_slots(*halves, qk[:, num_heads:], heads[:, -num_kv_heads:], rows, slots)
    for cache, expected in zip(halves, (k[1], v[1]), strict=True):
        assert torch.equal(cache.nan_to_num(), expected.nan_to_num()) and torch.equal(cache.isnan(), expected.isnan())


def check_rms_norm(num_rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Alone, and after adding to the residual in place."""
    torch.manual_seed(size)
    x, residual = torch.randn(2, num_rows, 2 * size, device=device).to(dtype)[..., :size]
    weight = torch.rand(size, device=device).to(dtype) + 0.5
    assert_near(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    summed = residual.clone()
    want = reference.add_rms_norm(summed, x, weight, 1e-5)
    got = ops.add_rms_norm(residual, x, weight, 1e-5)
    assert_near(got, want, dtype)
    assert_near(residual, summed, dtype)


def check_swiglu(num_tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Also where ``exp`` overflows."""
    torch.manual_seed(size)
    gate_up = torch.randn(num_tokens, 2 * size, device=device).to(dtype) * 4
    gate_up[:, 0] = -200.0
    assert_near(ops.swiglu(gate_up), reference.swiglu(gate_up.float()), dtype)


def check_snapkv_scores(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int, num_keys: int, span: tuple[int, int],
    over_row: bool, group_max: bool, dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    """Equal to the reference; keys lie inside a pool of NaN."""
    torch.manual_seed(num_keys)
    pool = torch.full((num_kv_heads, num_keys + 9, head_dim), NAN, dtype=dtype, device=device)
    keys = pool[:, 4 : 4 + num_keys]
    keys.copy_(torch.randn(keys.shape, device=device) * 2)
    queries = torch.randn(window, num_heads, head_dim, device=device).to(dtype)
    got = ops.snapkv_scores(queries, keys, num_keys - window, *span, over_row, group_max)
    want = reference.snapkv_scores(
        queries.float(), keys.float(), num_keys - window, *span, over_row=over_row, group_max=group_max
    )
    assert got.dtype == torch.float32
    # the sums are fp32 whatever the storage; tensor cores round theirs towards zero, and logits enter an exponential
    assert_near(got, want, torch.float32, 4.0 if device == "cpu" else 50.0)


def check_snapkv_memory(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int, num_keys: int, device: str
) -> None:
    """What is allocated beside the result is a small part of what the probabilities would be."""
    queries, keys = torch.randn(window, num_heads, head_dim), torch.randn(num_kv_heads, num_keys, head_dim)
    queries, keys = queries.to(device), keys.to(device)
    with LiveBytes(torch.device(device).type) as live:
        scores = ops.snapkv_scores(queries, keys, num_keys - window, 0, num_keys - window, False, False)
    assert live.peak - scores.nbytes < window * num_heads * num_keys * 4 / 50


def check_gather_rows(
    num_kv_heads: int, head_dim: int, num_tokens: int, num_kept: int, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit, in two rows, and no other slot is touched."""
    torch.manual_seed(num_tokens)
    pool = torch.randn(2, num_kv_heads, num_tokens + 7, head_dim, device=device).to(dtype)
    keys, values = pool[:, :, 3 : 3 + num_tokens]
    kept = [torch.randperm(num_tokens)[:num_kept].sort().values for _ in range(num_kv_heads)]
    index = torch.stack(kept).to(device)
    caches = torch.full((2, 4, num_kv_heads, num_kept + 5, head_dim), NAN, dtype=dtype, device=device)
    wanted = caches.clone()
    ops.gather_rows(*caches, [0, 2], keys, values, index)
    reference.gather_rows(*wanted, [0, 2], keys, values, index)
    assert torch.equal(caches.nan_to_num(), wanted.nan_to_num()) and torch.equal(caches.isnan(), wanted.isnan())
