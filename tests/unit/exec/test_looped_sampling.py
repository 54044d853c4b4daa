"""Native draws equal ``exec/sampling.py`` token by token and leave the same state, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snapstream.config.values import num_cores
from snapstream.exec.looped_cpu import NativeDraw
from snapstream.exec.row_state import UNIFORM_BITS, NewRow, SamplingNeeds, signed
from snapstream.exec.rows import Rows
from snapstream.exec.sampling import NO_TOKEN, WEIGHT_ONE, Sampled, sample
from snapstream.exec.sampling_state import SamplingState
from snapstream.kernels.cpu.looped.build import InstructionSet, find_compiler, instruction_sets
from snapstream.kernels.cpu.looped.library import Draw, Sampling, ThreadPool, load
from snapstream.step import FIRST, GOLDEN, SECOND, WORD
from snapstream.types import SamplingParams

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

COUNTERS = ("last_token", "num_tokens")
STOPS = [0, 3]
INFINITE = float("inf")


class Side:
    """Rows that either program draws for; both sides of a test are made alike."""

    def __init__(self, batch: Sequence[SamplingParams], vocab_size: int, library: Any = None, threads: int = 1) -> None:
        self.state = SamplingState(len(batch) + 1, vocab_size, "cpu")
        self.counters = Rows(len(batch) + 1, "cpu")
        self.needs = SamplingNeeds.of(batch)
        stops = [token for token in STOPS if token < vocab_size - 1]
        for row, params in enumerate(batch):
            prompt = [token % vocab_size for token in range(row, 40, 3)]
            self.state.set_rows([NewRow(row, params, params.seed or row, prompt, stops)])
        self.native: NativeDraw | None = None
        if library is not None:
            self.pool = ThreadPool(library, threads)
            self.native = NativeDraw(self.pool, self.state, self.counters, len(batch))

    def draw(self, logits: Tensor, rows: Tensor) -> Sampled:
        if self.native is not None:
            return self.native.draw(logits, rows, self.needs)
        sampled = sample(logits, self.state, rows, self.needs)
        self.counters.advance(rows, sampled.token_ids)
        return sampled

    def left(self) -> dict[str, list[Any]]:
        """What a draw may change; of rows without penalties nobody reads the counts."""
        kept = {name: getattr(self.counters, name).tolist() for name in COUNTERS}
        counted = (self.state.repetition != 1) | (self.state.frequency != 0) | (self.state.presence != 0)
        counts = self.state.output_counts[counted].tolist()
        return kept | {"num_sampled": self.state.num_sampled.tolist(), "output_counts": counts}


def params(**options: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, **options)


@st.composite
def sampling(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    token = st.integers(0, vocab_size - 1)
    return params(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.6, 1.0, 1.3, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 20, 300]) | st.integers(1, vocab_size + 1)),
        top_p=draw(st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.9999999, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.4, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.6])),
        logit_bias=draw(st.none() | st.dictionaries(token, st.sampled_from([-100.0, -1.25, 3.1]), max_size=4)),
        min_tokens=draw(st.sampled_from([0, 0, 2])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


def logits_of(kind: str, count: int, vocab_size: int, seed: int) -> Tensor:
    """[count, V] fp32."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(count, vocab_size, generator=generator)
    if kind == "ties":
        return (plain * 8).round() / 4
    if kind == "forbidden":
        plain[torch.rand(plain.shape, generator=generator) < 0.7] = -INFINITE
        plain[:, vocab_size // 2] = 0.0
    if kind == "outlier":  # the others share the first buckets of a search
        plain = plain * 1e-4
        plain[:, vocab_size - 1] = 5.0
    return plain * {"sharp": 12.0, "huge": 1e30, "tiny": 1e-40, "flat": 0.0}.get(kind, 3.0)


KINDS = ("ties", "forbidden", "outlier", "sharp", "huge", "tiny", "flat", "plain")


@pytest.mark.parametrize("instructions", instruction_sets())
@settings(max_examples=75)
@given(
    data=st.data(), vocab_size=st.sampled_from([1, 2, 7, 33, 700, 1025, 4608]), kind=st.sampled_from(KINDS),
    threads=st.integers(1, min(2, num_cores())),
    has_grammar=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_tokens_and_state_equal_the_definition(
    data: st.DataObject, vocab_size: int, kind: str, instructions: InstructionSet, threads: int, has_grammar: bool,
    seed: int,
) -> None:  # fmt: skip
    batch = data.draw(st.lists(sampling(vocab_size), min_size=1, max_size=4))
    rows = torch.tensor(data.draw(st.permutations(range(len(batch)))))
    native, plain = Side(batch, vocab_size, load(instructions), threads), Side(batch, vocab_size)
    for step in range(3):
        if has_grammar:
            words = torch.randint(-(2**31), 2**31, (len(batch), -(-vocab_size // 32)), dtype=torch.int32)
            words[0] = (0, -1, 9)[step]  # nothing, all, and the stop ids only
            words[0, 1:] *= step % 2
            for side in (native, plain):
                side.needs = replace(side.needs, grammar=True)
                side.state.allow(list(range(len(batch))), words)
        logits = logits_of(kind, len(batch), vocab_size, seed + step)
        before = logits.clone()
        assert torch.equal(native.draw(logits, rows).token_ids, plain.draw(logits, rows).token_ids)
        assert torch.equal(logits, before)
    assert native.left() == plain.left()


def test_it_knows_all_that_a_request_can_ask_for() -> None:
    """Whoever adds a sampling parameter is told here that looped steps draw without it so far."""
    assert all(hasattr(Sampling, name) for name in SamplingState(1, 5, "cpu").tensors())
    asked = {field.name for field in fields(SamplingNeeds)}
    by_row = {"random", "top_k", "top_p", "min_p"}  # which a row's own numbers tell
    assert asked == {name for name in asked if hasattr(Draw, name)} | by_row | {"num_logprobs"}


MIXED = (
    params(temperature=0.6, top_k=20, top_p=0.95),
    params(temperature=0.0),
    params(temperature=1.0),
    params(temperature=1.2, top_p=0.9),
    params(temperature=100.0, top_p=0.7, min_p=0.9),
    params(temperature=0.9, min_p=0.05, frequency_penalty=0.3),
    params(temperature=1.0, top_k=9000, top_p=0.99),
)


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("vocab_size", [32000, 151936])
def test_large_vocabularies(vocab_size: int, instructions: InstructionSet) -> None:
    native, plain = Side(MIXED, vocab_size, load(instructions)), Side(MIXED, vocab_size)
    rows = torch.arange(len(MIXED))
    for seed, kind in enumerate(("plain", "ties", "outlier")):
        logits = logits_of(kind, len(MIXED), vocab_size, seed)
        assert torch.equal(native.draw(logits, rows).token_ids, plain.draw(logits, rows).token_ids)


def test_every_k_and_every_token_of_the_cumulative_weights() -> None:
    """Many seeds over the same few tied logits: a threshold or a boundary that is off by one token would show."""
    vocab_size, seeds = 37, 40
    row = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(2)) * 2).round() / 2
    for options in [{"top_k": k} for k in range(1, vocab_size + 1)] + [{"top_p": p / 20} for p in range(1, 20)]:
        batch = [params(temperature=1.5, seed=seed, **options) for seed in range(seeds)]
        logits, rows = row.expand(seeds, vocab_size).contiguous(), torch.arange(seeds)
        native, plain = Side(batch, vocab_size, load()), Side(batch, vocab_size)
        for _ in range(3):
            assert torch.equal(native.draw(logits, rows).token_ids, plain.draw(logits, rows).token_ids)


def stream_of_uniform(numerator: int) -> int:
    """The stream whose first number is ``numerator / 2^53``: SplitMix64's finaliser backwards."""
    word = numerator << (64 - UNIFORM_BITS)
    for shift, factor in ((31, SECOND), (27, FIRST), (30, 1)):
        word ^= word >> shift ^ word >> 2 * shift
        word = word * pow(factor, -1, 2**64) & WORD
    return signed((word - GOLDEN) & WORD)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.99}, {"top_k": 4000}], ids=str)
