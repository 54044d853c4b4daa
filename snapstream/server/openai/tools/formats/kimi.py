"""Calls of Kimi K2: a section of special tokens; each call has an id with its name and number, which results repeat.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Collection

from snapstream.server.openai.tools.format import (
    CallFormat,
    Function,
    GrammarBuilder,
    Head,
    NotACall,
    bare_word,
    expect,
    option,
    skip_space,
)

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS, SPACE = "<|tool_call_argument_begin|>", "functions."


class KimiK2(CallFormat):
    name = "kimi_k2"
    marks = (SECTION, CALL)
    tags = (SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS)
    before, between, after = SECTION, "", SECTION_END

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = skip_space(text, expect(text, option(text, 0, SECTION), CALL))
        call_id, place = bare_word(text, place)
        name, _, number = call_id.removeprefix(SPACE).rpartition(":")
        if name not in names or not number.isascii() or not number.isdigit():
            raise NotACall
        return Head(name, expect(text, place, ARGUMENTS, "{") - 1, (CALL_END, SECTION_END), call_id)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        arguments = rules.arguments(function)
        head = f"{rules.text(f'{CALL}{SPACE}{function.name}:')} /[0-9]|[1-9][0-9]{{1,3}}/ {rules.text(ARGUMENTS)}"
        return f"{head} {arguments} {rules.text(CALL_END)}"
