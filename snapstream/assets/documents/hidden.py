"""One number in text that repeats itself (InfiniteBench's pass key and number string): exact retrieval."""

from __future__ import annotations

from snapstream.assets.documents.document import Fact
from snapstream.assets.documents.draw import Draw
from snapstream.assets.documents.words import HIDDEN_FACTS

FAMILIES = tuple(HIDDEN_FACTS)
REPEATED_SENTENCES = 4  # sentences that the filler repeats


def fact(draw: Draw, family: str) -> Fact:
    """The sentence that hides the number; the document asks for nothing else."""
    digits, sentence, question = HIDDEN_FACTS[family]
    low = 10 ** (digits - 1)
    value = draw.from_split(lambda: str(draw.rng.randrange(low, 10 * low)))
    return Fact(sentence.format(v=value), "", value, value, question, family)


def filler(draw: Draw) -> list[str]:
    """The sentences to repeat."""
    return [draw.filler() for _ in range(REPEATED_SENTENCES)]
