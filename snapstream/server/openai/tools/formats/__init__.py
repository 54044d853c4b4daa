"""Formats of tool calls by name, and by chat template. To add one: a class in this package, and a line here."""

from __future__ import annotations

from snapstream.server.openai.tools.format import CallFormat
from snapstream.server.openai.tools.formats.harmony import Harmony
from snapstream.server.openai.tools.formats.json_object import Cohere, Hermes, Llama3, Mistral, Nemotron
from snapstream.server.openai.tools.formats.pythonic import Llama4Pythonic
from snapstream.server.openai.tools.formats.sections import DeepSeekV3, DeepSeekV31, KimiK2
from snapstream.server.openai.tools.formats.xml import Glm45, Glm47, MiniMaxM2, Qwen3Coder

FORMATS: dict[str, CallFormat] = {
    call_format.name: call_format
    for call_format in (
        Hermes(), Llama3(), Llama4Pythonic(), Qwen3Coder(), Glm45(), Glm47(), DeepSeekV3(), DeepSeekV31(), KimiK2(),
        Mistral(), Harmony(), MiniMaxM2(), Cohere(), Nemotron(),
    )
}  # fmt: skip

# Texts by which a chat template is recognized: the first format whose texts it all contains.
_TEMPLATE_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("nemotron", ("<TOOLCALL>",)),
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
    """The format to read; ``auto`` goes by the chat template, ``none`` parses none.

    ``wanted`` is one of ``TOOL_PARSERS`` (``server/options.py``), which holds these names, ``auto`` and ``none``.
    """
    if wanted != "auto":
        return FORMATS.get(wanted)
    found = (name for name, texts in _TEMPLATE_TEXTS if all(text in chat_template for text in texts))
    return FORMATS.get(next(found, ""))
