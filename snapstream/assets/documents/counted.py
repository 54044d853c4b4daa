"""Aggregation (RULER's common and frequent words): a question asks for the commonest words, so every word counts.

The words that are asked for belong to the split; the others may be any. No word is part of another one that is
asked for, so that containment means the word itself.
"""

from __future__ import annotations

from collections.abc import Callable

from snapstream.assets.documents.draw import Draw
from snapstream.assets.documents.words import COMMON_QUESTIONS, FREQUENT_QUESTIONS

FAMILIES = ("common_words", "frequent_words")
COMMON_SHARE = 0.04  # of the words in a list, per common word
RARE_RATIO = 10  # a common word occurs so many times as often as another (RULER: 30 and 3)
ZETA_EXPONENT = 2.0  # of the frequent words' ranks (RULER: 2.0)


def _distinct(draw: Draw, word: Callable[[], str], count: int) -> list[str]:
    """Words of the split, none of them part of another."""
    found: list[str] = []
    while len(found) < count:
        candidate = draw.unused(lambda: draw.from_split(word))
        if not any(candidate in other or other in candidate for other in found):
            found.append(candidate)
    return found


def _cut(words: list[str], count_tokens: Callable[[str], int], target_tokens: int) -> list[str]:
    """As many of the words, from the front, as fit when a space stands before each."""
    num_tokens = 0
    for i, word in enumerate(words):
        num_tokens += count_tokens(f" {word}")
        if num_tokens > target_tokens:
            return words[:i]
    return words


def common_words(
    draw: Draw, count_tokens: Callable[[str], int], target_tokens: int, num_answers: int
) -> tuple[list[str], list[str]]:
    """The list and its common words in the order of their first occurrence, as (words, answers)."""
    pool = draw.adjectives + draw.nouns
    common = _distinct(draw, lambda: draw.rng.choice(pool), num_answers)
    others = [word for word in pool if not any(word in other or other in word for other in common)]
    others = draw.rng.sample(others, len(others))
    times = max(4, int(target_tokens * COMMON_SHARE))
    words = common * times
    rare = max(1, times // RARE_RATIO)
    num_tokens = sum(count_tokens(f" {word}") for word in common) * times
    for word in others:
        num_tokens += count_tokens(f" {word}") * rare
        if num_tokens > target_tokens:
            break
        words += [word] * rare
    words = _cut(draw.rng.sample(words, len(words)), count_tokens, target_tokens)
    return words, list(dict.fromkeys(word for word in words if word in common))


def frequent_words(
    draw: Draw, count_tokens: Callable[[str], int], target_tokens: int, num_answers: int
) -> tuple[list[str], list[str]]:
    """Invented words whose counts fall with the square of their rank, as (words, the most frequent by rank)."""
    ranked = _distinct(draw, draw.coin, max(20, 4 * num_answers))
    weights = [(rank + 1) ** -ZETA_EXPONENT for rank in range(len(ranked))]
    cost = sum(weight * count_tokens(f" {word}") for weight, word in zip(weights, ranked, strict=True))
    words = []
    for weight, word in zip(weights, ranked, strict=True):
        words += [word] * max(1, round(weight / cost * target_tokens))
    words = draw.rng.sample(words, len(words))
    kept = _cut(words, count_tokens, target_tokens)
    top = sorted(dict.fromkeys(kept), key=lambda word: (-kept.count(word), ranked.index(word)))
    return kept, top[:num_answers]


def make(
    draw: Draw, family: str, count_tokens: Callable[[str], int], target_tokens: int, num_answers: int
) -> tuple[str, str, tuple[str, ...]]:
    """A list as (text, question, answers)."""
    if family == "common_words":
        words, answers = common_words(draw, count_tokens, target_tokens, num_answers)
        question = draw.rng.choice(COMMON_QUESTIONS)
    else:
        words, answers = frequent_words(draw, count_tokens, target_tokens, num_answers)
        question = draw.rng.choice(FREQUENT_QUESTIONS)
    return " ".join(words), question.format(n=len(answers)), tuple(answers)
