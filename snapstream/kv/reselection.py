"""KV re-selection: recent decode queries re-select the tokens of a full row, as observation queries do for a prompt.

In the papers the top-k is fixed after prefill. Here tokens about to leave the ring compete with the selected ones. A
row of C slots holds, ordered by age:

    sinks   window   selected, and the oldest of the ring    the newest R - every of the ring
    stay    stay     candidates: K' + every of them          stay

The last queries score the candidates by the selector's ``scores`` and ``pool`` (SnapKV: softmax, sum over a kv head's
query heads, pooling along this order; no hops). A candidate's score is the larger of that and its stored score, which
decays by ``memory`` at every re-selection, so tokens that the prompt attended to survive sentences that do not. The
best K' stay, and ``every`` slots of the ring are free again. The row keeps its size, its one length and the rule
``layout.slot_of``: a re-selected row is one that was fed ``C - every`` tokens. ``exec/reselection.py`` decides when.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.config import KVBudget, ReselectionConfig, Selector
from snapstream.kernels.interface import Kernels
from snapstream.kv import layout
from snapstream.kv.selectors.scoring import select_topk


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
        """One more token was fed."""
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
