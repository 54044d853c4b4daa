"""Writes prompts into their rows, layer by layer, as a pass has read them.

All that depends on the one rule of a request (budget, selector, votes for rescoring) is here, so that code which wants
other rows of the same pass replaces the writer and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.cache import layout
from snapstream.cache.compress import kept_positions, write_rows
from snapstream.cache.head_rows import write_heads
from snapstream.cache.kv_cache import KVCache
from snapstream.config import EngineConfig, KVBudget
from snapstream.config.heads import HeadSlots
from snapstream.runner.rescoring import Rescorer
from snapstream.runner.rescoring_heads import HeadsRescorer
from snapstream.runner.rows import Counters, Rows
from snapstream.step import PrefillEntry


class RowWriter:
    """One rule for all rows of a request."""

    def __init__(self, cache: KVCache, config: EngineConfig, rescorer: Rescorer | None = None) -> None:
        self.cache, self.config, self.rescorer = cache, config, rescorer

    def num_queries(self, entry: PrefillEntry) -> int:
        """How many of the last queries of a prompt ``write`` needs; 0 where nothing is selected."""
        prompt_len = len(entry.token_ids)
        if not layout.candidates(entry.budget, prompt_len):
            return 0
        return entry.selector.num_queries(prompt_len)

    def write(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, values: Tensor
    ) -> Tensor | None:
        """Write one layer of a prompt: ``queries [w, H, E]``, ``keys, values [G, N, E]``.

        Of rows dealt out to ranks those of others are not written; what they keep is chosen all the same, by all ranks
        together. Returns the kept positions ``[G, C]``, None if all were kept.
        """
        kept = write_rows(
            self.cache, layer, self.cache.own(entry.rows), keys, values, queries, entry.budget, entry.selector
        )
        if self.rescorer is not None:
            self.rescorer.keep_votes(layer, entry, queries, keys, kept)
        return kept

    def counters(self, entry: PrefillEntry) -> list[Counters]:
        """Counters of each of the entry's rows, which hold the whole prompt now."""
        own = Rows.entry(len(entry.token_ids), entry.next_position, entry.budget)
        return [own] * len(entry.rows)

    def admit(self, entry: PrefillEntry) -> None:
        """The entry's rows go over to decode."""
        if self.rescorer is not None:
            self.rescorer.admit(entry, self.config.rescoring)


class HeadsWriter(RowWriter):
    """One rule for all rows, whose kv heads have slots of their own."""

    def num_queries(self, entry: PrefillEntry) -> int:
        prompt_len = len(entry.token_ids)
        return entry.selector.num_queries(prompt_len) if prompt_len > self._slots.least else 0

    def write(
        self, layer: int, entry: PrefillEntry, queries: Tensor | None, keys: Tensor, values: Tensor
    ) -> Tensor | None:
        """As above. Returns the kept positions of all heads in one ``[n]`` (``cache/kept.py``), None if all were kept,
        or nobody asked.
        """
        kept = write_heads(self.cache, layer, entry.rows, keys, values, queries, entry.selector)
        prompt_len = keys.shape[1]
        asked = self._asked_elsewhere(layer, prompt_len)
        if asked is not None:
            kept_positions(queries, keys, layer, asked, entry.selector, self.cache.kernels)
        if isinstance(self.rescorer, HeadsRescorer):
            self.rescorer.keep_head_votes(layer, entry, queries, keys, kept)
        if not entry.sampling.return_kept or prompt_len <= self._slots.least:
            return None
        whole = torch.arange(prompt_len, device=keys.device)
        return torch.cat([whole if own is None else own for own in kept])

    def _asked_elsewhere(self, layer: int, prompt_len: int) -> KVBudget | None:
        """Ranks that share kv heads add up their votes, all at once: the budget of a head that other ranks choose for,
        where the one here has nothing to choose.
        """
        assert self.cache.heads is not None
        [own, *more] = self.cache.heads.slots.budgets[layer]
        if more or self.config.parallel.size <= len(self._slots.topk[0]) or _chooses(own, prompt_len):
            return None  # kv heads are whole on a rank, or this one asks as the others do
        return next((budget for budget in self._slots.budgets[layer] if _chooses(budget, prompt_len)), None)

    def counters(self, entry: PrefillEntry) -> list[Counters]:
        own = Rows.entry(len(entry.token_ids), entry.next_position, self._slots.widest)
        return [own] * len(entry.rows)

    @property
    def _slots(self) -> HeadSlots:
        assert self.config.heads is not None
        return self.config.heads


def _chooses(budget: KVBudget, prompt_len: int) -> bool:
    """Whether a head of this budget has its votes counted for a prompt."""
    return budget.num_topk > 0 and layout.is_compressed(budget, prompt_len)


def make_row_writer(cache: KVCache, config: EngineConfig, rescorer: Rescorer | None = None) -> RowWriter:
    """The writer of an engine's rows."""
    return (RowWriter if config.heads is None else HeadsWriter)(cache, config, rescorer)
