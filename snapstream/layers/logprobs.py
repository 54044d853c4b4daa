"""Log-probabilities of given tokens and of the likeliest ones, under the raw model distribution.

Invariant: logits come in as the model made them - before bias, penalties, temperature and filters - so what
is reported does not depend on how tokens are drawn. Next: ``sampler.py`` (one per output token), the prefill
job (prompt tokens).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.layers.logit_order import top_tokens

SLICE_TOKENS = 64  # bounds the [slice, V] temporaries of a long prompt


class TokenLogprobs(NamedTuple):
    """``top_ids`` fall by log-probability, lowest id first among equals; n = min(num_top, V)."""

    logprobs: Tensor  # [T] fp32, of the given tokens
    top_ids: Tensor  # [T, n] int64
    top_logprobs: Tensor  # [T, n] fp32


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """logits [T, V] fp32, token_ids [T] int64."""
    logprobs = logits.log_softmax(-1)  # [T, V]
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    top_ids = top_tokens(logits, num_top) if num_top else token_ids.new_empty(len(token_ids), 0)
    return TokenLogprobs(chosen, top_ids, logprobs.gather(1, top_ids))


def prompt_logprobs(logits: Tensor, next_ids: Tensor, num_top: int) -> TokenLogprobs:
    """``token_logprobs`` for many tokens, in slices. logits [T, V], next_ids [T]: the token after each."""
    starts = range(0, max(len(next_ids), 1), SLICE_TOKENS)
    slices = [slice(start, start + SLICE_TOKENS) for start in starts]
    parts = [token_logprobs(logits[part], next_ids[part], num_top) for part in slices]
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))
