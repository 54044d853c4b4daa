"""Token ids to hidden states and back, where every rank holds its own range of the vocabulary.

Ranges have one length, so the last may end in rows that stand for no token: nobody looks them up, and their scores are
cut off. Alone, a rank has all of it, and nothing is added to the two products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.distributed.group import Group
from snapstream.kernels.bound import Kernels
from snapstream.models.weight import Weight


class Vocabulary:
    """Embedding and output embedding of one rank, ``[V', D]`` each, of V token ids."""

    def __init__(self, embed: Weight, head: Weight, vocab_size: int, kernels: Kernels, group: Group) -> None:
        self._embed, self._head, self._vocab_size = embed, head, vocab_size
        self._kernels, self._group = kernels, group
        self._num_own = embed.shape[0]  # V'
        self._first = group.rank * self._num_own

    def embed(self, token_ids: Tensor) -> Tensor:
        """``token_ids [T]`` to ``[T, D]``: each rank adds the ids of its own range."""
        if self._num_own == self._vocab_size:
            return self._embed.lookup(token_ids)
        own = token_ids - self._first
        is_elsewhere = (own < 0) | (own >= self._num_own)
        found = self._embed.lookup(own.masked_fill(is_elsewhere, 0))
        return self._group.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0.0))

    def scores(self, normed: Tensor) -> Tensor:
        """``normed [T, D]`` to the scores of the next token ``[T, V]`` fp32."""
        own = self._head.multiply(normed, None, self._kernels)  # [T, V']
        scores = self._group.all_gather(own, 1).to(torch.float32)
        return scores if scores.shape[1] == self._vocab_size else scores[:, : self._vocab_size].contiguous()
