"""POST /v1/messages and POST /v1/messages/count_tokens: the Messages API.

A request is converted to a ``ChatBody`` and follows the chat path:

    text -> text    tool_use -> a call    tool_result -> a message of the role tool    thinking -> reasoning_content

Its answer is a message, whole or as events:

    message_start, ping, (content_block_start, content_block_delta ..., content_block_stop) ..., message_delta,
    message_stop

Invariants: everything keeps its order, also system messages inside the list, so that a growing conversation keeps its
prefix; an unsupported block is a 400 that names its place. One block is open at a time, and the events add up to the
blocks. A stream ends with ``message_stop``, or with an ``error`` event.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic_core import from_json

from snapstream.server.engine.api import SampleDelta
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.openapi import COUNT, STRING, STRING_OR_NULL, answers, object_of
from snapstream.server.openai.answer_reader import CallPiece, CallStart, Content, Event, Reasoning
from snapstream.server.openai.generation import EventAnswer, Json, PreparedChat, prepare_chat, prompt_ids, respond
from snapstream.server.openai.protocol import (
    STATE,
    Body,
    ChatBody,
    KVCacheOptions,
    ReasoningEffort,
    Refused,
    bad_part,
    check_count,
    flag_of,
    is_harmless,
    string_of,
)
from snapstream.server.openai.state import AnswerContext, ServerState
from snapstream.types import FinishReason

REFUSED: Refused = {
    **STATE,
    "compaction": (),  # requests a summary instead of an answer
    "container": (),
    "fallbacks": ([], "default"),  # models to try after a refusal; by default there are none
    "mcp_servers": ([],),  # tools that Anthropic would run itself
}

THREAD = "thread"  # a conversation that the server stores

# Known, without effect: for Anthropic's storage, billing and routing, and hints that only shorten prompts.
WITHOUT_EFFECT = frozenset(
    "billing_policy cache_control context_management diagnostics fallback_credit_token inference_geo metadata "
    "service_tier speed user_profile_id workspace_id".split()
)


def check_thread(data: Mapping[str, Any]) -> None:
    """400 for a conversation stored on the server. By the error's details SDKs know to send the whole conversation
    again, without ``thread``."""
    if data.get(THREAD) is None:
        return
    unsupported = [name for name in REFUSED if not is_harmless(data.get(name), REFUSED[name])]
    raise ApiError(
        400,
        "this server keeps no conversations: send the whole conversation without `thread`",
        param=THREAD,
        code="unsupported_parameter",
        details={"error_code": "thread_unsupported_request", "unsupported": unsupported},
    )


class ThinkingOptions(Body):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None  # not enforced


class OutputOptions(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    refused = {name: harmless for name, harmless in REFUSED.items() if name != "compaction"}

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format, which wins
    # An extension of ours and other engines.
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def effort(self) -> ReasoningEffort | None:
        """As in chat completions; None: the template's default."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        return None if self.thinking is None else "medium"


class MessagesBody(CountBody):
    """POST /v1/messages"""

    refused = REFUSED

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    # Ours.
    kv_cache: KVCacheOptions | None = None
    prompt_compression: Any = None
    cache_salt: str | None = None


# What ``/openapi.json`` says about the answers of this API.

ERROR = object_of(
    {
        "type": {"const": "error"},
        "error": object_of({"type": STRING, "message": STRING}, details={"type": "object"}),
    }
)

_OBJECT = {"type": "object"}
_USAGE_COUNTS = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")

MESSAGE = {
    "id": STRING,
    "type": {"const": "message"},
    "role": {"const": "assistant"},
    "model": STRING,
    "content": {"type": "array", "items": _OBJECT},
    "stop_reason": STRING,
    "stop_sequence": STRING_OR_NULL,
    "usage": object_of(dict.fromkeys(_USAGE_COUNTS, COUNT)),
}
COUNTED = {"input_tokens": COUNT}


# Tools, tool choice and answer format, converted to chat completions. Only tools with an input schema are accepted.

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


# Tools that Anthropic runs itself; a date follows.
_DROPPED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")


def as_chat_choice(choice: Mapping[str, Any] | None) -> Any:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad_value(f"tool_choice.type is {kind!r}; it must be auto, any, tool or none", "tool_choice")
    return _CHOICES[kind]


def is_parallel(choice: Mapping[str, Any] | None) -> bool:
    """Whether there may be several calls."""
    return choice is None or not flag_of(choice, "disable_parallel_tool_use", "tool_choice")


