"""Calls as in Python, of Llama 3.2 and 4: ``[f(city="Paris", days=2), g()]``.

They are the whole answer, or between two special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from snapstream.server.openai.tools.format import (
    ArgumentReader,
    CallFormat,
    Function,
    GrammarBuilder,
    Head,
    bare_name,
    expect,
    option,
)
from snapstream.server.openai.tools.values import dumps, keyword_arguments, literal_as_json

_KEYWORD = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=(?!=)")


class PythonArguments:
    """Reads ``city="Paris", days=[1, 2])``, closing parenthesis included, as JSON, an argument at a time."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._names = list(properties) if isinstance(properties, Mapping) else []
        self._seen = 0  # scanned characters of the current argument
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._count = 0
        self.is_closed = False

    def read(self, text: str, *, is_over: bool) -> tuple[int, str]:
        start, json = 0, ""
        for place in range(self._seen, len(text)):
            if not self._ends_at(text[place]):
                continue
            json += self._argument(text[start:place])
            start = place + 1
            if text[place] == ")":
                self.is_closed = True
                json += "}" if self._count else "{}"
                break
        self._seen = len(text) - start
        if is_over and not self.is_closed:
            return len(text), json
        return start, json

    def _ends_at(self, char: str) -> bool:
        """Whether an argument ends before this character."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "'\"":
            self._quote = char
        elif self._depth == 0 and char in ",)":
            return True
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        return False

    def _argument(self, text: str) -> str:
        if not text.strip():
            return ""
        found = _KEYWORD.match(text)
        if found is not None:
            name, value = found[1], text[found.end() :]
        else:  # positional
            name, value = self._names[self._count] if self._count < len(self._names) else str(self._count), text
        json = ("{" if self._count == 0 else ", ") + f"{dumps(name)}: {literal_as_json(value)}"
        self._count += 1
        return json


START, END = "<|python_start|>", "<|python_end|>"


class Llama4Pythonic(CallFormat):
    name = "llama4_pythonic"
    marks = (START,)
    is_whole = True
    tags = (START, END)
    before, between, after = "[", ", ", "]"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, ",") if is_next else expect(text, option(text, 0, START), "[")
        name, place = bare_name(text, place, names)
        return Head(name, expect(text, place, "("), ("]", END))

    def arguments(self, schema: Mapping[str, Any]) -> ArgumentReader:
        return PythonArguments(schema)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        return f"{rules.text(f'{function.name}(')} {keyword_arguments(rules, function)} {rules.text(')')}"
