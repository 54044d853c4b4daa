"""A whole engine as a slow list-based program: one prompt, one token at a time, caches as Python lists.

Independent of slots, rings, staging, chunks and kernels: per layer and kv head it keeps a list of (position, key,
value) and forgets by the rule in words - sinks and selected tokens stay, of the rest the oldest goes when the row is
full. Only the decoder's two halves of a layer, which have a parity test of their own, are shared with the package.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.config import KVBudget, SnapKVConfig
from snapstream.models.decoder import Decoder
from tests.unit.cache import row_by_lists

Cell = tuple[int, Tensor, Tensor]  # position, key [E], value [E]


def attend(q: Tensor, cells: list[list[Cell]], last: int) -> Tensor:
    """One query ``[H, E]`` over the cells of each kv head up to position ``last``: ``[H, E]``."""
    per_head = q.shape[0] // len(cells)
    out = []
    for head in range(q.shape[0]):
        seen = [cell for cell in cells[head // per_head] if cell[0] <= last]
        keys, values = torch.stack([c[1] for c in seen]), torch.stack([c[2] for c in seen])
        out.append(((keys @ q[head]) / q.shape[1] ** 0.5).softmax(-1) @ values)
    return torch.stack(out)


class ListsEngine:
    """Greedy generation for one prompt under a budget."""

    def __init__(self, decoder: Decoder, budget: KVBudget, snapkv: SnapKVConfig) -> None:
        self.decoder, self.budget, self.snapkv = decoder, budget, snapkv
        layers, heads = range(decoder.config.num_layers), range(decoder.config.num_kv_heads)
        self.cells: list[list[list[Cell]]] = [[[] for _ in heads] for _ in layers]
        self.frozen: list[list[set[int]]] = [[set() for _ in heads] for _ in layers]

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and the log-probability of each."""
        hidden = self.decoder.embed(torch.tensor(prompt))
        positions = torch.arange(len(prompt))
        rope = self.decoder.rope(positions, torch.full_like(positions, len(prompt)))
        for layer in range(self.decoder.config.num_layers):
            q, k, v = self.decoder.project(layer, hidden, rope)
            cells = self.cells[layer]
            for head, own in enumerate(cells):
                own.extend((p, k[p, head], v[p, head]) for p in range(len(prompt)))
            attended = torch.stack([attend(q[p], cells, p) for p in range(len(prompt))])
            hidden = self.decoder.finish(layer, hidden, attended)
            self._compress(layer, q, k, len(prompt))
        tokens, logprobs = [], []
        for position in range(len(prompt), len(prompt) + count):
            scores = self.decoder.logits(hidden[-1:])[0].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
            hidden = self._decode(tokens[-1], position)
        return tokens, logprobs

    def _compress(self, layer: int, q: Tensor, k: Tensor, prompt_len: int) -> None:
        budget, config = self.budget, self.snapkv
        start, stop = budget.num_sink, prompt_len - budget.num_window - budget.num_recent
        spare = max(0, min(stop - start, budget.num_topk))  # top-k slots that this prompt fills
        window = set(range(prompt_len - budget.num_window, prompt_len))
        heads = range(len(self.cells[layer]))
        for head in heads:
            self.frozen[layer][head] = set(range(start + spare)) | window
        if prompt_len <= budget.capacity:
            return
        queries = q[-config.window_len :].tolist()
        keys = k.transpose(0, 1).tolist()
        over_row, group_max = config.softmax_over == "row", config.group_reduce == "max"
        scores = row_by_lists.votes(queries, keys, start, stop, over_row, group_max)
        latest = total = [row_by_lists.normalised(own) for own in scores]
        for _ in range(config.num_hops):
            latest = row_by_lists.hop(latest, q.tolist(), keys, start, config.window_len)
            total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, latest, strict=True)]
        for head in heads:
            own_votes = row_by_lists.pooled(scores[head], config.pool_kernel, config.pooling)
            smooth = row_by_lists.pooled(total[head], config.pool_kernel, config.pooling)
            if config.selection == "random":
                smooth = [row_by_lists.chance(layer, head, p) for p in range(start, stop)]
                own_votes = smooth
            chosen = {start + i for i in row_by_lists.best_with_hops(own_votes, smooth, budget.num_topk)}
            kept = set(range(start)) | chosen | window
            self.frozen[layer][head] = kept
            own = self.cells[layer][head]
            self.cells[layer][head] = [cell for cell in own if cell[0] in kept or cell[0] >= stop]

    def _decode(self, token: int, position: int) -> Tensor:
        hidden = self.decoder.embed(torch.tensor([token]))
        where = torch.tensor([position])
        rope = self.decoder.rope(where, where + 1)
        for layer in range(self.decoder.config.num_layers):
            q, k, v = self.decoder.project(layer, hidden, rope)
            for head, own in enumerate(self.cells[layer]):
                if len(own) == self.budget.capacity:
                    movable = [cell for cell in own if cell[0] not in self.frozen[layer][head]]
                    own.remove(min(movable, key=lambda cell: cell[0]))
                own.append((position, k[0, head], v[0, head]))
            hidden = self.decoder.finish(layer, hidden, attend(q[0], self.cells[layer], position)[None])
        return hidden