def as_response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``output_config.format``, a schema without a name."""
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise bad_value(
            f"output_config.format.type is {given.get('type')!r}; it must be 'json_schema'", "output_config"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.get("schema"), "strict": False}}


def _as_chat_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise bad_value(
            f"{place} has the type {kind!r}; this server runs no tools itself, so only tools with an input_schema "
            "are taken",
            "tools",
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise bad_value(f"{place}.input_schema must be a JSON schema of the type object", "tools")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


ROLES = ("user", "assistant", "system")

# Coding agents start the system prompt with a line for Anthropic's accounting. It differs between requests, so prompts
# would share no prefix.
_ACCOUNTING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")


def as_messages(system: str | Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for ``ChatBody.messages``."""
    if not messages:
        raise bad_value("messages is empty; it needs at least one message", "messages")
    done = _system(system)
    for index, message in enumerate(messages):
        place, role = f"messages[{index}]", message.get("role")
        if role not in ROLES:
            raise bad_value(f"{place}.role is {role!r}; it must be one of {', '.join(ROLES)}", "messages")
        blocks = _blocks(message.get("content"), f"{place}.content")
        if role == "assistant":
            done.append(_assistant(blocks, f"{place}.content"))
        elif role == "user":
            done += _user(blocks, f"{place}.content")
        else:
            done.append({"role": "system", "content": _texts(blocks, f"{place}.content")})
    return done


