"""Which version of a kernel runs for which tensors. Callers import from here and never name a version.

Tensors on an NVIDIA GPU go to the Triton kernels where Triton is installed (they are operators, see ``ops.py``),
tensors on a CPU to ``cpu/``, everything else to plain PyTorch. ``forced`` overrides that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import ops, reference, scores
from snapstream.kernels.cpu import attention as cpu_attention
from snapstream.kernels.cpu import linear as cpu_linear
from snapstream.kernels.fp8 import Scales
from snapstream.kernels.prefill.choice import automatic

Version = Literal["triton", "plain"]

HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.version.hip is None


class _Choice:
    version: Version | None = None


_choice = _Choice()


@contextmanager
def forced(version: Version) -> Iterator[None]:
    """Within the block use the Triton kernels (``"triton"``) or none of them (``"plain"``), on any device.

    For tests and comparisons. On a CPU the Triton kernels need Triton's interpreter.
    """
    before, _choice.version = _choice.version, version
    try:
        yield
    finally:
        _choice.version = before


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels of tensors like this one are the Triton ones."""
    if _choice.version is not None:
        return _choice.version == "triton"
    return HAS_TRITON and tensor.is_cuda


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``; by the table of ``prefill/``: for callers without an engine."""
    num_heads, head_dim = q.shape[1:]
    return automatic(q.device, q.dtype, head_dim, num_heads // k.shape[0]).attend(q, k, v)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor, scales: Scales | None = None
) -> Tensor:
    """See ``reference.decode_attention``."""
    if runs_triton(q):
        return ops.decode_attention(q, k, v, rows, lengths, *(scales or ()))
    version = cpu_attention if q.device.type == "cpu" else reference
    return version.decode_attention(q, k, v, rows, lengths, scales)


def write_slots(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, rows: Tensor, slots: Tensor, scales: Scales | None = None
) -> None:
    """See ``reference.write_slots``."""
    if runs_triton(k_cache):
        ops.write_slots(k_cache, v_cache, k, v, rows, slots, *(scales or ()))
    else:
        reference.write_slots(k_cache, v_cache, k, v, rows, slots, scales)


def norm_rope(
    heads: Tensor, head_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, num_kv_heads: int
) -> Tensor:
    """See ``reference.norm_rope``."""
    version = ops.norm_rope if runs_triton(heads) else reference.norm_rope
    return version(heads, head_norm, eps, cos, sin, num_kv_heads)


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
    scales: Scales | None = None,
) -> Tensor:
    """See ``reference.norm_rope_write``."""
    arguments = heads, head_norm, eps, cos, sin, k_cache, v_cache, rows, slots
    if runs_triton(heads):
        return ops.norm_rope_write(*arguments, *(scales or ()))
    return reference.norm_rope_write(*arguments, scales)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    return ops.rms_norm(x, weight, eps) if runs_triton(x) else F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.add_rms_norm``."""
    version = ops.add_rms_norm if runs_triton(x) else reference.add_rms_norm
    return version(residual, x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``; without Triton in the dtype of the input."""
    if runs_triton(gate_up):
        return ops.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def snapkv_scores(
    queries: Tensor, keys: Tensor, first_query: int, start: int, stop: int, *, over_row: bool, group_max: bool
) -> Tensor:
    """See ``reference.snapkv_scores``."""
    if runs_triton(keys):
        return ops.snapkv_scores(queries, keys, first_query, start, stop, over_row, group_max)
    return scores.snapkv_scores(queries, keys, first_query, start, stop, over_row=over_row, group_max=group_max)


def hop_scores(weights: Tensor, voters: Tensor, queries: Tensor, keys: Tensor, start: int, stop: int) -> Tensor:
    """See ``reference.hop_scores``; the same PyTorch on every device."""
    return scores.hop_scores(weights, voters, queries, keys, start, stop)


def gather_rows(
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    scales: Scales | None = None,
) -> None:
    """See ``reference.gather_rows``."""
    if runs_triton(keys):
        ops.gather_rows(k_cache, v_cache, rows, keys, values, index, *(scales or ()))
    else:
        reference.gather_rows(k_cache, v_cache, rows, keys, values, index, scales)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, D] weight [O, D]^T + bias``."""
    return cpu_linear.linear(x, weight, bias) if x.device.type == "cpu" else F.linear(x, weight, bias)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``residual + x weight^T + bias``, with the first sum inside the matrix product where that is fast."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] <= cpu_linear.MAX_TOKENS:
        return cpu_linear.linear(x, weight, bias).add_(residual)
    total = torch.addmm(residual, x, weight.t())
    return total if bias is None else total.add_(bias)
