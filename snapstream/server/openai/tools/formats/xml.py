r"""Calls whose arguments are between tags, so that code needs no escapes.

qwen3_coder   <tool_call>\n<function=f>\n<parameter=k>\nvalue\n</parameter>\n</function>\n</tool_call>
glm45         <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>value</arg_value>\n</tool_call>       GLM-4.5, 4.6
glm47         the same without line breaks                                                         GLM-4.7
minimax_m2    <minimax:tool_call>\n<invoke name="f">\n<parameter name="k">value</parameter>\n</invoke>\n</minimax:...>
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from snapstream.server.openai.tools.format import (
    MAX_HEAD,
    ArgumentReader,
    CallFormat,
    Function,
    GrammarBuilder,
    Head,
    bare_name,
    expect,
    next_is,
    option,
    overlap,
    skip_space,
)
from snapstream.server.openai.tools.values import Wrapping, as_json, each_property, kinds_of


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The text around keys and values."""

    key_start: str
    key_end: str
    value_start: str  # after the key, and white space; empty: the value begins at once
    value_end: str
    end: str  # of the arguments; consumed
    other_end: str = ""  # also ends them; not consumed
    has_lines: bool = False  # a line break before and after a value is not part of it


class TaggedArguments:
    """Reads the arguments of one call, a pair of tags for each parameter, as JSON.

    Parameters that the schema types as strings are streamed; other values come whole. Text between parameters that is
    no tag is dropped.
    """

    def __init__(self, tags: Tags, schema: Mapping[str, Any]) -> None:
        self._tags, self._schema = tags, schema
        self._properties = schema.get("properties")
        self._text = ""  # not consumed yet
        self._json = ""  # not returned yet
        self._kinds: frozenset[str] = frozenset()
        self._step = self._between
        self._is_first, self._is_over = True, False
        self.is_closed = False

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        self._text, self._json, self._is_over = text, "", is_over
        while not self.is_closed and self._step():
            pass
        return len(text) - len(self._text), self._json

    def _between(self) -> bool:
        """The next key, or the end."""
        tags = self._tags
        self._text = self._text[skip_space(self._text, 0) :]
        if self._text.startswith(tags.key_start):
            return self._key()
        for end in filter(None, (tags.end, tags.other_end)):
            if self._text.startswith(end):
                self._text = self._text[len(end) if end == tags.end else 0 :]
                self._json += "{}" if self._is_first else "}"
                self.is_closed = True
                return False
        starts = filter(None, (tags.key_start, tags.end, tags.other_end))
        if not self._text or any(start.startswith(self._text) for start in starts):
            self._text = "" if self._is_over else self._text
            return False
        place = self._text.find("<", 1)
        self._text = "" if place < 0 else self._text[place:]
        return bool(self._text)

    def _key(self) -> bool:
        """A key, up to the start of its value."""
        tags, text = self._tags, self._text
        end = text.find(tags.key_end, len(tags.key_start))
        if end < 0 and len(text) <= MAX_HEAD:
            return self._wait()
        key, place = text[len(tags.key_start) : end].strip(), end + len(tags.key_end)
        if end >= 0 and tags.value_start:
            place = skip_space(text, place)
            if not text.startswith(tags.value_start, place):
                if tags.value_start.startswith(text[place:]):
                    return self._wait()
                end = -1
            place += len(tags.value_start)
        if end >= 0 and tags.has_lines:
            if place == len(text) and not self._is_over:
                return False
            place += text.startswith("\n", place)
        if end < 0:  # no key after all
            self._text = text[len(tags.key_start) :]
            return True
        schemas = self._properties if isinstance(self._properties, Mapping) else {}
        self._kinds = kinds_of(schemas.get(key), self._schema)
        self._json += ("{" if self._is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._json += '"' if self._is_text else ""
        self._is_first = False
        self._text = text[place:]
        self._step = self._value
        return True

    def _wait(self) -> bool:
        self._text = "" if self._is_over else self._text
        return False

    @property
    def _is_text(self) -> bool:
        return self._kinds == {"string"}

    def _value(self) -> bool:
        tags = self._tags
        place = self._text.find(tags.value_end)
        if place >= 0:
            value = self._text[:place]
            value = value.removesuffix("\n") if tags.has_lines else value
            self._json += _escaped(value) + '"' if self._is_text else as_json(value, self._kinds)
            self._text = self._text[place + len(tags.value_end) :]
            self._step = self._between
            return True
        if self._is_text:
            ends = (tags.value_end, "\n" + tags.value_end) if tags.has_lines else (tags.value_end,)
            place = len(self._text) - overlap(self._text, ends)  # this may be the start of the closing tag
            self._json += _escaped(self._text[:place])
            self._text = self._text[place:]
        return self._wait()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


CALL, CALL_END = "<tool_call>", "</tool_call>"


class Qwen3Coder(CallFormat):
    name = "qwen3_coder"
    marks = (CALL, "<function=")  # it sometimes omits the first
    tags = (CALL, CALL_END)
    _tags: ClassVar[Tags] = Tags(
        key_start="<parameter=", key_end=">", value_start="", value_end="</parameter>", end="</function>",
        other_end=CALL_END, has_lines=True,
    )  # fmt: skip

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, CALL) if next_is(text, 0, CALL) else 0
        name, place = bare_name(text, expect(text, place, "<function="), names)
        return Head(name, expect(text, place, ">"), (CALL_END,))

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        return TaggedArguments(self._tags, schema)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        wrapping = Wrapping(lambda key: f"<parameter={key}>\n", "\n</parameter>\n")
        head = rules.text(f"{CALL}\n<function={function.name}>\n")
        return f"{head} {each_property(rules, function, wrapping)} {rules.text(f'</function>{chr(10)}{CALL_END}')}"


