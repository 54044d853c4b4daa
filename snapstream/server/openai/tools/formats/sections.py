r"""Calls in a section of special tokens, with arguments in JSON.

    deepseek_v3     <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{...}\n```<｜tool▁call▁end｜>      V3, R1
    deepseek_v31    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                            V3.1
    kimi_k2         <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>

Both DeepSeek formats are read under either name; the name decides which one a grammar writes.
"""

from __future__ import annotations

from collections.abc import Collection

from snapstream.server.openai.tools.format import (
    CallFormat,
    Function,
    GrammarBuilder,
    Head,
    NotACall,
    bare_name,
    bare_word,
    expect,
    next_is,
    option,
    skip_space,
)

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR, FENCE = "<｜tool▁sep｜>", "```"


class DeepSeekV31(CallFormat):
    name = "deepseek_v31"
    marks = (SECTION, CALL)
    tags = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
    before, between, after = SECTION, "", SECTION_END

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = expect(text, option(text, 0, SECTION), CALL)
        if not _is_older(text, place):
            name, place = bare_name(text, place, names)
            return Head(name, expect(text, place, SEPARATOR, "{") - 1, (CALL_END, SECTION_END))
        name, place = bare_name(text, expect(text, place, "function", SEPARATOR), names)
        place = option(text, option(text, place, FENCE), "json")
        return Head(name, expect(text, place, "{") - 1, (FENCE, CALL_END, SECTION_END))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        arguments = rules.arguments(function)
        return f"{rules.text(CALL + function.name + SEPARATOR)} {arguments} {rules.text(CALL_END)}"


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"
    between = "\n"

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        head = rules.text(f"{CALL}function{SEPARATOR}{function.name}\n{FENCE}json\n")
        arguments = rules.arguments(function)
        return f"{head} {arguments} {rules.text(f'{chr(10)}{FENCE}{CALL_END}')}"


def _is_older(text: str, place: int) -> bool:
    """Whether the kind of tool stands before the name; a tool of V3.1 may itself be called ``function``."""
    if not next_is(text, place, "function"):
        return False
    place = expect(text, place, "function")
    if not next_is(text, place, SEPARATOR):
        return False
    return not next_is(text, expect(text, place, SEPARATOR), "{")


KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS, KIMI_PREFIX = "<|tool_call_argument_begin|>", "functions."


class KimiK2(CallFormat):
    """Each call has an id with its name and number, which results repeat."""

    name = "kimi_k2"
    marks = (KIMI_SECTION, KIMI_CALL)
    tags = (KIMI_SECTION, KIMI_SECTION_END, KIMI_CALL, KIMI_CALL_END, KIMI_ARGUMENTS)
    before, between, after = KIMI_SECTION, "", KIMI_SECTION_END

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        place = skip_space(text, expect(text, option(text, 0, KIMI_SECTION), KIMI_CALL))
        call_id, place = bare_word(text, place)
        name, _, number = call_id.removeprefix(KIMI_PREFIX).rpartition(":")
        if name not in names or not number.isascii() or not number.isdigit():
            raise NotACall
        return Head(name, expect(text, place, KIMI_ARGUMENTS, "{") - 1, (KIMI_CALL_END, KIMI_SECTION_END), call_id)

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        arguments = rules.arguments(function)
        start = rules.text(f"{KIMI_CALL}{KIMI_PREFIX}{function.name}:")
        head = f"{start} /[0-9]|[1-9][0-9]{{1,3}}/ {rules.text(KIMI_ARGUMENTS)}"
        return f"{head} {arguments} {rules.text(KIMI_CALL_END)}"
