"""The layer of Llama, Mistral, Qwen, Mixtral and GLM-4: grouped-query attention and an MLP, each behind an RMSNorm.

What differs between them is data: biases, head norms, and whether the MLP is one or a mixture of experts (``mlp.py``).
The residual stream is carried as two parts: ``residual``, and what the block before has yet to add to it. The norm that
reads the sum does the addition, so that it costs no pass of its own, and an all-reduce over devices can stand between a
product and its sum. Of several ranks each has some heads and a part of the MLP: their products are parts of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.distributed.group import Group
from snapstream.kernels.bound import CosSin, HeadNorm, Kernels, SumNorm
from snapstream.layers.attention import KVView
from snapstream.models.mlp import bias_of_sum, mlp_of
from snapstream.models.weights import LayerWeights


class DenseLayer:
    """One layer over views of the stacked weights; a ``models.decoder.Layer``."""

    def __init__(self, index: int, config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> None:
        self._index, self._kernels, self._group, self._eps = index, kernels, group, config.rms_norm_eps
        self._num_heads = config.num_heads + 2 * config.num_kv_heads  # as projected
        self._head_dim = config.head_dim
        self._input_norm, self._post_norm = weights.vector("input_norm"), weights.vector("post_norm")
        self._qkv, self._qkv_bias = weights.matrix("qkv"), weights.optional("qkv_bias")
        self._o, self._o_bias = weights.matrix("o"), bias_of_sum(weights.optional("o_bias"), group)
        self._mlp = mlp_of(config, weights, kernels, group)
        self._head_norm = _head_norm(config, weights)

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """See ``models.decoder.Layer.attend``."""
        given = SumNorm(residual, pending, self._input_norm, self._eps)
        heads = self._qkv.multiply_normed(given, self._qkv_bias, self._kernels)  # [T, (H+2G)E]
        return view.attend(self._index, heads.view(-1, self._num_heads, self._head_dim), self._head_norm, rope)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """See ``models.decoder.Layer.finish``."""
        projected = self._group.all_reduce(
            self._o.multiply(attended.flatten(1), self._o_bias, self._kernels)
        )  # [T', D]
        return self._group.all_reduce(self._mlp.of_norm(SumNorm(residual, projected, self._post_norm, self._eps)))


def _head_norm(config: ModelConfig, weights: LayerWeights) -> HeadNorm:
    """Norms of q and k as one over ``[T, H+G, E]``, so that both cost one call."""
    if not config.qk_norm:
        return HeadNorm(None, config.rms_norm_eps)
    q, k = weights.vector("q_norm"), weights.vector("k_norm")
    per_head = torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))  # [H+G, E]
    return HeadNorm(per_head, config.rms_norm_eps)