class Glm45(CallFormat):
    name = "glm45"
    marks = (CALL,)
    tags = (CALL, CALL_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    _line: ClassVar[str] = "\n"
    _tags: ClassVar[Tags] = Tags(
        key_start="<arg_key>", key_end="</arg_key>", value_start="<arg_value>", value_end="</arg_value>", end=CALL_END
    )

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        name, place = bare_name(text, expect(text, 0, CALL), names)
        if not next_is(text, place, "<arg_key>"):
            expect(text, place, CALL_END)
        return Head(name, place)

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        return TaggedArguments(self._tags, schema)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        line = self._line
        wrapping = Wrapping(lambda key: f"<arg_key>{key}</arg_key>{line}<arg_value>", f"</arg_value>{line}")
        head = rules.text(f"{CALL}{function.name}{line}")
        return f"{head} {each_property(rules, function, wrapping)} {rules.text(CALL_END)}"


class Glm47(Glm45):
    name = "glm47"
    between = ""
    _line = ""


SECTION, SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"


class MiniMaxM2(CallFormat):
    """One section may have several calls."""

    name = "minimax_m2"
    marks = (SECTION,)
    tags = (SECTION, SECTION_END)
    before, after = f"{SECTION}\n", f"\n{SECTION_END}"
    _tags: ClassVar[Tags] = Tags(
        key_start='<parameter name="', key_end='">', value_start="", value_end="</parameter>", end="</invoke>",
        other_end=SECTION_END,
    )  # fmt: skip

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = option(text, 0, SECTION)
        name, place = bare_name(text, expect(text, place, "<invoke", 'name="'), names)
        return Head(name, expect(text, place, '"', ">"), (SECTION_END,))

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        return TaggedArguments(self._tags, schema)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        wrapping = Wrapping(lambda key: f'<parameter name="{key}">', "</parameter>\n")
        head = rules.text(f'<invoke name="{function.name}">\n')
        return f"{head} {each_property(rules, function, wrapping)} {rules.text('</invoke>')}"
