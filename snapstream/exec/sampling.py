"""Samples one token per row from logits: fixed shapes, no host synchronization, no generator.

Order: logit bias; no stop ids until min_tokens, unless a grammar allows nothing else; repetition penalty (prompt and
output tokens); frequency and presence penalties (output tokens); grammar mask. Then greedy rows take the argmax, lowest
id among equals; the others go through temperature, top-k, top-p over what top-k left, and min-p, as in transformers.
Filters are thresholds on the value: tokens equal to the last one kept are kept too, so top-k may keep more than k. The
nucleus includes the token that crosses p. Reported log-probabilities are those of the raw logits.

Invariant: the token of a row is a function of its logits, parameters, seed and number of output tokens alone. So
probabilities become integer weights, 2^42 for the likeliest token: integer sums do not depend on device, batch shape or
order of addition, and the cumulative distribution (in vocabulary order) is exact. Tokens 2^42 times less likely than
the likeliest are never sampled. Uniform numbers are a pure function of (seed, counter): SplitMix64's finalizer once
over the seed on the host (``row_state.stream_of``) and once over stream + counter on the device (``uniform``). torch
has neither uint64 nor a logical shift, so int64 wraps and shifts are masked.

A row whose logits have NaN, or no finite maximum, samples ``NO_TOKEN``, and the host ends its request when it reads the
step; until then the row is fed some token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, float64

from snapstream.exec.row_state import UNIFORM_BITS, SamplingNeeds, signed
from snapstream.exec.sampling_state import SamplingState
from snapstream.step import FIRST, GOLDEN, SECOND

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
    """Smallest key [B, 1] such that the tokens with keys up to it have at least ``limit`` of the mass.

    keys [B, V] int32, mass [B, V] int64 >= 0, limit [B, 1] int64 >= 1. If the whole row has less, the result is no
    smaller than any key. Exact, and one radix descent of three histograms is faster than sorting; top-k (mass 1 per
    token) and top-p (mass = weight) use it.
    """
    base = torch.full_like(limit, LOWEST_KEY)  # [B, 1] smallest key with the digits found so far
    for shift, num_buckets in DIGITS:
        # Keys outside the current digits go to the two outer buckets, which are not read.
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
    """Ids [B, n] of the ``num_top`` largest logits, descending; among equals the lowest id first, as argmax."""
    vocab_size = logits.shape[-1]
    ids = torch.arange(vocab_size, device=logits.device)  # [V] int64
    pairs = falling_keys(logits).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)  # key, then id
    return pairs.topk(min(num_top, vocab_size), dim=-1, largest=False).values & LOW_WORD


SLICE_TOKENS = 64  # bounds the [slice, V] temporaries of a long prompt


class TokenLogprobs(NamedTuple):
    """``top_ids`` descend by log-probability, lowest id first among equals; n = min(num_top, V)."""

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


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical shift: int64 shifts extend the sign, the mask drops it."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix64(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * signed(FIRST)
    words = (words ^ _shift_right(words, 27)) * signed(SECOND)
    return words ^ _shift_right(words, 31)


def uniform(stream: Tensor, counter: Tensor) -> Tensor:
    """Float64 uniforms in [0, 1), one for each (stream, counter); both int64 of one shape."""
    words = _mix64(stream + (counter + 1) * signed(GOLDEN))
    return _shift_right(words, 64 - UNIFORM_BITS).to(float64) * 2.0**-UNIFORM_BITS


NO_TOKEN = -1  # of a row whose logits are not finite
WEIGHT_ONE = 2**42  # weight of the likeliest token; times MAX_VOCAB = 2^20 it stays below 2^63


class Sampled(NamedTuple):
    """One token per row. ``top_*`` have n = min(needs.num_logprobs, V) columns, descending."""

    token_ids: Tensor  # [B] int64; NO_TOKEN where the logits are not finite
    logprobs: Tensor | None = None  # [B] fp32, of token_ids, raw model distribution
    top_ids: Tensor | None = None  # [B, n] int64
    top_logprobs: Tensor | None = None  # [B, n] fp32

    def each(self, change: Callable[[Tensor], Tensor]) -> Sampled:
        """The same with changed tensors."""
        return Sampled(change(self.token_ids), *(None if own is None else change(own) for own in self[1:]))

    @classmethod
    def joined(cls, parts: Sequence[Sampled], entries: Tensor) -> Sampled:
        """The ``entries [n]`` of samples that have the same fields, one after the other."""
        columns = zip(*(part[1:] for part in parts), strict=True)
        others = (None if own[0] is None else torch.cat(own)[entries] for own in columns)
        return cls(torch.cat([part.token_ids for part in parts])[entries], *others)


def sample(logits: Tensor, state: SamplingState, rows: Tensor, needs: SamplingNeeds) -> Sampled:
    """Sample a token for each of ``rows`` [B] int64 from ``logits`` [B, V] fp32 and advance the rows' counters.

    Rows are distinct, except for the padding row. ``logits`` are not modified.
    """
    scores = process_logits(logits, state, rows, needs)  # [B, V]
    token_ids = scores.argmax(-1)  # [B]
    if needs.random:
        drawn = draw(weights(scores, state, rows, needs), state, rows)
        token_ids = torch.where(state.is_greedy[rows], token_ids, drawn)
    _advance(state, rows, token_ids, needs)
    # The maximum of a row with NaN is NaN. Of the raw logits: a mask may hide NaN, or leave nothing finite.
    marked = token_ids.masked_fill(~logits.amax(-1).isfinite(), NO_TOKEN)
    if needs.num_logprobs is None:
        return Sampled(marked)
    return Sampled(marked, *token_logprobs(logits, token_ids, needs.num_logprobs))


def process_logits(logits: Tensor, state: SamplingState, rows: Tensor, needs: SamplingNeeds) -> Tensor:
    """Logits [B, V] after bias, min_tokens, penalties and grammar; the argument itself if the batch needs none."""
    if needs.bias:
        logits = logits.scatter_add(1, state.bias_ids[rows], state.bias_values[rows])
    allowed = _allowed(state, rows) if needs.grammar else None
    if needs.min_tokens:
        logits = _mask_stops(logits, state, rows, allowed)
    if needs.penalties:
        logits = _penalize(logits, state, rows)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits


def _allowed(state: SamplingState, rows: Tensor) -> Tensor:
    """The grammar mask [B, V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=rows.device)
    spread = state.allowed[rows].unsqueeze(2).bitwise_right_shift(bits).bitwise_and_(1)  # [B, W, 32]
    return spread.flatten(1)[:, : state.vocab_size].to(torch.bool)


