"""How much of an answer is right, and how sure a mean of such scores is.

A reference counts when it is contained in the answer, upper and lower case alike; with several references the score is
their share (RULER's rule). The first answer token comes out of the uncompressed prefill, so an answer is also scored
without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def found(answer: str, references: Sequence[str]) -> list[bool]:
    """For every reference: is it contained in the answer?"""
    if not references:
        raise ValueError("an answer without references cannot be judged")
    return [reference.lower() in answer.lower() for reference in references]


def found_after_first(answer: Sequence[str], references: Sequence[Sequence[str]]) -> list[bool]:
    """The same for token texts, without the first token of the answer.

    A reference that the answer begins with loses its first token too, whether or not that token was right. One that is
    a single token and stands there says nothing about the cache and is left out.
    """
    rest = "".join(answer[1:]).lower()
    out = []
    for reference in references:
        whole, tail = "".join(reference).strip().lower(), "".join(reference[1:]).lower()
        if tail:
            out.append(whole in rest or rest.startswith(tail))
        elif not answer or "".join(answer[:1]).strip().lower() != whole:
            out.append(whole in rest)
    return out


def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
    """Mean of scores from 0 to 1 and its standard error, both in points (0 to 100); binomial for zeros and ones."""
    if not scores:
        raise ValueError("no answers to average")
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / len(scores)
    return 100 * mean, 100 * math.sqrt(variance / len(scores))
