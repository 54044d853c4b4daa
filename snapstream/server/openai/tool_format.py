"""``CallFormat``: how a model writes tool calls, parsed with ``read_head`` and enforced with ``write_call``.

Invariants: ``read_head`` and the argument reader parse what a grammar of ``write_call`` makes a model write. Results of
parsing hold however the text continues; ``NeedMoreText`` is raised while they would not. What an argument reader
returns, put together, is a prefix of valid JSON, and does not depend on how the text was split into pieces.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from uuid import uuid4

from snapstream.grammar import closed, schema_options
from snapstream.types import MAX_GRAMMAR_CHARS

CUSTOM_INPUT = "input"  # the one parameter of a custom tool, as the model sees it


@dataclass(frozen=True, kw_only=True)
class Function:
    """A tool that the model calls with arguments."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of the type object
    is_strict: bool = False  # refuse a schema that cannot be enforced whole
    is_custom: bool = False  # clients get the text of ``CUSTOM_INPUT`` instead of JSON
    lark: str = ""  # of a custom tool whose text follows a Lark grammar,
    regex: str = ""  # or a regular expression


class GrammarBuilder:
    """A Lark grammar for llguidance, line by line.

    Clients' text is quoted; special tokens of the vocabulary are named by their ids.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        """``special``: ids of the special tokens of the vocabulary, by their text."""
        self.special = special
        self._lines: list[str] = []
        self._num_chars = 0  # of schemas
        known = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """Text as an expression; empty text as nothing."""
        if self._special is None:
            return json.dumps(text) if text else ""
        parts, place = [], 0
        for found in self._special.finditer(text):
            parts += [json.dumps(text[place : found.start()]), f"<[{self.special[found[0]]}]>"]
            place = found.end()
        return " ".join(part for part in [*parts, json.dumps(text[place:])] if part != '""')

    def add(self, stem: str, body: str) -> str:
        """Add a rule; returns its name."""
        name = f"{stem}_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def add_until(self, end: str) -> str:
        """Add a rule for any text that ends with ``end``; returns its name."""
        if self._special is not None and self._special.search(end):  # text cannot contain it
            return self.add("text", f"/(?s:.*)/ {self.text(end.lstrip())}")
        name = f"text_{len(self._lines)}"
        self._lines.append(f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/")
        return name

    def arguments(self, function: Function) -> str:
        """A rule for a call's arguments as one JSON object. ValueError for a custom tool with a Lark grammar."""
        if function.lark:
            raise ValueError(
                f"the tool {function.name!r} has a Lark grammar, and this model writes arguments as JSON, in which "
                "only a regular expression can be enforced"
            )
        return self.schema(function.parameters, strict=function.is_strict)

    def schema(self, schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
        """A rule for JSON of this schema; a separate one, so that references inside it stay valid."""
        self._num_chars += len(json.dumps(schema))
        self._check(self._num_chars)
        whole = closed(schema)
        options = {"x-guidance": schema_options(strict=strict)}
        return self.add("json", f"%json {json.dumps({**whole, **options} if isinstance(whole, dict) else options)}")

    def custom(self, function: Function) -> str:
        """A rule for the unquoted text of a custom tool with a grammar; "" if it has none."""
        if function.lark:
            return self.add("custom", f"%lark {{\n{function.lark}\n}}")
        return self.add("custom", self.regex(function.regex)) if function.regex else ""

    def regex(self, pattern: str) -> str:
        """A regular expression as a terminal; llguidance ends it at the first slash that is not escaped."""
        out, is_escaped = [], False
        for char in pattern:
            out.append("\\/" if char == "/" and not is_escaped else "\\n" if char == "\n" else char)
            is_escaped = char == "\\" and not is_escaped
        return f"/{''.join(out)}/"

    def check_size(self, functions: Sequence[Function]) -> None:
        """ValueError for schemas that are too large together, before they are used."""
        self._check(sum(len(json.dumps(function.parameters)) for function in functions))

    def _check(self, num_chars: int) -> None:
        if num_chars > MAX_GRAMMAR_CHARS:
            raise ValueError(f"the schemas of all tools have more than {MAX_GRAMMAR_CHARS} characters")

    def choice(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(expressions)})"

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines])


