"""A generated document: its text, the questions about it, and how hard it should be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a document. `spans` are character spans of the facts it needs, in the order of use.

    `spans` is empty where every word counts (aggregation).
    """

    text: str
    answer: str  # what a perfect model writes
    answers: tuple[str, ...]  # the parts of it that count, in its order; all are wanted
    family: str
    spans: tuple[tuple[int, int], ...]

    @property
    def value(self) -> str:
        """The parts of the answer that count, as one text."""
        return ", ".join(self.answers)

    def score(self, text: str) -> float:
        """Share of the answers contained in the text, upper and lower case alike (RULER's rule)."""
        lower = text.lower()
        return sum(answer.lower() in lower for answer in self.answers) / len(self.answers)

    def is_answered_by(self, text: str) -> bool:
        """All answers are contained in the text."""
        return self.score(text) == 1.0


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and the questions about it."""

    text: str
    questions: tuple[Question, ...]

    def prompt(self, question: Question, *, question_first: bool = False) -> str:
        """The user message that asks `question`: at the end of the document, or before it."""
        parts = (question.text, self.text) if question_first else (self.text, question.text)
        return "\n\n".join(parts)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How hard documents are; the defaults are the full task, a curriculum starts below them."""

    num_words: int = 10_000  # draw keys and values from so many adjectives and nouns
    key_words: int = 2  # words per key
    value_words: int = 3  # words per word value
    value_digits: int = 7  # digits per number value
    terse: float = 0.1  # share of questions that name the key and nothing else
    coined: float = 0.1  # share of key words that are invented on the spot, hence of several tokens
    max_depth: int = 3  # longest chain of assignments
    gibberish: float = 0.1  # share of filler sentences made of invented words
    split: str = "heldout"  # or "train": the keys and values of one never occur in the other


@dataclass(frozen=True)
class Fact:
    """One sentence to plant and the question about it."""

    sentence: str
    key: str
    answer: str
    value: str
    question: str
    family: str
    needs: tuple[str, ...] = ()  # sentences of other facts that the answer goes through
