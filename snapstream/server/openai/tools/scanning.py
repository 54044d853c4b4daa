"""Looks at the beginning of a call and finds the end of its arguments, in text that may go on.

Invariant: an answer about a text holds however the text goes on; if there is none yet, ``Unready`` is raised.
``parser.py`` decides what to do with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from snapstream.server.openai.tools.formats import CallFormat

MAX_HEAD = 1024  # characters; what is longer is no head
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"([^"\\]*)(")?')


class Unready(Exception):
    """More text is needed."""


class NoCall(Exception):
    """The text is not the head of a call."""


class ArgumentScanner:
    """Finds the brace that closes an object whose opening one was read; strings are jumped over."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_closed = False

    def scan(self, text: str) -> int:
        """How many characters belong to the object. Each character must be given once."""
        for place, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_string = char != '"'
                self._is_escaped = char == "\\"
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return place + 1
        return len(text)


def read_head(text: str, form: CallFormat, names: Collection[str], *, has_calls: bool) -> tuple[str, int]:
    """Name of the call and where its arguments begin (with their brace)."""
    is_cut, text = len(text) > MAX_HEAD, text[:MAX_HEAD]
    try:
        place = len(form.opening)  # ``_seek`` found it
        if not form.opening:
            place = _expect(text, 0, form.between.strip()) if has_calls else option(text, 0, form.mark)
        place = _expect(text, place, "{")
        if _looks_at(text, place, '"type"'):  # Llama 3.1 writes it now and then
            for piece in ('"type"', ":", '"function"', ","):
                place = _expect(text, place, piece)
        for piece in ('"name"', ":"):
            place = _expect(text, place, piece)
        name, place = _name(text, place, names)
        place = _expect(text, place, ",")
        key = '"arguments"' if _looks_at(text, place, '"arguments"') else '"parameters"'
        for piece in (key, ":"):
            place = _expect(text, place, piece)
        return name, _expect(text, place, "{") - 1
    except Unready:
        if is_cut:
            raise NoCall from None
        raise


def skip_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _looks_at(text: str, place: int, piece: str) -> bool:
    """Whether ``piece`` comes next; Unready while that is open."""
    place = skip_space(text, place)
    rest = text[place : place + len(piece)]
    if rest == piece:
        return True
    if piece.startswith(rest) and place + len(rest) == len(text):
        raise Unready
    return False


def _expect(text: str, place: int, piece: str) -> int:
    if not _looks_at(text, place, piece):
        raise NoCall
    return skip_space(text, place) + len(piece)


def option(text: str, place: int, piece: str) -> int:
    return _expect(text, place, piece) if _looks_at(text, place, piece) else place


def _name(text: str, place: int, names: Collection[str]) -> tuple[str, int]:
    place = skip_space(text, place)
    if place == len(text):
        raise Unready
    found = _NAME.match(text, place)
    if found is None:
        raise NoCall
    if found[2] is None:
        if found.end() == len(text) and any(name.startswith(found[1]) for name in names):
            raise Unready
        raise NoCall
    if found[1] not in names:
        raise NoCall
    return found[1], found.end()