ID_MEMBER = ', "id": "..."'  # as a piece of a tail: an id after the arguments
MAX_HEAD = 1024  # characters of a head, at most
_SPACE = re.compile(r"\s*")
_QUOTED = re.compile(r'"([^"\\]*)(")?')
_BARE = re.compile(r"[A-Za-z0-9_.:/-]*")  # what the names of functions are made of


class NeedMoreText(Exception):
    """More text is needed."""


class NotACall(Exception):
    """The text is not the head of a call."""


def skip_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def next_is(text: str, place: int, piece: str) -> bool:
    """Whether ``piece`` comes next, after white space. NeedMoreText if that is undecided."""
    place = skip_space(text, place)
    rest = text[place : place + len(piece)]
    if rest == piece:
        return True
    if piece.startswith(rest) and place + len(rest) == len(text):
        raise NeedMoreText
    return False


def expect(text: str, place: int, *pieces: str) -> int:
    """The end of ``pieces``, which must come next; NotACall else."""
    for piece in pieces:
        if not next_is(text, place, piece):
            raise NotACall
        place = skip_space(text, place) + len(piece)
    return place


def option(text: str, place: int, piece: str) -> int:
    """The end of ``piece`` if it comes next, else ``place``."""
    return expect(text, place, piece) if next_is(text, place, piece) else place


def skip_tail(text: str, tail: Sequence[str]) -> int:
    """The end of what follows the arguments of a call: those pieces of ``tail`` that are there."""
    place = 0
    for piece in tail:
        place = _skip_id(text, place) if piece == ID_MEMBER else option(text, place, piece)
    return place


def _skip_id(text: str, place: int) -> int:
    if not next_is(text, place, ",") or not next_is(text, end := expect(text, place, ","), '"id"'):
        return place
    end = text.find('"', expect(text, end, '"id"', ":", '"'))
    if end < 0:
        raise NeedMoreText
    return end + 1


def quoted_name(text: str, place: int, names: Collection[str]) -> tuple[str, int]:
    """A known name in quotes, and its end."""
    place = skip_space(text, place)
    if place == len(text):
        raise NeedMoreText
    found = _QUOTED.match(text, place)
    if found is None:
        raise NotACall
    if found[2] is None:
        if found.end() == len(text) and any(name.startswith(found[1]) for name in names):
            raise NeedMoreText
        raise NotACall
    if found[1] not in names:
        raise NotACall
    return found[1], found.end()


def bare_word(text: str, place: int) -> tuple[str, int]:
    """Characters of names, and where they end."""
    found = _BARE.match(text, place)
    end = found.end() if found else place
    if end == len(text):
        raise NeedMoreText
    return text[place:end], end


def bare_name(text: str, place: int, names: Collection[str]) -> tuple[str, int]:
    """A known name without quotes, and its end."""
    place = skip_space(text, place)
    try:
        word, end = bare_word(text, place)
    except NeedMoreText:
        if any(name.startswith(text[place:]) for name in names):
            raise
        raise NotACall from None
    if word not in names:
        raise NotACall
    return word, end


_BEGINNING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.", re.DOTALL
)  # two halves of a pair, any other character by its number, any other escape
_CUT_ESCAPE = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?"
)  # the beginning of one of the first two, to the end of the text

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_UNESCAPED = re.compile(r"""[^"'\\\x00-\x1f]+""")
_COMMA = re.compile(r",[ \t\r\n]*")
_WORD = re.compile(r"""[^\s,:"'{}\[\]][^\s,:"{}\[\]]*""")
_ATOM = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

MAX_DEPTH = 100  # of brackets; parsers of JSON take 200 to 1,000


class ArgumentReader(Protocol):
    """Reads the arguments of one call. ``is_closed``: the arguments have ended."""

    is_closed: bool

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        """How many characters of ``text`` were consumed, and their JSON. The rest is passed again with more text
        appended; ``is_over``: there is no more text."""
        ...


