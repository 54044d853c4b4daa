"""The choices of /v1/chat/completions: a message, or deltas of one, with the tool calls that the answer holds.

The role comes with the first text, not before it: clients take the first chunk with choices for the first token.
Invariant: the deltas of a choice, put together, are its message. ``tools/parser.py`` finds the calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from snapstream.request import FinishReason
from snapstream.server.engine.api import RequestDelta, SampleDelta
from snapstream.server.openai.logprobs import chat_entries
from snapstream.server.openai.token_text import TokenText
from snapstream.server.openai.tools.parser import CallPiece, CallStart, Content, Event, ToolCallParser


@dataclass
class _Choice:
    """One choice; text, log-probabilities and calls are what has not been sent yet."""

    parser: ToolCallParser | None
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index
    has_role: bool = False


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, texts: TokenText, *, has_logprobs: bool, make_parser: Callable[[], ToolCallParser] | None = None
    ) -> None:
        """``make_parser`` makes what reads tool calls, one for each choice; None: answers are text."""
        self._texts = texts
        self._has_logprobs = has_logprobs
        self._choices: defaultdict[int, _Choice] = defaultdict(lambda: _Choice(make_parser() if make_parser else None))

    def see(self, choice: int, prompt: int, request_delta: RequestDelta, delta: SampleDelta) -> None:
        state = self._choices[choice]
        if state.parser is None:
            state.text += delta.text
        else:
            _take(state, state.parser.push(delta.text))
            if delta.finish_reason is not None:
                _take(state, state.parser.finish())
        if self._has_logprobs and delta.logprobs:
            state.logprobs += chat_entries(delta.logprobs, self._texts)

    def has_news(self, choice: int) -> bool:
        return bool(self._choices[choice].text or self._choices[choice].calls)

    def num_tokens(self, delta: SampleDelta) -> int:
        return len(delta.token_ids)

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        """``length`` also where a grammar could not be followed to its end: clients then know that it is cut."""
        parser = self._choices[choice].parser
        if reason is FinishReason.ERROR:
            return FinishReason.LENGTH.value
        return "tool_calls" if reason is FinishReason.STOP and parser and parser.num_calls else reason.value

    def chunk_choice(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        delta: dict[str, Any] = {} if state.has_role else {"role": "assistant"}
        if state.text or not state.calls:
            delta["content"] = state.text
        elif not state.has_role:
            delta["content"] = None
        if state.calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in state.calls.items()]
        result = {"delta": delta, "logprobs": self._logprobs(state)}
        self._choices[choice] = _Choice(state.parser, has_role=True)
        return result

    def whole_choice(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        message: dict[str, Any] = {"role": "assistant", "content": state.text, "refusal": None}
        if state.calls:
            message["content"] = state.text or None
            message["tool_calls"] = list(state.calls.values())
        return {"message": message, "logprobs": self._logprobs(state)}

    def _logprobs(self, state: _Choice) -> dict[str, Any] | None:
        return {"content": state.logprobs, "refusal": None} if self._has_logprobs else None


def _take(state: _Choice, events: Sequence[Event]) -> None:
    for event in events:
        match event:
            case Content(text):
                state.text += text
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                state.calls[index] = {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
            case CallPiece(index, text):
                state.calls.setdefault(index, {"function": {"arguments": ""}})["function"]["arguments"] += text
