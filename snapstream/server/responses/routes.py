"""POST /v1/responses, and the stored ones: GET and DELETE /v1/responses/{id}, POST /v1/responses/{id}/cancel.

The way of a request: fields (``protocol.py``) -> what it goes on from (``store.py``) -> messages (``items.py``) and
tools (``tools.py``) -> the chat path (``openai/turns.py``) -> items and events (``writer.py``, ``answer.py``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic_core import to_json

from snapstream.config import as_count
from snapstream.server.http.errors import ApiError, bad_value
from snapstream.server.http.openapi import answers, body_schema
from snapstream.server.openai.front import Front
from snapstream.server.openai.parsing import check_fields, parse
from snapstream.server.openai.protocol import ChatBody, SamplingBody
from snapstream.server.openai.turns import new_tally, ready_chat, run, stream
from snapstream.server.openai.visit import AnswerVisit
from snapstream.server.responses import schemas
from snapstream.server.responses.answer import ResponseAnswer, ResponseFrames, new_head
from snapstream.server.responses.items import Item, as_messages, read_input
from snapstream.server.responses.protocol import (
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    REFUSED,
    ResponsesBody,
)
from snapstream.server.responses.store import ResponseStore, Slot
from snapstream.server.responses.tools import as_chat_choice, as_chat_tools, as_response_format
from snapstream.server.responses.writer import OutputWriter

T = TypeVar("T")

# Names of fields that the chat path has for those of this API.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def responses_routes(front: Front) -> APIRouter:
    router = APIRouter()
    store = ResponseStore(front.settings.responses_store, front.settings.max_stored_bytes)

    @router.post(
        "/v1/responses",
        openapi_extra=body_schema(ResponsesBody),
        responses=answers(schemas.RESPONSE, can_stream=True),
    )
    async def create(request: HttpRequest) -> Response:
        owner = owner_of(request)
        return await front.answer(request, lambda data, visit: _renamed(_create(front, store, data, visit, owner)))

    @router.get("/v1/responses/{response_id}", responses=answers(schemas.RESPONSE))
    async def retrieve(request: HttpRequest, response_id: str) -> Response:
        if request.query_params.get("stream", "false") == "true":
            raise bad_value("a stored response cannot be streamed again", "stream", "unsupported_parameter")
        return JSONResponse(store.get(response_id, owner_of(request)))

    @router.delete("/v1/responses/{response_id}", responses=answers(schemas.DELETED))
    async def delete(request: HttpRequest, response_id: str) -> Response:
        store.delete(response_id, owner_of(request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", responses=answers(schemas.RESPONSE))
    async def cancel(request: HttpRequest, response_id: str) -> Response:
        return JSONResponse(store.cancel(response_id, owner_of(request)))

    return router


def owner_of(request: HttpRequest) -> bytes:
    """Whose responses a request may see: those of its key; everybody's where the server asks for none."""
    caller: bytes = getattr(request.state, "caller", b"")
    return caller


async def _renamed(work: Awaitable[T]) -> T:
    try:
        return await work
    except ApiError as error:
        raise error.renamed(NAMES) from None


async def _create(
    front: Front, store: ResponseStore, data: dict[str, Any], visit: AnswerVisit, owner: bytes
) -> Response:
    front.need_engine()
    check_fields(data, REFUSED)
    body = parse(ResponsesBody, data)
    front.ignored.note(set(data) - {*ResponsesBody.model_fields, *REFUSED})
    _check(body, store)
    own = read_input(body.input)
    before = store.before(body.previous_response_id, owner)
    chat = _as_chat(body, before.items if before else (), own)
    ready = await ready_chat(front, chat, f"resp_{visit.answer_id}", visit.namespace)
    request, is_stored = ready.request, store.is_on and body.store is not False
    answer = ResponseAnswer(
        head=new_head(body, data, request, ready.model, is_stored=is_stored),
        reader=ready.reading.reader(),
        writer=OutputWriter(),
        tally=new_tally(front, [request], ready.trimming, visit),
        texts=front.texts,
        slot=Slot(store, owner, before, own) if is_stored else None,
    )
    steps = run(front, [request], visit)
    if not body.stream:
        return Response(to_json(await answer.whole(steps)), media_type="application/json")
    return await stream(front, answer.events(steps), visit, ResponseFrames(answer))


def _check(body: ResponsesBody, store: ResponseStore) -> None:
    """What needs more than types."""
    if body.store and not store.is_on:
        message = "store true needs a server that stores responses, and this one does not (--responses-store)"
        raise bad_value(message, "store", "unsupported_parameter")
    if body.max_output_tokens is not None:
        try:
            as_count("max_output_tokens", body.max_output_tokens, 1)
        except ValueError as error:
            raise bad_value(str(error), "max_output_tokens") from None
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise bad_value(f"metadata has {len(metadata)} keys; the limit is {MAX_METADATA}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            limits = f"{MAX_METADATA_KEY} characters, its value {MAX_METADATA_VALUE}"
            raise bad_value(f"metadata has the key {key[:80]!r}; a key may have {limits}", "metadata")


def _as_chat(body: ResponsesBody, before: Sequence[Item], own: Sequence[Item]) -> ChatBody:
    """The same wish as a request for a chat answer. ``before``: items of the responses that it goes on from."""
    shared = {name: getattr(body, name) for name in SamplingBody.model_fields}
    return ChatBody(
        **shared,
        messages=as_messages(body.instructions, [*before, *own], num_before=len(before)),
        max_completion_tokens=body.max_output_tokens,
        tools=as_chat_tools(body.tools) if body.tools else None,
        tool_choice=as_chat_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=as_response_format(body.text.format if body.text else None),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs if body.has_logprobs else None,
    )
