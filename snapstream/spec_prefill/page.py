"""A ``TrimReport`` as one self-contained HTML page: kept text plain, cut text struck through, scores on hover.

Invariant: every character of a source text passes ``html.escape``; the page has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from snapstream.spec_prefill.report import TextReport, TrimReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8884; border-radius: 6px; padding: 1rem; }
.cut { color: #8889; text-decoration: line-through; }
.kept { background: color-mix(in srgb, #3b82f6 calc(var(--heat) * 45%), transparent); }
td, th { text-align: left; padding: .1rem 1.2rem .1rem 0; font-weight: normal; }
th { color: #888; }
"""


def report_page(report: TrimReport, title: str = "Prompt compression") -> str:
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
