"""Every sampling option against a slow list-based program, and drawn frequencies against probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from snapstream.exec import sampling
from snapstream.exec.row_state import UNIFORM_BITS, NewRow, SamplingNeeds, stream_of
from snapstream.exec.sampling import (
    WEIGHT_ONE,
    falling_keys,
    process_logits,
    prompt_logprobs,
    sample,
    threshold_key,
    token_logprobs,
    top_tokens,
    uniform,
    weights,
)
from snapstream.exec.sampling_state import SamplingState
from snapstream.step import GOLDEN, WORD, splitmix64
from snapstream.types import Grammar, SamplingParams

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


@settings(max_examples=75, deadline=None)
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
        state.set_rows([NewRow(row, params, params.seed or 0, prompt, stop)])
    needs, index = SamplingNeeds.of(batch), torch.tensor(rows)
    for step in range(4):
        # Eighths in a narrow range: many ties, positive and negative.
        eighths = st.lists(st.integers(-30, 30), min_size=vocab_size, max_size=vocab_size)
        logits = torch.tensor([data.draw(eighths) for _ in batch], dtype=torch.float32) / 8
        mass = sampling.weights(sampling.process_logits(logits, state, index, needs), state, index, needs).double()
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
        state.set_rows([NewRow(row, params, row, [], [])])
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


# Masks of grammars in the sampler: only allowed tokens are drawn, and neighbours do not notice.

VOCAB = 77  # not a multiple of 32
ANY = Grammar.json_object()


def words_of(*allowed: int) -> torch.Tensor:
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def state_of(*rows: SamplingParams) -> SamplingState:
    state = SamplingState(len(rows), VOCAB, "cpu")
    for row, params in enumerate(rows):
        state.set_rows([NewRow(row, params, seed=row, prompt_ids=(1,), stop_ids=(2,))])
    return state


def test_needs() -> None:
    assert not SamplingNeeds.of([SamplingParams()]).grammar
    assert SamplingNeeds.of([SamplingParams(), SamplingParams(grammar=ANY)]).grammar


@pytest.mark.parametrize("allowed", [(0,), (31, 32), (76,), (3, 40, 64, 75)])
def test_allowed_tokens_only(allowed: tuple[int, ...]) -> None:
    sampling = SamplingParams(grammar=ANY, temperature=5.0, top_p=0.9, logit_bias={5: 100.0})
    state = state_of(sampling)
    rows, needs = torch.tensor([0]), SamplingNeeds.of([sampling])
    logits = torch.randn(1, VOCAB)
    state.allow([0], words_of(*allowed).unsqueeze(0))
    finite = process_logits(logits, state, rows, needs)[0].isfinite().nonzero().flatten().tolist()
    assert tuple(finite) == allowed
    drawn = {int(sample(torch.randn(1, VOCAB), state, rows, needs).token_ids) for _ in range(60)}
    assert drawn == set(allowed)


def test_a_stop_id_is_held_back_unless_the_grammar_allows_nothing_else() -> None:
    sampling, free = (SamplingParams(grammar=own, min_tokens=5, max_tokens=9, temperature=0.0) for own in (ANY, None))
    state = state_of(sampling, sampling, free)  # token 2 is their stop id
    state.allow([0, 1], torch.stack([words_of(2), words_of(2, 40)]))
    logits = torch.zeros(3, VOCAB).index_fill_(1, torch.tensor([2]), 9.0)
    logits[2, 3] = 1.0
    assert sample(logits, state, torch.arange(3), needs_of(sampling, free)).token_ids.tolist() == [2, 40, 3]


def test_greedy_takes_the_likeliest_that_is_allowed_and_logprobs_stay_raw() -> None:
    sampling = SamplingParams(grammar=ANY, temperature=0.0, logprobs=1)
    state = state_of(sampling)
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    state.allow([0], words_of(7, 33).unsqueeze(0))
    sampled = sample(logits, state, torch.tensor([0]), SamplingNeeds.of([sampling]))
    assert sampled.token_ids.tolist() == [33]
    assert sampled.logprobs is not None and sampled.top_ids is not None
    assert sampled.logprobs.item() == pytest.approx(logits.log_softmax(-1)[0, 33].item())
    assert sampled.top_ids[0, 0] == VOCAB - 1


def test_neighbours_and_later_owners_draw_as_without_grammars() -> None:
    plain, bound = SamplingParams(temperature=1.3, top_k=20), SamplingParams(grammar=ANY, temperature=1.0)
    logits = [torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(step)) for step in range(20)]
    alone, beside = state_of(plain, plain, plain), state_of(plain, bound, plain)
    beside.allow([1], words_of(4, 9).unsqueeze(0))
    needs = SamplingNeeds.of([plain, bound])
    rows = torch.arange(3)
    for step in logits:
        expected = sample(step, alone, rows, SamplingNeeds.of([plain])).token_ids
        drawn = sample(step, beside, rows, needs).token_ids
        assert drawn[[0, 2]].tolist() == expected[[0, 2]].tolist()
        assert drawn[1] in (4, 9)
    beside.set_rows([NewRow(1, plain, seed=1, prompt_ids=(1,), stop_ids=(2,))])  # the row's next owner has no grammar
    alone.set_rows([NewRow(1, plain, seed=1, prompt_ids=(1,), stop_ids=(2,))])
    for step in logits:
        assert sample(step, beside, rows, needs).token_ids[1] == sample(step, alone, rows, needs_of(plain)).token_ids[1]


def needs_of(*batch: SamplingParams) -> SamplingNeeds:
    return SamplingNeeds.of(batch)


# Corner cases of single options: stop ids, penalties, ties, nucleus, temperature, ends of the draw.


def one_row(params: SamplingParams, vocab_size: int = 6, prompt: tuple[int, ...] = ()) -> SamplingState:
    state = SamplingState(1, vocab_size, "cpu")
    state.set_rows([NewRow(0, params, 0, prompt, (3, 5))])
    return state


def draw_one(state: SamplingState, params: SamplingParams, logits: list[float]) -> int:
    return int(sample(torch.tensor([logits]), state, torch.tensor([0]), SamplingNeeds.of([params])).token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_min_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=3)
    state = one_row(params)
    logits = [0.0, 1.0, 0.0, 40.0, 0.0, 80.0]
    tokens = [draw_one(state, params, logits) for _ in range(5)]
    assert not {3, 5} & set(tokens[:3])
    assert tokens[3:] == [5, 5]


def test_frequency_counts_every_occurrence_and_presence_one() -> None:
    frequency = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    logits = [0.0, 4.5, 2.0, 0.0, 0.0, 0.0]
    state = one_row(frequency, prompt=(1, 1, 1, 1, 1))  # the prompt does not count
    assert [draw_one(state, frequency, logits) for _ in range(6)] == [1, 1, 1, 2, 1, 2]
    presence = SamplingParams(temperature=0.0, presence_penalty=2.0)
    state = one_row(presence)
    assert [draw_one(state, presence, [0.0, 4.5, 2.75, 0, 0, 0]) for _ in range(4)] == [1, 2, 1, 1]


def test_ties_go_to_the_lowest_id_and_top_k_keeps_them() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert draw_one(one_row(greedy), greedy, [0.0, 2.0, 2.0, 1.0, 2.0, 0.0]) == 1
    top_k = SamplingParams(top_k=2)
    state = one_row(top_k)
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0, 0.0]])
    kept = weights(logits, state, torch.tensor([0]), SamplingNeeds.of([top_k])) > 0
    assert kept.tolist() == [[False, True, True, False, True, False]]


def test_the_nucleus_includes_the_token_that_crosses() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.05, 0.5, 0.3, 0.15)]])
    kept = {}
    for top_p in (0.01, 0.49, 0.51, 0.79, 0.81, 0.96):
        params = SamplingParams(top_p=top_p)
        mass = weights(logits, one_row(params, vocab_size=6), torch.tensor([0]), SamplingNeeds.of([params]))
        kept[top_p] = int((mass > 0).sum())
    assert kept == {0.01: 1, 0.49: 1, 0.51: 2, 0.79: 2, 0.81: 3, 0.96: 4}


def test_no_nucleus_is_no_filter_however_flat_the_row() -> None:
    """8192 tokens of full weight and one of weight 1: their sum is no float64, but top_p = 1 keeps all."""
    state = SamplingState(1, 8193, "cpu")
    state.set_rows([NewRow(0, SamplingParams(), 0, [], [])])
    logits = torch.zeros(1, 8193)
    logits[0, -1] = -29.1
    mass = weights(logits, state, torch.tensor([0]), SamplingNeeds(random=True, top_p=True))
    assert mass[0, -1] == 1 and mass.sum() == 8192 * WEIGHT_ONE + 1


@pytest.mark.parametrize(("at", "token"), [(0.0, 1), (0.25, 2), (1 - 2**-53, 2)])
def test_the_ends_of_the_distribution(monkeypatch: pytest.MonkeyPatch, at: float, token: int) -> None:
    """Tokens without weight are never drawn, and an interval holds its left end but not its right one."""
    monkeypatch.setattr(sampling, "uniform", lambda stream, counter: torch.tensor([at], dtype=torch.float64))
    state, row = SamplingState(1, 4, "cpu"), torch.tensor([0])
    for one in (1, 2**20 - 1, 2**60 - 1, 2**60):  # totals that float64 holds, and one that it rounds up
        mass = torch.tensor([[0, one, 3 * one, 0]])
        assert sampling.draw(mass, state, row).tolist() == [token]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    state = one_row(params)
    assert {draw_one(state, params, [1e30, -3.0, 2e30, 0.0, -1e38, 1.0]) for _ in range(20)} == {2}


def test_a_huge_temperature_is_uniform() -> None:
    params = SamplingParams(temperature=100.0)
    mass = weights(
        torch.tensor([[0.0, 1e-3, -1e-3, 0.0, 0.0, 0.0]]), one_row(params), torch.tensor([0]), SamplingNeeds()
    )
    assert (mass.double() / mass.sum()).tolist()[0] == pytest.approx([1 / 6] * 6, rel=1e-4)


# Thresholds and top-n over integers, and log-probabilities, against sorted lists.

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=True)
ROWS = st.lists(FLOATS | st.sampled_from([0.0, -0.0, 1.0, -math.inf]), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_keys_fall_as_logits_rise(row: list[float]) -> None:
    keys = falling_keys(torch.tensor([row]))[0].tolist()
    for i, left in enumerate(row):
        for j, right in enumerate(row):
            assert (keys[i] < keys[j]) == (left > right)
            assert (keys[i] == keys[j]) == (left == right)


@settings(max_examples=300, deadline=None)
@given(row=ROWS, data=st.data())
def test_threshold_key_equals_a_walk_over_the_sorted_row(row: list[float], data: st.DataObject) -> None:
    masses = st.lists(st.integers(0, 2**42), min_size=len(row), max_size=len(row))
    mass = data.draw(st.just([1] * len(row)) | masses)
    limit = data.draw(st.integers(1, sum(mass) + 1))
    keys = falling_keys(torch.tensor([row]))
    bound = int(threshold_key(keys, torch.tensor([mass]), torch.tensor([[limit]])))
    reached, expected = 0, -math.inf
    for index in sorted(range(len(row)), key=lambda i: -row[i]):
        reached += mass[index]
        if reached >= limit:
            expected = row[index]
            break
    assert [key <= bound for key in keys[0].tolist()] == [value >= expected for value in row]


@settings(max_examples=200, deadline=None)
@given(row=ROWS, num_top=st.integers(1, 35))
def test_top_tokens_are_stable(row: list[float], num_top: int) -> None:
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num_top]
    assert top_tokens(torch.tensor([row]), num_top)[0].tolist() == expected


def test_logprobs_are_the_log_softmax_of_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, -math.inf, 0.0, 5.0]])
    found = token_logprobs(logits, torch.tensor([3, 0]), 3)
    assert found.top_ids.tolist() == [[1, 2, 0], [3, 0, 2]]
    for i, (row, token) in enumerate(zip(logits.tolist(), (3, 0), strict=True)):
        normaliser = math.log(math.fsum(math.exp(value) for value in row))
        assert found.logprobs[i].item() == pytest.approx(row[token] - normaliser, abs=1e-6)
        tops = [row[token] - normaliser for token in found.top_ids[i].tolist()]
        assert found.top_logprobs[i].tolist() == pytest.approx(tops, abs=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 130])
@pytest.mark.parametrize("num_top", [0, 4, 99])
def test_prompt_logprobs_do_not_notice_their_slices(num_tokens: int, num_top: int) -> None:
    logits = torch.randn(num_tokens, 17, generator=torch.Generator().manual_seed(num_tokens))
    next_ids = torch.arange(num_tokens) % 17
    found = prompt_logprobs(logits, next_ids, num_top)
    assert found.top_ids.shape == found.top_logprobs.shape == (num_tokens, min(num_top, 17))
    expected = logits.log_softmax(-1)
    assert torch.allclose(found.logprobs, expected[torch.arange(num_tokens), next_ids])
    ranked = expected.sort(dim=-1, descending=True)
    assert torch.equal(found.top_ids, ranked.indices[:, :num_top])
    assert torch.allclose(found.top_logprobs, ranked.values[:, :num_top])


# The counter-based generator: equal to its plain-integer twin, uniform, and without visible structure.


def uniform_scalar(stream: int, counter: int) -> float:
    """``random.uniform`` for one pair of integers."""
    word = splitmix64((stream + counter * GOLDEN) & WORD)
    return (word >> (64 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS


NUM_DRAWS = 100_000
INT64 = st.integers(-(2**63), 2**63 - 1)


def chi_square_limit(freedom: int) -> float:
    """Far right tail: five standard deviations above the mean."""
    return freedom + 5 * math.sqrt(2 * freedom)


def sampler_random_chi_square(bins: torch.Tensor, num_bins: int) -> float:
    counts = torch.bincount(bins, minlength=num_bins).double()
    expected = len(bins) / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


def draws(kind: str) -> torch.Tensor:
    """[NUM_DRAWS] uniforms: consecutive counters of one seed, or consecutive seeds at one counter."""
    if kind == "counters":
        return uniform(torch.full((NUM_DRAWS,), stream_of(7)), torch.arange(NUM_DRAWS))
    streams = torch.tensor([stream_of(seed) for seed in range(NUM_DRAWS)])
    return uniform(streams, torch.full((NUM_DRAWS,), 3))


def test_splitmix64_matches_published_splitmix64_outputs() -> None:
    # The first outputs of SplitMix64 started at 0, as printed in its reference implementations.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix64(step * GOLDEN) for step in (0, 1, 2)] == published


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(INT64, st.integers(0, 2**40)), min_size=1, max_size=20))
def test_device_and_scalar_versions_agree(pairs: list[tuple[int, int]]) -> None:
    seeds, counters = zip(*pairs, strict=True)
    streams = [stream_of(seed) for seed in seeds]
    values = uniform(torch.tensor(streams), torch.tensor(counters)).tolist()
    assert values == [uniform_scalar(*pair) for pair in zip(streams, counters, strict=True)]
    assert all(0.0 <= value < 1.0 for value in values)


@pytest.mark.parametrize("kind", ["counters", "seeds"])
def test_values_are_uniform(kind: str) -> None:
    assert sampler_random_chi_square((draws(kind) * 1000).long(), 1000) < chi_square_limit(999)


@pytest.mark.parametrize("kind", ["counters", "seeds"])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbours_are_independent(kind: str, lag: int) -> None:
    values = draws(kind)
    first, second = values[:-lag], values[lag:]
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(NUM_DRAWS)
    cells = (first * 20).long() * 20 + (second * 20).long()
    assert sampler_random_chi_square(cells, 400) < chi_square_limit(399)


def test_seeds_do_not_share_a_shifted_stream() -> None:
    """Unmixed, seed s + GOLDEN would repeat the stream of s one step later; here no value is shared."""
    counters = torch.arange(1000)
    seen: set[float] = set()
    for seed in (0, 1, -1, GOLDEN - 2**64, 2**63 - 1):
        seen.update(uniform(torch.full_like(counters, stream_of(seed)), counters).tolist())
    assert len(seen) == 5 * 1000
