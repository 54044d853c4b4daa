"""Order of logits in integers: exact thresholds and stable top-n, without a sort or a host synchronisation.

Invariant: results depend on the values alone - not on the device, the batch or the order of addition, since
floats become integers of the opposite order (the likelier, the smaller) and every mass that is summed is an
integer too. ``threshold_key`` serves top-k (mass 1 per token) and top-p (mass = probability) with one radix
descent of three histograms, which is faster than sorting. Next: ``sampler.py``, ``logprobs.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST_KEY = -(2**31)
DIGITS = ((21, 2**11), (10, 2**11), (0, 2**10))  # (shift, buckets): 11 + 11 + 10 bits of a 32-bit key
LOW_WORD = 2**32 - 1


def falling_keys(logits: Tensor) -> Tensor:
    """Int32 keys in the opposite order of fp32 ``logits``; equal floats (0.0 and -0.0 too) get equal keys."""
    bits = logits.contiguous().view(torch.int32)  # sign and magnitude, as IEEE 754 stores them
    is_positive = ~(bits >> 31)  # -1 where the sign bit is clear, else 0
    magnitude = bits & 0x7FFFFFFF
    return magnitude.bitwise_xor_(is_positive).sub_(is_positive)  # negated where positive; shape of logits


def threshold_key(keys: Tensor, mass: Tensor, limit: Tensor) -> Tensor:
    """Smallest key [B, 1] such that the tokens with keys up to it hold at least ``limit`` of the mass.

    keys [B, V] int32, mass [B, V] int64 >= 0, limit [B, 1] int64 >= 1. Where the whole row holds less than
    the limit, the result is no smaller than any key.
    """
    base = torch.full_like(limit, LOWEST_KEY)  # [B, 1] smallest key with the digits found so far
    for shift, num_buckets in DIGITS:
        # Keys before or after the current digits fall into the two outer buckets, which nobody reads.
        before = ((base >> shift) - 1).to(torch.int32)
        bucket = (keys >> shift).sub_(before).clamp_(0, num_buckets + 1)  # [B, V]
        histogram = mass.new_zeros(mass.shape[0], num_buckets + 2)
        inner = histogram.scatter_add_(1, bucket.to(torch.int64), mass)[:, 1:-1]  # [B, buckets]
        reached = inner.cumsum(1)
        crossing = torch.searchsorted(reached, limit)  # [B, 1] first with reached >= limit
        crossing = crossing.clamp_(max=num_buckets - 1)
        limit = limit - reached.gather(1, crossing) + inner.gather(1, crossing)
        base = base + (crossing << shift)
    return base


def top_tokens(logits: Tensor, num_top: int) -> Tensor:
    """Ids [B, n] of the ``num_top`` largest logits, falling; among equals the lowest id first, as argmax."""
    vocab_size = logits.shape[-1]
    ids = torch.arange(vocab_size, device=logits.device)  # [V] int64
    pairs = falling_keys(logits).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)  # key, then id
    return pairs.topk(min(num_top, vocab_size), dim=-1, largest=False).values & LOW_WORD
