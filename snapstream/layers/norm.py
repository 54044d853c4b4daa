"""Root-mean-square norm over the last dimension, fp32 inside, result in the dtype of the input."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import dispatch


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight``; ``weight`` is ``[E]``, or ``[heads, E]`` where heads differ.

    A GPU has one fused kernel for this. On a CPU the fused call falls apart into about ten small ones, which
    decode of a small model feels, so there the same formula runs as ``x / hypot(|x|, sqrt(E eps)) * (sqrt(E)
    weight)``.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        self._scaled = weight.to(torch.float32) * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1 and x.dim() == 2 and dispatch.runs_triton(x):
            return dispatch.rms_norm(x, self.weight, self.eps)
        return self.fused(x) if x.is_cuda else self.composed(x)

    def of_sum(self, residual: Tensor, x: Tensor | None) -> Tensor:
        """``residual [T, D] += x`` in place, and the norm of the sum; one launch where kernels are Triton's."""
        return self(residual) if x is None else dispatch.add_rms_norm(residual, x, self.weight, self.eps)

    def fused(self, x: Tensor) -> Tensor:
        """One kernel on a GPU; a weight per head is a second one."""
        shared = self.weight if self.weight.dim() == 1 else None
        normed = F.rms_norm(x, (x.shape[-1],), shared, self.eps)
        return normed if shared is not None else normed * self.weight

    def composed(self, x: Tensor) -> Tensor:
        """Four small kernels on a CPU."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        normed: Tensor = (x / length.hypot_(self._floor)).mul_(self._scaled)
        return normed.to(x.dtype)
