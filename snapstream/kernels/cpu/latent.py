"""Decode attention over rows of latents for a compiled decode step on a CPU: ``latent.cpp`` as an operator of torch.

As ``compiled.py``, which calls it; registering is global by its nature and happens when this module is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.kernels import reference
from snapstream.kernels.cpu import attention, native
from snapstream.kernels.rows import Keep, LayerRows, RowPlaces

_LIBRARY = torch.library.Library("snapstream", "FRAGMENT")
_LIBRARY.define(
    "attend_latents_cpu(Tensor q, Tensor latents, Tensor(a!) cache, int value_dim, int layer, "
    "Tensor rows, Tensor slots, Tensor lengths, Tensor? scales=None) -> Tensor"
)


def attend_rows(heads: Tensor, cache: LayerRows, places: RowPlaces, keep: Keep | None) -> Tensor:
    """``reference.attend_rows`` of latents: ``heads [B, H+1, E]`` (q | latent), rotated -> ``[B, H, E']``."""
    q, latents = heads[:, :-1], heads[:, -1:]
    if keep is not None:
        keep(q)
    out: Tensor = torch.ops.snapstream.attend_latents_cpu(
        q, latents, cache.keys, cache.values.shape[-1], cache.layer, *places, cache.key_scales
    )
    return out


def _attend_latents(
    q: Tensor, latents: Tensor, cache: Tensor, value_dim: int, layer: int, rows: Tensor, slots: Tensor, lengths: Tensor,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write a slot per row, then attend: ``q [B, H, E]``, ``latents [B, 1, E]``, ``cache [L, rows+1, 1, C, E]``.

    Rows in FP8 have ``scales [L, rows+1, 1]``; the C++ reads rows in fp32 alone.
    """
    if q.dtype != torch.float32 or scales is not None:
        own = LayerRows(cache, cache[..., :value_dim], layer, scales, scales, values_are_keys=True)
        reference.write_slots(latents, latents, own, rows, slots)
        return attention.decode_attention(q, own, rows, lengths)
    batch, num_heads, key_dim = q.shape
    q, latents, stored = _dense(q), _dense(latents), cache[layer]
    out = q.new_empty(batch, num_heads, value_dim)
    native.attend_latents(key_dim, value_dim)(
        q.data_ptr(),
        latents.data_ptr(),
        stored.data_ptr(),
        rows.data_ptr(),
        slots.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        batch,
        num_heads,
        q.stride(0),
        latents.stride(0),
        stored.stride(0),
        torch.get_num_threads(),
    )
    return out


def _attend_latents_shape(
    q: Tensor, latents: Tensor, cache: Tensor, value_dim: int, layer: int, rows: Tensor, slots: Tensor, lengths: Tensor,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[1], value_dim)


def _dense(heads: Tensor) -> Tensor:
    """The tensor itself if the heads of a token lie one after the other, else a copy in which they do."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


_LIBRARY.impl("attend_latents_cpu", _attend_latents, "CPU")
torch.library.register_fake("snapstream::attend_latents_cpu", _attend_latents_shape, lib=_LIBRARY)
