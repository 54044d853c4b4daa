"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, section 2.1), also data-parallel.

Keys and values of all heads are linear in one latent ``c | r`` per token, which gives two forms of the same attention:

* absorbed: queries are projected to the latent space; latents are the keys of one kv head for all query heads, and
their
  c the values. Rows hold latents, so decode uses this form, through ``view.attend``;
* expanded: keys and values of every head are made from the latents, less work when many queries meet many keys. An
  ``ExpandingView`` is passed queries and latents.

Kernels divide scores by the square root of the head size. Queries are scaled so that the result is the model's own
softmax scale; kernels and selectors need not know it.

Data-parallel attention (SnapStream, section 4): a latent belongs to all heads, so with split heads every rank would
keep every row. Instead, in decode a rank attends its own rows with all heads, and the ranks gather the results; all
other weights stay split. Prefill splits heads (``own_heads``) over the same stacks: every rank has all latents of a
prompt, and the owner of a row writes it.
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
from snapstream.models.layers import ExpandingView, KVView, mlp_of
from snapstream.models.views import QuerySink, RowsView
from snapstream.models.weights import LayerWeights

LATENT_EPS = 1e-6  # of both norms inside the attention, independent of rms_norm_eps
_NO_NORM = HeadNorm(None, LATENT_EPS)


