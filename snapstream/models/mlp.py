"""The second half of a layer: one SwiGLU, or a mixture of them (``experts.py``), as the layer's weights say.

Every layer class takes its MLP from ``mlp_of`` and need not know which of the two it is.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.distributed.group import Group
from snapstream.kernels.bound import Kernels, SumNorm
from snapstream.models.experts import Experts
from snapstream.models.weight import Weight
from snapstream.models.weights import LayerWeights


class Mlp(Protocol):
    """What a layer does to each token after attention, without norm and sum."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, D]``, normed, to what is added to the residual stream ``[T, D]``; of a rank, its part of the sum."""
        ...

    def of_norm(self, given: SumNorm) -> Tensor:
        """The same of a norm that is still to be made."""
        ...


class SwiGLU:
    """``down(silu(gate x) * up x)`` of stored matrices; an ``Mlp``."""

    def __init__(
        self, gate_up: Weight, down: Weight, biases: tuple[Tensor | None, Tensor | None], kernels: Kernels
    ) -> None:
        self._gate_up, self._down, self._kernels = gate_up, down, kernels
        self._gate_up_bias, self._down_bias = biases

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Mlp``."""
        return self._gate_up.swiglu(self._down, x, (self._gate_up_bias, self._down_bias), self._kernels)

    def of_norm(self, given: SumNorm) -> Tensor:
        """See ``Mlp``."""
        return self._gate_up.swiglu(self._down, given, (self._gate_up_bias, self._down_bias), self._kernels)


def bias_of_sum(bias: Tensor | None, group: Group) -> Tensor | None:
    """The bias of a product that is summed over the ranks: one of them adds it."""
    return bias if group.rank == 0 else None


def mlp_of(config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> Mlp:
    """The MLP of the layer that these weights belong to."""
    if config.moe is not None and "experts_down" in weights.matrices:
        shared = None
        if config.moe.num_shared:
            shared = SwiGLU(weights.matrix("shared_gate_up"), weights.matrix("shared_down"), (None, None), kernels)
        return Experts(config.moe, weights, kernels, shared)
    biases = weights.optional("gate_up_bias"), bias_of_sum(weights.optional("down_bias"), group)
    return SwiGLU(weights.matrix("gate_up"), weights.matrix("down"), biases, kernels)
