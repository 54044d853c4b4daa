"""POST /v1/messages and POST /v1/messages/count_tokens.

The way of a request: fields (``protocol.py``) -> messages (``conversation.py``) and tools (``tools.py``) -> the chat
path (``openai/turns.py``) -> blocks and events (``writer.py``, ``answer.py``). Errors have this API's form by their
path (``http/errors.py``).
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic_core import to_json

from snapstream.config import as_count
from snapstream.server.anthropic import schemas
from snapstream.server.anthropic.answer import MessageAnswer, MessageFrames
from snapstream.server.anthropic.conversation import as_messages
from snapstream.server.anthropic.protocol import REFUSED, WITHOUT_EFFECT, CountBody, MessagesBody
from snapstream.server.anthropic.tools import as_chat_choice, as_chat_tools, as_response_format, is_parallel
from snapstream.server.anthropic.writer import BlockWriter
from snapstream.server.http.errors import bad_value
from snapstream.server.http.openapi import ANTHROPIC_ERROR, answers, body_schema
from snapstream.server.openai.front import Front
from snapstream.server.openai.parsing import check_fields, parse
from snapstream.server.openai.protocol import ChatBody
from snapstream.server.openai.tools.plan import tools_of
from snapstream.server.openai.turns import new_tally, ready_chat, run, stream
from snapstream.server.openai.visit import AnswerVisit

B = TypeVar("B", bound=CountBody)


def anthropic_routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/messages",
        openapi_extra=body_schema(MessagesBody),
        responses=answers(schemas.MESSAGE, can_stream=True, error=ANTHROPIC_ERROR),
    )
    async def messages(request: HttpRequest) -> Response:
        return await front.answer(request, lambda data, visit: _messages(front, data, visit))

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=body_schema(CountBody),
        responses=answers(schemas.COUNTED, error=ANTHROPIC_ERROR),
    )
    async def count_tokens(request: HttpRequest) -> Response:
        return await front.answer(request, lambda data, _: _count(front, data))

    return router


async def _messages(front: Front, data: dict[str, Any], visit: AnswerVisit) -> Response:
    front.need_engine()
    body = _parsed(front, MessagesBody, data)
    try:
        as_count("max_tokens", body.max_tokens, 1)
    except ValueError as error:
        raise bad_value(str(error), "max_tokens") from None
    chat = _as_chat(body).model_copy(update={"stop": body.stop_sequences, **_sampling(body)})
    ready = await ready_chat(front, chat, f"msg_{visit.answer_id}", visit.namespace)
    answer = MessageAnswer(
        message_id=ready.request.request_id,
        model=ready.model,
        reader=ready.reading.reader(),
        writer=BlockWriter(),
        tally=new_tally(front, [ready.request], ready.trimming, visit),
    )
    steps = run(front, [ready.request], visit)
    if not body.stream:
        return Response(to_json(await answer.whole(steps)), media_type="application/json")
    return await stream(front, answer.events(steps), visit, MessageFrames())


async def _count(front: Front, data: dict[str, Any]) -> Response:
    """Tokens of the prompt that ``/v1/messages`` would make of the same fields."""
    body = _parsed(front, CountBody, data)
    front.need_model(body.model)
    chat = _as_chat(body)
    tools = tools_of(chat, front.call_format, has_place=front.tells_tools)
    prompt = await front.prompts.chat(chat, front.facts.max_model_len, has_tools=not tools.is_off)
    return JSONResponse({"input_tokens": len(prompt.ids)})


def _parsed(front: Front, kind: type[B], data: dict[str, Any]) -> B:
    check_fields(data, REFUSED)
    body = parse(kind, data)
    # A whole request may be sent to be counted: fields that only its answer would need are known, too.
    front.ignored.note(set(data) - {*MessagesBody.model_fields, *REFUSED, *WITHOUT_EFFECT})
    return body


def _sampling(body: MessagesBody) -> dict[str, Any]:
    """The fields that have one name in both."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "kv_cache", "prompt_compression", "cache_salt")
    return {name: getattr(body, name) for name in names}


def _as_chat(body: CountBody) -> ChatBody:
    """The same wish as a request for a chat answer."""
    messages = as_messages(body.system, body.messages)
    last = messages[-1]
    is_begun = last["role"] == "assistant" and not last.get("tool_calls")  # the model goes on from there
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=as_chat_tools(body.tools) if body.tools else None,
        tool_choice=as_chat_choice(body.tool_choice),
        parallel_tool_calls=is_parallel(body.tool_choice),
        continue_final_message=is_begun or None,
        response_format=as_response_format(body.output_config.format if body.output_config else None),
        reasoning_effort=body.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
