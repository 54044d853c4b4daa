"""The counter-based generator: equal to its plain-integer twin, uniform, and without visible structure."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.layers.random import uniform
from snapstream.layers.splitmix import GOLDEN, mix64, stream_of, uniform_scalar

NUM_DRAWS = 100_000
INT64 = st.integers(-(2**63), 2**63 - 1)


def chi_square_limit(freedom: int) -> float:
    """Far right tail: five standard deviations above the mean."""
    return freedom + 5 * math.sqrt(2 * freedom)


def chi_square(bins: torch.Tensor, num_bins: int) -> float:
    counts = torch.bincount(bins, minlength=num_bins).double()
    expected = len(bins) / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


def draws(kind: str) -> torch.Tensor:
    """[NUM_DRAWS] uniforms: consecutive counters of one seed, or consecutive seeds at one counter."""
    if kind == "counters":
        return uniform(torch.full((NUM_DRAWS,), stream_of(7)), torch.arange(NUM_DRAWS))
    streams = torch.tensor([stream_of(seed) for seed in range(NUM_DRAWS)])
    return uniform(streams, torch.full((NUM_DRAWS,), 3))


def test_mix64_matches_published_splitmix64_outputs() -> None:
    # The first outputs of SplitMix64 started at 0, as printed in its reference implementations.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64(step * GOLDEN) for step in (1, 2, 3)] == published


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
    assert chi_square((draws(kind) * 1000).long(), 1000) < chi_square_limit(999)


@pytest.mark.parametrize("kind", ["counters", "seeds"])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbours_are_independent(kind: str, lag: int) -> None:
    values = draws(kind)
    first, second = values[:-lag], values[lag:]
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(NUM_DRAWS)
    cells = (first * 20).long() * 20 + (second * 20).long()
    assert chi_square(cells, 400) < chi_square_limit(399)


def test_seeds_do_not_share_a_shifted_stream() -> None:
    """Unmixed, seed s + GOLDEN would repeat the stream of s one step later; here no value is shared."""
    counters = torch.arange(1000)
    seen: set[float] = set()
    for seed in (0, 1, -1, GOLDEN - 2**64, 2**63 - 1):
        seen.update(uniform(torch.full_like(counters, stream_of(seed)), counters).tolist())
    assert len(seen) == 5 * 1000