def _system(system: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    texts = [_text_of(block, f"system[{index}]") for index, block in enumerate(_blocks(system, "system"))]
    kept = [text for text in (_ACCOUNTING.sub("", text) for text in texts) if text]
    return [{"role": "system", "content": "\n".join(kept)}] if kept else []


def _user(blocks: Sequence[Any], place: str) -> list[dict[str, Any]]:
    """Messages of tools and of the user, in the order of the blocks."""
    done: list[dict[str, Any]] = []
    said: list[str] = []

    def flush() -> None:
        if said:
            done.append({"role": "user", "content": "\n".join(said)})
            said.clear()

    for index, block in enumerate(blocks):
        if _kind(block) == "tool_result":
            flush()
            done.append(_tool_result(block, f"{place}[{index}]"))
        else:
            said.append(_text_of(block, f"{place}[{index}]"))
    flush()
    return done or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Any], place: str) -> dict[str, Any]:
    said: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where, kind = f"{place}[{index}]", _kind(block)
        if kind == "tool_use":
            calls.append(_as_chat_call(block, where))
        elif kind == "thinking":
            reasoning.append(string_of(block, "thinking", where))
        elif kind != "redacted_thinking":  # encrypted by another server
            said.append(_text_of(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _as_chat_call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise bad_value(f"{place}.input must be an object", "messages")
    function = {"name": string_of(block, "name", place), "arguments": dict(arguments)}
    return {"id": string_of(block, "id", place), "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    content, is_error = block.get("content"), flag_of(block, "is_error", place)
    text = "" if content is None else _texts(_blocks(content, f"{place}.content"), f"{place}.content")
    return {
        "role": "tool",
        "tool_call_id": string_of(block, "tool_use_id", place),
        "content": f"Error: {text}" if is_error else text,  # chat messages have no field for it
    }


def _blocks(content: Any, place: str) -> Sequence[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_part(place, "must be a string or a list of blocks")
    return content


def _texts(blocks: Sequence[Any], place: str) -> str:
    return "\n".join(_text_of(block, f"{place}[{index}]") for index, block in enumerate(blocks))


def _text_of(block: Any, place: str) -> str:
    if _kind(block) != "text":
        raise bad_part(
            place, f"has the type {_kind(block)!r}, which is not supported here; images and documents are not supported"
        )
    return string_of(block, "text", place)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


B = TypeVar("B", bound=CountBody)


def anthropic_routes(server: ServerState) -> APIRouter:
    router = APIRouter()

    responses = answers(MESSAGE, can_stream=True, error=ERROR)
    server.add_post(router, "/v1/messages", messages, MessagesBody, responses=responses)
    responses = answers(COUNTED, error=ERROR)
    server.add_post(router, "/v1/messages/count_tokens", count_tokens, CountBody, responses=responses)
    return router


async def messages(server: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
    server.require_engine()
    body = _parsed(server, MessagesBody, data)
    check_count("max_tokens", body.max_tokens, 1)
    same = ("max_tokens", "temperature", "top_p", "top_k", "kv_cache", "prompt_compression", "cache_salt")
    sampling = {name: getattr(body, name) for name in same}
    chat = _as_chat(body).model_copy(update={"stop": body.stop_sequences, **sampling})
    answer = MessageAnswer(await prepare_chat(server, chat, "msg_", context))
    return await respond(server, answer, context, is_streamed=body.stream, end=b"")


async def count_tokens(server: ServerState, data: dict[str, Any], _: AnswerContext) -> Response:
    """Tokens of the prompt of ``/v1/messages`` with the same fields."""
    body = _parsed(server, CountBody, data)
    server.require_model(body.model)
    return JSONResponse({"input_tokens": len(await prompt_ids(server, _as_chat(body)))})


def _parsed(server: ServerState, kind: type[B], data: dict[str, Any]) -> B:
    check_thread(data)
    # A whole request may be sent to be counted: fields of its answer are known, and not refused.
    body = server.ignored.parse(kind, data, {*MessagesBody.model_fields, *REFUSED, *WITHOUT_EFFECT})
    tools = server.ignored.own_tools(body.tools or [], lambda tool: str(tool.get("type")).startswith(_DROPPED))
    return body.model_copy(update={"tools": tools})


def _as_chat(body: CountBody) -> ChatBody:
    messages = as_messages(body.system, body.messages)
    last = messages[-1]
    has_started = last["role"] == "assistant" and not last.get("tool_calls")  # the model continues it
    answer_format = body.output_config.format if body.output_config else None
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=[_as_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=as_chat_choice(body.tool_choice),
        parallel_tool_calls=is_parallel(body.tool_choice),
        continue_final_message=has_started or None,
        response_format=as_response_format(body.output_format if answer_format is None else answer_format),
        reasoning_effort=body.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


class BlockWriter:
    """The content of one message."""

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self._pieces: list[str] = []  # of the open block
        self._is_open = False

    def take(self, events: Sequence[Event]) -> list[Json]:
        out: list[Json] = []
        for event in events:
            match event:
                case Reasoning(text):
                    out += self._open_as("thinking", {"thinking": "", "signature": ""})
                    out.append(self._delta({"type": "thinking_delta", "thinking": text}, text))
                case Content(text):
                    out += self._open_as("text", {"text": ""})
                    out.append(self._delta({"type": "text_delta", "text": text}, text))
                case CallStart(_, name, call_id):
                    out += self.close() + self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallPiece(_, text):
                    out.append(self._delta({"type": "input_json_delta", "partial_json": text}, text))
        return out

    def close(self) -> list[Json]:
        """End the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        out, block, text = [], self.blocks[-1], "".join(self._pieces)
        if block["type"] == "thinking":
            block.update(thinking=text, signature=_signature(text))
            signed = {"type": "signature_delta", "signature": block["signature"]}
            out.append(self._event("content_block_delta", delta=signed))
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = _input(text)
        return [*out, self._event("content_block_stop")]

    def _open_as(self, kind: str, members: Json) -> list[Json]:
        """Open a block of that kind, unless it is the open one."""
        if self._is_open and self.blocks[-1]["type"] == kind:
            return []
        return self.close() + self._open({"type": kind, **members})

    def _open(self, block: Json) -> list[Json]:
        self.blocks.append(block)
        self._is_open, self._pieces = True, []
        return [self._event("content_block_start", content_block=dict(block))]

    def _delta(self, delta: Json, text: str) -> Json:
        self._pieces.append(text)
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **members: Any) -> Json:
        return {"type": kind, "index": len(self.blocks) - 1, **members}


def _input(text: str) -> Json:
    """Arguments as an object. Truncated ones are parsed as far as possible, as clients do with a stream; a text that is
    no JSON is returned as it is."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _signature(reasoning: str) -> str:
    """Clients send it back with the block; this server does not check it."""
    return b64encode(sha256(reasoning.encode(errors="replace")).digest()).decode()


class MessageAnswer(EventAnswer):
    def __init__(self, prepared: PreparedChat) -> None:
        super().__init__(prepared)
        self._head = {
            "id": prepared.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": prepared.model,
        }
        self._writer = BlockWriter()
        self._ending: Json = {"stop_reason": None, "stop_sequence": None}

    @property
    def result(self) -> Json:
        return {**self._message(self._writer.blocks), "snapstream": self.usage.metadata}

    def start(self) -> list[Json]:
        return [{"type": "message_start", "message": self._message([])}, {"type": "ping"}]

    def take(self, sample: SampleDelta, read: list[Event]) -> list[Json]:
        events = self._writer.take(read)
        if sample.finish_reason is None:
            return events
        self._end(sample)
        return events + self._writer.close()

    def end(self) -> list[Json]:
        about = {"usage": self._usage(), "snapstream": self.usage.metadata}
        return [{"type": "message_delta", "delta": self._ending, **about}, {"type": "message_stop"}]

    def _end(self, sample: SampleDelta) -> None:
        sequence = None
        if sample.finish_reason is not FinishReason.STOP:
            reason = "max_tokens"  # also if a grammar could not be completed
        elif isinstance(sample.stop_reason, str):
            reason, sequence = "stop_sequence", sample.stop_reason
        else:
            reason = "tool_use" if self.reader.has_calls else "end_turn"
        self._ending = {"stop_reason": reason, "stop_sequence": sequence}
        self.usage.ends[0] = {"finish_reason": reason, "stop_reason": sample.stop_reason}

    def _message(self, blocks: list[Json]) -> Json:
        return {**self._head, "content": blocks, **self._ending, "usage": self._usage()}

    def _usage(self) -> Json:
        """In this API cached tokens are not part of the input tokens."""
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens or 0},
        }
