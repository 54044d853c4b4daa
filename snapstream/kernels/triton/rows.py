"""From the projection to the row: head norm of q and k, rotation, and the write of k and v into slots.

``norm_rope_write`` is all of it in one kernel: it reads the projected heads ``[T, H+2G, E]`` once and writes q and one
slot per token. ``norm_rope`` is its first half, for prefill, which needs the rotated keys, and for rows of int8 and
int4, which ``store_codes`` writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.formats import encoding_of
from snapstream.kernels.rows import CosSin, HeadNorm, LayerRows
from snapstream.kernels.triton import configs
from snapstream.kernels.triton.dense import overlaps, wait_for_inputs

# The step before a kernel stores a number in FP8; ``FP8.scaled`` of ``kernels/formats.py`` defines it.


@triton.jit
def saturated(x, scale):
    """``x / scale`` in fp32 within what e4m3fn holds, so that the cast that follows never makes a NaN."""
    # div_rn: a plain division may be off by two units in the last place
    return tl.minimum(tl.maximum(tl.div_rn(x.to(tl.float32), scale), -448.0), 448.0)


# Rows of integers; ``INT8`` and ``INT4`` of ``kernels/formats.py`` define codes, scales and rotation. A group of int4
# is read as nine words of 16 bits: its scale in fp16, then four codes in each.

PLAIN, FP8, INT8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_KINDS = {"fp8": FP8, "int8": INT8, "int4": INT4}
_TINY = tl.constexpr(2.0**-126)


def kind_of(stored: Tensor, scale: Tensor | None) -> int:
    """Which of the four kinds above kernels see in a tensor of rows."""
    name = encoding_of(stored).format.name
    return (PLAIN if name == "fp8" and scale is None else _KINDS.get(name, PLAIN)).value


def has_codes(cache: LayerRows) -> bool:
    """Whether ``store_codes`` writes these rows."""
    return kind_of(cache.keys, cache.key_scales) >= INT8.value


def scale_strides(cache: LayerRows) -> tuple[int, int]:
    """From row to row and from head to head, of K's scales and V's alike; zeros without scales."""
    scale = next((own for own in cache.scales if own is not None), None)
    return (0, 0) if scale is None else (scale.stride(0), scale.stride(1))


def as_words(stored: Tensor) -> Tensor:
    """Rows as kernels read them."""
    return stored.view(torch.int16) if stored.dtype == torch.uint8 else stored


def rotation_steps(head_dim: int) -> int:
    """The logarithm of the size of the blocks that int4 rotates."""
    return (head_dim & -head_dim).bit_length() - 1


@triton.jit
def hadamard(x, ROWS: tl.constexpr, PAD: tl.constexpr, STEPS: tl.constexpr):
    """``formats.hadamard`` of ``x [ROWS, PAD]`` fp32 in blocks of ``2^STEPS``, with its order of sums.

    Each step adds and subtracts neighbors and makes the lowest bit of their index the highest.
    """
    size: tl.constexpr = 2**STEPS
    x = tl.reshape(x, (ROWS * PAD // size, size))
    for _ in tl.static_range(STEPS):
        low, high = tl.split(tl.reshape(x, (ROWS * PAD // size, size // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (ROWS * PAD // size, size))
    return tl.reshape(x * size**-0.5, (ROWS, PAD))


@triton.jit
def read_slots(
    head_ptr, slot, is_seen, stride_slot,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Numbers ``[slots, HEAD_PAD]`` of a head, without the scales of FP8 and int8, and of int4 still rotated."""
    if KIND == INT4:
        word = tl.arange(0, HEAD_PAD // 4)
        mask = is_seen[:, None] & (word < HEAD_DIM // 4)[None, :]
        group_at = head_ptr + slot[:, None] * stride_slot + (word // 8 * 9)[None, :]
        words = tl.load(group_at + (1 + word % 8)[None, :], mask=mask, other=0).to(tl.int32)
        scale = tl.load(group_at, mask=mask, other=0).to(tl.float16, bitcast=True).to(tl.float32)
        first = ((((words ^ 8) & 15) - 8).to(tl.float32) * scale).to(DTYPE)
        second = ((((words >> 4 ^ 8) & 15) - 8).to(tl.float32) * scale).to(DTYPE)
        third = ((((words >> 8 ^ 8) & 15) - 8).to(tl.float32) * scale).to(DTYPE)
        fourth = ((((words >> 12 ^ 8) & 15) - 8).to(tl.float32) * scale).to(DTYPE)
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # [slots, words, 2, 2]
        return tl.reshape(pairs, (slot.shape[0], HEAD_PAD))
    dim = tl.arange(0, HEAD_PAD)
    mask = is_seen[:, None] & (dim < HEAD_DIM)[None, :]
    numbers = tl.load(head_ptr + slot[:, None] * stride_slot + dim[None, :], mask=mask, other=0.0)
    if KIND == INT8:
        numbers = numbers.to(tl.float32)
    return numbers.to(DTYPE)


@triton.jit
def _rounded(x):
    """To nearest even, for ``|x| < 2^22``."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _is_usable(scale):
    """Neither 0 nor infinite nor NaN."""
    return (tl.abs(scale) > 0.0) & (tl.abs(scale) < float("inf"))


@triton.jit
def _store_token(
    x, place, scale_at, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """One head ``x [1, HEAD_PAD]`` fp32 of one token. A maximum drops NaN, and a sum of zeros does not."""
    if KIND == INT8:
        dim = tl.arange(0, HEAD_PAD)[None, :]
        largest = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
        scale = tl.div_rn(largest, tl.full((1,), 127.0, tl.float32))
        scale = tl.where(scale < _TINY, 0.0, scale)
        is_usable = _is_usable(scale)
        codes = _rounded(tl.div_rn(x, tl.where(is_usable, scale, 1.0)[:, None] + tl.zeros_like(x)))
        codes = tl.where(is_usable[:, None], codes, 0.0)
        tl.store(place + dim, codes.to(tl.int8), mask=dim < HEAD_DIM)
        tl.store(scale_at + tl.arange(0, 1), scale)
    else:
        num_groups: tl.constexpr = HEAD_PAD // 32
        own = tl.reshape(hadamard(x, 1, HEAD_PAD, STEPS), (num_groups, 32))
        most, least = tl.max(own, 1), tl.min(own, 1)
        first = tl.where(most >= -least, most, least) * -0.125 + tl.sum(own * 0.0, 1)
        is_usable = _is_usable(first)
        codes = tl.div_rn(own, tl.where(is_usable, first, 1.0)[:, None] + tl.zeros_like(own))
        codes = tl.minimum(tl.maximum(_rounded(codes), -8.0), 7.0)
        codes = tl.where(is_usable[:, None], codes, 0.0)
        wide = own.to(tl.float64)
        weighted = codes.to(tl.float64) * wide
        error = tl.sum(weighted * weighted, 1)
        scale = (tl.sum(weighted * wide * wide, 1) / tl.where(error == 0.0, 1.0, error)).to(tl.float32)
        scale = tl.where(is_usable, tl.minimum(tl.maximum(scale, -65504.0), 65504.0), first * 0.0)
        nibbles = tl.reshape(codes.to(tl.int32) & 15, (num_groups, 8, 2, 2))
        even, odd = tl.split(nibbles)  # [groups, words, 2]
        low, high = tl.split(even | odd << 4)  # [groups, words]
        group = tl.arange(0, num_groups)
        is_group = group < HEAD_DIM // 32
        tl.store(place + group * 9, scale.to(tl.float16).to(tl.int16, bitcast=True), mask=is_group)
        word_at = place + (group * 9)[:, None] + 1 + tl.arange(0, 8)[None, :]
        tl.store(word_at, (low | high << 8).to(tl.int16), mask=is_group[:, None])


@triton.jit
def store_codes_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, rows_ptr, slots_ptr,
    stride_k, stride_v, stride_k_row, stride_k_head, stride_k_slot, stride_v_row, stride_v_head, stride_v_slot,
    stride_scale_row, stride_scale_head,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, STEPS: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Key and value of one token and kv head."""
    wait_for_inputs(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, slot = tl.load(rows_ptr + token).to(tl.int64), tl.load(slots_ptr + token).to(tl.int64)
    scale_at = row * stride_scale_row + head * stride_scale_head + slot
    dim = tl.arange(0, HEAD_PAD)[None, :]
    at = head * HEAD_DIM + dim
    k = tl.load(k_ptr + token * stride_k + at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    place = k_cache_ptr + row * stride_k_row + head * stride_k_head + slot * stride_k_slot
    _store_token(k, place, k_scale_ptr + scale_at, HEAD_DIM, HEAD_PAD, STEPS, K_KIND)
    v = tl.load(v_ptr + token * stride_v + at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    place = v_cache_ptr + row * stride_v_row + head * stride_v_head + slot * stride_v_slot
    _store_token(v, place, v_scale_ptr + scale_at, HEAD_DIM, HEAD_PAD, STEPS, V_KIND)


def store_codes(k: Tensor, v: Tensor, cache: LayerRows, rows: Tensor, slots: Tensor) -> None:
    """``reference.write_slots`` of ``k, v [T, G, E]``, heads contiguous, into rows of int8 or int4."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if any(heads.stride(2) != 1 or heads.stride(1) != head_dim for heads in (k, v)):
        raise ValueError("rows of integers take tokens whose heads are contiguous")
    (k_scale, v_scale), k_cache, v_cache = cache.scales, as_words(cache.k), as_words(cache.v)
    early = overlaps(k.device)
    if num_tokens:
        store_codes_kernel[(num_tokens, num_kv_heads)](
            k, v, k_cache, v_cache, k if k_scale is None else k_scale, v if v_scale is None else v_scale, rows, slots,
            k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
            *scale_strides(cache),
            HEAD_DIM=head_dim, HEAD_PAD=configs.power_of_two(head_dim, 32), STEPS=rotation_steps(head_dim),
            K_KIND=kind_of(cache.k, k_scale), V_KIND=kind_of(cache.v, v_scale), EARLY=early, num_warps=1,
            launch_pdl=early,
        )  # fmt: skip


# The kept tokens of a prompt, from the staging buffers into their row: K and V in one kernel, no copy in between.

_TILE = 4096  # elements of K per program


# The scales of a layer begin at any multiple of 4 bytes: aligned or not, the same machine code reads its one number.
@triton.jit(
    do_not_specialize=["num_kept", "row"], do_not_specialize_on_alignment=["k_scale_ptr", "v_scale_ptr"]
)  # fmt: skip
def gather_row_kernel(
    k_ptr, v_ptr, index_ptr, k_row_ptr, v_row_ptr, k_scale_ptr, v_scale_ptr,
    num_kept, row,
    stride_k_head, stride_k_token, stride_v_head, stride_v_token,
    stride_kc_row, stride_kc_head, stride_kc_slot, stride_vc_row, stride_vc_head, stride_vc_slot,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` slots of one kv head: slot ``s`` takes the token at ``index[g, s]``."""
    kv_head = tl.program_id(1).to(tl.int64)
    slot = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    dim = tl.arange(0, HEAD_PAD)
    is_kept = slot < num_kept
    mask = is_kept[:, None] & (dim < HEAD_DIM)[None, :]
    token = tl.load(index_ptr + kv_head * num_kept + slot, mask=is_kept, other=0)
    k = tl.load(k_ptr + kv_head * stride_k_head + token[:, None] * stride_k_token + dim[None, :], mask=mask)
    v = tl.load(v_ptr + kv_head * stride_v_head + token[:, None] * stride_v_token + dim[None, :], mask=mask)
    wide_row = tl.cast(row, tl.int64)
    if IS_FP8:
        scale_at = wide_row * tl.num_programs(1) + kv_head
        k, v = saturated(k, tl.load(k_scale_ptr + scale_at)), saturated(v, tl.load(v_scale_ptr + scale_at))
    k_head = k_row_ptr + wide_row * stride_kc_row + kv_head * stride_kc_head
    v_head = v_row_ptr + wide_row * stride_vc_row + kv_head * stride_vc_head
    tl.store(k_head + slot[:, None] * stride_kc_slot + dim[None, :], k.to(k_row_ptr.dtype.element_ty), mask=mask)
    tl.store(v_head + slot[:, None] * stride_vc_slot + dim[None, :], v.to(v_row_ptr.dtype.element_ty), mask=mask)


def gather_rows(cache: LayerRows, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor) -> None:
    """See ``reference.gather_rows``; any strides with a contiguous head dimension. One launch per row; rows of integers
    by PyTorch, a prompt once.

    Of latents the kernel writes keys in the place of values too: the same bytes twice.
    """
    if has_codes(cache):
        reference.gather_rows(cache, rows, keys, values, index)
        return
    k_cache, (k_scale, v_scale) = cache.k, cache.scales
    v_cache, values = (k_cache, keys) if cache.values_are_keys else (cache.v, values)
    num_kv_heads, num_kept = index.shape
    head_dim = keys.shape[2]
    if any(tensor.stride(-1) != 1 for tensor in (k_cache, v_cache, keys, values)):
        raise ValueError("the gather needs a contiguous head dimension in staging and cache")
    head_pad = configs.power_of_two(head_dim)
    index = index.contiguous()
    for row in rows:
        gather_row_kernel[(triton.cdiv(num_kept, _TILE // head_pad), num_kv_heads)](
            keys, values, index, k_cache, v_cache,
            k_cache if k_scale is None else k_scale, v_cache if v_scale is None else v_scale,
            num_kept, row,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
            HEAD_DIM=head_dim, HEAD_PAD=head_pad, BLOCK=_TILE // head_pad, IS_FP8=k_scale is not None, num_warps=4,
        )  # fmt: skip


HEADS_PER_PROGRAM = 8


@triton.jit
def rope_write_kernel(
    heads_ptr, norm_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, rows_ptr, slots_ptr,
    eps,
    stride_heads, stride_k_row, stride_k_head, stride_k_slot, stride_v_row, stride_v_head, stride_v_slot,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, WRITES: tl.constexpr, IS_FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` heads of one token. The two halves of a head are two tiles, because they form the rotated pairs.

    With ``WRITES`` q goes to ``q [T, H, E]``, k and v to their slots; else q and k to ``q [T, H+G, E]``.
    """
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, HALF_PAD)
    half: tl.constexpr = HEAD_DIM // 2
    is_pair = pair < half
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_pair[None, :]
    at = heads_ptr + token * stride_heads + head[:, None] * HEAD_DIM + pair[None, :]
    low_raw = tl.load(at, mask=mask, other=0.0)  # [BLOCK, E/2]
    high_raw = tl.load(at + half, mask=mask, other=0.0)
    low, high = low_raw.to(tl.float32), high_raw.to(tl.float32)

    if HAS_NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
        inverse = (1.0 / tl.sqrt(mean + eps))[:, None]
        is_normed = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & is_pair[None, :]
        weight_at = norm_ptr + head[:, None] * HEAD_DIM + pair[None, :]
        low *= inverse * tl.load(weight_at, mask=is_normed, other=0.0).to(tl.float32)
        high *= inverse * tl.load(weight_at + half, mask=is_normed, other=0.0).to(tl.float32)
        # the norm alone would return the storage dtype: round here, so that fusion changes no result
        low, high = low.to(low_raw.dtype).to(tl.float32), high.to(low_raw.dtype).to(tl.float32)

    turn = token * HEAD_DIM + pair
    low_cos = tl.load(cos_ptr + turn, mask=is_pair, other=0.0)[None, :]
    high_cos = tl.load(cos_ptr + turn + half, mask=is_pair, other=0.0)[None, :]
    low_sin = tl.load(sin_ptr + turn, mask=is_pair, other=0.0)[None, :]  # the minus of the rotation is in the sine
    high_sin = tl.load(sin_ptr + turn + half, mask=is_pair, other=0.0)[None, :]
    low_turned = (low * low_cos + high * low_sin).to(low_raw.dtype)
    high_turned = (high * high_cos + low * high_sin).to(low_raw.dtype)

    num_out: tl.constexpr = NUM_HEADS if WRITES else NUM_HEADS + NUM_KV_HEADS
    is_out = (head < num_out)[:, None] & is_pair[None, :]
    q_at = q_ptr + (token * num_out + head)[:, None] * HEAD_DIM + pair[None, :]
    tl.store(q_at, low_turned, mask=is_out)
    tl.store(q_at + half, high_turned, mask=is_out)
    if not WRITES:
        return

    row, slot = tl.load(rows_ptr + token).to(tl.int64), tl.load(slots_ptr + token).to(tl.int64)
    k_head = head - NUM_HEADS
    is_k = ((k_head >= 0) & (k_head < NUM_KV_HEADS))[:, None] & is_pair[None, :]
    if IS_FP8:
        k_scale = tl.load(
            k_scale_ptr + row * NUM_KV_HEADS + k_head, mask=(k_head >= 0) & (k_head < NUM_KV_HEADS), other=1.0
        )
        low_turned, high_turned = saturated(low_turned, k_scale[:, None]), saturated(high_turned, k_scale[:, None])
    k_start = k_ptr + row * stride_k_row + slot * stride_k_slot
    k_at = k_start + k_head.to(tl.int64)[:, None] * stride_k_head + pair[None, :]
    tl.store(k_at, low_turned.to(k_ptr.dtype.element_ty), mask=is_k)
    tl.store(k_at + half, high_turned.to(k_ptr.dtype.element_ty), mask=is_k)

    v_head = k_head - NUM_KV_HEADS
    is_v = ((v_head >= 0) & (v_head < NUM_KV_HEADS))[:, None] & is_pair[None, :]
    if IS_FP8:
        v_scale = tl.load(
            v_scale_ptr + row * NUM_KV_HEADS + v_head, mask=(v_head >= 0) & (v_head < NUM_KV_HEADS), other=1.0
        )
        low_raw, high_raw = saturated(low_raw, v_scale[:, None]), saturated(high_raw, v_scale[:, None])
    v_start = v_ptr + row * stride_v_row + slot * stride_v_slot
    v_at = v_start + v_head.to(tl.int64)[:, None] * stride_v_head + pair[None, :]
    tl.store(v_at, low_raw.to(v_ptr.dtype.element_ty), mask=is_v)
    tl.store(v_at + half, high_raw.to(v_ptr.dtype.element_ty), mask=is_v)


def norm_rope_write(
    heads: Tensor, norm: HeadNorm, rope: CosSin, cache: LayerRows, rows: Tensor, slots: Tensor
) -> Tensor:
    """See ``reference.norm_rope_write``; ``heads [T, H+2G, E]`` may be strided along T only."""
    cache.refuse_latents("the write of slots in Triton")
    return _rotate(heads, norm, rope, cache.num_kv_heads, cache, (rows, slots))


def norm_rope(heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int) -> Tensor:
    """See ``reference.norm_rope``; ``heads [T, H+2G, E]`` may be strided along T only."""
    return _rotate(heads, norm, rope, num_kv_heads)


def _rotate(
    heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int, cache: LayerRows | None = None,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Rotated q ``[T, H, E]``, with k and v written to ``places``; or without a cache q and k ``[T, H+G, E]``."""
    (head_norm, eps), (cos, sin) = norm[:2], rope
    num_tokens, num_projected, head_dim = heads.shape
    num_heads, early = num_projected - 2 * num_kv_heads, overlaps(heads.device)
    if cache is None or places is None:
        num_read = num_projected - num_kv_heads
        k = v = rows = slots = out = heads.new_empty(num_tokens, num_read, head_dim)
        k_scale = v_scale = None
        strides = [0] * 6
    else:
        num_read, out = num_projected, heads.new_empty(num_tokens, num_heads, head_dim)
        k, v, (k_scale, v_scale), (rows, slots) = cache.k, cache.v, cache.scales, places
        strides = [*k.stride()[:3], *v.stride()[:3]]
    is_packed = heads.stride(2) == 1 and heads.stride(1) == head_dim
    if not is_packed or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("the projected heads of a token must be contiguous, and so the head dimension of the cache")
    if num_tokens:
        rope_write_kernel[(num_tokens, triton.cdiv(num_read, HEADS_PER_PROGRAM))](
            heads, heads if head_norm is None else head_norm.contiguous(), cos.contiguous(), sin.contiguous(),
            out, k, v, k if k_scale is None else k_scale, v if v_scale is None else v_scale, rows, slots,
            eps,
            heads.stride(0), *strides,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            HALF_PAD=configs.power_of_two(head_dim // 2), BLOCK=HEADS_PER_PROGRAM, HAS_NORM=head_norm is not None,
            WRITES=cache is not None, IS_FP8=k_scale is not None, EARLY=early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out
