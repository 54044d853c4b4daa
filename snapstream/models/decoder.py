"""The decoder of Llama, Mistral, Qwen2 and Qwen3: embedding, L equal layers, logits.

What differs between the four is data (biases, head norms, rope, tied embedding), so there is one class. It
keeps no state: tokens are packed along T whatever sequence they belong to, positions come from the caller,
and attention is left to a ``KVView``. The caller holds ``torch.inference_mode``. Read ``weights.py`` for
storage, ``layers/rope.py`` for the rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.config import ModelConfig
from snapstream.kernels.bound import CosSin, HeadNorm, Kernels, bind
from snapstream.layers.attention import FusingView, KVView
from snapstream.layers.rope import Rope
from snapstream.models.weights import DecoderWeights, LayerWeights


class DecoderLayer:
    """One layer over views of the stacked weights."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, kernels: Kernels) -> None:
        self.weights, self.kernels = weights, kernels
        self.eps = config.rms_norm_eps
        self.num_heads = config.num_heads
        self.num_rotated = config.num_heads + config.num_kv_heads
        self.num_projected = config.num_heads + 2 * config.num_kv_heads
        self.head_dim = config.head_dim
        self.head_norm = _head_norm(config, weights)

    def heads(self, hidden: Tensor) -> Tensor:
        """Heads of q, k and v as they are projected: ``[T, H+2G, E]``."""
        return self._projected(self.kernels.rms_norm(hidden, self.weights.input_norm, self.eps))

    def _projected(self, normed: Tensor) -> Tensor:
        projected = self.kernels.linear(normed, self.weights.qkv, self.weights.qkv_bias)
        return projected.view(-1, self.num_projected, self.head_dim)

    def rotated(self, heads: Tensor, rope: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated q ``[T, H, E]`` and k ``[T, G, E]``, and v ``[T, G, E]``, of ``heads [T, H+2G, E]``."""
        qk = self.kernels.norm_rope(heads, self.head_norm, rope, self.num_projected - self.num_rotated)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, self.num_rotated :]

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP, each added to the residual stream: ``[T, D]``."""
        weights, kernels = self.weights, self.kernels
        hidden = kernels.linear(attended.flatten(1), weights.o, weights.o_bias).add_(hidden)
        normed = kernels.rms_norm(hidden, weights.post_norm, self.eps)
        return self._mlp(normed).add_(hidden)

    def fused(self, index: int, residual: Tensor, pending: Tensor | None, rope: CosSin, view: FusingView) -> Tensor:
        """The whole layer in a decode step: each sum is done by the norm that reads it.

        ``pending [T, D]`` is what the layer before has yet to add to ``residual [T, D]``, which changes in place; the
        result is what this layer has yet to add.
        """
        weights, kernels = self.weights, self.kernels
        if pending is None:
            heads = self.heads(residual)
        else:
            heads = self._projected(kernels.add_rms_norm(residual, pending, weights.input_norm, self.eps))
        attended = view.attend_heads(index, heads, self.head_norm, rope)
        added = kernels.linear(attended.flatten(1), weights.o, weights.o_bias)
        return self._mlp(kernels.add_rms_norm(residual, added, weights.post_norm, self.eps))

    def _mlp(self, normed: Tensor) -> Tensor:
        weights, kernels = self.weights, self.kernels
        inner = kernels.swiglu(kernels.linear(normed, weights.gate_up, weights.gate_up_bias))  # [T, I]
        return kernels.linear(inner, weights.down, weights.down_bias)


class Decoder:
    """A decoder-only transformer over stacked weights."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels | None = None) -> None:
        """``kernels`` are by default those that ``bind`` has for the device of the weights."""
        self.config = config
        self.weights = weights
        self.kernels = kernels or bind(weights.embed.device)
        self.dtype = weights.embed.dtype
        self.device = weights.embed.device
        self.layers = [DecoderLayer(config, weights.layer(index), self.kernels) for index in range(config.num_layers)]
        self._rope = Rope(config.rope, config.head_dim, self.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """``token_ids [T]`` to the hidden states that enter layer 0, ``[T, D]``."""
        return F.embedding(token_ids, self.weights.embed)

    def rope(self, positions: Tensor, seq_lens: Tensor) -> CosSin:
        """Cosine and signed sine ``[T, 1, E]`` fp32 of every token.

        In decode it is made once for all layers, in prefill once per chunk and layer.

        ``seq_lens [T]`` is the length of each token's sequence when it is fed: the prompt length in prefill,
        position + 1 in decode. Only dynamic stretching reads it.
        """
        return self._rope.angles(positions, seq_lens)

    def project(self, layer: int, hidden: Tensor, rope: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """First half of a layer: ``hidden [T, D]`` to q ``[T, H, E]``, k and v ``[T, G, E]``."""
        own = self.layers[layer]
        return own.rotated(own.heads(hidden), rope)

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Second half of a layer: ``attended [T, H, E]`` back into the residual stream ``[T, D]``."""
        return self.layers[layer].finish(hidden, attended)

    def layer(self, index: int, hidden: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """One whole layer, ``[T, D]`` to ``[T, D]``."""
        layer = self.layers[index]
        return layer.finish(hidden, view.attend(index, *layer.rotated(layer.heads(hidden), rope)))

    def run(self, hidden: Tensor, rope: CosSin, view: KVView | FusingView) -> Tensor:
        """All layers: from what enters layer 0, ``[T, D]``, to scores of the next token ``[T, V]`` fp32.

        ``hidden`` may be overwritten.
        """
        if not isinstance(view, FusingView):
            for index in range(self.config.num_layers):
                hidden = self.layer(index, hidden, rope, view)
            return self.logits(hidden)
        pending: Tensor | None = None
        for index, layer in enumerate(self.layers):
            pending = layer.fused(index, hidden, pending, rope, view)
        assert pending is not None, "a decoder has a layer"
        return self._scores(
            self.kernels.add_rms_norm(hidden, pending, self.weights.final_norm, self.config.rms_norm_eps)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token ``[T, V]`` fp32, from the output of the last layer."""
        return self._scores(self.kernels.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps))

    def _scores(self, normed: Tensor) -> Tensor:
        return self.kernels.linear(normed, self.weights.lm_head, None).to(torch.float32)


def _head_norm(config: ModelConfig, weights: LayerWeights) -> HeadNorm:
    """Head norms of q and k as one norm over ``[T, H+G, E]``, so that both cost one call."""
    if weights.q_norm is None or weights.k_norm is None:
        return HeadNorm(None, 0.0)
    per_head = torch.cat(
        (weights.q_norm.expand(config.num_heads, -1), weights.k_norm.expand(config.num_kv_heads, -1))
    )  # [H+G, E]
    return HeadNorm(per_head, config.rms_norm_eps)
