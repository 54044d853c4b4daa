"""Which parts of a conversation may be dropped, where a text may be cut, and what the draft reads with it.

Always verbatim: system and developer messages, tools and tool calls, roles and template, the last tool outputs, short
messages, and a trailing assistant message (an answer to be continued). The last user message is verbatim too unless it
is long; then its first paragraph (if short) and its last paragraphs stay, because the request is there.

The draft reads a text with its request: the last user message's, or for a tool output the user message before it, which
does not change as the conversation grows, so that its scores can be cached.

Positions are those of characters; a boundary at ``i`` lies between ``text[i - 1]`` and ``text[i]``. Invariants: chunks
tile the text (characters that no token covers go to the chunk before them; bytes of one character that tokens share, to
the last of them); ``grow`` only widens a span and never splits a grapheme (base and combining marks, joined emoji,
flags, CR LF); spans are ascending, disjoint and never touch; the joined text consists of verbatim pieces of the source,
in order, and delimiters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.spec_prefill.settings import CHUNK_LEN, ChunkSettings, Protection, Snap

_WORD_LIMIT, _LINE_LIMIT = 48, 800  # characters to a boundary; farther ones are ignored
_SNIFFED, _SNIFFED_LINES = 20_000, 200  # characters, and lines of these, that tell the kind of a text
_JOINER = "\u200d"
_DEFINITION = re.compile(
    r"[ \t]*((export|public|private|protected|static|async|pub|final|abstract|override|inline|default|unsafe)[ \t]+)*"
    r"(def|class|fn|func|function|interface|struct|enum|trait|impl|module|namespace|type|object|record)\b"
)
_CODE_LINE = re.compile(
    r"[;{}]\s*$|^\s*(//|/\*|\*/|#include\b|import\b|from\b.+\bimport\b|return\b|@\w)|^\s*(if|for|while|else|elif|try)\b.*[:{(]\s*$"
    r"|\w\(.*\)[:;]?\s*$|^\s*\w[\w.\[\]]*\s*[-+*/|&]?=\s*\S|^\s*[)\]}]+[,;]?\s*$"
)
_HASH_LINE = re.compile(
    r"^\s*(#(?!include|define|if|endif|pragma)|def\b.*:|class\b.*:|elif\b|import \w|from \w.* import\b)"
)
_DEFINITION_LINES = 12  # how far up the head of a definition is looked for


def is_whole(text: str, i: int) -> bool:
    """True if a cut at ``i`` splits no grapheme (the common rules of Unicode's UAX 29)."""
    if i <= 0 or i >= len(text):
        return True
    left, right = text[i - 1], text[i]
    if left == "\r" and right == "\n":
        return False
    if right < "\u0300" and left != _JOINER:
        return True
    code = ord(right)
    if unicodedata.category(right)[0] == "M" or right == _JOINER or left == _JOINER:
        return False
    if 0x1F3FB <= code <= 0x1F3FF or 0xE0020 <= code <= 0xE007F:  # skin tones, tags
        return False
    if 0x1160 <= code <= 0x11FF and 0x1100 <= ord(left) <= 0x11FF:  # Hangul jamo of one syllable
        return False
    if _is_flag_half(left) and _is_flag_half(right):  # flags are pairs, counted from the first of a run
        run = 0
        while i - 1 - run >= 0 and _is_flag_half(text[i - 1 - run]):
            run += 1
        return run % 2 == 0
    return True


def _is_flag_half(char: str) -> bool:
    return 0x1F1E6 <= ord(char) <= 0x1F1FF


def _is_word_boundary(text: str, i: int) -> bool:
    left, right = text[i - 1], text[i]
    if left.isspace() or right.isspace():
        return True
    # Scripts without spaces: every character is a word.
    return unicodedata.east_asian_width(left) in "WF" or unicodedata.east_asian_width(right) in "WF"


def grow(text: str, start: int, end: int, snap: Snap, *, is_code: bool = False) -> tuple[int, int]:
    """Widen ``start .. end`` to the nearest boundaries outside it; a boundary too far away gives way to a finer one."""
    if snap == "line":
        left, right = _line_start(text, start), _line_end(text, end)
        if is_code and left is not None:
            left = _definition_start(text, left)
        start, end = _within(start, left), _within(end, right)
    if snap != "none":
        start, end = _word(text, start, -1), _word(text, end, 1)
    while not is_whole(text, start):
        start -= 1
    while not is_whole(text, end):
        end += 1
    return start, end


def _within(place: int, found: int | None) -> int:
    return place if found is None else found


def _word(text: str, i: int, step: int) -> int:
    """Nearest word boundary at or beyond ``i``; ``i`` itself if there is none near."""
    place = i
    while 0 < place < len(text) and not _is_word_boundary(text, place):
        place += step
        if abs(place - i) > _WORD_LIMIT:
            return i
    return place


def _line_start(text: str, i: int) -> int | None:
    low = max(0, i - _LINE_LIMIT)
    found = text.rfind("\n", low, i)
    if found >= 0:
        return found + 1
    return 0 if low == 0 else None


def _line_end(text: str, i: int) -> int | None:
    if i > 0 and text[i - 1] == "\n":
        return i
    high = i + _LINE_LIMIT
    found = text.find("\n", i, high)
    if found >= 0:
        return found + 1
    return len(text) if high >= len(text) else None


def _definition_start(text: str, line: int) -> int:
    """Head of the definition around the line at ``line``, decorators included, if it is a few lines up."""
    own, place = _indent(text, line), line
    for _ in range(_DEFINITION_LINES):
        if _DEFINITION.match(text, place) and (place == line or _indent(text, place) < own):
            above = _line_start(text, place - 1) if place else None
            while above is not None and text[above:place].lstrip(" \t").startswith("@"):
                place = above
                above = _line_start(text, place - 1) if place else None
            return place
        above = _line_start(text, place - 1) if place else None
        if above is None:
            break
        place = above
    return line


def _indent(text: str, line: int) -> int:
    """Width of the white space at the beginning of a line."""
    stop = line
    while stop < len(text) and text[stop] in " \t":
        stop += 1
    return stop - line


def looks_like_code(text: str) -> bool:
    """Whether most of the first lines look like a programming language."""
    lines = [line for line in text[:_SNIFFED].splitlines()[:_SNIFFED_LINES] if line.strip()]
    return len(lines) >= 3 and sum(bool(_CODE_LINE.search(line)) for line in lines) > len(lines) / 2


def code_delimiter(text: str) -> str:
    """A comment line that says that code is missing, in the text's own kind of comment."""
    lines = text[:_SNIFFED].splitlines()
    hashes = sum(bool(_HASH_LINE.match(line)) for line in lines)
    slashes = sum(
        line.lstrip().startswith(("//", "/*", "*")) or line.rstrip().endswith((";", "{", "}")) for line in lines
    )
    return "\n# omitted\n" if hashes > slashes else "\n// omitted\n"


Span = tuple[int, int]  # first character and the one after the last

TEXT_DELIMITER = "\n[...]\n"


class Cutter:
    """``ChunkSettings`` resolved for one text: its mode, chunk length, boundary and delimiter."""

    def __init__(self, settings: ChunkSettings, text: str) -> None:
        mode = settings.mode
        if mode == "auto":
            mode = "code" if looks_like_code(text) else "text"
        self.is_code = mode == "code"
        self.chunk_len = settings.chunk_len or CHUNK_LEN[mode]
        self.snap: Snap = settings.snap or ("line" if self.is_code else "word")
        self.delimiter = settings.delimiter or (code_delimiter(text) if self.is_code else TEXT_DELIMITER)

    def spans(self, text: str, chunks: Iterable[Span], forced: Iterable[Span] = ()) -> list[Span]:
        """Kept chunks grown to boundaries, and ``forced`` spans as they are; adjacent ones merged."""
        grown = [grow(text, start, end, self.snap, is_code=self.is_code) for start, end in merged(chunks)]
        return merged([*grown, *forced])

    def join(self, pieces: Sequence[str]) -> str:
        """Pieces that were not adjacent, with the delimiter between them; it does not double line ends."""
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


MAX_REQUEST = 2000  # characters of a request that the draft reads after another text: the last ones
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A text of which ``start .. end - 1`` may be compressed; ``after`` is what the draft reads after it."""

    text: str
    start: int
    end: int
    after: str = ""
    as_chat: bool = False
    message: int | None = None
    part: int | None = None

    @property
    def body(self) -> str:
        return self.text[self.start : self.end]


def candidates(messages: Sequence[Mapping[str, Any]], rules: Protection, count: Count) -> list[Candidate]:
    """Texts of a conversation that may be compressed, in order. ``count`` counts draft tokens."""
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    tools = [i for i, message in enumerate(messages) if message.get("role") == "tool"]
    fresh = set(tools[len(tools) - rules.recent_tools :]) if rules.recent_tools else set()
    last_user = users[-1] if users else None
    request = _request(messages, last_user, rules, count)
    found: list[Candidate] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        is_last_user = index == last_user
        is_prefix = role == "assistant" and index == len(messages) - 1
        if is_prefix or index in fresh or (role not in rules.roles and not is_last_user):
            continue
        texts = _texts(message)
        for part, text in texts:
            if is_last_user:
                is_last_part = part == texts[-1][0]
                if "user" in rules.roles and count(text) > rules.last_user_limit:
                    found.append(_in_last_user(text, index, part, is_last_part, request, rules, count))
            elif count(text) >= max(rules.min_message, 1):
                before = [i for i in users if i < index]
                own = _request(messages, before[-1], rules, count) if role == "tool" and before else request
                after = f"\n\n{own}" if own else ""
                found.append(
                    Candidate(text=text, start=0, end=len(text), after=after, as_chat=True, message=index, part=part)
                )
    return [candidate for candidate in found if candidate.body.strip()]


def _texts(message: Mapping[str, Any]) -> list[tuple[int | None, str]]:
    """Texts of a message with the index of their part (None where the content is one text)."""
    content = message.get("content")
    if isinstance(content, str):
        return [(None, content)]
    if not isinstance(content, Sequence):
        return []
    return [
        (i, part["text"])
        for i, part in enumerate(content)
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]


def _in_last_user(
    text: str, index: int, part: int | None, is_last_part: bool, request: str, rules: Protection, count: Count
) -> Candidate:
    start = head_end(text, rules.head, count)
    end = tail_start(text, rules.tail, count) if is_last_part else len(text)
    after = text[end:] if is_last_part else f"\n\n{request}"
    return Candidate(text=text, start=min(start, end), end=end, after=after, as_chat=True, message=index, part=part)


def _request(messages: Sequence[Mapping[str, Any]], user: int | None, rules: Protection, count: Count) -> str:
    """What a user message asks: all of it, or the tail of a long one."""
    texts = _texts(messages[user]) if user is not None else []
    if not texts:
        return ""
    text = texts[-1][1]
    if count(text) > rules.last_user_limit:
        text = text[tail_start(text, rules.tail, count) :]
    return text[-MAX_REQUEST:].strip()


def head_end(text: str, most: int, count: Count) -> int:
    """End of the first paragraph if it has at most ``most`` tokens and something follows it, else 0."""
    begin = len(text) - len(text.lstrip())
    boundary = text.find("\n\n", begin)
    if most == 0 or boundary < 0 or count(text[:boundary]) > most:
        return 0
    return boundary + 2


def tail_start(text: str, most: int, count: Count) -> int:
    """Where the last paragraphs begin, as many as have ``most`` tokens together.

    If the last paragraph alone is longer, lines count instead; if the last line is, a place about ``most`` tokens
    before the end, at a word.
    """
    if most == 0:
        return len(text)
    for boundary in ("\n\n", "\n"):
        best, place = len(text), len(text.rstrip())
        while place > 0:
            found = text.rfind(boundary, 0, place)
            begin = found + len(boundary) if found >= 0 else 0
            if count(text[begin:]) > most:
                break
            best, place = begin, found
        if text[best:].strip():
            return best
    size = max(1, len(text) * most // max(count(text), 1))  # characters of so many tokens, on average
    return grow(text, len(text) - size, len(text), "word")[0]
