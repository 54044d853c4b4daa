"""Counter-based randomness: a uniform number is a pure function of (seed, counter).

Invariant: there is no generator and no state, so what a row draws depends on its own seed and on how many
tokens it has drawn, never on its row index, the batch or the neighbours. The mixing function is the finaliser
of SplitMix64 (Steele, Lea, Flood 2014), once over the seed on the host (``stream_of``) and once over stream +
counter on the device (``uniform``); ``mix64`` and ``uniform_scalar`` are the same in plain integers, for
reading and for the tests. torch has neither uint64 arithmetic nor a logical shift, so int64 wraps and shifts
are masked. Next: ``sampler.py``.
"""

from __future__ import annotations

from torch import Tensor, float64

WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: steps of the counter are spread over all bits
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
UNIFORM_BITS = 53  # a float64 holds 53 bits exactly


def _signed(word: int) -> int:
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
    return _signed(mix64((seed + GOLDEN) & WORD))


def uniform_scalar(stream: int, counter: int) -> float:
    """``uniform`` for one pair of integers."""
    word = mix64((stream + (counter + 1) * GOLDEN) & WORD)
    return (word >> (64 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical shift: int64 shifts drag the sign along, the mask drops it again."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix64(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * _signed(FIRST)
    words = (words ^ _shift_right(words, 27)) * _signed(SECOND)
    return words ^ _shift_right(words, 31)


def uniform(stream: Tensor, counter: Tensor) -> Tensor:
    """Float64 uniforms in [0, 1), one for each (stream, counter); both int64 of one shape."""
    words = _mix64(stream + (counter + 1) * _signed(GOLDEN))
    return _shift_right(words, 64 - UNIFORM_BITS).to(float64) * 2.0**-UNIFORM_BITS
