"""KV re-selection: recent decode queries re-select the tokens of a full row, as observation queries do for a prompt.

In the papers the top-k is fixed after prefill. Here tokens about to leave the ring compete with the selected ones. A
row of C slots holds, ordered by age:

    sinks   window   selected, and the oldest of the ring    the newest R - every of the ring
    stay    stay     candidates: K' + every of them          stay

The last queries score the candidates by the selector's ``scores`` and ``pool`` (SnapKV: softmax, sum over a kv head's
query heads, pooling along this order; no hops). A candidate's score is the larger of that and its stored score, which
decays by ``memory`` at every re-selection, so tokens that the prompt attended to survive sentences that do not. The
best K' stay, and ``every`` slots of the ring are free again. The row keeps its size, its one length and the rule
``layout.slot_of``: a re-selected row is one that was fed ``C - every`` tokens.

It runs between two steps, outside captured code: a step only writes its queries to a buffer with a fixed address. The
host decides from counts alone. Invariant: a row is re-selected at most once in ``every`` tokens, and what it keeps
depends on that row only.

With per-head budgets each head re-selects as a row with its budget would. Heads with the same budget are due at the
same steps, so the host keeps a ``RowState`` per row and budget. A re-selection sets back the counters of the row, or
with per-head budgets ``HeadTable.behind`` of its heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.config import KVBudget, ReselectionConfig, Selector
from snapstream.exec.rows import Rows
from snapstream.kernels.interface import Kernels
from snapstream.kv import layout
from snapstream.kv.cache import KVCache
from snapstream.kv.selectors.scoring import select_topk
from snapstream.kv.spec import KVSpec
from snapstream.step import PrefillEntry


@dataclass(slots=True)
class RowState:
    """Host state of a row that may be re-selected, in plain integers: reading it never synchronizes."""

    budget: KVBudget
    config: ReselectionConfig
    selector: Selector
    num_tokens: int  # as ``Rows.num_tokens``
    ring_start: int
    num_window: int  # slots of the window region that the prompt filled; they precede the ring
    position: int  # of the next token in its text
    num_decoded: int = 0  # queries stored since the row was admitted

    @classmethod
    def admitted(cls, budget: KVBudget, config: ReselectionConfig, selector: Selector, prompt_len: int) -> RowState:
        """A row whose prompt has just been written."""
        return cls(
            budget=budget,
            config=config,
            selector=selector,
            num_tokens=prompt_len,
            ring_start=layout.ring_start(budget, prompt_len),
            num_window=layout.valid_window(budget, prompt_len),
            position=prompt_len,
        )

    @property
    def num_selected(self) -> int:
        """Slots between sinks and window."""
        return self.ring_start - self.num_window - self.budget.num_sink

    @property
    def is_due(self) -> bool:
        """True when the next token would overwrite one, and enough queries are stored."""
        return self.num_tokens >= self.budget.capacity and self.num_decoded >= self.config.num_queries

    def fed(self) -> None:
        self.num_tokens += 1
        self.position += 1
        self.num_decoded += 1

    def reselected(self) -> None:
        """All layers were re-selected."""
        self.num_tokens = self.budget.capacity - self.config.every
        self.ring_start = self.budget.capacity - self.budget.num_recent


def prompt_scores(
    queries: Tensor, keys: Tensor, kept: Tensor, budget: KVBudget, selector: Selector, kernels: Kernels
) -> Tensor:
    """Mean score per query of the selected prompt tokens: ``[G, K]`` fp32 in slot order.

    ``queries [w, H, E]`` are the prompt's last, ``keys [G, N, E]`` all its keys, ``kept [G, C]`` from ``write_rows``.
    """
    places = layout.candidates(budget, keys.shape[1])
    chosen = kept[:, budget.num_sink : budget.num_sink + budget.num_topk] - places.start
    return _mean_scores(queries, keys, places, selector, kernels).gather(1, chosen)


def _mean_scores(queries: Tensor, keys: Tensor, candidates: range, selector: Selector, kernels: Kernels) -> Tensor:
    """Scores ``[G, n]`` per query, comparable across numbers of queries."""
    return selector.scores(queries, keys, candidates, kernels) / queries.shape[0]


def slots_by_age(state: RowState, device: torch.device) -> Tensor:
    """Slots ``[C]`` of a full row ordered by age: sinks, window, selected, ring from its oldest token."""
    sinks = torch.arange(state.budget.num_sink, device=device)
    window = torch.arange(state.ring_start - state.num_window, state.ring_start, device=device)
    selected = torch.arange(state.num_selected, device=device) + state.budget.num_sink
    ring_len = state.budget.capacity - state.ring_start
    oldest = (state.num_tokens - state.ring_start) % ring_len  # the next to be overwritten, see layout.slot_of
    ring = state.ring_start + (torch.arange(ring_len, device=device) + oldest) % ring_len
    return torch.cat([sinks, window, selected, ring])


def reselect(queries: Tensor, keys: Tensor, scores: Tensor, state: RowState, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Which tokens of a full row stay, and the new scores of the selected ones.

    ``queries [w, H, E]`` are the last decode queries, ``keys [G, C, E]`` the row's keys ordered by age, ``scores
    [G, n]`` the stored scores of the selected tokens. Returns indices ``[G, C - every]`` into the order by age, in the
    order of their new slots, and scores ``[G, K']``.
    """
    num_kv_heads, capacity, _ = keys.shape
    budget, every = state.budget, state.config.every
    start, stop = budget.num_sink + state.num_window, capacity - budget.num_recent + every
    fresh = _mean_scores(queries, keys, range(start, stop), state.selector, kernels)  # [G, K' + every]
    before = torch.zeros_like(fresh)  # tokens of the ring have no stored score yet
    before[:, : scores.shape[1]] = scores
    total = torch.maximum(fresh, before * state.config.memory)
    chosen = select_topk(state.selector.pool(total), stop - start - every)  # [G, K']
    place = torch.arange(capacity, device=keys.device).expand(num_kv_heads, -1)
    sinks, window = place[:, : budget.num_sink], place[:, budget.num_sink : start]
    return torch.cat([sinks, chosen + start, window, place[:, stop:]], dim=1), total.gather(1, chosen)


