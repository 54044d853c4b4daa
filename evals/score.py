"""Right or wrong, and how sure a share of right answers is.

A value counts when it is contained in the answer, upper and lower case alike (RULER's rule). The first answer token
comes out of the uncompressed prefill, so a cell is also scored without it: the first token is taken off both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def is_right(answer: str, value: str) -> bool:
    """The value is contained in the answer."""
    return value.lower() in answer.lower()


def is_right_after_first(answer: Sequence[str], value: Sequence[str]) -> bool:
    """The same for token texts, without the first token of both; a value of one token cannot be judged so."""
    if len(value) < 2:
        raise ValueError(f"the value {''.join(value)!r} is one token; it says nothing about the cache")
    return is_right("".join(answer[1:]), "".join(value[1:]))


def share(results: Sequence[bool]) -> tuple[float, float]:
    """Share of right answers and its standard error, both in points (0 to 100)."""
    if not results:
        raise ValueError("no answers to average")
    mean = sum(results) / len(results)
    return 100 * mean, 100 * math.sqrt(mean * (1 - mean) / len(results))
