"""A mixture of experts in the place of a layer's MLP: route, two grouped products, a weighted sum, shared experts.

A pair is a token and one of its experts. Pairs are sorted by expert, so that each chosen matrix is read once, in
place, by all of its tokens; every tensor has a size that follows from the number of tokens alone. What a token gets
does not depend on its neighbours but for rounding: its own pairs are summed in the order of the router's choice.
A rank may store some of the experts only. It routes as all do, and leaves out the pairs of others' experts.
``layers/router.py`` chooses; the products are the weights' (``weight.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snapstream.config.moe import MoEConfig
from snapstream.kernels.bound import Kernels, Pairs, SumNorm
from snapstream.layers.router import route
from snapstream.models.weights import LayerWeights


class Experts:
    """The experts of one layer; a ``models.mlp.Mlp``."""

    def __init__(
        self, moe: MoEConfig, weights: LayerWeights, kernels: Kernels, shared: Callable[[Tensor], Tensor] | None
    ) -> None:
        """``shared`` is the MLP that every token passes, if there is one."""
        self._moe, self._kernels, self._shared = moe, kernels, shared
        self._router, self._correction = weights.vector("router"), weights.optional("router_bias")
        self._gate_up, self._down = weights.matrix("experts_gate_up"), weights.matrix("experts_down")
        self._first, self._num_own = moe.own.start, len(moe.own)
        self._ids = torch.arange(self._num_own, device=self._router.device)

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, D]`` to the weighted sum of its experts' outputs and the shared ones' ``[T, D]``."""
        logits = self._kernels.linear(x.to(torch.float32), self._router, None)  # [T, X]
        weights, experts = route(logits, self._correction, self._moe)
        flat = self._own(experts.flatten())
        order = flat.argsort(stable=True)  # [T k], pairs by expert, those of others' experts behind all
        ends = torch.searchsorted(flat[order], self._ids, right=True, out_int32=True)  # [X'], of each expert's pairs
        is_whole = self._num_own == self._moe.num_experts
        pairs = Pairs(order, ends, weights, None if is_whole else flat == self._num_own)
        routed = self._gate_up.swiglu_grouped(self._down, x, pairs, self._kernels)  # [T, D]
        return routed if self._shared is None else routed.add_(self._shared(x))

    def of_norm(self, given: SumNorm) -> Tensor:
        """See ``models.mlp.Mlp``."""
        return self(self._kernels.normed(given))

    def _own(self, experts: Tensor) -> Tensor:
        """Ids of experts as counted here, 0 to X' - 1; X' for those of other ranks."""
        if self._num_own == self._moe.num_experts:
            return experts
        own = experts - self._first
        return own.masked_fill((own < 0) | (own >= self._num_own), self._num_own)
