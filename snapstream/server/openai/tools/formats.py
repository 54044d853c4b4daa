"""How models write tool calls: the two formats that we read, and which of them a chat template teaches.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>     Qwen 2.5 and 3, Nous Hermes
    llama3_json   {"name": "f", "parameters": {...}}; {...}                    Llama 3.1 to 3.3, the whole answer

``parser.py`` reads them, ``forcing.py`` makes a model write them.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.server.settings import ToolParser


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The fixed text around a call."""

    name: str
    arguments_key: str
    opening: str  # before each call; empty: calls begin with the answer
    closing: str
    between: str  # how a model writes two calls in a row
    mark: str = ""  # may stand before the first call


HERMES = CallFormat(
    name="hermes", arguments_key="arguments", opening="<tool_call>", closing="</tool_call>", between="\n"
)
LLAMA3 = CallFormat(
    name="llama3_json", arguments_key="parameters", opening="", closing="", between="; ", mark="<|python_tag|>"
)
FORMATS = {one.name: one for one in (HERMES, LLAMA3)}


def choose_format(wanted: ToolParser, chat_template: str) -> CallFormat | None:
    """The format to read; ``auto`` goes by what the chat template tells the model to write."""
    if wanted != "auto":
        return FORMATS.get(wanted)
    if "<tool_call>" in chat_template:
        return HERMES
    if '"parameters"' in chat_template and "ipython" in chat_template.lower():  # Llama's role of tool results
        return LLAMA3
    return None
