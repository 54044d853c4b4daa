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
from snapstream.models.latent import DataParallelRowsView
from snapstream.models.layers import KVView
from snapstream.models.views import RowsView


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """State of a decode step; its tensors keep their addresses for the life of the engine."""

    decoder: Decoder
    cache: KVCache
    rows: Rows
    sampling: SamplingState
    config: EngineConfig
    queries: RecentQueries | None = None  # of every row, for KV re-selection

    @property
    def padding_row(self) -> int:
        return self.config.max_rows


class DecodeStep(Protocol):
    """One token for each row of a batch."""

    def warm_up(self, progress: bool) -> None:
        """Called once before the first step; feeds only the padding row. ``progress`` is shown on stderr."""
        ...

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Feed each of ``rows [B]`` int64 its last token and sample the next one."""
        ...


@runtime_checkable
class OwnSampler(Protocol):
    """A decode step with its own sampler, which first tokens use too."""

    def sample(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """See ``sampling.sample``: ``logits [B, V]`` fp32, ``rows [B]`` int64, distinct."""
        ...


@runtime_checkable
class HoldsPrograms(Protocol):
    """A decode step that holds captured programs."""

    def release(self) -> None:
        """Free them; no step runs afterwards."""
        ...


MakeDecode = Callable[[StepParts], DecodeStep]


class RowsForward:
    """The forward pass of decode, from row indices to logits; a draft uses it too."""

    def __init__(self, decoder: Decoder, cache: KVCache, rows: Rows, queries: RecentQueries | None = None) -> None:
        self._decoder, self._cache, self._rows, self._queries = decoder, cache, rows, queries

    def logits(self, rows: Tensor) -> Tensor:
        """Feed each of ``rows [B]`` int64 its last token; logits of the next ``[B, V]`` fp32."""
        positions = self._rows.next_position[rows]  # [B]
        view: KVView
        if self._cache.partition is None:
            view = self._view(rows, positions)
        else:
            shard = self._cache.partition.shard(RowPlaces(rows, self._rows.slots(rows), self._rows.lengths(rows)))
            positions = positions[shard.entries]
            queries = None if self._queries is None else self._queries.of_step(shard.places.rows, positions)
            view = DataParallelRowsView(self._cache, shard, self._decoder.kernels, queries)
        angles = self._decoder.rope(positions, positions + 1)
        return self._decoder.run(self._rows.last_token[rows], angles, view)

    def _view(self, rows: Tensor, positions: Tensor) -> KVView:
        kernels, state = self._decoder.kernels, self._rows
        queries = None if self._queries is None else self._queries.of_step(rows, positions)
        places = state.places(rows, self._cache.spec, heads=self._cache.heads)
        return RowsView(self._cache, rows, places, kernels, queries)


class EagerDecode:
    """A ``DecodeStep``."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._forward = RowsForward(parts.decoder, parts.cache, parts.rows, parts.queries)

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Compile Triton kernels: a forward pass of the padding row for each batch tile."""
        kernels = self._parts.decoder.kernels
        if kernels.version == "triton":
            for size in kernels.batch_tiles:
                if size <= self._parts.config.max_rows:
                    self.logits(torch.full((size,), self._parts.padding_row, device=self._parts.decoder.device))

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        return self.draw(self.logits(rows), rows, needs)

    def logits(self, rows: Tensor) -> Tensor:
        """First half: feed each of ``rows [B]`` its last token; logits of the next ``[B, V]`` fp32."""
        return self._forward.logits(rows)

    def draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Second half: sample a token per row from ``logits [B, V]`` and advance the rows."""
        sampled = sample(logits, self._parts.sampling, rows, needs)
        self._parts.rows.advance(rows, sampled.token_ids)
        return sampled
