"""The layer of DeepSeek-V2 and V3: multi-head latent attention (arXiv 2405.04434, section 2.1) and an MLP.

A token's keys and values of all heads are linear in one latent ``c | r``. Two forms of the same attention follow:

* absorbed: a query is taken to the space of the latents, which then are the keys of one kv head for all query heads,
  and their c the values. Rows hold latents, so decode reads them so, through ``view.attend`` as any other heads;
* expanded: keys and values of every head are made from the latents, a fraction of the work where many queries meet
  many keys. A view that has room for them (``ExpandingView``) is handed queries and latents and expands.

Kernels divide products by the square root of a head's size. A query is therefore multiplied by what turns this into the
model's own scale of the softmax: kernels, selectors and votes need to know nothing of it.

Of several ranks each has some query heads, and all have the whole latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.config import ModelConfig
from snapstream.config.latent import LatentConfig
from snapstream.distributed.group import Group
from snapstream.kernels.bound import CosSin, HeadNorm, Kernels, SumNorm
from snapstream.layers.attention import ExpandingView, KVView
from snapstream.models.mlp import mlp_of
from snapstream.models.weights import LayerWeights

LATENT_EPS = 1e-6  # of both norms inside the attention, whatever rms_norm_eps says
_NO_NORM = HeadNorm(None, LATENT_EPS)


class LatentHeads:
    """The two forms of a layer's queries, keys and values; a ``layers.attention.LatentHeads``."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, weights: LayerWeights, kernels: Kernels) -> None:
        self._latent, self._num_heads, self._kernels = latent, config.num_heads, kernels
        self.value_dim = latent.value_dim
        self._kv_b = weights.matrix("kv_b")  # [H (N_o + U), R]
        up = self._kv_b.dense().view(config.num_heads, -1, latent.kv_rank)
        self._up_k, self._up_v = up[:, : latent.nope_dim], up[:, latent.nope_dim :]  # [H, N_o, R], [H, U, R]
        self._absorbed_factor = latent.softmax_scale * latent.latent_dim**0.5
        self._expanded_factor = latent.softmax_scale * latent.expanded_dim**0.5

    def absorbed(self, queries: Tensor) -> Tensor:
        """See ``layers.attention.LatentHeads.absorbed``."""
        nope, turned = (queries * self._absorbed_factor).split((self._latent.nope_dim, self._latent.rope_dim), -1)
        compared = torch.bmm(nope.transpose(0, 1), self._up_k).transpose(0, 1)  # [T, H, R]
        return torch.cat((compared, turned), -1)

    def expanded(self, queries: Tensor) -> Tensor:
        """See ``layers.attention.LatentHeads.expanded``."""
        missing = self._latent.expanded_dim - self._latent.query_dim
        return torch.nn.functional.pad(queries * self._expanded_factor, (0, missing))

    def expand(self, latents: Tensor, keys: Tensor, values: Tensor) -> None:
        """See ``layers.attention.LatentHeads.expand``."""
        nope_dim, query_dim = self._latent.nope_dim, self._latent.query_dim
        compressed, turned = latents[:, : self._latent.kv_rank], latents[:, self._latent.kv_rank :]
        both = self._kv_b.multiply(compressed.contiguous(), None, self._kernels)  # [n, H (N_o + U)]
        per_head = both.view(len(latents), self._num_heads, -1).transpose(0, 1)  # [H, n, N_o + U]
        keys[..., :nope_dim] = per_head[..., :nope_dim]
        keys[..., nope_dim:query_dim] = turned
        values[..., : self.value_dim] = per_head[..., nope_dim:]

    def values(self, attended: Tensor) -> Tensor:
        """See ``layers.attention.LatentHeads.values``."""
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
        """Add ``pending`` to ``residual [T, D]``; what enters the attention."""
        return self._kernels.sum_norm(residual, pending, self._input_norm, self._eps)

    def attend_normed(self, normed: Tensor, rope: CosSin, view: KVView) -> Tensor:
        """Attention of ``normed [T, D]`` behind its view, ``[T', H, U]``."""
        queries, latents = self._project(normed, rope)
        if isinstance(view, ExpandingView):
            return view.attend_latents(self._index, queries, latents, self._heads)
        heads = torch.cat((self._heads.absorbed(queries), latents), 1)  # [T, H+1, E]
        return self._heads.values(view.attend(self._index, heads, _NO_NORM, None))

    def project(self, attended: Tensor) -> Tensor:
        """What the heads of this rank add, from ``[T', H, U]`` to ``[T', D]``."""
        return self._o.multiply(attended.flatten(1), None, self._kernels)

    def add(self, residual: Tensor, projected: Tensor) -> Tensor:
        """Add what attention made, then the MLP: what is yet to be added to ``residual [T', D]``."""
        return self.group.all_reduce(self._mlp.of_norm(SumNorm(residual, projected, self._post_norm, self._eps)))

    def _project(self, normed: Tensor, rope: CosSin) -> tuple[Tensor, Tensor]:
        """Queries ``[T, H, N_o + P]`` and latents ``[T, 1, R + P]``, both rotated in their last P numbers."""
        latent, kernels = self._latent, self._kernels
        if self._q_a is not None and self._q_a_norm is not None:
            narrow = kernels.rms_norm(self._q_a.multiply(normed, None, kernels), self._q_a_norm, LATENT_EPS)
        else:
            narrow = normed
        queries = self._q.multiply(narrow, None, kernels).view(len(normed), -1, latent.query_dim)
        kept = self._kv_a.multiply(normed, None, kernels)  # [T, R + P]
        compressed = kernels.rms_norm(kept[:, : latent.kv_rank].contiguous(), self._kv_a_norm, LATENT_EPS)
        unturned = torch.cat((queries[..., latent.nope_dim :], kept[:, None, latent.kv_rank :]), 1)  # [T, H+1, P]
        turned = kernels.norm_rope(unturned, _NO_NORM, rope, 0)
        queries = torch.cat((queries[..., : latent.nope_dim], turned[:, :-1]), -1)
        return queries, torch.cat((compressed[:, None], turned[:, -1:]), -1)
