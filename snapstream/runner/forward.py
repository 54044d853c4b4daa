"""One token per row through the model: from row indices to the scores of the next tokens.

Everything in between stays on the device. A decode step (``decode_eager.py``) draws from the scores; a draft that looks
ahead takes the best.
"""

from __future__ import annotations

from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.kernels.bound import RowPlaces
from snapstream.layers.attention import KVView
from snapstream.models.dealt import DealtRowsView
from snapstream.models.decoder import Decoder
from snapstream.models.heads_view import HeadsView
from snapstream.models.views import RowsView
from snapstream.runner.rescoring import RecentQueries
from snapstream.runner.rows import Rows


class RowsForward:
    """Feeds rows of the persistent state their last token."""

    def __init__(self, decoder: Decoder, cache: KVCache, rows: Rows, queries: RecentQueries | None = None) -> None:
        """``queries`` keeps the last queries of every row; None where nobody asks for them."""
        self._decoder, self._cache, self._rows, self._queries = decoder, cache, rows, queries

    def logits(self, rows: Tensor) -> Tensor:
        """Feed each of ``rows [B]`` int64 its last token; scores of the next ``[B, V]`` fp32."""
        positions = self._rows.next_position[rows]  # [B]
        view: KVView
        if self._cache.deal is None:
            view = self._view(rows, positions)
        else:
            share = self._cache.deal.share(RowPlaces(rows, self._rows.slots(rows), self._rows.lengths(rows)))
            positions = positions[share.entries]  # only what is attended here is rotated
            queries = None if self._queries is None else self._queries.of_step(share.places.rows, positions)
            view = DealtRowsView(self._cache, share, self._decoder.kernels, queries)
        hidden = self._decoder.embed(self._rows.last_token[rows])  # [B, D]
        return self._decoder.run(hidden, self._decoder.rope(positions, positions + 1), view)

    def _view(self, rows: Tensor, positions: Tensor) -> KVView:
        kernels, state = self._decoder.kernels, self._rows
        queries = None if self._queries is None else self._queries.of_step(rows, positions)
        if self._cache.heads is not None:
            places = self._cache.heads.places(rows, state.num_tokens[rows], state.ring_start[rows])
            return HeadsView(self._cache, rows, places, kernels, queries)
        return RowsView(self._cache, RowPlaces(rows, state.slots(rows), state.lengths(rows)), kernels, queries)
