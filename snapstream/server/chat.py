"""The choices of /v1/chat/completions: a message, or deltas of one.

The role comes with the first text, not before it: clients take the first chunk with choices for the first token.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from snapstream.server.engine_api import RequestDelta, SampleDelta
from snapstream.server.logprobs import chat_entries
from snapstream.server.token_text import TokenText


@dataclass
class _Choice:
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    has_role: bool = False


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, texts: TokenText, *, has_logprobs: bool) -> None:
        self._texts = texts
        self._has_logprobs = has_logprobs
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)

    def see(self, choice: int, prompt: int, request_delta: RequestDelta, delta: SampleDelta) -> None:
        state = self._choices[choice]
        state.text += delta.text
        if self._has_logprobs and delta.logprobs:
            state.logprobs += chat_entries(delta.logprobs, self._texts)

    def has_news(self, choice: int) -> bool:
        return bool(self._choices[choice].text)

    def num_tokens(self, delta: SampleDelta) -> int:
        return len(delta.token_ids)

    def chunk_choice(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        delta = {"content": state.text} if state.has_role else {"role": "assistant", "content": state.text}
        result = {"delta": delta, "logprobs": self._logprobs(state)}
        self._choices[choice] = _Choice(has_role=True)
        return result

    def whole_choice(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        message = {"role": "assistant", "content": state.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(state)}

    def _logprobs(self, state: _Choice) -> dict[str, Any] | None:
        return {"content": state.logprobs, "refusal": None} if self._has_logprobs else None
