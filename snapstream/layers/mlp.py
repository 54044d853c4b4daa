"""The gate of a Llama-style MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of one fused projection ``[T, 2I]`` (rows gate | up), ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
