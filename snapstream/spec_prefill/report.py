"""What a draft did to a prompt: plain frozen data that can be printed, stored and drawn (``page.py``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChunk:
    """Some draft tokens of a text: characters ``start .. end - 1``, their mean score, and whether they were chosen."""

    start: int
    end: int
    score: float
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReport:
    """One text that was cut: the whole prompt, or the content of a message."""

    message: int | None  # index of the message; None for a plain text
    part: int | None  # index of the content part, where the content is a list
    text: str  # the source
    spans: tuple[tuple[int, int], ...]  # characters that are still there, ascending and disjoint
    chunks: tuple[ScoredChunk, ...]  # the candidates; what lies outside them was protected
    num_draft_tokens: int  # of the candidates
    num_passages: int  # in which the draft read them; 0: from the cache
    is_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimReport:
    """Whether the prompt was cut, why not, and the counts. Tokens are the target's if its tokenizer was given."""

    is_applied: bool
    reason: str  # why the prompt was left alone; empty if it was cut
    counted_with: str  # "target", or "draft" where the target's tokenizer is not known
    tokens_before: int
    tokens_after: int
    draft_tokens_before: int
    draft_tokens_after: int
    draft_ms: float  # reading and scoring; 0 where everything came from the cache
    num_cached: int  # texts whose scores came from the cache
    texts: tuple[TextReport, ...] = ()

    @property
    def ratio(self) -> float:
        """Tokens after over tokens before."""
        return self.tokens_after / self.tokens_before if self.tokens_before else 1.0

    def as_dict(self, *, with_text: bool = False) -> dict[str, Any]:
        """Plain data for JSON; the source texts only if asked for."""
        data = asdict(self) | {"ratio": self.ratio}
        if not with_text:
            for text in data["texts"]:
                del text["text"]
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedText:
    """A shorter prompt and how it came about: a ``text`` if a text was given, else ``messages``.

    Roles, order and everything beside the contents of messages are as they were.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    report: TrimReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedIds:
    """Kept token ids of a prompt and the positions they had in it, for a target with the draft's own tokenizer."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    report: TrimReport
