"""The formats of tool calls by name, and which of them a chat template teaches.

A format is a class in this package and a line here.
"""

from __future__ import annotations

from snapstream.server.openai.tools.format import CallFormat
from snapstream.server.openai.tools.formats.deepseek import DeepSeekV3, DeepSeekV31
from snapstream.server.openai.tools.formats.json_object import Hermes, Llama3
from snapstream.server.openai.tools.formats.kimi import KimiK2
from snapstream.server.openai.tools.formats.mistral import Mistral
from snapstream.server.openai.tools.formats.pythonic import Llama4Pythonic
from snapstream.server.openai.tools.formats.xml import Glm45, Glm47, Qwen3Coder

FORMATS: dict[str, CallFormat] = {
    call_format.name: call_format
    for call_format in (
        Hermes(), Llama3(), Llama4Pythonic(), Qwen3Coder(), Glm45(), Glm47(), DeepSeekV3(), DeepSeekV31(), KimiK2(),
        Mistral(),
    )
}  # fmt: skip

# What a template must hold, all of it, to teach a format; the first that fits is taken.
_TAUGHT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>", "<arg_value>", "</arg_key>\\n<arg_value>")),
    ("glm45", ("<arg_key>", "<arg_value>", "</arg_key>\n<arg_value>")),
    ("glm47", ("<arg_key>", "<arg_value>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("llama4_pythonic", ("func_name1(",)),  # as Meta's prompts for this format have it, for 3.2 and 4
    ("llama3_json", ('"parameters"', "ipython")),  # Llama's role of tool results; Llama 4's own template, too
    ("llama4_pythonic", ("<|python_start|>",)),
)


def choose_format(wanted: str, chat_template: str) -> CallFormat | None:
    """The format to read; ``auto`` goes by what the chat template tells the model to write, ``none`` reads none.

    ``wanted`` is one of ``TOOL_PARSERS`` (``server/options.py``), which holds these names, ``auto`` and ``none``.
    """
    if wanted != "auto":
        return FORMATS.get(wanted)
    found = (name for name, signs in _TAUGHT if all(sign in chat_template for sign in signs))
    return FORMATS.get(next(found, ""))