def _mask_stops(logits: Tensor, state: SamplingState, rows: Tensor, allowed: Tensor | None) -> Tensor:
    """A row whose grammar (``allowed`` [B, V] bool) allows only stop ids may sample them."""
    ids = state.stop_ids[rows]  # [B, K]
    is_early = (state.num_sampled[rows] < state.min_tokens[rows]).unsqueeze(1)  # [B, 1]
    if allowed is not None:
        is_early = is_early & allowed.scatter(1, ids, False).any(1, keepdim=True)
    return logits.scatter(1, ids, logits.gather(1, ids).masked_fill(is_early, float("-inf")))


def _penalize(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    counts = state.output_counts[rows]  # [B, V]
    in_output = counts > 0
    seen = state.prompt_seen[rows] | in_output
    factor = torch.where(seen, state.repetition[rows].unsqueeze(1), 1.0)  # [B, V]
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    penalty = state.frequency[rows].unsqueeze(1) * counts + state.presence[rows].unsqueeze(1) * in_output
    return logits - penalty


def weights(scores: Tensor, state: SamplingState, rows: Tensor, needs: SamplingNeeds) -> Tensor:
    """Integer weights [B, V] proportional to the filtered probabilities, as if no row were greedy."""
    # Clamped, so that a row of -inf gives zeros, not NaN.
    peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)  # [B, 1]
    scaled = scores.to(torch.float64).sub_(peak).div_(state.temperature[rows].unsqueeze(1))
    mass = scaled.exp_().mul_(WEIGHT_ONE).to(torch.int64)  # [B, V], 0 .. WEIGHT_ONE
    if needs.top_k or needs.top_p:
        keys = falling_keys(scores)
        if needs.top_k:
            mass.mul_(keys <= threshold_key(keys, torch.ones_like(mass), state.top_k[rows].unsqueeze(1)))
        if needs.top_p:
            mass.mul_(keys <= _nucleus_key(keys, mass, state.top_p[rows].unsqueeze(1)))
    if needs.min_p:
        least = (state.min_p[rows] * WEIGHT_ONE).to(torch.int64).unsqueeze(1)  # [B, 1]
        mass.mul_(mass >= least)
    return mass


def _nucleus_key(keys: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
    """Key [B, 1] at which the likeliest tokens have ``top_p`` [B, 1] of the mass; no limit if it is 1."""
    total = mass.sum(-1, keepdim=True)  # [B, 1]
    limit = (total * top_p).ceil_().to(torch.int64).clamp_(min=1)
    # top_p = 1 is no filter, however the total is rounded: other rows that filter must not matter.
    return threshold_key(keys, mass, limit).masked_fill_(top_p >= 1.0, torch.iinfo(torch.int64).max)


def draw(mass: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """Token ids [B] by inverting the cumulative weights, in vocabulary order, at the row's next uniform."""
    reached = mass.cumsum(-1)  # [B, V]
    at = uniform(state.stream[rows], state.num_sampled[rows])  # [B], at most 1 - 2^-53
    # Less than the total even after rounding: 2^-53 of a float64 is at least half of its last place.
    target = (at * reached[:, -1]).to(torch.int64).unsqueeze(1)
    token_ids = torch.searchsorted(reached, target, right=True).squeeze(1)
    return token_ids.clamp_(max=mass.shape[1] - 1)  # only for a row without mass


def _advance(state: SamplingState, rows: Tensor, token_ids: Tensor, needs: SamplingNeeds) -> None:
    state.num_sampled.index_add_(0, rows, torch.ones_like(rows))
    if needs.penalties:
        counts = state.output_counts
        places = rows * state.vocab_size + token_ids  # [B] in the flat counts
        counts.view(-1).scatter_add_(0, places, torch.ones_like(rows, dtype=counts.dtype))
