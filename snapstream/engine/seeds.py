"""One random seed per sample, so that a sample never depends on its neighbours or on its place in the batch.

Invariant: the seed is a function of (request seed, sample index) alone. The sampler on the device mixes it
with the count of tokens drawn so far.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the increment of SplitMix64


def _mix(value: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits that mixes every bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample ``index``, 63 bits, so that it fits a signed device integer.

    The request's seed is mixed before the index is added: otherwise sample 1 of seed 7 would repeat sample 0
    of seed 8.
    """
    return _mix((_mix(seed & _MASK) + index) & _MASK) >> 1
