"""The mixing function of the random streams in plain integers: what a row keeps of its seed, and a draw. No torch.

SplitMix64's finaliser (Steele, Lea, Flood 2014). ``random.py`` does the same on tensors, and says why.
"""

from __future__ import annotations

WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: steps of the counter are spread over all bits
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
UNIFORM_BITS = 53  # a float64 holds 53 bits exactly


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


def mix64(word: int) -> int:
    """SplitMix64's finaliser over unsigned 64-bit words: an input bit flips half of the output bits."""
    word &= WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def stream_of(seed: int) -> int:
    """What a row keeps of its seed, as an int64. Mixed, so that neighbouring seeds are unrelated streams."""
    return signed(mix64((seed + GOLDEN) & WORD))


def uniform_scalar(stream: int, counter: int) -> float:
    """``random.uniform`` for one pair of integers."""
    word = mix64((stream + (counter + 1) * GOLDEN) & WORD)
    return (word >> (64 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS
