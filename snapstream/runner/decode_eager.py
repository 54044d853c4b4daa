"""The decode step as plain calls: the definition of every other executor.

One token for each row of a batch: embed, layers against the rows view, logits, sample, advance. Everything between the
row indices and the sampled ids stays on the device. ``decode_graph.py`` compiles or captures the same two halves.
"""

from __future__ import annotations

from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.kernels.bound import RowPlaces
from snapstream.layers.sampler import Sampled, sample
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState
from snapstream.models.decoder import Decoder
from snapstream.runner.rescoring import RecentQueries
from snapstream.runner.rows import Rows
from snapstream.runner.views import RowsView


class EagerDecode:
    """Decode step over ``rows [B]`` of the persistent state."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: Rows,
        sampling: SamplingState,
        queries: RecentQueries | None = None,
    ) -> None:
        """``queries`` keeps the last queries of every row, for rescoring; None where rows are not rescored."""
        self._decoder, self._cache, self._rows, self._sampling = decoder, cache, rows, sampling
        self._queries = queries

    def step(self, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Feed each row its last token and draw the next one; ``rows [B]`` int64."""
        return self.draw(self.logits(rows), rows, needs)

    def logits(self, rows: Tensor) -> Tensor:
        """First half: feed each of ``rows [B]`` its last token; scores of the next ``[B, V]`` fp32."""
        positions = self._rows.next_position[rows]  # [B]
        queries = None if self._queries is None else self._queries.of_step(rows, positions)
        places = RowPlaces(rows, self._rows.slots(rows), self._rows.lengths(rows))
        view = RowsView(self._cache, self._decoder.kernels, places, queries)
        hidden = self._decoder.embed(self._rows.last_token[rows])  # [B, D]
        rope = self._decoder.rope(positions, positions + 1)
        return self._decoder.run(hidden, rope, view)

    def draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> Sampled:
        """Second half: draw a token per row from ``logits [B, V]`` and advance the rows."""
        sampled = sample(logits, self._sampling, rows, needs)
        self._rows.advance(rows, sampled.token_ids)
        return sampled
