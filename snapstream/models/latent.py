"""Multi-head latent attention, the layer of DeepSeek-V2 and V3 (arXiv 2405.04434, section 2.1).

A token's keys and values of all heads are linear in one latent ``c | r``. The same attention has two forms:

* absorbed: queries are projected to the latent space; the latents are the keys of one kv head for all query heads, and
  their ``c`` the values. Rows hold latents, so decode uses this form, through ``view.attend``;
* expanded: keys and values of every head are made from the latents, a fraction of the work if many queries attend to
  many keys. ``StagingView``, which has room for them, gets queries and latents and expands.

Kernels scale by the square root of the head size, so queries are premultiplied by a factor that turns this into the
model's softmax scale; kernels and selectors need not know it. With several ranks each has some query heads and all of
the latents.

With data-parallel attention (SnapStream, section 4) whole rows are stored on one rank each, because a latent belongs to
all heads: with split heads every rank would hold every row. In decode a rank attends its own rows with all heads, and
the ranks all-gather the result; MLPs stay split. In prefill heads are split (``local_heads``, views of the same
weights): every rank then has all latents of a prompt, and the owner of a row writes it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.config.model import LatentConfig
from snapstream.distributed.group import Group
from snapstream.kernels.interface import CosSin, HeadNorm, Kernels, SumNorm
from snapstream.kv.cache import BatchShard, KVCache
from snapstream.models.layers import KVView, mlp_of
from snapstream.models.views import RowsView, StagingView
from snapstream.models.weights import LayerWeights

_NO_NORM = HeadNorm(None, 1.0)


class LatentHeads:
    """Absorbed and expanded forms of a layer's queries and latents ``c | r``.

    A latent has E = R + P elements, an expanded key or value X: the larger of both, zero-padded.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, weights: LayerWeights, kernels: Kernels) -> None:
        self._latent, self._num_heads, self._kernels = latent, config.num_heads, kernels
        self.value_dim = latent.value_dim
        self._kv_b = weights.matrix("kv_b")  # [H (N_o + U), R]
        up = self._kv_b.dense().view(config.num_heads, -1, latent.kv_rank)
        self._up_k, self._up_v = up[:, : latent.nope_dim], up[:, latent.nope_dim :]  # [H, N_o, R], [H, U, R]
        self._absorbed_factor = latent.softmax_scale * latent.latent_dim**0.5
        self._expanded_factor = latent.softmax_scale * latent.expanded_dim**0.5

    def absorbed(self, queries: Tensor) -> Tensor:
        """Queries ``[T, H, N_o + P]`` for attention over latents: ``[T, H, E]``."""
        nope, rotated = (queries * self._absorbed_factor).split((self._latent.nope_dim, self._latent.rope_dim), -1)
        projected = torch.bmm(nope.transpose(0, 1), self._up_k).transpose(0, 1)  # [T, H, R]
        return torch.cat((projected, rotated), -1)

    def expanded(self, queries: Tensor) -> Tensor:
        """The same for attention over expanded keys: ``[T, H, X]``."""
        missing = self._latent.expanded_dim - self._latent.query_dim
        return torch.nn.functional.pad(queries * self._expanded_factor, (0, missing))

    def expand(self, latents: Tensor, keys: Tensor, values: Tensor) -> None:
        """Expand ``latents [n, E]`` into ``keys, values [H, n, X]``."""
        nope_dim, query_dim = self._latent.nope_dim, self._latent.query_dim
        compressed, rotated = latents[:, : self._latent.kv_rank], latents[:, self._latent.kv_rank :]
        both = self._kv_b.multiply(compressed.contiguous(), None, self._kernels)  # [n, H (N_o + U)]
        per_head = both.view(len(latents), self._num_heads, -1).transpose(0, 1)  # [H, n, N_o + U]
        keys[..., :nope_dim] = per_head[..., :nope_dim]
        keys[..., nope_dim:query_dim] = rotated
        values[..., : self.value_dim] = per_head[..., nope_dim:]

    def values(self, attended: Tensor) -> Tensor:
        """Attended latents ``[T, H, R]`` as attended values ``[T, H, U]``."""
        return torch.bmm(attended.transpose(0, 1), self._up_v.transpose(1, 2)).transpose(0, 1)


