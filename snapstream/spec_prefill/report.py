"""What a draft did to a prompt, as data and as a self-contained HTML page: dropped text struck through, scores on
hover.

Invariant: every character of a source text passes ``html.escape``; the page has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from snapstream.types import CompressionSummary


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
class CompressionReport(CompressionSummary):
    """The summary, the draft's own counts, and the scores of every text."""

    counted_with: str  # "target", or "draft" where the target's tokenizer is not known
    draft_tokens_before: int
    draft_tokens_after: int
    texts: tuple[TextReport, ...] = ()

    def as_dict(self, *, with_text: bool = False) -> dict[str, Any]:
        """Plain data for JSON; the source texts only if asked for."""
        data = asdict(self) | {"is_applied": self.is_applied, "ratio": self.ratio}
        if not with_text:
            for text in data["texts"]:
                del text["text"]
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedText:
    """A shorter prompt and how it came about: a ``text`` if a text was given, else ``messages``.

    Roles, order and everything but the contents of messages are as they were.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    report: CompressionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedIds:
    """Kept token ids of a prompt and the positions they had in it, for a target with the draft's own tokenizer."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    report: CompressionReport


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8884; border-radius: 6px; padding: 1rem; }
.cut { color: #8889; text-decoration: line-through; }
.kept { background: color-mix(in srgb, #3b82f6 calc(var(--heat) * 45%), transparent); }
td, th { text-align: left; padding: .1rem 1.2rem .1rem 0; font-weight: normal; }
th { color: #888; }
"""


def report_page(report: CompressionReport, title: str = "Prompt compression") -> str:
    """The page."""
    facts = [
        ("applied", "yes" if report.is_applied else f"no: {report.reason}"),
        (
            "tokens",
            f"{report.tokens_before:,} to {report.tokens_after:,} ({report.ratio:.1%}), {report.counted_with}'s",
        ),
        ("draft tokens", f"{report.draft_tokens_before:,} to {report.draft_tokens_after:,}"),
        ("draft time", f"{report.draft_ms:,.0f} ms"),
    ]
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>\n" for name, value in facts)
    texts = "".join(f"<h2>{escape(_name(text))}</h2>\n<pre>{''.join(_pieces(text))}</pre>\n" for text in report.texts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<table>\n{rows}</table>\n"
        f"{texts}</body>\n</html>\n"
    )


def _name(text: TextReport) -> str:
    if text.message is None:
        return "Text"
    return f"Message {text.message}" + (f", part {text.part}" if text.part is not None else "")


def _pieces(text: TextReport) -> Iterator[str]:
    """The source in order, every run of characters of one state and one chunk in its own element."""
    highest = max((chunk.score for chunk in text.chunks), default=0.0) or 1.0
    borders = {0, len(text.text), *(i for span in text.spans for i in span)}
    borders.update(i for chunk in text.chunks for i in (chunk.start, chunk.end))
    cuts = sorted(i for i in borders if 0 <= i <= len(text.text))
    spans, chunks = list(text.spans), list(text.chunks)
    for start, end in zip(cuts, cuts[1:], strict=False):
        while spans and spans[0][1] <= start:
            spans.pop(0)
        while chunks and chunks[0].end <= start:
            chunks.pop(0)
        is_kept = bool(spans) and spans[0][0] <= start
        chunk = chunks[0] if chunks and chunks[0].start <= start else None
        words = escape(text.text[start:end])
        score = "protected" if chunk is None else f"score {chunk.score:.3g}" + (", chosen" if chunk.is_kept else "")
        if is_kept:
            heat = 0.0 if chunk is None else max(chunk.score, 0.0) / highest
            yield f'<span class="kept" style="--heat: {heat:.3f}" title="{escape(score)}">{words}</span>'
        else:
            yield f'<span class="cut" title="{escape(score)}">{words}</span>'
