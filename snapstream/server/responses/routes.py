"""POST /v1/responses and /v1/responses/input_tokens, and stored responses: GET and DELETE /v1/responses/{id}.

A request becomes a ``ChatBody`` (``protocol.py``) with the stored conversation that it continues, and follows the chat
path. Its answer is a response object, whole or as numbered events:

    response.created, response.in_progress,
    (output_item.added, content_part.added, delta ..., done, content_part.done, output_item.done) ...,
    response.completed | incomplete | failed

Invariants: one item is open at a time, and the events add up to the items. ``sequence_number`` counts the events of a
stream from 0 without gaps; the last one has the response that the same request without a stream gets."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import deepcopy
from itertools import dropwhile
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from snapstream.server.engine.api import SampleDelta
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.openapi import answers
from snapstream.server.openai.answer_reader import CallPiece, CallStart, Content, Event, Reasoning
from snapstream.server.openai.generation import EventAnswer, Json, PreparedChat, Step, prepare_chat, prompt_ids, respond
from snapstream.server.openai.prompts import TokenText
from snapstream.server.openai.protocol import ChatBody, SamplingBody, check_count
from snapstream.server.openai.routes import chat_entries
from snapstream.server.openai.state import AnswerContext, ServerState, Usage, caller_of
from snapstream.server.responses import protocol
from snapstream.server.responses.protocol import (
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    Item,
    ResponsesBody,
    ResponseStore,
    as_chat_choice,
    as_chat_tools,
    as_messages,
    as_response_format,
    chosen_names,
    is_dropped,
    names_in_spaces,
    read_input,
)
from snapstream.types import FinishReason, Request

T = TypeVar("T")

# Fields of the chat path -> of this API.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def responses_routes(server: ServerState) -> APIRouter:
    router = APIRouter()
    store = ResponseStore(server.settings.responses_store, server.settings.max_stored_bytes)

    async def create(_: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
        return await _renamed(_create(server, store, data, context))

    async def input_tokens(_: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
        return await _renamed(_count(server, store, data, context.caller))

    responses = answers(protocol.RESPONSE, can_stream=True)
    server.add_post(router, "/v1/responses", create, ResponsesBody, responses=responses)
    responses = answers(protocol.COUNTED)
    server.add_post(router, "/v1/responses/input_tokens", input_tokens, ResponsesBody, responses=responses)

    @router.get("/v1/responses/{response_id}", responses=answers(protocol.RESPONSE))
    async def retrieve(request: HttpRequest, response_id: str) -> Response:
        if request.query_params.get("stream", "false") == "true":
            raise bad_value("a stored response cannot be streamed again", "stream", "unsupported_parameter")
        return JSONResponse(store.get(response_id, caller_of(request)))

    @router.delete("/v1/responses/{response_id}", responses=answers(protocol.DELETED))
    async def delete(request: HttpRequest, response_id: str) -> Response:
        store.delete(response_id, caller_of(request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


async def _renamed(work: Awaitable[T]) -> T:
    try:
        return await work
    except ApiError as error:
        if error.param is not None:
            error.param = NAMES.get(error.param, error.param)
        raise


async def _create(server: ServerState, store: ResponseStore, data: dict[str, Any], context: AnswerContext) -> Response:
    server.require_engine()
    body, owner = _parsed(server, data), context.caller
    _check(body, store)
    own = store.resolve(read_input(body.input), owner)
    before = store.before(body.previous_response_id, owner)
    chat = _as_chat(body, before.items if before else (), own)
    prepared = await prepare_chat(server, chat, "resp_", context)
    is_stored = store.is_on and body.store is not False
    answer = ResponseAnswer(
        prepared,
        head=new_head(body, data, prepared.request, prepared.model, is_stored=is_stored),
        writer=OutputWriter(names_in_spaces(body.tools or ())),
        texts=server.texts,
        keep=(lambda response: store.keep(response, owner, before, own)) if is_stored else None,
    )
    return await respond(server, answer, context, is_streamed=body.stream, fault_item=answer.failed)


async def _count(server: ServerState, store: ResponseStore, data: dict[str, Any], owner: bytes) -> Response:
    """Tokens of the prompt of ``/v1/responses`` with the same fields."""
    body = _parsed(server, data)
    server.require_model(body.model)
    before = store.before(body.previous_response_id, owner)
    chat = _as_chat(body, before.items if before else (), store.resolve(read_input(body.input), owner))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(await prompt_ids(server, chat))})


def _parsed(server: ServerState, data: dict[str, Any]) -> ResponsesBody:
    body = server.ignored.parse(ResponsesBody, data)
    return body.model_copy(update={"tools": server.ignored.own_tools(body.tools or [], is_dropped)})


def _check(body: ResponsesBody, store: ResponseStore) -> None:
    """400 for values that types do not exclude."""
    if body.store and not store.is_on:
        message = "store true needs a server that stores responses, and this one does not (--responses-store 0)"
        raise bad_value(message, "store", "unsupported_parameter")
    if body.max_output_tokens is not None:
        check_count("max_output_tokens", body.max_output_tokens, 1)
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise bad_value(f"metadata has {len(metadata)} keys; the limit is {MAX_METADATA}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            limits = f"{MAX_METADATA_KEY} characters, its value {MAX_METADATA_VALUE}"
            raise bad_value(f"metadata has the key {key[:80]!r}; a key may have {limits}", "metadata")


def _as_chat(body: ResponsesBody, before: Sequence[Item], own: Sequence[Item]) -> ChatBody:
    """The request as a chat body. ``before``: items of the responses that it continues."""
    shared = {name: getattr(body, name) for name in SamplingBody.model_fields}
    return ChatBody(
        **shared,
        messages=as_messages(body.instructions, [*before, *own], num_before=len(before)),
        max_completion_tokens=body.max_output_tokens,
        tools=as_chat_tools(body.tools) if body.tools else None,
        tool_choice=as_chat_choice(body.tool_choice, chosen_names(body.tools or ())),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=as_response_format(body.text.format if body.text else None),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs if body.has_logprobs else None,
    )


class ResponseAnswer(EventAnswer):
    def __init__(
        self,
        prepared: PreparedChat,
        head: Json,
        writer: OutputWriter,
        texts: TokenText,
        keep: Callable[[Json], None] | None,
    ) -> None:
        """``head``: members that do not change. ``keep`` stores the response."""
        super().__init__(prepared)
        self._head, self._writer, self._texts, self._keep = head, writer, texts, keep
        self._status, self._details = "in_progress", dict[str, Any]()
        self._sequence = 0
        self._completed_at: int | None = None

    async def events(self, steps: AsyncGenerator[Step, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(super().events(steps)) as events:
            async for event in events:
                yield self._numbered(event)

    def failed(self, error: ApiError) -> Json:
        """The last event of a stream that fails."""
        self._end("failed", error={"code": "server_error", "message": error.message})
        return self._numbered({"type": "response.failed", "response": self.result})

    @property
    def result(self) -> Json:
        """Its present state."""
        has_ended = self._status != "in_progress"
        return {
            **self._head,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._details.get("error"),
            "incomplete_details": self._details.get("incomplete_details"),
            "output": list(self._writer.items) if has_ended else [],
            "usage": as_usage(self.usage) if has_ended else None,
            **({"snapstream": self.usage.metadata} if has_ended else {}),
        }

    def start(self) -> list[Json]:
        return [{"type": f"response.{name}", "response": self.result} for name in ("created", "in_progress")]

    def take(self, sample: SampleDelta, read: list[Event]) -> list[Json]:
        num_before = self.usage.completion_tokens - len(sample.token_ids)
        of_text = (sample.logprobs or ())[max(self.reader.num_reasoning_tokens - num_before, 0) :]
        events = self._writer.take(read, chat_entries(of_text, self._texts))
        if sample.finish_reason is None:
            return events
        is_whole = sample.finish_reason is FinishReason.STOP
        reason = "stop" if is_whole else "length"
        self.usage.ends[0] = {"finish_reason": reason, "stop_reason": sample.stop_reason}
        events += self._writer.finish(is_whole=is_whole and not self.reader.is_call_open)
        if is_whole:
            self._end("completed")
        else:
            self._end("incomplete", incomplete_details={"reason": "max_output_tokens"})
        return events

    def end(self) -> list[Json]:
        return [{"type": f"response.{self._status}", "response": self.result}]

    def _end(self, status: str, **details: Any) -> None:
        self._status, self._details = status, details
        self._completed_at = int(time.time()) if status == "completed" else None
        if self._keep is not None:
            self._keep(self.result)

    def _numbered(self, event: Json) -> Json:
        numbered = {"type": event["type"], "sequence_number": self._sequence, **event}
        self._sequence += 1
        return numbered


def as_usage(usage: Usage) -> Json:
    counts = usage.as_openai
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": counts["total_tokens"],
    }


def new_head(body: ResponsesBody, data: Mapping[str, Any], request: Request, model: str, *, is_stored: bool) -> Json:
    """Members that repeat the request; ``data`` as it was sent."""
    text, reasoning = data.get("text") or {}, data.get("reasoning") or {}
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": request.sampling.presence_penalty,
        "frequency_penalty": request.sampling.frequency_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": request.sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class OutputWriter:
    def __init__(self, spaces: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """``spaces``: name and namespace of tools in a namespace, by the name that the model sees."""
        self._spaces = spaces or {}
        self.items: list[Json] = []
        self._logprobs: list[Json] = []  # of tokens whose text is held back
        self._pieces: list[str] = []  # of the open item
        self._listed: list[Json] = []  # log-probabilities of the open item
        self._is_open = False

    def take(self, events: Sequence[Event], logprobs: Sequence[Json] = ()) -> list[Json]:
        """Parsed events as events of this API. ``logprobs``: of tokens after the reasoning; their text may be held."""
        self._logprobs += logprobs
        out: list[Json] = []
        for event in events:
            match event:
                case Reasoning(text):
                    out += self._open_as("reasoning") + [self._delta("response.reasoning_text.delta", text)]
                case Content(text):
                    if self.items and self._item["type"] == "reasoning":  # white space behind it is no text
                        self._logprobs = [*dropwhile(lambda one: bytes(one["bytes"]).isspace(), self._logprobs)]
                    out += self._open_as("message") + [self._text_delta(text)]
                case CallStart():
                    out += self._close() + self._open({**_call(event), **self._spaces.get(event.name, {})})
                case CallPiece(_, text):
                    out.append(self._delta(f"response.{self._argument_event}.delta", text))
            if not isinstance(event, Content):
                self._logprobs = [*logprobs] if isinstance(event, Reasoning) else []
        return out

    def finish(self, *, is_whole: bool) -> list[Json]:
        """Close the open item, of a text with the tokens that added nothing. Without items clients expect a message."""
        out = [] if self.items else self._open_as("message")
        if self._logprobs and self._is_open and self._item["type"] == "message":
            out.append(self._text_delta(""))
        return out + self._close("completed" if is_whole else "incomplete")

    @property
    def _item(self) -> Json:
        return self.items[-1]

    @property
    def _place(self) -> Json:
        place = {"item_id": self._item["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if self._item["type"] in ("reasoning", "message") else place

    @property
    def _argument_event(self) -> str:
        return "custom_tool_call_input" if self._item["type"] == "custom_tool_call" else "function_call_arguments"

    def _open_as(self, kind: str) -> list[Json]:
        """Open an item of that kind, unless it is the open one."""
        if self._is_open and self._item["type"] == kind:
            return []
        return self._close() + self._open(_reasoning() if kind == "reasoning" else _message())

    def _open(self, item: Json) -> list[Json]:
        self.items.append(item)
        self._is_open, self._pieces, self._listed = True, [], []
        out: list[Json] = [
            {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": deepcopy(item)}
        ]
        if item["type"] in ("reasoning", "message"):
            out.append({"type": "response.content_part.added", **self._place, "part": self._part("")})
        return out

    def _delta(self, kind: str, text: str) -> Json:
        self._pieces.append(text)
        return {"type": kind, **self._place, "delta": text}

    def _text_delta(self, text: str) -> Json:
        logprobs, self._logprobs = self._logprobs, []
        self._listed += logprobs
        return {**self._delta("response.output_text.delta", text), "logprobs": logprobs}

    def _close(self, status: str = "completed") -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        item, text, place = self._item, "".join(self._pieces), self._place
        out: list[Json] = []
        if item["type"] in ("reasoning", "message"):
            part = self._part(text)
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            logprobs = {} if item["type"] == "reasoning" else {"logprobs": self._listed}
            out.append({"type": f"response.{kind}.done", **place, "text": text, **logprobs})
            out.append({"type": "response.content_part.done", **place, "part": part})
            item["content"] = [part]
        else:
            member = "input" if item["type"] == "custom_tool_call" else "arguments"
            item[member] = text
            name = {} if member == "input" else {"name": item["name"]}
            out.append({"type": f"response.{self._argument_event}.done", **place, **name, member: text})
        item["status"] = status
        out.append({"type": "response.output_item.done", "output_index": place["output_index"], "item": deepcopy(item)})
        return out

    def _part(self, text: str) -> Json:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._listed)}


def _reasoning() -> Json:
    return {
        "id": f"rs_{uuid4().hex}", "type": "reasoning", "status": "in_progress", "summary": [], "content": [],
        "encrypted_content": None,
    }  # fmt: skip


def _message() -> Json:
    return {
        "id": f"msg_{uuid4().hex}", "type": "message", "status": "in_progress", "role": "assistant", "content": [],
    }  # fmt: skip


def _call(start: CallStart) -> Json:
    kind, letters, member = "function_call", "fc", "arguments"
    if start.is_custom:
        kind, letters, member = "custom_tool_call", "ctc", "input"
    return {
        "id": f"{letters}_{uuid4().hex}", "type": kind, "status": "in_progress", "call_id": start.call_id,
        "name": start.name, member: "",
    }  # fmt: skip
