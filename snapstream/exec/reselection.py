"""When full rows re-select what they keep, and with which queries; ``kv/reselection.py`` says how.

A re-selection happens between two steps, outside compiled or captured code: a step only writes its queries into a
buffer whose address never changes. The host decides from counts alone. Invariant: a row is re-selected at most once in
``every`` tokens, and what it keeps depends on nothing but that row.

Where kv heads have budgets of their own, each head re-selects as a row of its own budget would. Heads of one budget are
due at the same steps, so the host keeps a ``RowState`` per row and budget. A row whose heads are equal is set back in
its counters; other heads are set back behind their row (``HeadTable.behind``), whose counters go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.config import ReselectionConfig
from snapstream.exec.rows import Rows
from snapstream.kernels.interface import Kernels
from snapstream.kv.cache import KVCache
from snapstream.kv.reselection import RowState, choose, prompt_votes, slots_by_age
from snapstream.kv.spec import KVSpec
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


class Reselector:
    """Re-selects in the rows that are due; has what ``RowState`` holds of every row, and the votes of its tokens.

    With data-parallel attention each rank has the queries and votes of its own rows; the counts are known to all.
    """

    def __init__(
        self, cache: KVCache, rows: Rows, queries: RecentQueries, config: ReselectionConfig, kernels: Kernels
    ) -> None:
        """``kernels`` count the votes of the queries that are kept here."""
        self._cache, self._rows, self.queries = cache, rows, queries
        self._config, self._kernels = config, kernels
        self._states: dict[int, list[RowState]] = {}  # of a row, one per budget that selects
        # One per slot; entry i of a head belongs to its i-th slot after the sinks; only selected tokens have one
        self.votes = torch.zeros(cache.k.shape[:-1], dtype=torch.float32, device=cache.k.device)
        # [L, rows+1, G] where heads have budgets of their own
        self._behind = None if cache.heads is None else cache.heads.count_reselections(cache.num_rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of queries and votes, the padding row's included."""
        return self.queries.num_bytes + self.votes.nbytes + (0 if self._behind is None else self._behind.nbytes)

    def keep_votes(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, kept: Sequence[Tensor | None]
    ) -> None:
        """A layer of a prompt was written to its rows: ``keys [G, N, E]``, ``kept`` what ``write_rows`` returned."""
        cache = self._cache
        for span, index in zip(cache.spans(layer, entry.budget), kept, strict=True):
            votes: Tensor | None = None
            if index is not None and queries is not None and span.budget.num_topk:
                last = span.queries(queries[-self._config.num_queries :], len(keys))
                votes = prompt_votes(
                    last, keys[span.heads], index, span.budget, entry.selector, cache.kernels
                )  # [g, K]
            for row in cache.own(entry.rows):  # one by one: a list as an index would be sent to the device
                own = cache.slots(self.votes, layer, row, span).zero_()  # [g, C]
                if votes is not None:
                    own[:, : span.budget.num_topk] = votes

    def admit(self, entry: PrefillEntry, config: ReselectionConfig | None) -> None:
        """A prompt has been written to its rows. Without ``config``, or a budget that selects, none re-selects."""
        heads = self._cache.heads
        budgets = (entry.budget,) if heads is None else heads.slots.distinct
        for row in entry.rows:
            if self._behind is not None:
                self._behind[:, row].zero_()
            self._states[row] = [
                RowState.admitted(budget, config, entry.selector, len(entry.token_ids), entry.next_position)
                for budget in budgets
                if config is not None and budget.num_topk
            ]

    def before_step(self, rows: Sequence[int]) -> None:
        """Re-select in those of ``rows`` that are due; the step that follows feeds each of them one token."""
        for row in rows:
            for state in self._states.get(row, ()):
                if state.is_due:
                    self._reselect(row, state)
                state.fed()

    def reselect(self, row: int) -> None:
        """Re-select what all heads of an admitted row keep."""
        for state in self._states[row]:
            self._reselect(row, state)

    def _reselect(self, row: int, state: RowState) -> None:
        """Re-select in all heads of one budget."""
        cache, before = self._cache, state.num_tokens
        order = slots_by_age(state, cache.k.device)
        spans = [
            (layer, span)
            for layer in range(cache.spec.num_layers)
            for span in cache.spans(layer, state.budget)
            if span.budget == state.budget
        ]
        for own in cache.own([row]):
            queries = self.queries.last(own, state.position, state.config.num_queries)  # [L, w, H, E]
            for layer, span in spans:
                asking = span.queries(queries[layer], cache.spec.num_kv_heads)
                votes = cache.slots(self.votes, layer, own, span)  # [g, C]
                keys, values = cache.tokens(layer, own, order, span)
                kept, total = choose(asking, keys, votes[:, : state.num_selected], state, self._kernels)
                cache.gather(layer, [own], keys, values, kept, span)
                votes[:, : total.shape[1]] = total
        state.reselected()
        if self._behind is None:
            self._rows.reselect(row, state.num_tokens, state.ring_start)
            return
        for layer, span in spans:
            self._behind[layer, row, span.heads].add_(before - state.num_tokens)
