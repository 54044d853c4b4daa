"""Eager decode, the reference for the other executors, and their interface (``StepParts -> DecodeStep``).

One token for each row of a batch: embed, layers against the rows view, logits, sample, advance. Everything between the
row indices and the sampled ids stays on the device. ``cuda_graph.py`` captures the same two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from snapstream.config import EngineConfig
from snapstream.exec.reselection import RecentQueries
from snapstream.exec.rows import Rows
from snapstream.exec.sampling import Sampled, sample
from snapstream.exec.sampling_state import SamplingNeeds, SamplingState
from snapstream.kernels.interface import RowPlaces
from snapstream.kv.cache import KVCache
from snapstream.models.decoder import Decoder
from snapstream.models.latent import DealtRowsView
from snapstream.models.layers import KVView
from snapstream.models.views import RowsView


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Everything a decode step works on; its tensors keep their addresses for the life of the engine."""

    decoder: Decoder
    cache: KVCache
    rows: Rows
    sampling: SamplingState
    config: EngineConfig
    queries: RecentQueries | None = None  # keeps the last queries of every row, where rows are re-selected

    @property
    def padding_row(self) -> int:
        """The padding row, as a batch names it."""
        return self.config.max_rows


class DecodeStep(Protocol):
    """One token for each row of a batch: feed, draw, advance."""

    def warm_up(self, progress: bool) -> None:
        """Do all that must be done once, before the first step; only the padding row is fed.

        ``progress`` shows on stderr what takes long.
        """
        ...

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Feed each of ``rows [B]`` int64 its last token and draw the next one."""
        ...


@runtime_checkable
class OwnSampler(Protocol):
    """What a decode step has besides, where it draws by other means than ``sampler.sample``: first tokens go there."""

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``sampler.sample``, over the engine's own state: ``logits [B, V]`` fp32, ``rows [B]`` int64, distinct."""
        ...


MakeDecode = Callable[[StepParts], DecodeStep]


class RowsForward:
    """Feeds rows of the persistent state their last token."""

    def __init__(self, decoder: Decoder, cache: KVCache, rows: Rows, queries: RecentQueries | None = None) -> None:
        """``queries`` keeps the last queries of every row; None where they are not needed."""
        self._decoder, self._cache, self._rows, self._queries = decoder, cache, rows, queries

    def logits(self, rows: Tensor) -> Tensor:
        """Feed each of ``rows [B]`` int64 its last token; scores of the next ``[B, V]`` fp32."""
        positions = self._rows.next_position[rows]  # [B]
        view: KVView
        if self._cache.partition is None:
            view = self._view(rows, positions)
        else:
            share = self._cache.partition.shard(RowPlaces(rows, self._rows.slots(rows), self._rows.lengths(rows)))
            positions = positions[share.entries]  # only what is attended here is rotated
            queries = None if self._queries is None else self._queries.of_step(share.places.rows, positions)
            view = DealtRowsView(self._cache, share, self._decoder.kernels, queries)
        hidden = self._decoder.embed(self._rows.last_token[rows])  # [B, D]
        return self._decoder.run(hidden, self._decoder.rope(positions, positions + 1), view)

    def _view(self, rows: Tensor, positions: Tensor) -> KVView:
        kernels, state = self._decoder.kernels, self._rows
        queries = None if self._queries is None else self._queries.of_step(rows, positions)
        if self._cache.heads is None:
            places = state.places(rows, self._cache.spec)
        else:
            places = self._cache.heads.places(rows, state.num_tokens[rows], state.ring_start[rows])
        return RowsView(self._cache, rows, places, kernels, queries)


class EagerDecode:
    """Decode step over ``rows [B]`` of the persistent state; a ``DecodeStep``."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._forward = RowsForward(parts.decoder, parts.cache, parts.rows, parts.queries)

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Where kernels are compiled at their first launch, launch them: a step of the padding row for each kind of
        batch."""
        kernels = self._parts.decoder.kernels
        if kernels.version == "triton":
            for size in kernels.batch_tiles:
                if size <= self._parts.config.max_rows:
                    self.logits(torch.full((size,), self._parts.padding_row, device=self._parts.decoder.device))

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Feed each row its last token and draw the next one; ``rows [B]`` int64."""
        return self.draw(self.logits(rows), rows, needs)

    def logits(self, rows: Tensor) -> Tensor:
        """First half: feed each of ``rows [B]`` its last token; scores of the next ``[B, V]`` fp32."""
        return self._forward.logits(rows)

    def draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Second half: draw a token per row from ``logits [B, V]`` and advance the rows."""
        sampled = sample(logits, self._parts.sampling, rows, needs)
        self._parts.rows.advance(rows, sampled.token_ids)
        return sampled
