"""Calls with a JSON object of arguments.

hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>         Qwen 2.5 and 3, Nous Hermes
llama3_json   {"name": "f", "parameters": {...}}; {...}                        Llama 3.1 to 4, the whole answer
mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, {...}]          tokenizers v2 to v7
              [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}                             v11 on; also with [CALL_ID]id and [ARGS]
nemotron      <TOOLCALL>[{"name": "f", "arguments": {...}}, {...}]</TOOLCALL>  Nemotron Nano 2
cohere        <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}, {...}]<|END_ACTION|>
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection
from typing import ClassVar

from snapstream.server.openai.tools.format import (
    ID_MEMBER,
    CallFormat,
    Function,
    GrammarBuilder,
    Head,
    bare_name,
    bare_word,
    expect,
    next_is,
    option,
    quoted_name,
)

PYTHON_TAG = "<|python_tag|>"  # Llama 3
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"  # Llama 4


def object_head(text: str, place: int, names: Collection[str]) -> tuple[str, int]:
    """Name of a call that is an object, and where its arguments start (with their brace)."""
    place = expect(text, place, "{")
    if next_is(text, place, '"type"'):  # Llama 3.1 sometimes writes it
        place = expect(text, place, '"type"', ":", '"function"', ",")
    place = expect(text, place, '"name"', ":")
    name, place = quoted_name(text, place, names)
    place = expect(text, place, ",")
    key = '"arguments"' if next_is(text, place, '"arguments"') else '"parameters"'
    return name, expect(text, place, key, ":", "{") - 1


def object_call(rules: GrammarBuilder, function: Function, key: str) -> str:
    """The same as a grammar expression."""
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
    tags: ClassVar[tuple[str, ...]] = ()  # the tags above are optional around calls
    between = "; "

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        if is_next:
            return Head(*object_head(text, expect(text, 0, ";"), names), ("}", PYTHON_END))
        place = option(text, option(text, 0, PYTHON_TAG), PYTHON_START)
        return Head(*object_head(text, place, names), ("}", PYTHON_END))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        return object_call(rules, function, "parameters")


MARK, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NUM_ID_CHARS = 9


class Mistral(CallFormat):
    """Reads both forms; writes the older one if the vocabulary has no ``[ARGS]``. Ids have nine letters and digits."""

    name = "mistral"
    marks = (MARK,)
    tags = (MARK, CALL_ID, ARGUMENTS)
    between = ""

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        if is_next and next_is(text, 0, ","):
            return Head(*object_head(text, expect(text, 0, ","), names), (ID_MEMBER, "}", "]"))
        place = expect(text, 0, MARK)
        if next_is(text, place, "[") or next_is(text, place, "{"):
            return Head(*object_head(text, option(text, place, "["), names), (ID_MEMBER, "}", "]"))
        name, place = bare_name(text, place, names)
        call_id = ""
        if next_is(text, place, CALL_ID):
            call_id, place = bare_word(text, expect(text, place, CALL_ID))
        return Head(name, expect(text, option(text, place, ARGUMENTS), "{") - 1, (), call_id)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        return f"{rules.text(MARK + function.name + ARGUMENTS)} {rules.arguments(function)}"

    def in_vocabulary(self, special: Collection[str]) -> CallFormat:
        return self if ARGUMENTS in special else MistralList()

    def new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(NUM_ID_CHARS))


class MistralList(Mistral):
    """The older form, as a grammar writes it."""

    before, between, after = f"{MARK}[", ", ", "]"

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        return object_call(rules, function, "arguments")


CALLS, CALLS_END = "<TOOLCALL>", "</TOOLCALL>"


class Nemotron(CallFormat):
    name = "nemotron"
    marks = (CALLS,)
    tags = (CALLS, CALLS_END)
    before, between, after = f"{CALLS}[", ", ", f"]{CALLS_END}"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, ",") if is_next else option(text, expect(text, 0, CALLS), "[")
        return Head(*object_head(text, place, names), ("}", "]", CALLS_END))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        return object_call(rules, function, "arguments")


ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"


class Cohere(CallFormat):
    """Command R7B and Command A. The model's ids count from 0 in each turn, so calls get others."""

    name = "cohere"
    marks = (ACTION,)
    tags = (ACTION, ACTION_END)
    before, between, after = f"{ACTION}[\n    ", ",\n    ", f"\n]{ACTION_END}"

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, 0, ",") if is_next else option(text, expect(text, 0, ACTION), "[")
        place = expect(text, place, "{")
        if next_is(text, place, '"tool_call_id"'):
            _, place = bare_word(text, expect(text, place, '"tool_call_id"', ":", '"'))
            place = expect(text, place, '"', ",")
        name, place = quoted_name(text, expect(text, place, '"tool_name"', ":"), names)
        return Head(name, expect(text, place, ",", '"parameters"', ":", "{") - 1, ("}", "]", ACTION_END))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        begin = rules.text('{"tool_call_id": "')
        head = rules.text(f'", "tool_name": {json.dumps(function.name)}, "parameters": ')
        end = rules.text("}")
        return f"{begin} /[0-9]|[1-9][0-9]{{1,3}}/ {head} {rules.arguments(function)} {end}"
