"""A whole engine as a slow list-based program: one prompt, one token at a time, caches as Python lists.

Independent of slots, rings, staging, chunks and kernels: per layer and kv head it keeps a list of (position, key,
value) and forgets by the rule in words - sinks and selected tokens stay, of the rest the oldest goes when the row is
full. A layer with a sliding window keeps the last tokens, a recurrent one its state; one that shares keys and values
reads another's list. Only the decoder's layers, which have a parity test of their own, are shared with the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evals.selectors import Random, Variant, as_variant
from snapstream.config import KVBudget, Selector
from snapstream.kernels.interface import CosSin, HeadNorm
from snapstream.kv.spec import KVSpec, Window
from snapstream.models.decoder import Decoder
from snapstream.models.layers import Recurrence, RowsRecurrence
from tests.parity.heads import queries, split, whole_layer
from tests.unit.kv import row_by_lists

Cell = tuple[int, Tensor, Tensor]  # position, key [E], value [E']


def attend(q: Tensor, cells: list[list[Cell]], last: int, norm: HeadNorm, window: int | None = None) -> Tensor:
    """One query ``[H, E]`` over the cells of each kv head to position ``last``: ``[H, E']``, with sinks and cap."""
    first = 0 if window is None else last - window + 1
    per_head = q.shape[0] // len(cells)
    out = []
    for head in range(q.shape[0]):
        seen = [cell for cell in cells[head // per_head] if first <= cell[0] <= last]
        keys, values = torch.stack([c[1] for c in seen]), torch.stack([c[2] for c in seen])
        scores = (keys @ q[head]) / q.shape[1] ** 0.5
        scores = scores if norm.cap is None else norm.cap * torch.tanh(scores / norm.cap)
        extra = scores[:0] if norm.sinks is None else norm.sinks[head : head + 1]
        out.append(torch.cat([scores, extra]).softmax(-1)[: len(seen)] @ values)
    return torch.stack(out)


def window_at(spec: KVSpec, layer: int, position: int) -> int | None:
    """Tokens that a query sees, itself among them; None: all that is kept."""
    own = spec.slots_of(layer)
    if not isinstance(own, Window):
        return None
    return position % own.num_tokens + 1 if own.is_chunked else own.num_tokens


class _Prompt:
    """The view of a layer that a whole prompt passes."""

    def __init__(self, engine: ListsEngine, cells: list[list[Cell]]) -> None:
        decoder, self.states = engine.decoder, engine.states
        self.cells, self.spec = cells, decoder.kv_spec()

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        if self.spec.source(layer) != layer:
            q = queries(heads, norm, rope)
        else:
            q, k, v = split(heads, norm, rope, self.spec.slots_of(layer))
            self.queries, self.keys = q, k
            for head, own in enumerate(self.cells):
                own.extend((p, k[p, head], v[p, head]) for p in range(len(q)))
        return torch.stack([attend(q[p], self.cells, p, norm, window_at(self.spec, layer, p)) for p in range(len(q))])

    def recur(
        self, layer: int, inputs: Tensor, recurrence: Recurrence, of_rows: RowsRecurrence | None = None
    ) -> Tensor:
        return recurrence(inputs[None], self.states[layer])[0]

    def outputs(self, x: Tensor) -> Tensor:
        return x


class _Token:
    """The view of a layer that one decoded token passes."""

    recur, outputs = _Prompt.recur, _Prompt.outputs

    def __init__(self, engine: ListsEngine, layer: int, position: int) -> None:
        self.engine, self.layer, self.position, self.states = engine, layer, position, engine.states

    def attend(self, layer: int, heads: Tensor, norm: HeadNorm, rope: CosSin | None) -> Tensor:
        spec = self.engine.decoder.kv_spec()
        cells = self.engine.cells[spec.source(layer)]
        if spec.source(layer) != layer:
            return attend(queries(heads, norm, rope)[0], cells, self.position, norm)[None]
        q, k, v = split(heads, norm, rope, spec.slots_of(layer))
        self.engine.store(self.layer, self.position, k[0], v[0])
        return attend(q[0], cells, self.position, norm, window_at(spec, layer, self.position))[None]


class ListsEngine:
    """Greedy generation for one prompt under a budget."""

    def __init__(
        self,
        decoder: Decoder,
        budget: KVBudget,
        selector: Selector,
        budgets: Sequence[Sequence[KVBudget]] | None = None,
    ) -> None:
        """``budgets``: of every layer and kv head, where they differ from ``budget``."""
        self.decoder, self.budget, self.is_random = decoder, budget, isinstance(selector, Random)
        self.rule = Variant() if self.is_random else as_variant(selector)
        config = decoder.config
        layers = [range(config.heads_of(layer).num_kv_heads) for layer in range(config.num_layers)]
        self.cells: list[list[list[Cell]]] = [[[] for _ in heads] for heads in layers]
        self.frozen: list[list[set[int]]] = [[set() for _ in heads] for heads in layers]
        self.windows = decoder.config.layer_windows
        by_layer = [budget if size is None else KVBudget.full(size) for size in self.windows]
        given = budgets or [()] * len(by_layer)  # none for layers to which no budget applies
        self.budgets = [
            own or [other for _ in heads] for own, other, heads in zip(given, by_layer, layers, strict=True)
        ]
        self.states = {
            layer: {name: torch.zeros(1, *shape) for name, shape in decoder.kv_spec().state_shapes(layer)}
            for layer in range(decoder.config.num_layers)
        }

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and the log-probability of each."""
        ids, sources = torch.tensor(prompt), map(self.decoder.config.source_of, range(self.decoder.config.num_layers))
        hidden, inputs, whole = self.decoder.embed(ids), self.decoder.token_inputs(ids), {}
        positions = torch.arange(len(prompt))
        rope = self.decoder.rope(positions, torch.full_like(positions, len(prompt)))
        for layer, source in enumerate(sources):
            if source == layer:
                whole[layer] = [list(own) for own in self.cells[layer]]
            view = _Prompt(self, whole[source])
            hidden = whole_layer(self.decoder, layer, hidden, rope, view, inputs)
            if layer in self.decoder.kv_spec().slot_layer_indices:
                self.cells[layer] = [list(own) for own in whole[layer]]
                self._compress(layer, view.queries, view.keys, len(prompt))
        tokens, logprobs = [], []
        for position in range(len(prompt), len(prompt) + count):
            scores = self.decoder.logits(hidden[-1:])[0].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
            hidden = self._decode(tokens[-1], position)
        return tokens, logprobs

    def _compress(self, layer: int, q: Tensor, k: Tensor, prompt_len: int) -> None:
        if self.windows[layer] is not None:
            self.cells[layer] = [own[-self.windows[layer] :] for own in self.cells[layer]]
            return
        for head, budget in enumerate(self.budgets[layer]):
            start, stop = budget.num_sink, prompt_len - budget.num_window - budget.num_recent
            spare = max(0, min(stop - start, budget.num_topk))  # top-k slots that this prompt fills
            window = set(range(prompt_len - budget.num_window, prompt_len))
            self.frozen[layer][head] = set(range(start + spare)) | window
            if prompt_len > budget.capacity:
                self._choose(layer, head, q, k, range(start, stop), window)

    def _choose(self, layer: int, head: int, q: Tensor, k: Tensor, candidates: range, window: set[int]) -> None:
        rule, num_topk, start, stop = self.rule, self.budgets[layer][head].num_topk, candidates.start, candidates.stop
        queries = q[-rule.observation_len :].tolist()
        keys = k.transpose(0, 1).tolist()
        own_sinks = self.decoder.sinks(layer)
        sinks, cap = None if own_sinks is None else own_sinks.tolist(), self.decoder.config.score_cap
        over_row, group_max = rule.softmax_over == "row", rule.group_reduce == "max"
        scores = row_by_lists.votes(queries, keys, start, stop, over_row, group_max, sinks, cap)
        latest = total = [row_by_lists.normalised(own) for own in scores]
        for _ in range(rule.num_hops):
            latest = row_by_lists.hop(latest, q.tolist(), keys, start, rule.observation_len, sinks, cap)
            total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, latest, strict=True)]
        own_votes = row_by_lists.pooled(scores[head], rule.pool_width, rule.pooling, rule.pool_half_life)
        smooth = row_by_lists.pooled(total[head], rule.pool_width, rule.pooling, 0)
        if rule.num_hops == 0:
            smooth = own_votes
        if self.is_random:
            smooth = [row_by_lists.chance(layer, head, p) for p in range(start, stop)]
            own_votes = smooth
        chosen = {start + i for i in row_by_lists.best_with_hops(own_votes, smooth, num_topk)}
        kept = set(range(start)) | chosen | window
        self.frozen[layer][head] = kept
        own = self.cells[layer][head]
        self.cells[layer][head] = [cell for cell in own if cell[0] in kept or cell[0] >= stop]

    def _decode(self, token: int, position: int) -> Tensor:
        hidden = self.decoder.embed(torch.tensor([token]))
        where = torch.tensor([position])
        rope = self.decoder.rope(where, where + 1)
        for layer in range(self.decoder.config.num_layers):
            inputs = self.decoder.token_inputs(torch.tensor([token]))
            hidden = whole_layer(self.decoder, layer, hidden, rope, _Token(self, layer, position), inputs)
        return hidden

    def store(self, layer: int, position: int, k: Tensor, v: Tensor) -> None:
        """A decoded token's ``k, v [G, E]``; of what may move the oldest goes when the row is full."""
        for head, own in enumerate(self.cells[layer]):
            if len(own) == self.budgets[layer][head].capacity:
                movable = [cell for cell in own if cell[0] not in self.frozen[layer][head]]
                own.remove(min(movable, key=lambda cell: cell[0]))
            own.append((position, k[head], v[head]))
