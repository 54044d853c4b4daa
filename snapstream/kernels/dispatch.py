"""Which version of a kernel runs for which tensors. Callers import from here and never name a version."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import reference, scores
from snapstream.kernels.cpu import attention as cpu_attention
from snapstream.kernels.cpu import linear as cpu_linear

write_slots = reference.write_slots
snapkv_scores = scores.snapkv_scores


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``reference.prefill_attention``."""
    version = cpu_attention if q.device.type == "cpu" else reference
    return version.prefill_attention(q, k, v)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """See ``reference.decode_attention``."""
    version = cpu_attention if q.device.type == "cpu" else reference
    return version.decode_attention(q, k, v, rows, lengths)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, D] weight [O, D]^T + bias``."""
    return cpu_linear.linear(x, weight, bias) if x.device.type == "cpu" else F.linear(x, weight, bias)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``residual + x weight^T + bias``, with the first sum inside the matrix product where that is fast."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] <= cpu_linear.MAX_TOKENS:
        return cpu_linear.linear(x, weight, bias).add_(residual)
    total = torch.addmm(residual, x, weight.t())
    return total if bias is None else total.add_(bias)
