"""Harmony, the format of gpt-oss: an answer is a list of messages, each with a channel in its header.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

``HarmonySplitter`` (``answer_reader.py``) reads the messages, and hands calls on as ``Harmony`` reads them here: with
one spelling of the header.
"""

from __future__ import annotations

from collections.abc import Collection

from snapstream.server.openai.tools.format import CallFormat, Function, GrammarBuilder, Head, bare_name, expect, option

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
RECIPIENT = "functions."  # before the name of a tool
CALL_MARK = f"{CHANNEL}commentary to={RECIPIENT}"
FINAL_HEAD = f"{CHANNEL}final{MESSAGE}"


class Harmony(CallFormat):
    name = "harmony"
    marks = (CALL_MARK,)
    tags = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
    between = ""
    answer_head = FINAL_HEAD

    def read_head(self, text: str, names: Collection[str], *, is_next: bool) -> Head:
        name, end = bare_name(text, expect(text, 0, CALL_MARK), names)
        end = option(text, option(text, end, CONSTRAIN), "json")
        return Head(name, expect(text, end, MESSAGE, "{") - 1, (CALL,))

    def write_call(self, rules: GrammarBuilder, function: Function) -> str:
        head = f"{CALL_MARK}{function.name} {CONSTRAIN}json{MESSAGE}"
        return f"{rules.text(head)} {rules.arguments(function)}"
