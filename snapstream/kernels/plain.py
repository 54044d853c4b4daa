"""The kernels in plain PyTorch for any device: as ``reference.py`` means them, without its fp32 copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import reference
from snapstream.kernels.rows import CosSin, HeadNorm, Keep, LayerRows, RowPlaces

NormRope = Callable[[Tensor, HeadNorm, CosSin, int], Tensor]
DecodeAttention = Callable[[Tensor, LayerRows, Tensor, Tensor], Tensor]
AttendRows = Callable[[Tensor, HeadNorm, CosSin | None, LayerRows, RowPlaces, Keep | None], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.add_rms_norm``."""
    return rms_norm(residual.add_(x), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``; in the dtype of the input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """See ``reference.grouped_linear``. On a CPU one expert after the other, elsewhere all in one call."""
    if x.device.type == "cpu":
        return each_expert(x, weight, scale, ends)
    wide = weight if scale is None else reference.widen_blocks(weight, scale)
    return F.grouped_mm(x, wide.to(x.dtype).transpose(1, 2), offs=ends)


def each_expert(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """``grouped_linear`` as a product per expert that has rows; reads ``ends`` on the host."""
    out, start = x.new_empty(len(x), weight.shape[1]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            own = weight[expert]
            matrix = own if scale is None else reference.widen_blocks(own, scale[expert])
            out[start:end] = F.linear(x[start:end], matrix.to(x.dtype))
        start = end
    return out


def gather_rows(cache: LayerRows, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor) -> None:
    """See ``reference.gather_rows``; token by token, where ``gather`` would go number by number."""
    reference.fill_rows(cache, rows, keys, values, index, whole_tokens)


def whole_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """See ``reference.taken``: a call per kv head, so for a CPU."""
    out = tokens.new_empty(*index.shape, tokens.shape[-1])  # [G, n, E]
    for head, own in enumerate(index):
        torch.index_select(tokens[head], 0, own, out=out[head])
    return out


def rotate(heads: Tensor, rope: CosSin) -> Tensor:
    """``heads [T, any, E]`` turned by their angles: fp32 inside, result in the dtype of ``heads``."""
    cos, sin = rope
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * cos, heads.roll(half, dims=-1), sin).to(heads.dtype)


def norm_rope(heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int) -> Tensor:
    """See ``reference.norm_rope``."""
    qk = heads[:, : heads.shape[1] - num_kv_heads]
    if norm.weight is not None:
        qk = F.rms_norm(qk, (qk.shape[-1],), None, norm.eps) * norm.weight
    return rotate(qk, rope)


def rows_attention(norm_rope: NormRope, decode_attention: DecodeAttention) -> AttendRows:
    """``reference.attend_rows`` of these parts."""

    def attend_rows(
        heads: Tensor, norm: HeadNorm, rope: CosSin | None, cache: LayerRows, places: RowPlaces, keep: Keep | None
    ) -> Tensor:
        q, k, v = split_heads(heads, norm_rope, norm, rope, cache)
        if keep is not None:
            keep(q)
        reference.write_slots(k, v, cache, places.rows, places.slots)
        return decode_attention(q, cache, places.rows, places.lengths)

    return attend_rows


def split_heads(
    heads: Tensor, norm_rope: NormRope, norm: HeadNorm, rope: CosSin | None, cache: LayerRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q ``[B, H, E]`` and k ``[B, G, E]``, and v ``[B, G, E]``, as views; latents have no v."""
    num_kv_heads = cache.num_kv_heads
    num_values = 0 if cache.values_are_keys else num_kv_heads
    qk = heads[:, : heads.shape[1] - num_values] if rope is None else norm_rope(heads, norm, rope, num_values)
    num_heads = qk.shape[1] - num_kv_heads
    return qk[:, :num_heads], qk[:, num_heads:], heads[:, heads.shape[1] - num_kv_heads :]
