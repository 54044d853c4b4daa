"""Corner cases of single options: stop ids, penalties, ties, nucleus, temperature, ends of the draw."""

from __future__ import annotations

import math

import pytest
import torch

from snapstream.layers import sampler
from snapstream.layers.sampler import WEIGHT_ONE, sample, weights
from snapstream.layers.sampling_state import SamplingNeeds, SamplingState
from snapstream.request import SamplingParams


def one_row(params: SamplingParams, vocab_size: int = 6, prompt: tuple[int, ...] = ()) -> SamplingState:
    state = SamplingState(1, vocab_size, "cpu")
    state.set_row(0, params, 0, prompt, (3, 5))
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
    state.set_row(0, SamplingParams(), 0, [], [])
    logits = torch.zeros(1, 8193)
    logits[0, -1] = -29.1
    mass = weights(logits, state, torch.tensor([0]), SamplingNeeds(random=True, top_p=True))
    assert mass[0, -1] == 1 and mass.sum() == 8192 * WEIGHT_ONE + 1


@pytest.mark.parametrize(("at", "token"), [(0.0, 1), (0.25, 2), (1 - 2**-53, 2)])
def test_the_ends_of_the_distribution(monkeypatch: pytest.MonkeyPatch, at: float, token: int) -> None:
    """Tokens without weight are never drawn, and an interval holds its left end but not its right one."""
    monkeypatch.setattr(sampler, "uniform", lambda stream, counter: torch.tensor([at], dtype=torch.float64))
    state, row = SamplingState(1, 4, "cpu"), torch.tensor([0])
    for one in (1, 2**20 - 1, 2**60 - 1, 2**60):  # totals that float64 holds, and one that it rounds up
        mass = torch.tensor([[0, one, 3 * one, 0]])
        assert sampler.draw(mass, state, row).tolist() == [token]


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
