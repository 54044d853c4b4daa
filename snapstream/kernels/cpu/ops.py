"""The CPU kernels that compiled graphs call, as operators of torch.

``torch.compile`` cannot look inside them (they read lengths on the host) and need not: an operator has a name, says
what it writes to, and has a version for shapes alone. Registering with torch is global by its nature; it happens when
this module is imported and nowhere else. The views of ``runner/`` call them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.cpu import attention, native

_LIBRARY = torch.library.Library("snapstream", "FRAGMENT")
# The bare registration: the decorator of the same library costs 20 microseconds a call more, per layer and step.
_LIBRARY.define(
    "attend_rows_cpu(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, int layer, "
    "Tensor rows, Tensor slots, Tensor lengths, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor"
)
_LIBRARY.define("linear_cpu(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_GROUP = 8  # tokens that linear.cpp takes at a time, and a power of two below
MAX_TOKENS = 32  # from here on the product is bound by arithmetic, and the matrix library is better at that


def attend_rows(
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
    keys, values = k_cache[layer], v_cache[layer]
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    scales = None if k_scale is None or v_scale is None else (k_scale[layer], v_scale[layer])
    if q.dtype != torch.float32:
        reference.write_slots(keys, values, k, v, rows, slots, scales)
        return attention.decode_attention(q.contiguous(), keys, values, rows, lengths, scales)
    kernel = native.attend_rows(head_dim, num_heads // num_kv_heads, is_fp8=scales is not None)
    q, k, v = _heads_together(q), _heads_together(k), _heads_together(v)
    out = torch.empty(q.shape, dtype=q.dtype)
    kernel(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
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


def takes_linear(x: Tensor, weight: Tensor) -> bool:
    """True where ``linear`` computes this product."""
    tokens = x.shape[0]
    is_size = tokens in (1, 2, 4) or (tokens % _GROUP == 0 and tokens <= MAX_TOKENS)
    is_fp32 = x.dtype == torch.float32 and weight.dtype == torch.float32
    return is_fp32 and is_size and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [T, D] weight [O, D]^T + bias`` where ``takes_linear``; the weight is contiguous."""
    tokens, (num_out, num_in) = x.shape[0], weight.shape
    group = min(tokens, _GROUP)
    x = x.contiguous()
    out = torch.empty(tokens, num_out)
    native.linear(group)(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        tokens // group,
        num_in,
        num_out,
        torch.get_num_threads(),
    )
    return out


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _heads_together(heads: Tensor) -> Tensor:
    """The tensor itself if the heads of a token lie one after the other, else a copy in which they do."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


_LIBRARY.impl("attend_rows_cpu", attend_rows, "CPU")
torch.library.register_fake("snapstream::attend_rows_cpu", _attend_rows_shape, lib=_LIBRARY)
_LIBRARY.impl("linear_cpu", linear, "CPU")
torch.library.register_fake("snapstream::linear_cpu", _linear_shape, lib=_LIBRARY)
