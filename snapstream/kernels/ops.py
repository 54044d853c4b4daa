"""The Triton kernels as PyTorch operators ``snapstream::*``: opaque to tracing, with the shapes that tracing asks for.

``torch.compile`` sees one node per call (no graph break, nothing to recompile), a captured graph sees the launches.
Triton is imported by the first call, not by this module. ``dispatch.py`` chooses between these and the other versions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("snapstream::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.decode_attention``; the two scales of FP8 rows come together or not at all, here and below."""
    from snapstream.kernels.triton import attention

    return attention.decode_attention(q, k, v, rows, lengths, k_scale, v_scale)


@decode_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


@custom_op("snapstream::norm_rope_write", mutates_args=("k_cache", "v_cache"))
def norm_rope_write(
    heads: Tensor,
    head_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See ``reference.norm_rope_write``."""
    from snapstream.kernels.triton import rope_write

    return rope_write.norm_rope_write(heads, head_norm, eps, cos, sin, k_cache, v_cache, rows, slots, k_scale, v_scale)


@norm_rope_write.register_fake
def _(
    heads: Tensor,
    head_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    return heads.new_empty(heads.shape[0], heads.shape[1] - 2 * k_cache.shape[1], heads.shape[2])


@custom_op("snapstream::norm_rope", mutates_args=())
def norm_rope(
    heads: Tensor, head_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, num_kv_heads: int
) -> Tensor:
    """See ``reference.norm_rope``."""
    from snapstream.kernels.triton import rope_write

    return rope_write.norm_rope(heads, head_norm, eps, cos, sin, num_kv_heads)


@norm_rope.register_fake
def _(heads: Tensor, head_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, num_kv_heads: int) -> Tensor:
    return heads.new_empty(heads.shape[0], heads.shape[1] - num_kv_heads, heads.shape[2])


@custom_op("snapstream::write_slots", mutates_args=("k_cache", "v_cache"))
def write_slots(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See ``reference.write_slots``."""
    from snapstream.kernels.triton import rope_write

    rope_write.write_slots(k_cache, v_cache, k, v, rows, slots, k_scale, v_scale)


@write_slots.register_fake
def _(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    return None


@custom_op("snapstream::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    from snapstream.kernels.triton import norm

    return norm.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("snapstream::add_rms_norm", mutates_args=("residual",))
def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.add_rms_norm``."""
    from snapstream.kernels.triton import norm

    return norm.add_rms_norm(residual, x, weight, eps)


@add_rms_norm.register_fake
def _(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("snapstream::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``."""
    from snapstream.kernels.triton import swiglu as version

    return version.swiglu(gate_up)


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@custom_op("snapstream::snapkv_scores", mutates_args=())
def snapkv_scores(
    queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, over_row: bool, group_max: bool
) -> Tensor:
    """See ``reference.snapkv_scores``."""
    from snapstream.kernels.triton import scores

    return scores.snapkv_scores(queries, keys, first_query, start, stop, over_row=over_row, group_max=group_max)


@snapkv_scores.register_fake
def _(
    queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, over_row: bool, group_max: bool
) -> Tensor:
    return keys.new_empty(keys.shape[0], stop - start, dtype=torch.float32)


@custom_op("snapstream::gather_rows", mutates_args=("k_cache", "v_cache"))
def gather_rows(
    k_cache: Tensor, v_cache: Tensor, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """See ``reference.gather_rows``."""
    from snapstream.kernels.triton import gather

    gather.gather_rows(k_cache, v_cache, rows, keys, values, index, k_scale, v_scale)


@gather_rows.register_fake
def _(
    k_cache: Tensor, v_cache: Tensor, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    return None