class JsonArguments:
    """An object as the model wrote it, up to the brace that closes it.

    JSON passes unchanged. Anything else is repaired, because clients parse the arguments while they arrive and send
    them back: control characters and wrong escapes in strings are escaped, bare words and Python's quotes become
    strings, missing separators are added, superfluous ones dropped.
    """

    def __init__(self) -> None:
        self._open = ""  # brackets, the outermost first
        self._needs = "value"  # or key, colon, next (a separator or the end)
        self._quote = ""  # of the string that is being read
        self.is_closed = False

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        place, pieces = 0, []
        while place < len(text) and not self.is_closed:
            step = self._in_string(text, place) if self._quote else self._outside(text, place)
            if step is None:
                break
            place = step[0]
            pieces.append(step[1])
        return place, "".join(pieces)

    # Both consume what is at ``place``: where to continue, and its JSON. None: more text is needed.

    def _in_string(self, text: str, place: int) -> tuple[int, str] | None:
        if found := _UNESCAPED.match(text, place):
            return found.end(), found[0]
        char = text[place]
        if char == self._quote:
            self._quote = ""
            self._needs = "colon" if self._needs == "key" else "next"
            return place + 1, '"'
        if char != "\\":
            return place + 1, json.dumps(char)[1:-1]
        if _CUT_ESCAPE.fullmatch(text, place):
            return None
        found = _ESCAPE.match(text, place)
        assert found is not None
        escape = found[0]
        if escape == "\\'":
            return place + 2, "'"
        if len(escape) == 2 and escape[1] not in '"\\/bfnrt':
            return place + 1, "\\\\"
        return found.end(), "\\ufffd" if _HALF_PAIR.fullmatch(escape) else escape

    def _outside(self, text: str, place: int) -> tuple[int, str] | None:
        char, inner = text[place], self._open[-1:]
        if char.isspace():
            return place + 1, char if char in " \t\r\n" else ""
        if char == ",":
            return self._comma(text, place)
        if char == ":":
            is_due = self._needs == "colon"
            self._needs = "value" if is_due else self._needs
            return place + 1, ":" if is_due else ""
        if char in "}]":
            return place + 1, self._close("{" if char == "}" else "[")
        if self._needs == "next":
            self._needs = "key" if inner == "{" else "value"
            return place, ","
        if self._needs == "colon":
            self._needs = "value"
            return place, ":"
        if char in "\"'":
            self._quote = char
            return place + 1, '"'
        if char in "{[":
            return place + 1, self._begin(char)
        return self._word(text, place)

    def _comma(self, text: str, place: int) -> tuple[int, str] | None:
        found = _COMMA.match(text, place)
        assert found is not None
        if self._needs == "colon" or (self._needs == "value" and self._open[-1:] == "{"):
            return place, self._no_value()
        if self._needs != "next":
            return place + 1, ""
        if found.end() == len(text):
            return None
        if text[found.end()] in ",]}":
            return found.end(), ""
        self._needs = "key" if self._open[-1:] == "{" else "value"
        return found.end(), found[0]

    def _no_value(self) -> str:
        """What a key still lacks."""
        lacking = {"colon": ":null", "value": "null"}.get(self._needs, "") if self._open[-1:] == "{" else ""
        self._needs = "next"
        return lacking

    def _begin(self, bracket: str) -> str:
        if len(self._open) == MAX_DEPTH:
            return ""
        before = '"arguments":' if self._needs == "key" else ""
        self._open += bracket
        self._needs = "key" if bracket == "{" else "value"
        return before + bracket

    def _close(self, bracket: str) -> str:
        if bracket not in self._open:
            return ""
        place = self._open.rindex(bracket)
        pieces = [self._no_value(), *("}" if one == "{" else "]" for one in reversed(self._open[place:]))]
        self._open = self._open[:place]
        self.is_closed = not self._open
        return "".join(pieces)

    def _word(self, text: str, place: int) -> tuple[int, str] | None:
        found = _WORD.match(text, place)
        assert found is not None
        if found.end() == len(text):
            return None
        is_json = self._needs == "value" and _ATOM.fullmatch(found[0])
        self._needs = "colon" if self._needs == "key" else "next"
        return found.end(), found[0] if is_json else json.dumps(found[0], ensure_ascii=False)


