"""Draws one token per row from logits: fixed shapes, no host synchronisation, no generator.

Order: logit bias; stop ids held back until min_tokens, unless a grammar allows nothing else; repetition penalty
(prompt and output tokens); frequency and presence penalties (output tokens); only what a grammar allows. Then greedy
rows take the argmax, lowest id among equals; the others go through temperature, top-k, top-p over what top-k left, and
min-p, as in transformers.

Filters are thresholds on the value: tokens equal to the last one kept are kept too, so top-k may keep more
than k. The nucleus includes the token that crosses p.

Invariant: the token of a row is a function of its logits, parameters, seed and number of output tokens alone.
For that, probabilities become integer weights, 2^42 for the likeliest token: integer sums do not depend on
device, batch shape or order of addition, so the cumulative distribution (in vocabulary order) is exact and
monotone. Tokens 2^42 times less likely than the likeliest are never drawn.

A row whose logits hold NaN, or no finite maximum, draws ``NO_TOKEN``, so that the host ends its request instead of
taking token 0 for an answer. Nobody waits for the device to learn this: the row is fed some token and goes on, and the
host sees the mark when it reads the step. Next: ``sampling_state.py``, ``random.py``, ``logit_order.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.layers.logit_order import falling_keys, threshold_key
from snapstream.layers.logprobs import token_logprobs
from snapstream.layers.random import uniform
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState

NO_TOKEN = -1  # stands for the token of a row whose logits are not finite
WEIGHT_ONE = 2**42  # weight of the likeliest token; times MAX_VOCAB = 2^20 it stays below 2^63


class Sampled(NamedTuple):
    """One token per row. ``top_*`` have n = min(needs.num_logprobs, V) columns, falling."""

    token_ids: Tensor  # [B] int64; NO_TOKEN where the logits are not finite
    logprobs: Tensor | None = None  # [B] fp32, of token_ids, raw model distribution
    top_ids: Tensor | None = None  # [B, n] int64
    top_logprobs: Tensor | None = None  # [B, n] fp32

    def first(self, num_rows: int) -> Sampled:
        """Of the first rows only."""
        others = (None if field is None else field[:num_rows] for field in self[1:])
        return Sampled(self.token_ids[:num_rows], *others)


def sample(logits: Tensor, state: SamplingState, rows: Tensor, needs: SamplingNeeds) -> Sampled:
    """Draw a token for each of ``rows`` [B] int64 from ``logits`` [B, V] fp32 and advance the rows' counters.

    Rows are distinct but for the padding row, which may stand any number of times. ``logits`` stay untouched.
    """
    scores = adjusted(logits, state, rows, needs)  # [B, V]
    token_ids = scores.argmax(-1)  # [B]
    if needs.random:
        drawn = draw(weights(scores, state, rows, needs), state, rows)
        token_ids = torch.where(state.is_greedy[rows], token_ids, drawn)
    _advance(state, rows, token_ids, needs)
    # The maximum of a row with NaN is NaN. Of the model's own logits: a mask may hide NaN, and leave nothing finite.
    marked = token_ids.masked_fill(~logits.amax(-1).isfinite(), NO_TOKEN)
    if needs.num_logprobs is None:
        return Sampled(marked)
    return Sampled(marked, *token_logprobs(logits, token_ids, needs.num_logprobs))


def adjusted(logits: Tensor, state: SamplingState, rows: Tensor, needs: SamplingNeeds) -> Tensor:
    """Logits [B, V] after bias, min_tokens, penalties and grammar; the argument itself when the batch needs none."""
    if needs.bias:
        logits = logits.scatter_add(1, state.bias_ids[rows], state.bias_values[rows])
    allowed = _allowed(state, rows) if needs.grammar else None
    if needs.min_tokens:
        logits = _hold_back_stops(logits, state, rows, allowed)
    if needs.penalties:
        logits = _penalised(logits, state, rows)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits


def _allowed(state: SamplingState, rows: Tensor) -> Tensor:
    """Which tokens may be drawn: [B, V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=rows.device)
    spread = state.allowed[rows].unsqueeze(2).bitwise_right_shift(bits).bitwise_and_(1)  # [B, W, 32]
    return spread.flatten(1)[:, : state.vocab_size].to(torch.bool)


def _hold_back_stops(logits: Tensor, state: SamplingState, rows: Tensor, allowed: Tensor | None) -> Tensor:
    """``allowed`` [B, V] bool, of grammars: a row that may draw nothing but stop ids draws one of them."""
    ids = state.stop_ids[rows]  # [B, K]
    is_early = (state.num_sampled[rows] < state.min_tokens[rows]).unsqueeze(1)  # [B, 1]
    if allowed is not None:
        is_early = is_early & allowed.scatter(1, ids, False).any(1, keepdim=True)
    return logits.scatter(1, ids, logits.gather(1, ids).masked_fill(is_early, float("-inf")))


def _penalised(logits: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    counts = state.output_counts[rows]  # [B, V]
    in_output = counts > 0
    seen = state.prompt_seen[rows] | in_output
    factor = torch.where(seen, state.repetition[rows].unsqueeze(1), 1.0)  # [B, V]
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    penalty = state.frequency[rows].unsqueeze(1) * counts + state.presence[rows].unsqueeze(1) * in_output
    return logits - penalty


def weights(scores: Tensor, state: SamplingState, rows: Tensor, needs: SamplingNeeds) -> Tensor:
    """Integer weights [B, V] proportional to the filtered probabilities, as if no row were greedy."""
    # Clamped, so that a row of -inf gives zeros and not NaN.
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
    """Key [B, 1] at which the likeliest tokens hold ``top_p`` [B, 1] of the mass; no limit where it is 1."""
    total = mass.sum(-1, keepdim=True)  # [B, 1]
    limit = (total * top_p).ceil_().to(torch.int64).clamp_(min=1)
    # top_p = 1 is no filter, however total was rounded: a row must not notice neighbours that filter.
    return threshold_key(keys, mass, limit).masked_fill_(top_p >= 1.0, torch.iinfo(torch.int64).max)


def draw(mass: Tensor, state: SamplingState, rows: Tensor) -> Tensor:
    """Token ids [B] by inverting the cumulative weights, in vocabulary order, at the row's next uniform."""
    reached = mass.cumsum(-1)  # [B, V]
    at = uniform(state.stream[rows], state.num_sampled[rows])  # [B], at most 1 - 2^-53
    # Less than the total even after rounding: 2^-53 of a float64 is at least half of its last place.
    target = (at * reached[:, -1]).to(torch.int64).unsqueeze(1)
    token_ids = torch.searchsorted(reached, target, right=True).squeeze(1)
    return token_ids.clamp_(max=mass.shape[1] - 1)  # only a row without any mass is beyond


def _advance(state: SamplingState, rows: Tensor, token_ids: Tensor, needs: SamplingNeeds) -> None:
    state.num_sampled.index_add_(0, rows, torch.ones_like(rows))
    if needs.penalties:
        counts = state.output_counts
        places = rows * state.vocab_size + token_ids  # [B] in the flat counts
        counts.view(-1).scatter_add_(0, places, torch.ones_like(rows, dtype=counts.dtype))
