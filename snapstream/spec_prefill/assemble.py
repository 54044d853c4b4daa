"""From chosen chunks back to texts, conversations and reports.

Invariant: a text is made of verbatim pieces of its source; messages that were given are never changed.
``text_trimmer.py`` chooses, this module puts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snapstream.spec_prefill.protection import Candidate
from snapstream.spec_prefill.report import ScoredChunk, TextReport, TrimReport
from snapstream.spec_prefill.scorer import ScoredText
from snapstream.spec_prefill.select import Choice
from snapstream.spec_prefill.spans import Span, check_spans

Spans = Sequence[Span] | Mapping[int, Sequence[Span]]


def kept_tokens(scored: Sequence[ScoredText], choice: Choice) -> list[int]:
    """Draft tokens of the chosen chunks of each text."""
    return [sum(own.chunk_tokens[i] for i in chosen) for own, chosen in zip(scored, choice, strict=True)]


def kept_spans(candidate: Candidate, own: ScoredText, kept: set[int], forced: list[Span]) -> list[Span]:
    """Characters of the candidate's text that stay: kept chunks, what was never a candidate, forced spans."""
    always = [(0, candidate.start), (candidate.end, len(candidate.text)), *forced]
    return own.cutter.spans(candidate.text, [own.chunks[i] for i in kept], always)


def shorter_text(candidate: Candidate, spans: list[Span], own: ScoredText) -> str:
    if not spans and candidate.message is not None:
        return own.cutter.delimiter.strip()  # a message may not be empty
    return own.cutter.join([candidate.text[a:b] for a, b in spans])


def with_texts(
    messages: list[dict[str, Any]], found: Sequence[Candidate], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """The conversation with new texts in the places of the candidates; the messages given are not changed."""
    out = list(messages)
    for candidate, text in zip(found, texts, strict=True):
        assert candidate.message is not None
        message = out[candidate.message]
        content: Any = text
        if candidate.part is not None:
            content = list(message["content"])
            content[candidate.part] = {**content[candidate.part], "text": text}
        out[candidate.message] = {**message, "content": content}
    return out


def forced_in(messages: Sequence[Mapping[str, Any]], found: Sequence[Candidate], spans: Spans) -> list[list[Span]]:
    """``keep_spans`` per candidate; those of messages that are not cut are kept anyway."""
    if not spans:
        return [[] for _ in found]
    if not isinstance(spans, Mapping):
        raise ValueError("keep_spans is a list; for messages it must map the index of a message to its spans")
    for index in spans:
        if index not in range(len(messages)):
            raise ValueError(f"keep_spans names message {index!r}; there are {len(messages)}, from 0")
        if not isinstance(messages[index].get("content"), str):
            raise ValueError(f"keep_spans names message {index}, whose content is not one text")
    return [check_spans(spans.get(c.message, ()) if c.message is not None else (), len(c.text)) for c in found]


def text_report(candidate: Candidate, own: ScoredText, kept: set[int], forced: list[Span]) -> TextReport:
    return TextReport(
        message=candidate.message,
        part=candidate.part,
        text=candidate.text,
        spans=tuple(kept_spans(candidate, own, kept, forced)),
        chunks=tuple(
            ScoredChunk(start=a, end=b, score=score, is_kept=i in kept)
            for i, ((a, b), score) in enumerate(zip(own.chunks, own.scores, strict=True))
        ),
        num_draft_tokens=own.num_tokens,
        num_passages=own.num_passages,
        is_code=own.cutter.is_code,
    )


def make_report(
    reason: str,
    counted_with: str,
    before: int,
    after: int,
    scored: Sequence[ScoredText] = (),
    choice: Choice | None = None,
    texts: tuple[TextReport, ...] = (),
) -> TrimReport:
    return TrimReport(
        is_applied=not reason,
        reason=reason,
        counted_with=counted_with,
        tokens_before=before,
        tokens_after=after,
        draft_tokens_before=sum(own.num_tokens for own in scored),
        draft_tokens_after=sum(kept_tokens(scored, choice or [])),
        draft_ms=sum(own.draft_ms for own in scored),
        num_cached=sum(own.num_passages == 0 for own in scored),
        texts=texts,
    )
