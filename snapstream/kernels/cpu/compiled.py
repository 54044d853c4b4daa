"""The CPU kernels that a compiled decode step calls, as operators of torch.

``torch.compile`` cannot look inside them (they read lengths on the host) and need not: an operator has a name, says
what it writes to, and has a version for shapes alone. Registering with torch is global by its nature; it happens when
this module is imported and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import fp8, plain, reference
from snapstream.kernels.cpu import attention, latent, native
from snapstream.kernels.cpu.experts import GroupedLinear
from snapstream.kernels.cpu.linear import by_native, takes_native
from snapstream.kernels.cpu.norm import Norms
from snapstream.kernels.rows import CosSin, HeadNorm, Keep, LayerRows, RowPlaces

NORMS = Norms(remembers=False)

_LIBRARY = torch.library.Library("snapstream", "FRAGMENT")
# The bare registration: the decorator of the same library costs 20 microseconds a call more, per layer and step.
_LIBRARY.define(
    "attend_rows_cpu(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, int layer, "
    "Tensor rows, Tensor slots, Tensor lengths, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor"
)
_LIBRARY.define("linear_cpu(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define("grouped_linear_cpu(Tensor x, Tensor weight, Tensor? scale, Tensor ends) -> Tensor")


def attend_rows(
    heads: Tensor, norm: HeadNorm, rope: CosSin | None, cache: LayerRows, places: RowPlaces, keep: Keep | None
) -> Tensor:
    """See ``reference.attend_rows``."""
    if rope is None:
        return latent.attend_rows(heads, cache, places, keep)
    cache.refuse_latents("attend_rows_cpu")
    q, k, v = plain.split_heads(heads, NORMS.norm_rope, norm, rope, cache)
    if keep is not None:
        keep(q)
    out: Tensor = torch.ops.snapstream.attend_rows_cpu(
        q, k, v, cache.keys, cache.values, cache.layer, *places, cache.key_scales, cache.value_scales
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See ``reference.linear``; the shapes are known when the graph is made."""
    if not takes_native(x, weight):
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.snapstream.linear_cpu(x, weight, bias)
    return out


def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    """See ``reference.grouped_linear``."""
    out: Tensor = torch.ops.snapstream.grouped_linear_cpu(x, weight, scale, ends)
    return out


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layer: int,
    rows: Tensor,
    slots: Tensor,
    lengths: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write a slot per row, then attend: ``write_slots`` and ``decode_attention`` of the reference in one call.

    ``q [B, H, E]``, ``k, v [B, G, E]``, ``k_cache, v_cache [L, rows+1, G, C, E]``, the others ``[B]`` int64;
    for rows in FP8 ``k_scale, v_scale [L, rows+1, G]``, both or neither.
    """
    cache = LayerRows(k_cache, v_cache, layer, k_scale, v_scale)
    if q.dtype != torch.float32:
        reference.write_slots(k, v, cache, rows, slots)
        return attention.decode_attention(q, cache, rows, lengths)
    batch, num_heads, head_dim = q.shape
    keys, scales, num_kv_heads = cache.k, cache.scales, k.shape[1]
    kernel = native.attend_rows(head_dim, num_heads // num_kv_heads, is_fp8=keys.dtype == fp8.DTYPE)
    q, k, v = _heads_together(q), _heads_together(k), _heads_together(v)
    out = torch.empty(q.shape, dtype=q.dtype)
    kernel(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        keys.data_ptr(),
        cache.v.data_ptr(),
        rows.data_ptr(),
        slots.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        *((None, None) if scales is None else (scale.data_ptr() for scale in scales)),
        batch,
        num_kv_heads,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        keys.stride(0),
        keys.stride(1),
        torch.get_num_threads(),
    )
    return out


def _attend_rows_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layer: int,
    rows: Tensor,
    slots: Tensor,
    lengths: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    return q.new_empty(q.shape)


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _grouped_linear_shape(x: Tensor, weight: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _heads_together(heads: Tensor) -> Tensor:
    """The tensor itself if the heads of a token lie one after the other, else a copy in which they do."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


_LIBRARY.impl("attend_rows_cpu", _attend_rows, "CPU")
torch.library.register_fake("snapstream::attend_rows_cpu", _attend_rows_shape, lib=_LIBRARY)
_LIBRARY.impl("linear_cpu", by_native, "CPU")
torch.library.register_fake("snapstream::linear_cpu", _linear_shape, lib=_LIBRARY)
_LIBRARY.impl("grouped_linear_cpu", GroupedLinear(), "CPU")
torch.library.register_fake("snapstream::grouped_linear_cpu", _grouped_linear_shape, lib=_LIBRARY)