def test_numbers_that_fall_on_a_boundary(options: dict[str, Any]) -> None:
    """Between two of 4,096 equal tokens the later one is drawn, and never one of the forbidden before them."""
    vocab_size, places = 8192, (0, 1, 63, 64, 65, 2047, 2048, 4095)
    row = torch.full((vocab_size,), -INFINITE)
    row[::2] = 1.5
    batch = [params(temperature=0.7, **options) for _ in range(len(places) + 1)]
    logits, rows = row.expand(len(batch), vocab_size).contiguous(), torch.arange(len(batch))
    native, plain = Side(batch, vocab_size, load()), Side(batch, vocab_size)
    numbers = [place * 2**41 for place in places] + [2**53 - 1]
    for side in (native, plain):
        side.state.stream[: len(batch)] = torch.tensor([stream_of_uniform(number) for number in numbers])
    found = native.draw(logits, rows).token_ids
    assert found.tolist() == [2 * place for place in (*places, 4095)]
    assert torch.equal(found, plain.draw(logits, rows).token_ids)


@pytest.mark.parametrize("others", [0, 500])
def test_a_nucleus_that_the_last_unit_of_weight_decides(others: int) -> None:
    """The likeliest of two tokens holds ``top_p`` of the weight exactly, or all but one unit of it."""
    both = WEIGHT_ONE + int(math.exp(-1.0) * WEIGHT_ONE)
    row = torch.tensor([-1.0, 0.0] + [-29.3] * others)  # the others weigh nothing, and make the search take its rounds
    drawn = []
    for limit in (WEIGHT_ONE, WEIGHT_ONE + 1):
        share = (limit - 0.5) / both
        assert math.ceil(both * share) == limit
        batch = [params(temperature=1.0, top_p=share, seed=seed) for seed in range(40)]
        logits, rows = row.expand(len(batch), len(row)).contiguous(), torch.arange(len(batch))
        native, plain = Side(batch, len(row), load()), Side(batch, len(row))
        drawn.append(native.draw(logits, rows).token_ids.tolist())
        assert drawn[-1] == plain.draw(logits, rows).token_ids.tolist()
    assert (set(drawn[0]), set(drawn[1])) == ({1}, {0, 1})