class LatentHeads:
    """The two forms of a layer's queries, keys and values; see ``layers.LatentHeads``."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, weights: LayerWeights, kernels: Kernels) -> None:
        self._latent, self._num_heads, self._kernels = latent, config.num_heads, kernels
        self.value_dim = latent.value_dim
        self._kv_b = weights.matrix("kv_b")  # [H (N_o + U), R]
        up = self._kv_b.dense().view(config.num_heads, -1, latent.kv_rank)
        self._up_k, self._up_v = up[:, : latent.nope_dim], up[:, latent.nope_dim :]  # [H, N_o, R], [H, U, R]
        self._absorbed_factor = latent.softmax_scale * latent.latent_dim**0.5
        self._expanded_factor = latent.softmax_scale * latent.expanded_dim**0.5

    def absorbed(self, queries: Tensor) -> Tensor:
        nope, turned = (queries * self._absorbed_factor).split((self._latent.nope_dim, self._latent.rope_dim), -1)
        compared = torch.bmm(nope.transpose(0, 1), self._up_k).transpose(0, 1)  # [T, H, R]
        return torch.cat((compared, turned), -1)

    def expanded(self, queries: Tensor) -> Tensor:
        missing = self._latent.expanded_dim - self._latent.query_dim
        return torch.nn.functional.pad(queries * self._expanded_factor, (0, missing))

    def expand(self, latents: Tensor, keys: Tensor, values: Tensor) -> None:
        nope_dim, query_dim = self._latent.nope_dim, self._latent.query_dim
        compressed, turned = latents[:, : self._latent.kv_rank], latents[:, self._latent.kv_rank :]
        both = self._kv_b.multiply(compressed.contiguous(), None, self._kernels)  # [n, H (N_o + U)]
        per_head = both.view(len(latents), self._num_heads, -1).transpose(0, 1)  # [H, n, N_o + U]
        keys[..., :nope_dim] = per_head[..., :nope_dim]
        keys[..., nope_dim:query_dim] = turned
        values[..., : self.value_dim] = per_head[..., nope_dim:]

    def values(self, attended: Tensor) -> Tensor:
        return torch.bmm(attended.transpose(0, 1), self._up_v.transpose(1, 2)).transpose(0, 1)


class LatentLayer:
    """One layer over views of the stacked weights; a ``models.decoder.Layer``."""

    def __init__(self, index: int, config: ModelConfig, weights: LayerWeights, kernels: Kernels, group: Group) -> None:
        if config.latent is None:
            raise ValueError(f"{config.architecture} has no latent attention in its config")
        self.group = group
        self._index, self._kernels, self._eps, self._latent = index, kernels, config.rms_norm_eps, config.latent
        self._input_norm, self._post_norm = weights.vector("input_norm"), weights.vector("post_norm")
        self._q_a, self._q_a_norm = weights.matrices.get("q_a"), weights.optional("q_a_norm")
        self._q, self._o = weights.matrix("q"), weights.matrix("o")
        self._kv_a, self._kv_a_norm = weights.matrix("kv_a"), weights.vector("kv_a_norm")
        self._mlp = mlp_of(config, weights, kernels, group)
        self._heads = LatentHeads(config, config.latent, weights, kernels)

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """See ``models.decoder.Layer.attend``: ``[T', H, U]``."""
        return self.attend_normed(self.norm(residual, pending), rope, view)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """See ``models.decoder.Layer.finish``."""
        return self.add(residual, self.group.all_reduce(self.project(attended)))

    def norm(self, residual: Tensor, pending: Tensor | None) -> Tensor:
        """Add ``pending`` to ``residual [T, D]``; the input of the attention."""
        return self._kernels.sum_norm(residual, pending, self._input_norm, self._eps)

    def attend_normed(self, normed: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """Attention of ``normed [T, D]`` behind its view, ``[T', H, U]``."""
        queries, latents = self._project(normed, rope)
        if isinstance(view, ExpandingView):
            return view.attend_latents(self._index, queries, latents, self._heads)
        heads = torch.cat((self._heads.absorbed(queries), latents), 1)  # [T, H+1, E]
        return self._heads.values(view.attend(self._index, heads, _NO_NORM, None))

    def project(self, attended: Tensor) -> Tensor:
        """The output of this rank's heads, from ``[T', H, U]`` to ``[T', D]``."""
        return self._o.multiply(attended.flatten(1), None, self._kernels)

    def add(self, residual: Tensor, projected: Tensor) -> Tensor:
        """Add the attention's output to ``residual [T', D]``; the output of the MLP, yet to be added."""
        return self.group.all_reduce(self._mlp.of_norm(SumNorm(residual, projected, self._post_norm, self._eps)))

    def _project(self, normed: Tensor, rope: CosSin) -> tuple[Tensor, Tensor]:
        """Queries ``[T, H, N_o + P]`` and latents ``[T, 1, R + P]``, both rotated in their last P numbers."""
        latent, kernels = self._latent, self._kernels
        if self._q_a is not None and self._q_a_norm is not None:
            reduced = kernels.rms_norm(self._q_a.multiply(normed, None, kernels), self._q_a_norm, LATENT_EPS)
        else:
            reduced = normed
        queries = self._q.multiply(reduced, None, kernels).view(len(normed), -1, latent.query_dim)
        kept = self._kv_a.multiply(normed, None, kernels)  # [T, R + P]
        compressed = kernels.rms_norm(kept[:, : latent.kv_rank].contiguous(), self._kv_a_norm, LATENT_EPS)
        unturned = torch.cat((queries[..., latent.nope_dim :], kept[:, None, latent.kv_rank :]), 1)  # [T, H+1, P]
        turned = kernels.norm_rope(unturned, _NO_NORM, rope, 0)
        queries = torch.cat((queries[..., : latent.nope_dim], turned[:, :-1]), -1)
        return queries, torch.cat((compressed[:, None], turned[:, -1:]), -1)


class DealtRowsView(RowsView):
    """Attention of a rank's own entries of a batch against its own rows."""

    def __init__(self, cache: KVCache, share: BatchShard, kernels: Kernels, queries: QuerySink | None = None) -> None:
        """``queries`` keeps those of the rank's own entries, of all heads; None where rows are not re-selected."""
        super().__init__(cache, share.places.rows, [share.places] * cache.spec.num_layers, kernels, queries)
        self.share = share


class DealtLatentLayer(LatentLayer):
    """A layer of data-parallel decode, with the weights of all heads."""

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """``residual [B, D]`` is of the whole batch, ``rope`` of the rank's own entries; the attention's output for the
        whole batch ``[B, D]``.
        """
        if not isinstance(view, DealtRowsView):
            raise TypeError(f"data-parallel attention needs a DealtRowsView; the view is a {type(view).__name__}")
        normed = self.norm(residual, pending)
        attended = self.attend_normed(normed[view.share.entries], rope, view)  # [b, H, U]
        return self.group.all_gather(self.project(attended), 0)[view.share.order]

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """See ``models.decoder.Layer.finish``; ``attended [B, D]`` is as ``attend`` returned it."""
        return self.add(residual, attended)


def is_dealt(model: ModelConfig, stored: ModelConfig, group: Group) -> bool:
    """Whether ``stored``, a rank's share of ``model``, uses data-parallel attention."""
    return group.size > 1 and model.latent is not None and stored.num_heads == model.num_heads


def with_own_heads(stored: ModelConfig, group: Group) -> ModelConfig:
    """A rank's share for prefill, which splits heads."""
    return replace(stored, num_heads=stored.num_heads // group.size)


def own_heads(weights: LayerWeights, config: ModelConfig, group: Group) -> LayerWeights:
    """Views of a layer's weights with the rank's ``config.num_heads`` heads only."""
    latent = config.latent
    assert latent is not None, "data-parallel attention is for latents"

    def cut(size: int) -> slice:
        size *= config.num_heads
        return slice(group.rank * size, (group.rank + 1) * size)

    own = {
        "q": weights.matrix("q")[cut(latent.query_dim)],
        "kv_b": weights.matrix("kv_b")[cut(latent.nope_dim + latent.value_dim)],
        "o": weights.matrix("o")[:, cut(latent.value_dim)],
    }
    return LayerWeights({**weights.matrices, **own}, weights.vectors)
