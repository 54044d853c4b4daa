"""The gate of a Llama-style MLP."""

from __future__ import annotations

from torch import Tensor

from snapstream.kernels import dispatch


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of one fused projection ``[T, 2I]`` (rows gate | up), ``[T, I]``."""
    return dispatch.swiglu(gate_up)