class CustomInput:
    """Streams the text of a custom tool's one argument instead of the JSON around it.

    Arguments that do not start with that text are held back; if they turn out to have none, they are returned as they
    are.
    """

    def __init__(self, inner: ArgumentReader) -> None:
        self._inner = inner
        self._json = ""  # held back: all of it until the text starts, then an incomplete escape
        self._is_inside = self._has_ended = False
        self.is_closed = False

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        end, piece = self._inner.read(text, is_over=is_over)
        self.is_closed = self._inner.is_closed
        if self._has_ended:
            return end, ""
        self._json += piece
        if not self._is_inside:
            begun = _BEGINNING.match(self._json)
            if begun is None:
                return end, _input_of(self._json) if self.is_closed else ""
            self._is_inside, self._json = True, self._json[begun.end() :]
        return end, self._take()

    def _take(self) -> str:
        """The text so far, up to its end or the last complete escape."""
        text, place, out = self._json, 0, []
        while place < len(text) and text[place] != '"':
            found = _PLAIN.match(text, place)
            if found is None:
                found = None if _CUT_ESCAPE.fullmatch(text, place) else _ESCAPE.match(text, place)
                if found is None:
                    break
            out.append(_plain(found[0]))
            place = found.end()
        self._has_ended = text.startswith('"', place)
        self._json = text[place:]
        return "".join(out)


def _plain(piece: str) -> str:
    """A piece of a JSON string, decoded; unchanged if it is invalid."""
    try:
        return whole_characters(json.loads(f'"{piece}"', strict=False)) if piece[0] == "\\" else piece
    except ValueError:
        return piece


def whole_characters(text: str) -> str:
    """Half surrogate pairs, which no encoding can send, as replacement characters."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _input_of(text: str) -> str:
    """The text of ``CUSTOM_INPUT`` in whole arguments."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    value = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return whole_characters(value) if isinstance(value, str) else text


@dataclass(frozen=True, slots=True)
class Head:
    """What precedes the arguments of a call."""

    name: str
    end: int  # where the arguments begin
    tail: tuple[str, ...] = ()  # what may follow them, each once and in this order; it is dropped
    call_id: str = ""  # the model's own


class CallFormat(ABC):
    """How a family of models writes calls."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()  # texts that start a call
    is_whole: ClassVar[bool] = False  # an answer may also start with a call, without a mark
    tags: ClassVar[tuple[str, ...]] = ()  # special tokens, if the vocabulary has them, that text must show
    before: ClassVar[str] = ""  # a grammar writes this before the first call,
    between: ClassVar[str] = "\n"  # this between two,
    after: ClassVar[str] = ""  # and this after the last
    answer_head: ClassVar[str] = ""  # and this before an answer that is not a call
    call_head: ClassVar[str] = ""  # of a call before its arguments; %s is the name, which needs no escapes
    call_tail: ClassVar[str] = ""

    @abstractmethod
    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        """The head at the start of ``text``. NeedMoreText if it is incomplete, NotACall if there is none.

        ``is_next``: a call ended just before; otherwise the text starts with a mark, or is the whole answer.
        """

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        """A call of this function as an expression of a Lark grammar."""
        head, tail = rules.text(self.call_head % function.name), rules.text(self.call_tail)
        return f"{head} {self.write_arguments(rules, function)} {tail}".rstrip()

    def write_arguments(self, rules: GrammarBuilder, function: Function) -> str:
        """Its arguments, by default as one JSON object."""
        return rules.arguments(function)

    def in_vocabulary(self, special: Collection[str]) -> CallFormat:
        """The variant for a model with these special tokens."""
        return self

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        """A reader of one call's arguments; ``schema`` gives types that the notation does not show."""
        return JsonArguments()

    def new_id(self) -> str:
        """An id for a call to which the model gave none."""
        return f"call_{uuid4().hex[:24]}"
