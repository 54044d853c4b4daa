"""Seeds of samples: stable, 63 bits, and no two the same by construction."""

from hypothesis import given
from hypothesis import strategies as st

from snapstream.engine.seeds import sample_seed

ALL_BITS, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def split_mix(state: int) -> int:
    """The first number of SplitMix64 (Steele, Lea, Flood 2014), as published."""
    z = (state + GOLDEN) & ALL_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ALL_BITS
    return z ^ (z >> 31)


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 127))
def test_fits_a_signed_64_bit_integer(seed: int, index: int) -> None:
    assert 0 <= sample_seed(seed, index) < 2**63
    assert sample_seed(seed, index) == sample_seed(seed, index)


def test_neighbouring_seeds_and_samples_do_not_collide() -> None:
    seeds = {sample_seed(seed, index) for seed in range(-50, 50) for index in range(100)}
    assert len(seeds) == 100 * 100


def test_the_mapping_is_frozen() -> None:
    """A stored seed must give the same output in a later version."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # SplitMix64 started at 0
    assert [split_mix(step * GOLDEN) for step in range(3)] == published
    assert sample_seed(0, 0) == split_mix(published[0]) >> 1
    assert sample_seed(0, 5) == split_mix(published[0] + 5) >> 1
    assert sample_seed(-7, 3) == split_mix((split_mix(2**64 - 7) + 3) & ALL_BITS) >> 1
