"""Reads tool calls out of an answer as it comes: content, then calls whose arguments stream.

    text --> content ... <opening> { "name": "f" , "arguments" : { ....... } } <closing> --> content or the next call
                          held back until the head is whole    streamed

Invariant: what comes out does not depend on how the text was cut into pieces, and nothing is taken back. A call stands
as soon as the head is whole and names a known tool; a fault before that makes the text content, a fault after it stays
in the arguments, as the model wrote them. ``formats.py`` has the formats, ``scanning.py`` looks at a call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from snapstream.server.openai.tools.formats import CallFormat
from snapstream.server.openai.tools.scanning import ArgumentScanner, NoCall, Unready, option, read_head, skip_space

THINK, THOUGHT = "<think>", "</think>"  # Qwen 3 thinks first; a call in there is a thought


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a call's arguments."""

    index: int
    text: str


Event = Content | CallStart | CallPiece


class ToolCallParser:
    """One sample's answer. ``push`` pieces in order, then ``finish`` once."""

    def __init__(self, form: CallFormat, names: Collection[str], *, max_calls: int | None = None) -> None:
        """``names``: known tools. ``max_calls``: what follows so many calls is dropped."""
        self._form = form
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._text = ""  # not dealt with yet
        self._step = self._begin
        self._is_over = False  # no more text will come
        self._arguments = ArgumentScanner()
        self._events: list[Event] = []
        self.num_calls = 0

    def push(self, piece: str) -> list[Event]:
        """What this piece of text completes."""
        self._text += piece
        return self._run()

    def finish(self) -> list[Event]:
        """The rest: what was held back is content now."""
        self._is_over = True
        return self._run()

    def _run(self) -> list[Event]:
        self._events = []
        while self._step():
            pass
        return _joined(self._events)

    # Each step handles the beginning of the text and says whether another may go on now.

    def _begin(self) -> bool:
        """At the first visible character it shows whether the model thinks, or (without tags) calls."""
        stripped = self._text.lstrip()
        if not stripped and not self._is_over:
            return False
        if not self._is_over and len(stripped) < len(THINK) and THINK.startswith(stripped):
            return False
        if stripped.startswith(THINK):
            self._step = self._think
        elif self._form.opening:
            self._step = self._seek
        else:
            self._step = self._head
        return True

    def _think(self) -> bool:
        """Content up to the end of the thought."""
        place = self._text.find(THOUGHT)
        if place < 0:
            self._release(_overlap(self._text, THOUGHT))
            return False
        self._show(place + len(THOUGHT))
        self._step = self._seek if self._form.opening else self._head
        return True

    def _seek(self) -> bool:
        """Content up to the next opening tag."""
        place = self._text.find(self._form.opening)
        if place < 0:
            self._release(_overlap(self._text, self._form.opening))
            return False
        self._show(place)
        self._step = self._head
        return True

    def _head(self) -> bool:
        """The text begins like a call, or it is content."""
        try:
            name, end = read_head(self._text, self._form, self._names, has_calls=self.num_calls > 0)
        except Unready:
            if not self._is_over:
                return False
            name, end = "", 0
        except NoCall:
            name, end = "", 0
        if not name:
            self._show(len(self._form.opening))
            self._step = self._seek if self._form.opening else self._rest
            return True
        self._text = self._text[end:]
        self._arguments = ArgumentScanner()
        self._events.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self._step = self._stream
        return True

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def _stream(self) -> bool:
        """Arguments, to the brace that closes them."""
        end = self._arguments.scan(self._text)
        if end:
            self._events.append(CallPiece(self.num_calls - 1, self._text[:end]))
            self._text = self._text[end:]
        if not self._arguments.is_closed:
            return False
        self._step = self._after_call
        return True

    def _after_call(self) -> bool:
        """The end of the call itself, which says nothing; the closing tag may have been forgotten."""
        try:
            place = option(self._text, 0, "}")
            if self._form.closing:
                place = option(self._text, place, self._form.closing)
        except Unready:
            if not self._is_over:
                return False
            place = len(self._text)
        self._text = self._text[place:]
        self._step = self._between
        return True

    def _between(self) -> bool:
        """White space between two calls, and after the last, is nobody's content."""
        start = skip_space(self._text, 0)
        if start == len(self._text):
            if self._is_over:
                self._text = ""
            return False
        if self._is_full:
            self._step = self._drop
        elif self._form.opening:
            self._text = self._text[start:]
            self._step = self._seek
        else:
            self._step = self._head
        return True

    def _rest(self) -> bool:
        self._release(0)
        return False

    def _drop(self) -> bool:
        self._text = ""
        return False

    def _release(self, num_held: int) -> None:
        """Show all but the last ``num_held`` characters, which may begin a tag."""
        self._show(len(self._text) - (0 if self._is_over else num_held))

    def _show(self, count: int) -> None:
        if count:
            self._events.append(Content(self._text[:count]))
        self._text = self._text[count:]


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` with which ``tag`` begins."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, CallPiece) and isinstance(last, CallPiece) and event.index == last.index:
            out[-1] = CallPiece(event.index, last.text + event.text)
        else:
            out.append(event)
    return out