@pytest.mark.skipif(num_cores() < 2, reason="one core")
def test_a_token_depends_on_its_row_alone() -> None:
    logits, tokens = logits_of("plain", len(MIXED), 5000, 1), []
    for threads, size in ((1, 7), (2, 7), (2, 3), (2, 1)):
        side = Side(MIXED, 5000, load(), threads)
        parts = [rows.flip(0) for rows in torch.arange(len(MIXED)).split(size)]
        tokens.append({})
        for rows in parts:
            tokens[-1] |= dict(zip(rows.tolist(), side.draw(logits[rows], rows).token_ids.tolist(), strict=True))
    assert all(own == tokens[0] for own in tokens)


def test_a_draw_that_does_not_feed_rows() -> None:
    native, plain = Side(MIXED, 900, load()), Side(MIXED, 900)
    logits, rows = logits_of("plain", len(MIXED), 900, 4), torch.arange(len(MIXED))
    before = native.left()
    assert native.native is not None
    found = native.native.sample(logits, rows, native.needs).token_ids
    assert torch.equal(found, sample(logits, plain.state, rows, plain.needs).token_ids)
    assert native.left() == plain.left() != before
    assert {name: before[name] for name in COUNTERS} == {name: native.left()[name] for name in COUNTERS}


@pytest.mark.parametrize("wrong", [float("nan"), INFINITE, -INFINITE])
def test_logits_that_are_not_finite_draw_no_token(wrong: float) -> None:
    """At any place, and only the row whose they are."""
    for place in (0, 63, 64, 1500, 2499):
        logits = logits_of("plain", len(MIXED), 2500, 3)
        if wrong == -INFINITE:
            logits[2:4] = wrong
        logits[2:4, place] = wrong
        native, plain = Side(MIXED, 2500, load()), Side(MIXED, 2500)
        rows = torch.arange(len(MIXED))
        found = native.draw(logits, rows).token_ids
        assert torch.equal(found, plain.draw(logits, rows).token_ids)
        assert (found == NO_TOKEN).tolist() == [False, False, True, True, False, False, False]
        assert native.left()["last_token"] == plain.left()["last_token"]


def test_a_score_that_penalties_make_infinite_is_drawn() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 9] = 3e38
    side = Side([params(temperature=1.0, repetition_penalty=0.01, top_p=0.5)], 300, load())
    assert side.draw(logits, torch.tensor([0])).token_ids.tolist() == [9]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [2, 7, 700, 40000])
def test_log_probabilities_are_those_of_the_definition(vocab_size: int, kind: str) -> None:
    """By the logits as they are, whatever the row asks for; the likeliest in the same order, ties by their ids."""
    batch = [replace(own, logprobs=3) for own in MIXED] + [params(temperature=0.0, logit_bias={1: 9.0}, logprobs=20)]
    native, plain = Side(batch, vocab_size, load()), Side(batch, vocab_size)
    logits, rows = logits_of(kind, len(batch), vocab_size, 0), torch.arange(len(batch))
    logits[4, 1] = float("nan")
    others = [0, 1, 2, 3, 5, 6, 7]
    found, want = native.draw(logits, rows), plain.draw(logits, rows)
    for own, same in zip(found, want, strict=True):
        assert own is not None and same is not None
        torch.testing.assert_close(own[others], same[others], rtol=1e-6, atol=1e-5)
    assert (
        found.top_ids is not None
        and want.top_ids is not None
        and torch.equal(found.top_ids[others], want.top_ids[others])
    )
    assert found.token_ids[4] == NO_TOKEN
