"""Counter-based randomness: a uniform number is a pure function of (seed, counter).

Invariant: there is no generator and no state, so what a row draws depends on its own seed and on how many
tokens it has drawn, never on its row index, the batch or the neighbours. The mixing function is the finaliser
of SplitMix64, once over the seed on the host (``splitmix.stream_of``) and once over stream + counter on the device
(``uniform``); ``splitmix.py`` has it in plain integers, for reading and for the tests. torch has neither uint64
arithmetic nor a logical shift, so int64 wraps and shifts are masked. Next: ``sampler.py``.
"""

from __future__ import annotations

from torch import Tensor, float64

from snapstream.layers.splitmix import FIRST, GOLDEN, SECOND, UNIFORM_BITS, signed


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical shift: int64 shifts drag the sign along, the mask drops it again."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix64(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * signed(FIRST)
    words = (words ^ _shift_right(words, 27)) * signed(SECOND)
    return words ^ _shift_right(words, 31)


def uniform(stream: Tensor, counter: Tensor) -> Tensor:
    """Float64 uniforms in [0, 1), one for each (stream, counter); both int64 of one shape."""
    words = _mix64(stream + (counter + 1) * signed(GOLDEN))
    return _shift_right(words, 64 - UNIFORM_BITS).to(float64) * 2.0**-UNIFORM_BITS
