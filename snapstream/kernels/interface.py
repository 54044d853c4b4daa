"""The kernels of one device, bound once when an engine is loaded.

Decoder, cache and views call the fields of the ``Kernels`` that ``bind`` returns. ``reference.py`` has the reference of
every field in plain PyTorch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor

from snapstream.kernels import pytorch, reference
from snapstream.kernels.cpu import attention
from snapstream.kernels.cpu.looped import prompt
from snapstream.kernels.pytorch import Norms
from snapstream.kernels.rows import (
    CosSin,
    ExpertParts,
    HeadNorm,
    Keep,
    LayerActivation,
    LayerRows,
    Pairs,
    RowPlaces,
    SumNorm,
    Xielu,
)

__all__ = [
    "CosSin", "ExpertParts", "HeadNorm", "Keep", "KernelVersion", "Kernels", "LayerActivation", "LayerRows", "Pairs",
    "RowPlaces", "SumNorm", "Xielu", "bind", "has_triton",
]  # fmt: skip

KernelVersion = Literal["triton", "cpu", "torch"]


class ScoreKernel(Protocol):
    def __call__(
        self, queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool,
        group_max: bool, sinks: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class HopKernel(Protocol):
    def __call__(
        self, weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int, *,
        sinks: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Tensors in, tensors out; each field's reference is the function of that name in ``reference.py``."""

    version: KernelVersion
    # x [P, D] sorted by expert, weight [X, O, D], its scales or None, ends [X] int32 of each expert's rows -> [P, O]
    grouped_linear: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    # x [T, D] of few tokens, codes [O, D * bits / 8], scales [O, D / group], bias [O] -> [T, O]. None: the
    # matrix is dequantized block by block.
    code_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
    # Products of one token with a dense matrix. x [1, D], the weight [D] of a norm of x or None, eps, weight [O, D],
    # bias [O], and whether weight is [2I, D] of a SwiGLU -> [1, O] or [1, I]. None: a product like any other.
    one_linear: Callable[[Tensor, Tensor | None, float, Tensor, Tensor | None, bool], Tensor] | None = None
    # residual [1, O] += the product of x [1, D], weight [O, D] and bias [O]; a device has both or neither.
    add_one_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], None] | None = None
    # Products of 2 to 16 tokens with a dense matrix of 16-bit numbers. x [T, D], weight [O, D], bias [O] -> [T, O], or
    # fp32 parts of it [S, T, O], which add_rms_norm takes. None: a product like any other.
    few_linear: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor] | None = None
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [T, D], weight [D], eps
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]  # residual += x in place, and the norm of the sum
    swiglu: Callable[[Tensor], Tensor]  # [T, 2I] -> [T, I]
    norm_rope: Callable[[Tensor, HeadNorm, CosSin, int], Tensor]  # heads [T, H+2G, E], G -> [T, H+G, E]
    # A decode step's attention in one layer: norm, rotate, write a slot per row, attend over the visible slots.
    # heads [B, H+2G, E] as projected -> [B, H, E]
    attend_rows: Callable[[Tensor, HeadNorm, CosSin | None, LayerRows, RowPlaces, Keep | None], Tensor]
    # The same of a layer that shares the slots of another: q [B, H, E], rows [B], lengths [B], sinks, cap -> [B, H, E]
    decode_attention: pytorch.DecodeAttention = reference.decode_attention
    gather_rows: Callable[[LayerRows, Sequence[int], Tensor, Tensor, Tensor], None]  # rows, keys, values, index [G, n]
    snapkv_scores: ScoreKernel
    hop_scores: HopKernel
    key_diversity: Callable[[Tensor, int, int], Tensor]  # keys [G, N, E], start, stop -> [G, stop - start]
    # Recurrent layers: x [S, n, C], state [S, K-1, C], taps [K, C], bias [C], silu -> [S, n, C]
    causal_conv: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor] = reference.causal_conv
    # q, k [S, n, G, K], v [S, n, H, V], decay, beta [S, n, H], state [S, H, K, V] -> [S, n, H, V]
    gated_delta: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = pytorch.gated_delta
    # c, b [S, n, G, N], x [S, n, H, P], decay [S, n, H], state [S, H, N, P] -> [S, n, H, P]
    selective_scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = pytorch.selective_scan
    # Their decode steps, which read and write the states of all rows in place at ``rows [B]``, distinct but for the
    # padding row; a device has both or, None, neither: there the states of a batch are copied.
    # x [B, C], state [rows+1, K-1, C], rows, taps [K, C], bias [C], silu -> [B, C]
    conv_step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], Tensor] | None = None
    # mixed q | k | v [B, 2GK + HV], gates beta | decay [B, 2H] or [B, H + HK], memory [rows+1, H, K, V], rows,
    # rate [H], step [H] or [HK], None -> [B, HV] fp32; of Mamba-2 x | B | C, gates [B, H], and skip [H], not None
    memory_step: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
    batch_tiles: tuple[int, ...] = (1,)  # the batch sizes from which a decode step launches other kernels

    def with_sinks(self, sinks: Tensor | None) -> Kernels:
        """The same; attention scores are those of a layer with learned ``sinks [H]``, None: without."""
        if sinks is None:
            return self
        snapkv, hops = partial(self.snapkv_scores, sinks=sinks), partial(self.hop_scores, sinks=sinks)
        return replace(self, snapkv_scores=snapkv, hop_scores=hops)

    def with_cap(self, cap: float | None) -> Kernels:
        """The same; attention scores are those of a model with a ``cap``, see ``reference.capped``; None: without."""
        if cap is None:
            return self
        snapkv, hops = cast(Any, self.snapkv_scores), cast(Any, self.hop_scores)  # what is bound first takes a cap
        return replace(self, snapkv_scores=partial(snapkv, cap=cap), hop_scores=partial(hops, cap=cap))

    def normed(self, given: SumNorm) -> Tensor:
        """``sum_norm`` of ``given``, ``[T, D]``."""
        return self.sum_norm(*given)

    def sum_norm(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``residual [T, D] += x`` in place if ``x`` is given, and the norm of the sum."""
        return self.rms_norm(residual, weight, eps) if x is None else self.add_rms_norm(residual, x, weight, eps)


def bind(device: torch.device | str, version: KernelVersion | None = None) -> Kernels:
    """The kernels of a device: by default Triton's on an NVIDIA GPU that has it, those of ``cpu/`` on a CPU.

    ``"torch"`` runs anywhere; ``"triton"`` on other devices needs Triton's interpreter. ValueError for a version that
    cannot be had here.
    """
    kind = torch.device(device).type
    version = version or _default(kind)
    if version == "cpu" and kind not in ("cpu", "meta"):
        raise ValueError(f"kernels {version!r} run on a CPU, and the device is {device}")
    match version:
        case "triton":
            return _triton(torch.device(device))
        case "cpu":
            return _cpu()
        case "torch":
            return _torch()
    raise ValueError(f"kernels are {version!r}; they must be one of {', '.join(get_args(KernelVersion))}")


def has_triton() -> bool:
    """True where Triton is installed with a PyTorch for NVIDIA GPUs; it is not imported."""
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


def _default(kind: str) -> KernelVersion:
    if kind == "cuda":
        return "triton" if has_triton() else "torch"
    return "cpu" if kind == "cpu" else "torch"


def _torch() -> Kernels:
    return Kernels(
        version="torch",
        grouped_linear=pytorch.grouped_linear,
        rms_norm=pytorch.rms_norm,
        add_rms_norm=pytorch.add_rms_norm,
        swiglu=pytorch.swiglu,
        norm_rope=pytorch.norm_rope,
        attend_rows=pytorch.rows_attention(pytorch.norm_rope, reference.decode_attention),
        gather_rows=reference.gather_rows,
        snapkv_scores=pytorch.snapkv_scores,
        hop_scores=pytorch.hop_scores,
        key_diversity=pytorch.key_diversity,
    )


def _cpu() -> Kernels:
    norms = Norms()
    return replace(
        _torch(),
        version="cpu",
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        norm_rope=norms.norm_rope,
        gather_rows=pytorch.gather_rows,
        attend_rows=pytorch.rows_attention(norms.norm_rope, attention.decode_attention),
        decode_attention=attention.decode_attention,
        causal_conv=prompt.causal_conv,
        gated_delta=prompt.gated_delta,
        selective_scan=prompt.selective_scan,
    )


def _triton(device: torch.device) -> Kernels:
    if not has_triton():
        raise ValueError("kernels 'triton' need Triton, which is not installed for this PyTorch")
    from snapstream.kernels.triton import (
        attention,
        configs,
        dense,
        latent_attention,
        products,
        recurrence,
        rows,
        scores,
    )

    return replace(
        _torch(),
        version="triton",
        decode_attention=attention.decode_attention,
        grouped_linear=products.grouped_linear,
        code_linear=products.code_linear,
        one_linear=dense.one_linear,
        add_one_linear=dense.add_one_linear,
        few_linear=dense.few_linear if dense.overlaps(device) else None,
        rms_norm=dense.rms_norm,
        add_rms_norm=dense.add_rms_norm,
        swiglu=dense.swiglu,
        norm_rope=rows.norm_rope,
        attend_rows=latent_attention.attend_rows,
        gather_rows=rows.gather_rows,
        snapkv_scores=scores.scores_of_any_size,
        conv_step=recurrence.conv_step,
        memory_step=recurrence.memory_step,
        batch_tiles=(1, 2, *(tokens + 1 for tokens in configs.CODE_TOKENS[:-1])),
    )
