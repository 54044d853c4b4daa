"""POST /v1/messages and POST /v1/messages/count_tokens.

A request becomes a ``ChatBody`` (``protocol.py``) and follows the chat path; its answer is a message, whole or as
events:

    message_start, ping, (content_block_start, content_block_delta ..., content_block_stop) ..., message_delta,
    message_stop

Invariant: one block is open at a time, and the events add up to the blocks. A stream ends with ``message_stop``, or
with an ``error`` event."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic_core import from_json, to_json

from snapstream.config import as_count
from snapstream.server.anthropic import protocol
from snapstream.server.anthropic.protocol import (
    REFUSED,
    WITHOUT_EFFECT,
    CountBody,
    MessagesBody,
    as_chat_choice,
    as_chat_tools,
    as_messages,
    as_response_format,
    check_thread,
    is_parallel,
    own_tools,
)
from snapstream.server.engine.api import SampleDelta
from snapstream.server.http.errors import bad_value
from snapstream.server.http.openapi import answers, body_schema
from snapstream.server.openai.answer_reader import AnswerReader, CallPiece, CallStart, Content, Event, Reasoning
from snapstream.server.openai.generation import Step, new_usage, prepare_chat, run, stream
from snapstream.server.openai.protocol import ChatBody, check_fields, kinds_of, parse
from snapstream.server.openai.state import AnswerContext, ServerState, Usage
from snapstream.server.openai.tools import tools_of
from snapstream.types import FinishReason

Json = dict[str, Any]
B = TypeVar("B", bound=CountBody)


def anthropic_routes(server: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/messages",
        openapi_extra=body_schema(MessagesBody),
        responses=answers(protocol.MESSAGE, can_stream=True, error=protocol.ERROR),
    )
    async def messages(request: HttpRequest) -> Response:
        return await server.answer(request, lambda data, context: _messages(server, data, context))

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=body_schema(CountBody),
        responses=answers(protocol.COUNTED, error=protocol.ERROR),
    )
    async def count_tokens(request: HttpRequest) -> Response:
        return await server.answer(request, lambda data, _: _count(server, data))

    return router


async def _messages(server: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
    server.require_engine()
    body = _parsed(server, MessagesBody, data)
    try:
        as_count("max_tokens", body.max_tokens, 1)
    except ValueError as error:
        raise bad_value(str(error), "max_tokens") from None
    chat = _as_chat(body).model_copy(update={"stop": body.stop_sequences, **_sampling(body)})
    prepared = await prepare_chat(server, chat, f"msg_{context.answer_id}", context.namespace)
    answer = MessageAnswer(
        message_id=prepared.request.request_id,
        model=prepared.model,
        reader=prepared.reader(),
        writer=BlockWriter(),
        usage=new_usage(server, [prepared.request], prepared.compression, context),
    )
    steps = run(server, [prepared.request], context)
    if not body.stream:
        return Response(to_json(await answer.whole(steps)), media_type="application/json")
    return await stream(server, answer.events(steps), context, end=b"")


async def _count(server: ServerState, data: dict[str, Any]) -> Response:
    """Tokens of the prompt of ``/v1/messages`` with the same fields."""
    body = _parsed(server, CountBody, data)
    server.require_model(body.model)
    chat = _as_chat(body)
    tools = tools_of(chat, server.call_format, template_has_tools=server.template_has_tools)
    prompt = await server.prompts.chat(chat, server.metadata.max_model_len, has_tools=not tools.is_off)
    return JSONResponse({"input_tokens": len(prompt.ids)})


def _parsed(server: ServerState, kind: type[B], data: dict[str, Any]) -> B:
    check_thread(data)
    # A whole request may be sent to be counted: fields of its answer are known, and not refused.
    counted = {name for name in REFUSED if kind is CountBody and name == "compaction"}
    check_fields(data, {name: REFUSED[name] for name in REFUSED.keys() - counted})
    body = parse(kind, data)
    tools = own_tools(body.tools or [])
    left_out = kinds_of(body.tools or []) - kinds_of(tools)
    server.ignored.note(set(data) - {*MessagesBody.model_fields, *REFUSED, *WITHOUT_EFFECT} | left_out)
    return body.model_copy(update={"tools": tools})


def _sampling(body: MessagesBody) -> dict[str, Any]:
    """The fields with the same name in both."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "kv_cache", "prompt_compression", "cache_salt")
    return {name: getattr(body, name) for name in names}


def _as_chat(body: CountBody) -> ChatBody:
    """The request as a chat body."""
    messages = as_messages(body.system, body.messages)
    last = messages[-1]
    has_started = last["role"] == "assistant" and not last.get("tool_calls")  # the model continues it
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=as_chat_tools(body.tools) if body.tools else None,
        tool_choice=as_chat_choice(body.tool_choice),
        parallel_tool_calls=is_parallel(body.tool_choice),
        continue_final_message=has_started or None,
        response_format=as_response_format(body.output_config.format if body.output_config else None),
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
        """Parsed events as events of this API."""
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
            out.append(self._event("content_block_delta", delta=_signed(block["signature"])))
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


def _signed(signature: str) -> Json:
    return {"type": "signature_delta", "signature": signature}


@dataclass
class MessageAnswer:
    """The answer to one request."""

    message_id: str
    model: str
    reader: AnswerReader
    writer: BlockWriter
    usage: Usage
    _stop_reason: str | None = None
    _stop_sequence: str | None = None

    async def whole(self, steps: AsyncGenerator[Step, None]) -> Json:
        """The message as one object."""
        async with aclosing(self.events(steps)) as events:
            async for _ in events:
                pass
        return {**self._message(self.writer.blocks), "snapstream": self.usage.metadata}

    async def events(self, steps: AsyncGenerator[Step, None]) -> AsyncGenerator[Json, None]:
        has_started = False
        async with aclosing(steps):
            async for prompt, delta in steps:
                self.usage.take(prompt, delta)
                if not has_started:
                    has_started = True
                    yield {"type": "message_start", "message": self._message([])}
                    yield {"type": "ping"}
                for sample in delta.samples:
                    for event in self._take(sample):
                        yield event
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": ending, "usage": self._usage(), "snapstream": self.usage.metadata}
        yield {"type": "message_stop"}

    def _take(self, sample: SampleDelta) -> list[Json]:
        usage = self.usage
        usage.completion_tokens += len(sample.token_ids)
        usage.count(0, 0, sample)
        events = self.writer.take(self.reader.take(sample))
        usage.reasoning_tokens = self.reader.num_reasoning_tokens
        if sample.finish_reason is None:
            return events
        self._end(sample)
        return events + self.writer.close()

    def _end(self, sample: SampleDelta) -> None:
        if sample.finish_reason is not FinishReason.STOP:
            self._stop_reason = "max_tokens"  # also if a grammar could not be completed
        elif isinstance(sample.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", sample.stop_reason
        else:
            self._stop_reason = "tool_use" if self.reader.num_calls else "end_turn"
        self.usage.ends[0] = {"finish_reason": self._stop_reason, "stop_reason": sample.stop_reason}

    def _message(self, blocks: list[Json]) -> Json:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

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
