"""KV re-selection: the last decode queries re-select what a full row keeps, as the end of the prompt did.

In the papers selected tokens stay for ever and only the ring moves on. Here tokens that are about to leave the ring
compete with the selected ones. A row of C slots holds, in the order of age:

    sinks   window   selected, and the oldest of the ring    the newest R - every of the ring
    stay    stay     candidates: K' + every of them          stay

The last queries score the candidates by the selector's ``votes`` and ``pool`` (SnapKV: softmax, merge of heads, then
pooling over neighbors in this order; no hops). A candidate's score is the larger of that and the best it had before,
which decays by ``memory`` at every re-selection: tokens that the prompt pointed at are not lost because the last
sentence pointed elsewhere. The best K' stay, and ``every`` slots of the ring are free again. The row keeps its size,
its one length and the rule ``layout.slot_of``: a re-selected row is one that was fed ``C - every`` tokens.
``exec/reselection.py`` says when.
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
    """What the host knows of a row that may be re-selected; plain integers, so that no device has to be asked."""

    budget: KVBudget
    config: ReselectionConfig
    selector: Selector  # of the row's request
    num_tokens: int  # as ``Rows.num_tokens``
    ring_start: int
    num_window: int  # slots of the window region that the prompt filled; they lie before the ring
    position: int  # of the next token in its text
    num_decoded: int = 0  # queries that were kept since the row was admitted

    @classmethod
    def admitted(
        cls, budget: KVBudget, config: ReselectionConfig, selector: Selector, prompt_len: int, next_position: int
    ) -> RowState:
        """A row whose prompt has just been written."""
        return cls(
            budget=budget,
            config=config,
            selector=selector,
            num_tokens=prompt_len,
            ring_start=layout.ring_start(budget, prompt_len),
            num_window=layout.valid_window(budget, prompt_len),
            position=next_position,
        )

    @property
    def num_selected(self) -> int:
        """Slots between the sinks and the window: selected tokens, or those of a prompt that fitted."""
        return self.ring_start - self.num_window - self.budget.num_sink

    @property
    def is_due(self) -> bool:
        """True when the next token would overwrite one, and enough queries are there to vote."""
        return self.num_tokens >= self.budget.capacity and self.num_decoded >= self.config.num_queries

    def fed(self) -> None:
        """One more token is on its way into the row."""
        self.num_tokens += 1
        self.position += 1
        self.num_decoded += 1

    def reselected(self) -> None:
        """All layers have been re-selected."""
        self.num_tokens = self.budget.capacity - self.config.every
        self.ring_start = self.budget.capacity - self.budget.num_recent


def prompt_votes(
    queries: Tensor, keys: Tensor, kept: Tensor, budget: KVBudget, selector: Selector, kernels: Kernels
) -> Tensor:
    """Votes of a prompt's end for the tokens that were selected, per query: ``[G, K]`` fp32 in slot order.

    ``queries [w, H, E]`` are its last, ``keys [G, N, E]`` all its keys, ``kept [G, C]`` what ``write_rows`` returned.
    """
    places = layout.candidates(budget, keys.shape[1])
    chosen = kept[:, budget.num_sink : budget.num_sink + budget.num_topk] - places.start
    return _votes(queries, keys, places, selector, kernels).gather(1, chosen)


def _votes(queries: Tensor, keys: Tensor, candidates: range, selector: Selector, kernels: Kernels) -> Tensor:
    """Votes of the last tokens of ``keys``, per query, so that they compare with those of more or fewer: ``[G, n]``."""
    return selector.votes(queries, keys, candidates, kernels) / queries.shape[0]


def slots_by_age(state: RowState, device: torch.device) -> Tensor:
    """Slots ``[C]`` of a full row: sinks, window, selected, ring from its oldest token on."""
    sinks = torch.arange(state.budget.num_sink, device=device)
    window = torch.arange(state.ring_start - state.num_window, state.ring_start, device=device)
    selected = torch.arange(state.num_selected, device=device) + state.budget.num_sink
    ring_len = state.budget.capacity - state.ring_start
    turn = (state.num_tokens - state.ring_start) % ring_len  # layout.slot_of: whose turn it is, hence the oldest
    ring = state.ring_start + (torch.arange(ring_len, device=device) + turn) % ring_len
    return torch.cat([sinks, window, selected, ring])


def choose(queries: Tensor, keys: Tensor, votes: Tensor, state: RowState, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Which tokens of a full row stay, in the order of their new slots, and the votes of the selected ones.

    ``queries [w, H, E]`` are the last that were decoded, ``keys [G, C, E]`` those of the row in the order of age,
    ``votes [G, n]`` what the selected tokens have. Returns places ``[G, C - every]`` in the order of age, and
    ``[G, K']``.
    """
    num_kv_heads, capacity, _ = keys.shape
    budget, every = state.budget, state.config.every
    start, stop = budget.num_sink + state.num_window, capacity - budget.num_recent + every
    fresh = _votes(queries, keys, range(start, stop), state.selector, kernels)  # [G, K' + every]
    before = torch.zeros_like(fresh)  # tokens of the ring have no votes yet
    before[:, : votes.shape[1]] = votes
    total = torch.maximum(fresh, before * state.config.memory)
    chosen = select_topk(state.selector.pool(total), stop - start - every)  # [G, K']
    place = torch.arange(capacity, device=keys.device).expand(num_kv_heads, -1)
    sinks, window = place[:, : budget.num_sink], place[:, budget.num_sink : start]
    return torch.cat([sinks, chosen + start, window, place[:, stop:]], dim=1), total.gather(1, chosen)
