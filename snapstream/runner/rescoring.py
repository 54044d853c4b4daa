"""When rows are rescored, and with which queries: the runner's half of ``cache/rescoring.py``.

A refresh happens between two steps, outside compiled or captured code: the step only writes its queries into a buffer
whose address never changes. The host decides from counts alone. Invariant: a row is refreshed at most once in ``every``
tokens, and what it keeps depends on nothing but that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.cache.rescoring import RowState, prompt_votes, refresh_layer, slots_by_age
from snapstream.cache.spec import KVSpec
from snapstream.config import RescoringConfig
from snapstream.kernels.bound import Kernels
from snapstream.runner.rows import Rows
from snapstream.step import PrefillEntry


@dataclass(frozen=True, slots=True)
class StepQueries:
    """Where a decode step puts its queries; a ``models.views.QuerySink``."""

    buffer: Tensor  # [L, rows+1, w, H, E]
    rows: Tensor  # [B]
    places: Tensor  # [B]

    def put(self, layer: int, q: Tensor) -> None:
        """``q [B, H, E]``, rotated."""
        self.buffer[layer, self.rows, self.places] = q


class RecentQueries:
    """The last ``num_queries`` decode queries of every row: position p lies in place p mod w."""

    def __init__(
        self, spec: KVSpec, num_rows: int, num_queries: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (spec.num_layers, num_rows + 1, num_queries, spec.num_heads, spec.key_dim)
        self.buffer = torch.zeros(shape, dtype=dtype, device=device)  # [L, rows+1, w, H, E]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer, the padding row's included."""
        return self.buffer.nbytes

    def of_step(self, rows: Tensor, positions: Tensor) -> StepQueries:
        """Where the queries of ``rows [B]`` at ``positions [B]`` go."""
        return StepQueries(self.buffer, rows, positions % self.buffer.shape[2])

    def put(self, layer: int, row: int, position: int, q: Tensor) -> None:
        """Keep a query ``[H, E]`` that no decode step made: of a prompt's token."""
        self.buffer[layer, row, position % self.buffer.shape[2]] = q

    def last(self, row: int, position: int, count: int) -> Tensor:
        """Queries ``[L, count, H, E]`` of the ``count`` positions before ``position``, oldest first."""
        places = torch.arange(position - count, position, device=self.buffer.device) % self.buffer.shape[2]
        return self.buffer[:, row].index_select(1, places)


class Rescorer:
    """Refreshes the rows that are due; knows of every row what ``RowState`` holds, and the votes of its tokens.

    Of rows dealt out to ranks each rank has the queries and votes of its own; the counts are known to all.
    """

    def __init__(
        self, cache: KVCache, rows: Rows, queries: RecentQueries, config: RescoringConfig, kernels: Kernels
    ) -> None:
        """``kernels`` count the votes of the queries that are kept here."""
        self._cache, self._rows, self.queries = cache, rows, queries
        self._config, self._kernels = config, kernels
        self._states: dict[int, RowState] = {}
        # [L, rows+1, G, C]: entry i belongs to the i-th slot after the sinks; only selected tokens have one
        self.votes = torch.zeros(cache.k.shape[:-1], dtype=torch.float32, device=cache.k.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of queries and votes, the padding row's included."""
        return self.queries.num_bytes + self.votes.nbytes

    def keep_votes(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, kept: Tensor | None
    ) -> None:
        """A layer of a prompt was written to its rows: ``keys [G, N, E]``, ``kept [G, C]`` (None: all of them)."""
        votes: Tensor | None = None
        if kept is not None and queries is not None:
            last = queries[-self._config.num_queries :]
            votes = prompt_votes(last, keys, kept, entry.budget, entry.selector, self._cache.kernels)  # [G, K]
        for row in self._cache.own(entry.rows):  # one by one: a list as an index would be sent to the device
            own = self.votes[layer, row].zero_()  # [G, C]
            if votes is not None:
                own[:, : entry.budget.num_topk] = votes

    def admit(self, entry: PrefillEntry, config: RescoringConfig | None) -> None:
        """A prompt has been written to its rows; None, or a budget that selects nothing: they are never refreshed."""
        for row in entry.rows:
            self._states.pop(row, None)
            if config is not None and entry.budget.num_topk:
                self._states[row] = RowState.admitted(
                    entry.budget, config, entry.selector, len(entry.token_ids), entry.next_position
                )

    def before_step(self, rows: Sequence[int]) -> None:
        """Refresh those of ``rows`` that are due; the step that follows feeds each of them one token."""
        for row in rows:
            state = self._states.get(row)
            if state is None:
                continue
            if state.is_due:
                self.refresh(row)
            state.fed()

    def refresh(self, row: int) -> None:
        """Choose again what an admitted row keeps."""
        state = self._states[row]
        order = slots_by_age(state, self._cache.k.device)
        for own in self._cache.own([row]):
            queries = self.queries.last(own, state.position, state.config.num_queries)
            for layer in range(self._cache.k.shape[0]):
                votes = self.votes[layer, own]
                refresh_layer(self._cache, layer, own, queries[layer], order, votes, state, self._kernels)
        state.refreshed()
        self._rows.refresh(row, state.num_tokens, state.ring_start)
