"""Every sampling option against a slow list-based program, and drawn frequencies against probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from snapstream.layers import sampler
from snapstream.layers.sampler import sample
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState
from snapstream.layers.splitmix import stream_of, uniform_scalar
from snapstream.request import SamplingParams

VAGUE = 1e-9  # closer than this to a threshold, float64 programs may differ

Scores = list[np.float32]


def reference_scores(
    logits: Sequence[float], params: SamplingParams, prompt: list[int], output: list[int], stops: list[int]
) -> Scores:
    """Bias, min_tokens, penalties: fp32, one token at a time."""
    scores = [np.float32(value) for value in logits]
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        for token in stops:
            scores[token] = np.float32(-np.inf)
    factor = np.float32(params.repetition_penalty)
    for token in set(prompt + output):
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        total = np.float32(params.frequency_penalty) * np.float32(output.count(token))
        scores[token] -= total + np.float32(params.presence_penalty)
    return scores


def reference_probabilities(scores: Scores, params: SamplingParams) -> list[float] | None:
    """Temperature, top-k, top-p, min-p; None when a value lies so near a threshold that rounding decides."""
    values = [float(score) for score in scores]
    peak = max(values)
    mass = [math.exp((value - peak) / params.temperature) for value in values]
    falling = sorted(values, reverse=True)
    if params.top_k and params.top_k < len(values):
        least = falling[params.top_k - 1]
        mass = [m if value >= least else 0.0 for m, value in zip(mass, values, strict=True)]
    if params.top_p < 1.0:
        total, reached, last = math.fsum(mass), 0.0, -math.inf
        for index in sorted(range(len(values)), key=lambda i: -values[i]):
            reached += mass[index]
            if abs(reached - params.top_p * total) < VAGUE * total:
                return None
            if reached > params.top_p * total:
                last = values[index]
                break
        mass = [m if value >= last else 0.0 for m, value in zip(mass, values, strict=True)]
    if any(abs(m - params.min_p) < VAGUE for m in mass if params.min_p and m):
        return None
    mass = [m if m >= params.min_p else 0.0 for m in mass]
    total = math.fsum(mass)
    return [m / total for m in mass]


def reference_draw(probabilities: list[float], at: float) -> set[int]:
    """Tokens whose interval of the cumulative distribution holds ``at``, or touches it within rounding."""
    start, found = 0.0, set()
    for token, probability in enumerate(probabilities):
        if probability and start - VAGUE <= at <= start + probability + VAGUE:
            found.add(token)
        start += probability
    return found


@st.composite
def sampling_params(draw: Callable[..., object], vocab_size: int) -> SamplingParams:
    token = st.integers(0, vocab_size - 1)
    options = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.integers(0, vocab_size + 2),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.6]),
        "logit_bias": st.none() | st.dictionaries(token, st.sampled_from([-100.0, -1.25, 2.0]), max_size=4),
        "min_tokens": st.integers(0, 3),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
    return SamplingParams(**{name: draw(strategy) for name, strategy in options.items()})  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_batches_equal_the_list_based_program(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(2, 37), "V")
    batch = data.draw(st.lists(sampling_params(vocab_size), min_size=1, max_size=4), "batch")
    rows = data.draw(st.permutations(range(6)), "rows")[: len(batch)]
    token = st.integers(0, vocab_size - 1)
    prompts = [data.draw(st.lists(token, max_size=6)) for _ in batch]
    stops = [data.draw(st.lists(token, max_size=vocab_size - 1, unique=True)) for _ in batch]
    outputs: list[list[int]] = [[] for _ in batch]
    state = SamplingState(6, vocab_size, "cpu")
    for row, params, prompt, stop in zip(rows, batch, prompts, stops, strict=True):
        state.set_row(row, params, params.seed or 0, prompt, stop)
    needs, index = SamplingNeeds.of(batch), torch.tensor(rows)
    for step in range(4):
        # Eighths in a narrow range: many ties, positive and negative.
        eighths = st.lists(st.integers(-30, 30), min_size=vocab_size, max_size=vocab_size)
        logits = torch.tensor([data.draw(eighths) for _ in batch], dtype=torch.float32) / 8
        mass = sampler.weights(sampler.adjusted(logits, state, index, needs), state, index, needs).double()
        found = (mass / mass.sum(-1, keepdim=True)).tolist()
        tokens = sample(logits, state, index, needs).token_ids.tolist()
        for i, params in enumerate(batch):
            scores = reference_scores(logits[i].tolist(), params, prompts[i], outputs[i], stops[i])
            if params.is_greedy:
                assert tokens[i] == scores.index(max(scores))
            else:
                expected = reference_probabilities(scores, params)
                assume(expected is not None)
                assert found[i] == pytest.approx(expected, abs=1e-9)
                at = uniform_scalar(stream_of(params.seed or 0), step)
                assert tokens[i] in reference_draw(expected, at)
            outputs[i].append(tokens[i])


OPTIONS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


def chi_square(counts: list[int], probabilities: list[float]) -> tuple[float, int]:
    """Statistic and degrees of freedom over the tokens that can be drawn."""
    num_draws = sum(counts)
    cells = [(count, num_draws * p) for count, p in zip(counts, probabilities, strict=True) if p > 0]
    return sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_frequencies_follow_probabilities(options: dict[str, float]) -> None:
    num_rows, num_steps, vocab_size = 1000, 20, 53
    params = SamplingParams(**options)  # type: ignore[arg-type]
    row_logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 1.5
    state = SamplingState(num_rows, vocab_size, "cpu")
    for row in range(num_rows):
        state.set_row(row, params, row, [], [])
    rows, logits = torch.arange(num_rows), row_logits.expand(num_rows, -1).contiguous()
    steps = [sample(logits, state, rows, SamplingNeeds.of([params])).token_ids for _ in range(num_steps)]
    counts = torch.bincount(torch.cat(steps), minlength=vocab_size).tolist()
    probabilities = reference_probabilities([np.float32(x) for x in row_logits.tolist()], params)
    assert probabilities is not None
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0)
    statistic, freedom = chi_square(counts, probabilities)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    # The test has teeth: another temperature is told apart.
    other = SamplingParams(**{**options, "temperature": params.temperature * 1.2})  # type: ignore[arg-type]
    wrong = reference_probabilities([np.float32(x) for x in row_logits.tolist()], other)
    assert wrong is not None
    statistic, freedom = chi_square(counts, wrong)
    assert statistic > freedom + 4 * math.sqrt(2 * freedom)
