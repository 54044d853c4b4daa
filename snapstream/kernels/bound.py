"""The functions that a layer and a cache call on one device, bound once when an engine is loaded.

``bind`` makes the object; it is handed to the decoder, the cache and the views, which call its fields and never ask what
device they are on. ``reference.py`` holds the meaning of every field, in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import dispatch, reference
from snapstream.kernels.rows import LayerRows

KernelVersion = Literal["triton", "cpu", "compiled_cpu", "torch"]


class HeadNorm(NamedTuple):
    """Norm of the heads of q and k before the rotation; no weight where a model has none."""

    weight: Tensor | None  # [H+G, E]
    eps: float


class RowPlaces(NamedTuple):
    """Where the tokens of a decode step go, and what they see."""

    rows: Tensor  # [B] int64
    slots: Tensor  # [B] int64: where each row's new token is written
    lengths: Tensor  # [B] int64: visible slots once it is


class ScoreKernel(Protocol):
    def __call__(
        self, queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool, group_max: bool
    ) -> Tensor: ...


CosSin = tuple[Tensor, Tensor]  # [T, 1, E] fp32 each, the minus of the rotation in the sine
Keep = Callable[[Tensor], None]  # takes the rotated queries [B, H, E] of a decode step


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Tensors in, tensors out; the meaning of each field is the function of its name in ``reference.py``."""

    version: KernelVersion
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [T, D], weight [O, D], bias [O] -> [T, O]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [T, D], weight [D], eps
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]  # residual += x in place, and the norm of the sum
    swiglu: Callable[[Tensor], Tensor]  # [T, 2I] -> [T, I]
    norm_rope: Callable[[Tensor, HeadNorm, CosSin, int], Tensor]  # heads [T, H+2G, E], G -> [T, H+G, E]
    # A decode step's attention in one layer: norm, rotate, write a slot per row, attend over the visible slots.
    # heads [B, H+2G, E] as projected -> [B, H, E]
    attend_rows: Callable[[Tensor, HeadNorm, CosSin, LayerRows, RowPlaces, Keep | None], Tensor]
    gather_rows: Callable[[LayerRows, Sequence[int], Tensor, Tensor, Tensor], None]  # rows, keys, values, index [G, n]
    snapkv_scores: ScoreKernel
    hop_scores: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]

    def sum_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``residual [T, D] += x`` in place unless there is no ``x``, and the norm of the sum."""
        return self.rms_norm(residual, weight, eps) if x is None else self.add_rms_norm(residual, x, weight, eps)


def bind(device: torch.device | str, version: KernelVersion | None = None) -> Kernels:
    """The kernels of a device: by default Triton's on an NVIDIA GPU that has it, those of ``cpu/`` on a CPU."""
    del device, version

    def norm_rope(heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int) -> Tensor:
        return dispatch.norm_rope(heads, norm.weight, norm.eps, *rope, num_kv_heads)

    def attend_rows(
        heads: Tensor, norm: HeadNorm, rope: CosSin, cache: LayerRows, places: RowPlaces, keep: Keep | None
    ) -> Tensor:
        num_kv_heads = cache.k.shape[1]
        qk, v = norm_rope(heads, norm, rope, num_kv_heads), heads[:, -num_kv_heads:]
        q, k = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
        if keep is not None:
            keep(q)
        dispatch.write_slots(cache.k, cache.v, k, v, places.rows, places.slots, cache.scales)
        return dispatch.decode_attention(q, cache.k, cache.v, places.rows, places.lengths, cache.scales)

    def gather_rows(cache: LayerRows, rows: Sequence[int], keys: Tensor, values: Tensor, index: Tensor) -> None:
        dispatch.gather_rows(cache.k, cache.v, rows, keys, values, index, cache.scales)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dispatch.linear(x, weight, bias)

    return Kernels(
        version="cpu",
        linear=linear,
        rms_norm=rms_norm,
        add_rms_norm=reference.add_rms_norm,
        swiglu=dispatch.swiglu,
        norm_rope=norm_rope,
        attend_rows=attend_rows,
        gather_rows=gather_rows,
        snapkv_scores=dispatch.snapkv_scores,
        hop_scores=dispatch.hop_scores,
    )
