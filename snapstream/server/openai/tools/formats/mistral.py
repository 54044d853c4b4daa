"""Calls of Mistral, after a special token.

    [TOOL_CALLS] [{"name": "f", "arguments": {...}}, {...}]      tokenizers v2 to v7
    [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}                         v11 and later; there may be [CALL_ID]id and [ARGS]

Its templates take no ids but those of nine letters and digits.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection

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
)
from snapstream.server.openai.tools.formats.json_object import object_call, object_head

MARK, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NUM_ID_CHARS = 9


class Mistral(CallFormat):
    """Reads both; writes the older form where the vocabulary has no ``[ARGS]``."""

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
