"""From chunks of draft tokens to character spans of the source text, and back to a shorter text.

Invariants: chunks tile the text, so every character belongs to exactly one (characters that no token covers go to the
chunk before them; bytes of one character that tokens share, to the last of them); spans are ascending, disjoint and
never touch; the joined text consists of verbatim pieces of the source, in order, and delimiters. ``borders.py`` says
where a span may end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from snapstream.spec_prefill.borders import code_delimiter, grow, looks_like_code
from snapstream.spec_prefill.settings import CHUNK_LEN, CutSettings, Snap

Span = tuple[int, int]  # first character and the one after the last

TEXT_DELIMITER = "\n[...]\n"


class Cutter:
    """``CutSettings`` resolved for one text: its mode, chunk length, border and delimiter."""

    def __init__(self, settings: CutSettings, text: str) -> None:
        mode = settings.mode
        if mode == "auto":
            mode = "code" if looks_like_code(text) else "text"
        self.is_code = mode == "code"
        self.chunk_len = settings.chunk_len or CHUNK_LEN[mode]
        self.snap: Snap = settings.snap or ("line" if self.is_code else "word")
        self.delimiter = settings.delimiter or (code_delimiter(text) if self.is_code else TEXT_DELIMITER)

    def spans(self, text: str, chunks: Iterable[Span], forced: Iterable[Span] = ()) -> list[Span]:
        """Kept chunks grown to borders, and ``forced`` spans as they are; neighbours merged."""
        grown = [grow(text, start, end, self.snap, is_code=self.is_code) for start, end in merged(chunks)]
        return merged([*grown, *forced])

    def join(self, pieces: Sequence[str]) -> str:
        """Pieces that were not neighbours, with the delimiter between them; it does not double line ends."""
        out = ""
        for piece in pieces:
            if out:
                out += self.delimiter.lstrip("\n") if out.endswith("\n") else self.delimiter
            out += piece
        return out


def chunk_spans(starts: Sequence[int], text_len: int, chunk_len: int) -> list[Span]:
    """Character span of each run of ``chunk_len`` tokens whose first characters are ``starts``; they tile the text."""
    if not starts:
        return []
    cuts = [0, *starts[chunk_len::chunk_len], text_len]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Ascending, disjoint, not touching; empty spans are dropped."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def check_spans(spans: Iterable[Span], text_len: int) -> list[Span]:
    """Spans that a caller wants kept, merged; ValueError for one outside the text."""
    spans = [(int(start), int(end)) for start, end in spans]
    for start, end in spans:
        if not 0 <= start <= end <= text_len:
            raise ValueError(f"keep span ({start}, {end}) lies outside the text of {text_len} characters")
    return merged(spans)
