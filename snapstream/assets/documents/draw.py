"""Draws keys, values and filler. One generator per document; this module decides what a split may use.

Invariant: the order of draws is part of the format. A new kind of draw comes from a family of its own, so that old
families keep their documents.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random

from snapstream.assets.documents.document import Style
from snapstream.assets.documents.words import (
    ADJECTIVES,
    FILLER,
    FIRST_NAMES,
    KV_LINES,
    LAST_NAMES,
    NOUNS,
    NUMBER_FACTS,
    PLACES,
    SYLLABLES,
    TIMES,
    VERBS,
    WORDS_FACTS,
)


def is_heldout(text: str) -> bool:
    """Whether a key or value belongs to the held-out split: one in eight, by checksum."""
    return zlib.crc32(text.encode()) % 8 == 0


class Draw:
    """Draws keys, values and filler of one document."""

    def __init__(self, rng: Random, style: Style, split: str) -> None:
        self.rng, self.style, self.heldout = rng, style, split == "heldout"
        self.adjectives = ADJECTIVES[: style.num_words]
        self.nouns = NOUNS[: style.num_words]
        self.used: set[str] = set()
        self.number_fact = rng.choice(NUMBER_FACTS)
        self.words_fact = rng.choice(WORDS_FACTS)
        self.kv_line = rng.choice(KV_LINES)

    def coin(self) -> str:
        """An invented word."""
        return "".join(self.rng.choice(SYLLABLES) for _ in range(self.rng.randint(2, 3)))

    def from_split(self, draw: Callable[[], str]) -> str:
        """The first drawn text that belongs to the split."""
        while True:
            text = draw()
            if is_heldout(text) == self.heldout:
                return text

    def unused(self, draw: Callable[[], str]) -> str:
        """The first drawn text that this document has not had."""
        while True:
            text = draw()
            if text not in self.used:
                self.used.add(text)
                return text

    def key(self) -> str:
        """An unused key: adjective and noun, now and then with an invented word."""

        def draw() -> str:
            words = [self.rng.choice(self.adjectives)] if self.style.key_words > 1 else []
            words.append(self.rng.choice(self.nouns))
            if self.rng.random() < self.style.coined:
                words[self.rng.randrange(len(words))] = self.coin()
            return " ".join(words)

        if self.style.key_words == 1:  # single words are too few to hold any out
            return self.unused(draw)
        return self.unused(lambda: self.from_split(draw))

    def number(self) -> str:
        """A number of `value_digits` digits."""
        low = 10 ** (self.style.value_digits - 1)
        return self.from_split(lambda: str(self.rng.randrange(low, 10 * low)))

    def uuid(self) -> str:
        """Three groups of four hexadecimal digits."""
        return self.from_split(lambda: "-".join(f"{self.rng.randrange(65536):04x}" for _ in range(3)))

    def words(self) -> str:
        """A value of `value_words` words."""
        count = self.style.value_words
        pool = self.adjectives + self.nouns
        return self.from_split(lambda: " ".join(self.rng.choice(pool) for _ in range(count)))

    def person(self) -> str:
        """An unused full name."""

        def draw() -> str:
            first, last = self.rng.choice(FIRST_NAMES), self.rng.choice(LAST_NAMES)
            return f"{first} {self.coin().capitalize() if self.rng.random() < self.style.coined else last}"

        return self.unused(lambda: self.from_split(draw))

    def filler(self) -> str:
        """A sentence that says nothing anyone will ask about."""
        draw = self.rng.choice
        if self.rng.random() < self.style.gibberish:
            words = [self.coin() for _ in range(self.rng.randint(4, 8))]
            return " ".join(words).capitalize() + "."
        return draw(FILLER).format(
            a=draw(self.adjectives), b=draw(self.adjectives), n=draw(self.nouns), m=draw(self.nouns),
            p=draw(PLACES), t=draw(TIMES), v=draw(VERBS), f=draw(FIRST_NAMES), g=draw(FIRST_NAMES),
        )  # fmt: skip
