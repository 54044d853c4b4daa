"""Which chunks stay: a share of every text, or as many as fit a ceiling in target tokens.

Chunks of one text compete by score, ties going to the earlier. Texts that were scored apart cannot be compared by
score, so a ceiling takes from every text in the same proportion: a chunk's turn is its rank over the number of chunks.
Invariant: a choice that ``count`` finds above the ceiling is never returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Choice = list[set[int]]  # per text: indices of the chunks that stay


def ranked(scores: Sequence[float]) -> list[int]:
    """Indices, best first; ties go to the earlier."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def num_kept(num_chunks: int, keep: float) -> int:
    """``ceil(n * keep)``, not fooled by 0.1 * 30 being 3.0000000000000004."""
    return min(num_chunks, math.ceil(num_chunks * keep - 1e-9))


def keep_share(scores: Sequence[Sequence[float]], keep: float) -> Choice:
    """The best ``ceil(n * keep)`` chunks of every text (SpecPrefill, arXiv 2502.02789)."""
    return [set(ranked(own)[: num_kept(len(own), keep)]) for own in scores]


def keep_ceiling(scores: Sequence[Sequence[float]], max_tokens: int, count: Callable[[Choice], int]) -> Choice:
    """As many chunks as fit: the worst are taken away until ``count`` finds at most ``max_tokens``.

    ValueError if even nothing but the protected text is more.
    """
    turns = sorted(
        (rank / len(own), text, chunk) for text, own in enumerate(scores) for rank, chunk in enumerate(ranked(own))
    )

    def first(size: int) -> Choice:
        chosen: Choice = [set() for _ in scores]
        for _, text, chunk in turns[:size]:
            chosen[text].add(chunk)
        return chosen

    least = count(first(0))
    if least > max_tokens:
        raise ValueError(f"max_tokens is {max_tokens}; what must stay takes {least} tokens on its own")
    low, high = 0, len(turns)  # the counts grow with the size but for a delimiter now and then: low always fits
    while low < high:
        middle = (low + high + 1) // 2
        if count(first(middle)) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return first(low)
