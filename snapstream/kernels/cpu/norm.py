"""RMSNorm on a CPU in four PyTorch kernels instead of about ten: ``x / hypot(|x|, sqrt(E eps)) * (sqrt(E) weight)``."""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.kernels import pytorch
from snapstream.kernels.rows import CosSin, HeadNorm


class Constants(NamedTuple):
    """The parts of the formula that depend on weight and eps alone, fp32."""

    scaled: Tensor  # [..., E]: the weight times sqrt(E)
    floor: Tensor  # []: sqrt(E eps)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Constants:
        size = weight.shape[-1]
        floor = torch.full((), math.sqrt(size * eps), dtype=torch.float32, device=weight.device)
        return cls(weight.to(torch.float32) * math.sqrt(size), floor)


def composed(x: Tensor, constants: Constants) -> Tensor:
    """The norm of ``x [..., E]`` in its dtype, fp32 inside."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    normed: Tensor = (x / length.hypot_(constants.floor)).mul_(constants.scaled)
    return normed.to(x.dtype)


class Norms:
    """The norms of a kernel set. A weight's constants are kept while it lives: weights do not change once loaded."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], tuple[weakref.ref[Tensor], Constants]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.rms_norm``; ``weight`` may also be ``[heads, E]``, where heads differ."""
        return composed(x, self._constants(weight, eps))

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``reference.add_rms_norm``."""
        return composed(residual.add_(x), self._constants(weight, eps))

    def norm_rope(self, heads: Tensor, norm: HeadNorm, rope: CosSin, num_kv_heads: int) -> Tensor:
        """See ``reference.norm_rope``."""
        qk = heads[:, : heads.shape[1] - num_kv_heads]
        return pytorch.rotate(qk if norm.weight is None else self.rms_norm(qk, norm.weight, norm.eps), rope)

    def _constants(self, weight: Tensor, eps: float) -> Constants:
        key = id(weight), eps
        known = self._known.get(key)
        if known is not None and known[0]() is weight:
            return known[1]
        made = Constants.of(weight, eps)
        self._known[key] = weakref.ref(weight, lambda _: self._known.pop(key, None)), made
        return made
