"""How many tokens a prompt is to its target: counted as ``LLM.generate`` and ``LLM.chat`` would feed it.

A conversation is normalised by ``conversation.py`` and rendered by the target's chat template, tools and generation
prompt included. Where there is no template, or it refuses the conversation, contents and tool calls are counted with
``MESSAGE_TOKENS`` per message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snapstream.request.conversation import as_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGE_TOKENS = 8  # role marks of a message where the template is not known


class TokenCounter:
    """Counts with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str) -> int:
        """Tokens of a plain prompt, special tokens included."""
        return len(self._tokenizer(text, verbose=False)["input_ids"])

    def messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> int:
        """Tokens of a conversation, ready for the answer."""
        rendered = self._render(messages, tools)
        if rendered is not None:
            return self._plain(rendered)
        total = self._plain(json.dumps(tools)) if tools else 0
        for message in messages:
            content = message.get("content")
            words = content if isinstance(content, str) else json.dumps(content) if content else ""
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            total += self._plain(words) + self._plain(calls) + MESSAGE_TOKENS
        return total

    def _plain(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str | None:
        if self._tokenizer.chat_template is None:
            return None
        from jinja2 import TemplateError

        conversation = _as_fed(messages, has_developer="developer" in str(self._tokenizer.chat_template))
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError, KeyError, ValueError):  # templates are programs; each fails in its own way
            return None


def _as_fed(messages: Sequence[Mapping[str, Any]], *, has_developer: bool) -> list[dict[str, Any]]:
    """The messages as the engine's template gets them. An upstream may take messages that those rules refuse."""
    try:
        return as_conversation(messages, has_developer=has_developer)
    except ValueError:
        return [
            {**message, "content": "" if message.get("content") is None else message["content"]} for message in messages
        ]
