"""Latent attention where whole rows are dealt out to ranks (SnapStream, section 4: decode's attention over the batch).

A latent belongs to all heads: were heads split, every rank would have to keep every row. So in decode a rank attends
its own rows with all heads, and the ranks gather what they attended; MLPs stay split, as all other weights. Prompts are
read with split heads (``own_heads``), out of the same stacks: every rank then has all latents of a prompt, and the
owner of a row writes it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from snapstream.cache.deal import BatchShare
from snapstream.cache.kv_cache import KVCache
from snapstream.config import ModelConfig
from snapstream.distributed.group import Group
from snapstream.kernels.bound import CosSin, Kernels
from snapstream.layers.attention import KVView
from snapstream.models.latent import LatentLayer
from snapstream.models.views import QuerySink, RowsView
from snapstream.models.weights import LayerWeights


class DealtRowsView(RowsView):
    """Attention of a rank's own entries of a batch against its own rows."""

    def __init__(self, cache: KVCache, share: BatchShare, kernels: Kernels, queries: QuerySink | None = None) -> None:
        """``queries`` keeps those of the rank's own entries, of all heads; None where rows are not rescored."""
        super().__init__(cache, share.places, kernels, queries)
        self.share = share


class DealtLatentLayer(LatentLayer):
    """A layer of decode that has the weights of all heads; between its halves stands what all ranks attended."""

    def attend(self, residual: Tensor, pending: Tensor | None, rope: CosSin, view: KVView) -> Tensor:
        """``residual [B, D]`` of the whole batch and ``rope`` of the rank's own entries to what attention adds to the
        whole batch, ``[B, D]``. TypeError for a view of anything but dealt rows.
        """
        if not isinstance(view, DealtRowsView):
            raise TypeError(f"rows are dealt out; the view is a {type(view).__name__}")
        normed = self.norm(residual, pending)
        attended = self.attend_normed(normed[view.share.entries], rope, view)  # [b, H, U]
        return self.group.all_gather(self.project(attended), 0)[view.share.order]

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """See ``models.decoder.Layer.finish``; ``attended [B, D]`` is as ``attend`` returned it."""
        return self.add(residual, attended)


def is_dealt(model: ModelConfig, stored: ModelConfig, group: Group) -> bool:
    """Whether ``stored``, a rank's share of ``model``, has the attention of all heads."""
    return group.size > 1 and model.latent is not None and stored.num_heads == model.num_heads


def with_own_heads(stored: ModelConfig, group: Group) -> ModelConfig:
    """The share of a rank that reads prompts with its part of the heads."""
    return replace(stored, num_heads=stored.num_heads // group.size)


def own_heads(weights: LayerWeights, config: ModelConfig, group: Group) -> LayerWeights:
    """Views of a layer's weights with the rank's heads only, as many as ``config`` has."""
    latent = config.latent
    assert latent is not None, "rows are dealt out for latents alone"

    def cut(size: int) -> slice:
        size *= config.num_heads
        return slice(group.rank * size, (group.rank + 1) * size)

    own = {
        "q": weights.matrix("q")[cut(latent.query_dim)],
        "kv_b": weights.matrix("kv_b")[cut(latent.nope_dim + latent.value_dim)],
        "o": weights.matrix("o")[:, cut(latent.value_dim)],
    }
    return LayerWeights({**weights.matrices, **own}, weights.vectors)
