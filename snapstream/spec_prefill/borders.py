"""Where a text may be cut: between characters as people see them, at words, sentences, lines, definitions.

Everything works on character positions of the source text; a border at ``i`` lies between ``text[i - 1]`` and
``text[i]``. Invariant: ``grow`` only ever widens a span, and its ends never split a character that people see as one
(base and combining marks, joined emoji, flags, CR LF). ``spans.py`` uses it.
"""

from __future__ import annotations

import re
import unicodedata

from snapstream.spec_prefill.settings import Snap

_LIMITS: dict[str, int] = {"word": 48, "sentence": 400, "line": 800}  # characters; farther borders are not looked for
_JOINER = "\u200d"
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]|\n")
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
    """True if a cut at ``i`` splits no character as people see it (the common rules of Unicode's UAX 29)."""
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


def _is_word_border(text: str, i: int) -> bool:
    left, right = text[i - 1], text[i]
    if left.isspace() or right.isspace():
        return True
    # Scripts without spaces: every wide character is a word.
    return unicodedata.east_asian_width(left) in "WF" or unicodedata.east_asian_width(right) in "WF"


def grow(text: str, start: int, end: int, snap: Snap, *, is_code: bool = False) -> tuple[int, int]:
    """Widen ``start .. end`` to the nearest borders outside it; a border too far away gives way to a finer one."""
    if snap == "line":
        left, right = _line_start(text, start), _line_end(text, end)
        if is_code and left is not None:
            left = _definition_start(text, left)
        start, end = _within(start, left), _within(end, right)
    elif snap == "sentence":
        start, end = _within(start, _sentence_start(text, start)), _within(end, _sentence_end(text, end))
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
    """Nearest word border at or beyond ``i``; ``i`` itself if there is none near."""
    place = i
    while 0 < place < len(text) and not _is_word_border(text, place):
        place += step
        if abs(place - i) > _LIMITS["word"]:
            return i
    return place


def _line_start(text: str, i: int) -> int | None:
    low = max(0, i - _LIMITS["line"])
    found = text.rfind("\n", low, i)
    if found >= 0:
        return found + 1
    return 0 if low == 0 else None


def _line_end(text: str, i: int) -> int | None:
    if i > 0 and text[i - 1] == "\n":
        return i
    high = i + _LIMITS["line"]
    found = text.find("\n", i, high)
    if found >= 0:
        return found + 1
    return len(text) if high >= len(text) else None


def _sentence_start(text: str, i: int) -> int | None:
    low = max(0, i - _LIMITS["sentence"])
    # One character more than the span's start, so that an end of sentence right before it is seen.
    ends = [match.end() for match in _SENTENCE_END.finditer(text, low, i) if match.end() <= i]
    if ends:
        return ends[-1]
    return 0 if low == 0 else None


def _sentence_end(text: str, i: int) -> int | None:
    low, high = max(0, i - 8), i + _LIMITS["sentence"]
    for match in _SENTENCE_END.finditer(text, low, min(high, len(text))):
        if match.end() >= i:
            return match.end()
    return len(text) if high >= len(text) else None


def _definition_start(text: str, line: int) -> int:
    """Head of the definition that the line at ``line`` lies in, decorators included, if it is a few lines up."""
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


def looks_like_code(text: str, num_lines: int = 200) -> bool:
    """Whether most of the first lines look like a programming language."""
    lines = [line for line in text[:20_000].splitlines()[:num_lines] if line.strip()]
    return len(lines) >= 3 and sum(bool(_CODE_LINE.search(line)) for line in lines) > len(lines) / 2


def code_delimiter(text: str) -> str:
    """A comment line that says that code is missing, in the text's own kind of comment."""
    lines = text[:20_000].splitlines()
    hashes = sum(bool(_HASH_LINE.match(line)) for line in lines)
    slashes = sum(
        line.lstrip().startswith(("//", "/*", "*")) or line.rstrip().endswith((";", "{", "}")) for line in lines
    )
    return "\n# omitted\n" if hashes > slashes else "\n// omitted\n"
