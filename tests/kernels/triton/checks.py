"""One check per Triton kernel: random inputs, the kernel, its plain reference in fp32. Any device, any size.

``test_interpreted.py`` runs them small on CPU tensors under the interpreter, ``tests/gpu/test_triton_kernels.py`` at
real sizes on the device. Places that a kernel must not read hold NaN, places it must write hold NaN before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from snapstream.config import RopeConfig
from snapstream.kernels import reference
from snapstream.kernels.interface import CosSin, HeadNorm, LayerRows, bind
from snapstream.models.rope import Rope
from tests.kernels.layers import one_layer
from tests.live import LiveBytes

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the norm
NAN = float("nan")


def decode_attention(
    q: Tensor, cache: LayerRows, rows: Tensor, lengths: Tensor, sinks: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """The part of ``attend_rows`` that reads rows; imported here, because a machine may be without Triton."""
    from snapstream.kernels.triton import attention

    return attention.decode_attention(q, cache, rows, lengths, sinks, cap)


def norm_rope_write(
    heads: Tensor, norm: HeadNorm, rope: CosSin, cache: LayerRows, rows: Tensor, slots: Tensor
) -> Tensor:
    """The part of ``attend_rows`` that writes them."""
    from snapstream.kernels.triton import rows as rope_write

    return rope_write.norm_rope_write(heads, norm, rope, cache, rows, slots)


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
) -> LayerRows:
    """Layer 1 of a three-layer cache ``[3, rows+1, G, C, E]``: NaN but for the visible slots."""
    k, v = torch.full((2, 3, num_rows + 1, num_kv_heads, capacity, head_dim), NAN, dtype=dtype, device=device)
    for row, length in lengths.items():
        for cache in (k, v):
            cache[1, row, :, :length] = torch.randn(num_kv_heads, length, head_dim, device=device).to(dtype)
    return LayerRows(k, v, 1)


def check_decode_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, capacity: int, rows: Sequence[int], lengths: Sequence[int],
    dtype: torch.dtype, device: str, cap: float | None = None,
) -> None:  # fmt: skip
    """Equal to the reference; and a row alone gives bit for bit what it gives in the batch."""
    torch.manual_seed(capacity)
    cache = filled_rows(
        max(rows), num_kv_heads, capacity, head_dim, dict(zip(rows, lengths, strict=True)), dtype, device
    )
    q = torch.randn(len(rows), num_heads, head_dim, device=device).to(dtype)
    index, length = torch.tensor(rows, device=device), torch.tensor(lengths, device=device)
    got = decode_attention(q, cache, index, length, cap=cap)
    assert got.dtype == dtype and got.is_contiguous()
    wide = one_layer(cache.k.nan_to_num().float(), cache.v.nan_to_num().float())
    want = reference.decode_attention(q.float(), wide, index, length, None, cap)
    assert_near(got, want, dtype)
    for i in {0, len(rows) - 1}:
        alone = decode_attention(q[i : i + 1], cache, index[i : i + 1], length[i : i + 1], cap=cap)
        assert torch.equal(alone, got[i : i + 1])


def check_sinks(num_heads: int, num_kv_heads: int, capacity: int, dtype: torch.dtype, device: str) -> None:
    """Learned sinks of heads, and of each entry its own: small ones, and some that take nearly all the weight."""
    torch.manual_seed(capacity)
    lengths = [capacity, 1, capacity // 2 + 1]
    cache = filled_rows(2, num_kv_heads, capacity, 32, dict(enumerate(lengths)), dtype, device)
    q = torch.randn(3, num_heads, 32, device=device).to(dtype)
    rows, length = torch.arange(3, device=device), torch.tensor(lengths, device=device)
    wide = one_layer(cache.k.nan_to_num().float(), cache.v.nan_to_num().float())
    for shape in ((num_heads,), (3, num_heads)):
        sinks = torch.randn(shape, device=device) * 6
        want = reference.decode_attention(q.float(), wide, rows, length, sinks)
        assert_near(decode_attention(q, cache, rows, length, sinks), want, dtype)


def check_decode_attention_strides(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """As with tensors of their own; the cache of one layer of ``[slot, row, head]``."""
    torch.manual_seed(head_dim)
    wide = torch.randn(3, num_heads + 2 * num_kv_heads, head_dim + 8, device=device).to(dtype)
    q = wide[:, 1 : 1 + num_heads, :head_dim]
    caches = torch.randn(2, 200, 4, num_kv_heads, head_dim, device=device).to(dtype).permute(0, 2, 3, 1, 4)
    rows, lengths = torch.tensor([3, 0, 1], device=device), torch.tensor([200, 1, 131], device=device)
    got = decode_attention(q, one_layer(*caches), rows, lengths)
    assert torch.equal(got, decode_attention(q.contiguous(), one_layer(*caches.contiguous()), rows, lengths))
    assert_near(got, reference.decode_attention(q.float(), one_layer(*caches.float()), rows, lengths), dtype)


def check_prefill_attention(
    num_queries: int, num_keys: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """Chunks behind earlier keys equal the reference: full layers and windows, with sinks and a cap, each or both. Keys
    and values are ranges of a larger pool whose other tokens are NaN.
    """
    from snapstream.kernels.triton.prefill import prefill_attention

    torch.manual_seed(head_dim)
    q = torch.randn(num_queries, heads[0], head_dim, device=device).to(dtype)
    pool = torch.full((2, heads[1], num_keys + 48, head_dim), NAN, device=device)
    pool[:, :, 16 : 16 + num_keys] = torch.randn(2, heads[1], num_keys, head_dim, device=device)
    k, v = pool.to(dtype)[:, :, 16 : 16 + num_keys]
    logits = torch.randn(heads[0], device=device)
    for window, sinks, cap in product((None, 1, 50, num_keys), (None, logits), (None, 4.0)):
        got = prefill_attention(q, k, v, window=window, sinks=sinks, cap=cap)
        want = reference.prefill_attention(q.float(), k.float(), v.float(), window=window, sinks=sinks, cap=cap)
        assert got.dtype == dtype and got.shape == want.shape
        assert_near(got, want, dtype)
    with pytest.raises(ValueError, match="contiguous head dimension"):
        prefill_attention(q.transpose(0, 2).contiguous().transpose(0, 2), k, v)


def check_refusals(device: str) -> None:
    """Kernels that would read the wrong numbers say so instead."""
    heads = torch.randn(3, 8, 32, device=device)
    odd, stored = heads[..., ::2], torch.randn(2, 4, 2, 40, 16, device=device)
    odd_stored = torch.randn(2, 4, 2, 40, 32, device=device)[..., ::2]
    cache, odd_cache, kernels = one_layer(*stored), one_layer(*odd_stored), bind(device, "triton")
    index, angle = torch.zeros(3, dtype=torch.int64, device=device), torch.randn(3, 1, 16, device=device)
    even = heads[..., :16].contiguous()
    kept = torch.zeros(2, 5, dtype=torch.int64, device=device)
    none, angles, ones = HeadNorm(None, 1e-6), (angle, angle), torch.ones(16, device=device)
    calls: list[Callable[[], object]] = [
        lambda: decode_attention(odd[:, :4], cache, index, index + 1),
        lambda: decode_attention(even[:, :4], odd_cache, index, index + 1),
        lambda: norm_rope_write(odd, none, angles, cache, index, index),
        lambda: norm_rope_write(even, none, angles, odd_cache, index, index),
        lambda: kernels.norm_rope(heads[:, :, :16], none, angles, 2),  # heads of a token lie apart
        lambda: kernels.rms_norm(odd[:, 0], ones, 1e-6),
        lambda: kernels.add_rms_norm(odd[:, 0], even[:, 0], ones, 1e-6),
        lambda: kernels.swiglu(odd[:, 0]),
        lambda: kernels.snapkv_scores(even[:, :4], odd_stored[0, 0], 37, 0, 30, over_row=False, group_max=False),
        lambda: kernels.gather_rows(odd_cache, [0], *stored[:, 0], kept),
        lambda: kernels.gather_rows(cache, [0], *odd_stored[:, 0], kept),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="contiguous"):
            call()
    latents = LayerRows(stored[:1], stored[:1, ..., :8], 0, values_are_keys=True)
    calls = [
        lambda: decode_attention(even[:, :4], latents, index, index + 1),
        lambda: norm_rope_write(even[:, :6], none, angles, latents, index, index),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="values are the keys"):
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
    rope = Rope(RopeConfig(), head_dim, device).angles(positions, positions + 1)
    rows = torch.arange(num_tokens, device=device).flip(0) % 5
    slots = torch.arange(num_tokens, device=device) // 5 + 2
    shape = (2, 5, num_kv_heads, num_tokens // 5 + 4, head_dim)
    k, v = torch.full((2, *shape), NAN, dtype=dtype, device=device)
    want_k, want_v = torch.full(shape[1:], NAN, device=device), torch.full(shape[1:], NAN, device=device)
    own = HeadNorm(norm, 1e-6)
    got = norm_rope_write(heads, own, rope, LayerRows(k, v, 1), rows, slots)
    wide_norm = HeadNorm(None if norm is None else norm.float(), 1e-6)
    want = reference.norm_rope_write(heads.float(), wide_norm, rope, one_layer(want_k, want_v), rows, slots)
    assert got.dtype == dtype and got.is_contiguous()
    assert_near(got, want, dtype)
    for cache, expected in ((k, want_k), (v, want_v)):
        assert torch.equal(cache[1].isnan(), expected.isnan()) and cache[0].isnan().all()
        assert_near(cache[1].nan_to_num(), expected.nan_to_num(), dtype)
    assert torch.equal(v[1, rows, :, slots], heads[:, -num_kv_heads:])
    unused = rows.clone().fill_(4)  # entries of the padding row meet in one slot; nobody else's slot is touched
    padded = torch.full((2, *shape[1:]), NAN, dtype=dtype, device=device)
    q = norm_rope_write(heads, own, rope, one_layer(*padded), unused, slots.clone().fill_(1))
    assert torch.equal(q, got) and not padded[:, 4, :, 1].isnan().any()
    assert padded.isnan().sum() == padded.numel() - padded[:, 4, :, 1].numel()
    qk = bind(device, "triton").norm_rope(heads, own, rope, num_kv_heads)  # the two halves: the same, bit for bit
    assert torch.equal(qk[:, :num_heads], got)
    halves = torch.full((2, *shape[1:]), NAN, dtype=dtype, device=device)
    reference.write_slots(qk[:, num_heads:], heads[:, -num_kv_heads:], one_layer(*halves), rows, slots)
    for cache, expected in zip(halves, (k[1], v[1]), strict=True):
        assert torch.equal(cache.nan_to_num(), expected.nan_to_num()) and torch.equal(cache.isnan(), expected.isnan())


def check_rms_norm(num_rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Alone, and after adding to the residual in place."""
    torch.manual_seed(size)
    x, residual = torch.randn(2, num_rows, 2 * size, device=device).to(dtype)[..., :size]
    weight = torch.rand(size, device=device).to(dtype) + 0.5
    kernels = bind(device, "triton")
    assert_near(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    summed = residual.clone()
    want = reference.add_rms_norm(summed, x, weight, 1e-5)
    got = kernels.add_rms_norm(residual, x, weight, 1e-5)
    assert_near(got, want, dtype)
    assert_near(residual, summed, dtype)


def check_swiglu(num_tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Also where ``exp`` overflows."""
    torch.manual_seed(size)
    gate_up = torch.randn(num_tokens, 2 * size, device=device).to(dtype) * 4
    gate_up[:, 0] = -200.0
    assert_near(bind(device, "triton").swiglu(gate_up), reference.swiglu(gate_up.float()), dtype)


def check_snapkv_scores(
    num_heads: int, num_kv_heads: int, head_dim: int, num_queries: int, num_keys: int, span: tuple[int, int],
    over_row: bool, group_max: bool, dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    """Equal to the reference; keys lie inside a pool of NaN."""
    torch.manual_seed(num_keys)
    pool = torch.full((num_kv_heads, num_keys + 9, head_dim), NAN, dtype=dtype, device=device)
    keys = pool[:, 4 : 4 + num_keys]
    keys.copy_(torch.randn(keys.shape, device=device) * 2)
    queries = torch.randn(num_queries, num_heads, head_dim, device=device).to(dtype)
    got = bind(device, "triton").snapkv_scores(
        queries, keys, num_keys - num_queries, *span, over_row=over_row, group_max=group_max
    )
    want = reference.snapkv_scores(
        queries.float(), keys.float(), num_keys - num_queries, *span, over_row=over_row, group_max=group_max
    )
    assert got.dtype == torch.float32
    # the sums are fp32 whatever the storage; tensor cores round theirs towards zero, and logits enter an exponential
    assert_near(got, want, torch.float32, 4.0 if device == "cpu" else 50.0)


def check_snapkv_memory(
    num_heads: int, num_kv_heads: int, head_dim: int, num_queries: int, num_keys: int, device: str
) -> None:
    """What is allocated beside the result is a small part of what the probabilities would be."""
    queries, keys = torch.randn(num_queries, num_heads, head_dim), torch.randn(num_kv_heads, num_keys, head_dim)
    queries, keys = queries.to(device), keys.to(device)
    with LiveBytes(torch.device(device).type) as live:
        scores = bind(device, "triton").snapkv_scores(
            queries, keys, num_keys - num_queries, 0, num_keys - num_queries, over_row=False, group_max=False
        )
    assert live.peak - scores.nbytes < num_queries * num_heads * num_keys * 4 / 50


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
    bind(device, "triton").gather_rows(one_layer(*caches), [0, 2], keys, values, index)
    reference.gather_rows(one_layer(*wanted), [0, 2], keys, values, index)
    assert torch.equal(caches.nan_to_num(), wanted.nan_to_num()) and torch.equal(caches.isnan(), wanted.isnan())
