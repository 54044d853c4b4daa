"""Rescoring where kv heads have slots of their own: each head chooses again as a row of its own budget would.

Heads with as many slots are due at the same steps, so the host keeps a ``RowState`` per row and size, and a head that
chose again is set back behind its row (``HeadTable.behind``), whose own counters go on. Invariant: as in
``rescoring.py``; a head without top-k slots never chooses again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from snapstream.cache.kv_cache import KVCache
from snapstream.cache.rescoring import RowState, prompt_votes, refresh_head, slots_by_age
from snapstream.config import RescoringConfig
from snapstream.kernels.bound import Kernels
from snapstream.runner.rescoring import RecentQueries, Rescorer
from snapstream.runner.rows import Rows
from snapstream.step import PrefillEntry


class HeadsRescorer(Rescorer):
    """Refreshes the heads that are due."""

    def __init__(
        self, cache: KVCache, rows: Rows, queries: RecentQueries, config: RescoringConfig, kernels: Kernels
    ) -> None:
        super().__init__(cache, rows, queries, config, kernels)  # votes are [slots of all rows]
        assert cache.heads is not None
        self._slots = cache.heads.slots
        self._behind = cache.heads.count_refreshes(cache.num_rows)  # [L, rows+1, G]
        self._group = cache.spec.num_heads // cache.spec.num_kv_heads
        self._heads: dict[int, list[tuple[int, int]]] = {}  # layers and heads, by top-k slots
        for layer, own in enumerate(self._slots.topk):
            for head, num_topk in enumerate(own):
                self._heads.setdefault(num_topk, []).append((layer, head))
        self._by_size: dict[int, list[RowState]] = {}  # of a row, a state per size

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._behind.nbytes

    def keep_head_votes(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, kept: Sequence[Tensor | None]
    ) -> None:
        """A layer of a prompt was written to its rows: ``keys [G, N, E]``; ``kept``: of each head ``[C]`` or None."""
        for head, (own, budget) in enumerate(zip(kept, self._slots.budgets[layer], strict=True)):
            found: Tensor | None = None
            if own is not None and queries is not None and budget.num_topk:
                last = queries[-self._config.num_queries :, self._of_group(head)]
                found = prompt_votes(
                    last.contiguous(), keys[head : head + 1], own[None], budget, entry.selector, self._cache.kernels
                )[0]  # [K]
            for row in entry.rows:
                first = self._slots.first(row, layer, head)
                votes = self.votes[first : first + budget.capacity].zero_()
                if found is not None:
                    votes[: budget.num_topk] = found

    def admit(self, entry: PrefillEntry, config: RescoringConfig | None) -> None:
        for row in entry.rows:
            self._behind[:, row].zero_()
            self._by_size.pop(row, None)
            if config is not None:
                budgets = {budget.num_topk: budget for layer in self._slots.budgets for budget in layer}
                self._by_size[row] = [
                    RowState.admitted(budget, config, entry.selector, len(entry.token_ids), entry.next_position)
                    for budget in budgets.values()
                    if budget.num_topk
                ]

    def before_step(self, rows: Sequence[int]) -> None:
        for row in rows:
            for state in self._by_size.get(row, ()):
                if state.is_due:
                    self._refresh(row, state)
                state.fed()

    def refresh(self, row: int) -> None:
        """Choose again what all heads of an admitted row keep."""
        for state in self._by_size[row]:
            self._refresh(row, state)

    def _refresh(self, row: int, state: RowState) -> None:
        """Let all heads of a size choose again."""
        before, order = state.num_tokens, slots_by_age(state, self._cache.k.device)
        queries = self.queries.last(row, state.position, state.config.num_queries)  # [L, w, H, E]
        heads = self._heads[state.budget.num_topk]
        for layer, head in heads:
            first = self._slots.first(row, layer, head)
            votes = self.votes[first : first + state.budget.capacity]
            own = queries[layer][:, self._of_group(head)].contiguous()  # [w, H / G, E]
            refresh_head(self._cache, first, own, order, votes, state, self._kernels)
        state.refreshed()
        for layer, head in heads:
            self._behind[layer, row, head].add_(before - state.num_tokens)

    def _of_group(self, head: int) -> slice:
        return slice(head * self._group, (head + 1) * self._group)


def make_rescorer(
    cache: KVCache, rows: Rows, queries: RecentQueries, config: RescoringConfig, kernels: Kernels
) -> Rescorer:
    """Of an engine's rows."""
    return (Rescorer if cache.heads is None else HeadsRescorer)(cache, rows, queries, config, kernels)