@dataclass(frozen=True, slots=True)
class StepQueries:
    """Where a decode step puts its queries; a ``models.views.QuerySink``."""

    buffer: Tensor  # [L', rows+1, w, H, E]
    layers: Mapping[int, int]  # index in the buffer
    rows: Tensor  # [B]
    places: Tensor  # [B]

    def put(self, layer: int, q: Tensor) -> None:
        """``q [B, H, E]``, rotated."""
        self.buffer[self.layers[layer], self.rows, self.places] = q


class RecentQueries:
    """The last w = ``num_queries`` decode queries of every row in the layers with slots; position p is at p mod w."""

    def __init__(
        self, spec: KVSpec, num_rows: int, num_queries: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.layers = {layer: place for place, layer in enumerate(spec.slot_layer_indices)}
        shape = (len(self.layers), num_rows + 1, num_queries, spec.num_heads, spec.key_dim)
        self.buffer = torch.zeros(shape, dtype=dtype, device=device)  # [L', rows+1, w, H, E]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer, including the padding row."""
        return self.buffer.nbytes

    def of_step(self, rows: Tensor, positions: Tensor) -> StepQueries:
        """Where the queries of ``rows [B]`` at ``positions [B]`` go."""
        return StepQueries(self.buffer, self.layers, rows, positions % self.buffer.shape[2])

    def put(self, layer: int, row: int, position: int, q: Tensor) -> None:
        """Store a query ``[H, E]`` outside of a decode step."""
        self.buffer[self.layers[layer], row, position % self.buffer.shape[2]] = q

    def last(self, row: int, position: int, count: int) -> Tensor:
        """Queries ``[L', count, H, E]`` of the ``count`` positions before ``position``, oldest first."""
        places = torch.arange(position - count, position, device=self.buffer.device) % self.buffer.shape[2]
        return self.buffer[:, row].index_select(1, places)


class Reselector:
    """Re-selects rows that are due; holds the ``RowState`` of every row and the scores of its tokens.

    With data-parallel attention each rank holds the queries and scores of its local rows, and the states of all.
    """

    def __init__(
        self, cache: KVCache, rows: Rows, queries: RecentQueries, config: ReselectionConfig, kernels: Kernels
    ) -> None:
        """``kernels`` score candidates with the queries that this rank stores."""
        self._cache, self._rows, self.queries = cache, rows, queries
        self._config, self._kernels = config, kernels
        self._states: dict[int, list[RowState]] = {}  # by row; one per budget with a top-k
        self._requests: dict[int, tuple[KVBudget, int]] = {}  # by row: budget and length of the prompt
        # One per slot: entry i of a head is of its i-th slot after the sinks, if that holds a selected token.
        self.scores = torch.zeros(cache.k.shape[:-1], dtype=torch.float32, device=cache.k.device)
        # [L, rows+1, G] with per-head budgets
        self._behind = None if cache.heads is None else cache.heads.count_reselections()

    @property
    def num_bytes(self) -> int:
        """Bytes of queries and scores, including the padding row."""
        return self.queries.num_bytes + self.scores.nbytes + (0 if self._behind is None else self._behind.nbytes)

    def store_scores(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, kept: Sequence[Tensor | None]
    ) -> None:
        """A layer of a prompt was written to its rows: ``keys [G, N, E]``, ``kept`` what ``write_rows`` returned."""
        cache = self._cache
        for span, index in zip(cache.spans(layer, entry.budget, len(entry.token_ids)), kept, strict=True):
            scores: Tensor | None = None  # [g, K]
            if index is not None and queries is not None and span.budget.num_topk:
                last = span.queries(queries[-self._config.num_queries :], len(keys))
                kernels = cache.score_kernels(layer, span)
                scores = prompt_scores(last, keys[span.heads], index, span.budget, entry.selector, kernels)
            for row in cache.local_rows(entry.rows):  # one by one: a list as an index would be sent to the device
                stored = cache.slots(self.scores, layer, row, span).zero_()  # [g, C]
                if scores is not None:
                    stored[:, : span.budget.num_topk] = scores

    def admit(self, entry: PrefillEntry, config: ReselectionConfig | None) -> None:
        """A prompt was written to its rows. Without ``config`` or a top-k they are never re-selected."""
        heads = self._cache.heads
        own = entry.budget, len(entry.token_ids)
        budgets = (entry.budget,) if heads is None else heads.slots.of(*own).distinct
        for row in entry.rows:
            self._requests[row] = own
            if self._behind is not None:
                self._behind[:, row].zero_()
            self._states[row] = [
                RowState.admitted(budget, config, entry.selector, len(entry.token_ids))
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
        """Re-select all heads of an admitted row."""
        for state in self._states[row]:
            self._reselect(row, state)

    def _reselect(self, row: int, state: RowState) -> None:
        """Re-select all heads with the budget of ``state``."""
        cache, before = self._cache, state.num_tokens
        order = slots_by_age(state, cache.k.device)
        spans = [
            (layer, span)
            for layer in range(cache.spec.num_layers)
            for span in cache.spans(layer, *self._requests[row])
            if span.budget == state.budget
        ]
        for local in cache.local_rows([row]):
            queries = self.queries.last(local, state.position, state.config.num_queries)  # [L', w, H, E]
            for layer, span in spans:
                q = span.queries(queries[self.queries.layers[layer]], cache.spec.num_kv_heads)
                scores = cache.slots(self.scores, layer, local, span)  # [g, C]
                keys, values = cache.tokens(layer, local, order, span)
                kernels = cache.score_kernels(layer, span, self._kernels)
                kept, selected = reselect(q, keys, scores[:, : state.num_selected], state, kernels)
                cache.gather(layer, [local], keys, values, kept, span)
                scores[:, : selected.shape[1]] = selected
        state.reselected()
        if self._behind is None:
            self._rows.reselect(row, state.num_tokens, state.ring_start)
            return
        for layer, span in spans:
            self._behind[layer, row, span.heads].add_(before - state.num_tokens)
