"""Calls that are JSON objects with a name and arguments.

hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>     Qwen 2.5 and 3, Nous Hermes
llama3_json   {"name": "f", "parameters": {...}}; {...}                    Llama 3.1 to 4, the whole answer
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import ClassVar

from snapstream.server.openai.tools.format import (
    CallFormat,
    Function,
    GrammarBuilder,
    Head,
    expect,
    next_is,
    option,
    quoted_name,
)

PYTHON_TAG = "<|python_tag|>"  # Llama 3
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"  # Llama 4


def object_head(text: str, place: int, names: Collection[str]) -> tuple[str, int]:
    """Name of a call that is an object, and where its arguments begin (with their brace)."""
    place = expect(text, place, "{")
    if next_is(text, place, '"type"'):  # Llama 3.1 writes it now and then
        place = expect(text, place, '"type"', ":", '"function"', ",")
    place = expect(text, place, '"name"', ":")
    name, place = quoted_name(text, place, names)
    place = expect(text, place, ",")
    key = '"arguments"' if next_is(text, place, '"arguments"') else '"parameters"'
    return name, expect(text, place, key, ":", "{") - 1


def object_call(rules: GrammarBuilder, function: Function, key: str) -> str:
    """The same as an expression of a grammar."""
    head = rules.text(f'{{"name": {json.dumps(function.name)}, "{key}": ')
    return f"{head} {rules.arguments(function)} {rules.text('}')}"


class Hermes(CallFormat):
    name = "hermes"
    marks = ("<tool_call>",)
    tags = ("<tool_call>", "</tool_call>")

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        name, end = object_head(text, expect(text, 0, "<tool_call>"), names)
        return Head(name, end, ("}", "</tool_call>"))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        call = object_call(rules, function, "arguments")
        return f"{rules.text('<tool_call>' + chr(10))} {call} {rules.text(chr(10) + '</tool_call>')}"


class Llama3(CallFormat):
    name = "llama3_json"
    is_whole = True
    tags: ClassVar[tuple[str, ...]] = ()  # the tags below are optional around calls
    between = "; "

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        if is_next:
            return Head(*object_head(text, expect(text, 0, ";"), names), ("}", PYTHON_END))
        place = option(text, option(text, 0, PYTHON_TAG), PYTHON_START)
        return Head(*object_head(text, place, names), ("}", PYTHON_END))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        return object_call(rules, function, "parameters")