class LatentLayer:
    """One layer over views of the stacked weights; a ``models.decoder.Layer``."""

    def __init__(self, index: int, config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> None:
        if config.latent is None:
            raise ValueError(f"{config.architecture} has no latent attention in its config")
        self.group = group
        self._index, self._kernels, self._eps, self._latent = index, kernels, config.rms_norm_eps, config.latent
        self._input_norm, self._post_norm = weights.vector("input_norm"), weights.vector("post_norm")
        self._mlp_out_norm = weights.optional("mlp_out_norm")
        self._q_a, self._q_a_norm = weights.matrices.get("q_a"), weights.optional("q_a_norm")
        self._q, self._o = weights.matrix("q"), weights.matrix("o")
        self._kv_a, self._kv_a_norm = weights.matrix("kv_a"), weights.vector("kv_a_norm")
        self._mlp = mlp_of(index, config, weights, kernels, group)
        self._heads = LatentHeads(config, config.latent, weights, kernels)
        self._gates, self._gate_dim = weights.matrices.get("gates"), config.gate_dim
        self._head_norm = HeadNorm(None, 1.0, weights.vector("sinks") if config.has_sinks_in(index) else None)
        self._scales_queries = config.length_scale is not None
        self._is_rotated = config.rotated_layers is None or config.rotated_layers[index]

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """``[T', H, U]``."""
        return self.attend_normed(self.norm(residual, pending), rope, view)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.run_mlp(residual, self.mixed(attended))

    def mixed(self, attended: Tensor) -> Tensor:
        """What attention adds to the residual stream, ``[T', D]``."""
        return self.group.all_reduce(self.project(attended))

    def run_mlp(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        """Add ``pending`` to ``residual [T', D]``; what the MLP then adds."""
        output = self.group.all_reduce(self._mlp.of_norm(SumNorm(residual, pending, self._post_norm, self._eps)))
        own = self._mlp_out_norm
        return output if own is None else self._kernels.rms_norm(output, own, self._eps)

    def norm(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        """Add ``pending`` to ``residual [T, D]``; the input of the attention."""
        return self._kernels.sum_norm(residual, pending, self._input_norm, self._eps)

    def attend_normed(self, normed: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """Attention of ``normed [T, D]`` behind its view, ``[T', H, U]``."""
        queries, latents = self._project(normed, rope)
        if isinstance(view, StagingView):
            attended = view.attend_latents(self._index, queries, latents, self._heads, self._head_norm.sinks)
        else:
            heads = torch.cat((self._heads.absorbed(queries), latents), 1)  # [T, H+1, E]
            attended = self._heads.values(view.attend(self._index, heads, self._head_norm, None))
        if self._gates is None:
            return attended
        gates = self._gates.multiply(view.outputs(normed), None, self._kernels)  # [T', H or H U]
        return attended * gates.sigmoid().unflatten(1, (-1, self._gate_dim))

    def project(self, attended: Tensor) -> Tensor:
        """The output of this rank's heads, from ``[T', H, U]`` to ``[T', D]``."""
        return self._o.multiply(attended.flatten(1), None, self._kernels)

    def _project(self, normed: Tensor, rope: CosSin) -> tuple[Tensor, Tensor]:
        """Queries ``[T, H, N_o + P]`` and latents ``[T, 1, R + P]``, both rotated in their last P numbers."""
        latent, kernels = self._latent, self._kernels
        scales = rope[0][1, ..., :1] if self._scales_queries else None  # [T, 1, 1]
        rope = rope if scales is None else (rope[0][0], rope[1][0])
        if self._q_a is not None and self._q_a_norm is not None:
            reduced = kernels.rms_norm(self._q_a.multiply(normed, None, kernels), self._q_a_norm, latent.norm_eps)
        else:
            reduced = normed
        queries = self._q.multiply(reduced, None, kernels).unflatten(1, (-1, latent.query_dim))
        kept = self._kv_a.multiply(normed, None, kernels)  # [T, R + P]
        compressed = kernels.rms_norm(kept[:, : latent.kv_rank].contiguous(), self._kv_a_norm, latent.norm_eps)
        unrotated = torch.cat((queries[..., latent.nope_dim :], kept[:, None, latent.kv_rank :]), 1)  # [T, H+1, P]
        rotated = kernels.norm_rope(unrotated, _NO_NORM, rope, 0) if self._is_rotated else unrotated
        queries = torch.cat((queries[..., : latent.nope_dim], rotated[:, :-1]), -1)
        if scales is not None:
            queries.mul_(scales)
        return queries, torch.cat((compressed[:, None], rotated[:, -1:]), -1)


class DataParallelRowsView(RowsView):
    """Attention of a rank's own entries of a batch against its own rows."""

    def __init__(self, cache: KVCache, shard: BatchShard, kernels: Kernels) -> None:
        super().__init__(cache, shard.places.rows, [shard.places] * cache.spec.num_layers, kernels)
        self.shard = shard


class DataParallelLatentLayer(LatentLayer):
    """A decode layer with the attention weights of all heads; ``attend`` gathers what all ranks attended."""

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """``residual [B, D]`` of the whole batch and ``rope`` of the rank's entries to the attention output of the
        whole batch, ``[B, D]``. TypeError for any view but a ``DataParallelRowsView``.
        """
        if not isinstance(view, DataParallelRowsView):
            raise TypeError(f"data-parallel attention needs a DataParallelRowsView, not a {type(view).__name__}")
        normed = self.norm(residual, pending)
        attended = self.attend_normed(normed[view.shard.entries], rope, view)  # [b, H, U]
        return self.group.all_gather(self.project(attended), 0)[view.shard.order]

    def mixed(self, attended: Tensor) -> Tensor:
        """``attended [B, D]`` is the result of ``attend``."""
        return attended


def is_data_parallel(model: ModelConfig, stored: ModelConfig, group: Group) -> bool:
    """Whether ``stored``, a rank's shard of ``model``, has the attention of all heads."""
    return group.size > 1 and model.latent is not None and stored.num_heads == model.num_heads


def with_local_heads(stored: ModelConfig, group: Group) -> ModelConfig:
    """The shard of a rank in prefill, with its part of the heads."""
    return replace(stored, num_heads=stored.num_heads // group.size)


def local_heads(weights: LayerWeights, config: ModelConfig, group: Group) -> LayerWeights:
    """Views of a layer's weights with the rank's heads only, as many as ``config`` has."""
    latent = config.latent
    assert latent is not None, "data-parallel attention is for latents only"

    def heads(size: int) -> slice:
        size *= config.num_heads
        return slice(group.rank * size, (group.rank + 1) * size)

    local = {
        "q": weights.matrix("q")[heads(latent.query_dim)],
        "kv_b": weights.matrix("kv_b")[heads(latent.nope_dim + latent.value_dim)],
        "o": weights.matrix("o")[:, heads(latent.value_dim)],
    }
    if config.gate_dim:
        local["gates"] = weights.matrix("gates")[heads(config.gate_dim)]
    return LayerWeights({**weights.matrices, **local}, weights.vectors)
