"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models.

The way of a request: body (``http/body.py``) -> fields (``parsing.py``) -> engine requests (``turns.py`` for chat) ->
steps (``generation.py``) -> answer (``answers.py``), in one piece or as frames (``http/sse.py``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from snapstream.config import DEFAULT_SINK
from snapstream.request import Request
from snapstream.server.http.openapi import answers, body_schema
from snapstream.server.openai import schemas
from snapstream.server.openai.answers import Answer, Head, Shape
from snapstream.server.openai.chat import ChatShape
from snapstream.server.openai.completions import CompletionShape
from snapstream.server.openai.front import Front
from snapstream.server.openai.parsing import (
    CHAT_ONLY_REFUSED,
    COMPLETION_ONLY_REFUSED,
    REFUSED,
    check_fields,
    parse,
    unknown_fields,
)
from snapstream.server.openai.prompt_trims import TrimWish, told
from snapstream.server.openai.prompts import as_prompts
from snapstream.server.openai.protocol import ChatBody, CompletionBody, GenerationBody
from snapstream.server.openai.sampling import check_answer_size, check_samples, completion_wish, make_request
from snapstream.server.openai.structured import read_form
from snapstream.server.openai.turns import new_tally, ready_chat, run, stream
from snapstream.server.openai.visit import AnswerVisit


def openai_routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        openapi_extra=body_schema(ChatBody),
        responses=answers(schemas.CHAT, can_stream=True),
    )
    async def chat_completions(request: HttpRequest) -> Response:
        return await front.answer(request, lambda data, visit: _chat(front, data, visit))

    @router.post(
        "/v1/completions",
        openapi_extra=body_schema(CompletionBody),
        responses=answers(schemas.COMPLETION, can_stream=True),
    )
    async def completions(request: HttpRequest) -> Response:
        return await front.answer(request, lambda data, visit: _completion(front, data, visit))

    @router.get("/v1/models", responses=answers(schemas.MODELS))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(front, name) for name in front.facts.names]})

    @router.get("/v1/models/{name:path}", responses=answers(schemas.MODEL))
    async def model(name: str) -> Response:
        return JSONResponse(_model(front, front.need_model(name)))

    return router


async def _chat(front: Front, data: dict[str, Any], visit: AnswerVisit) -> Response:
    front.need_engine()
    check_fields(data, {**REFUSED, **CHAT_ONLY_REFUSED})
    body = parse(ChatBody, data)
    front.ignored.note(unknown_fields(ChatBody, data))
    ready = await ready_chat(front, body, f"chatcmpl-{visit.answer_id}", visit.namespace)
    shape = ChatShape(front.texts, ready.reading, has_logprobs=bool(body.logprobs))
    head = _head(front, ready.request.request_id, ready.model)
    return await _respond(front, body, shape, [ready.request], head, visit, ready.trimming)


async def _completion(front: Front, data: dict[str, Any], visit: AnswerVisit) -> Response:
    front.need_engine()
    check_fields(data, {**REFUSED, **COMPLETION_ONLY_REFUSED})
    body = parse(CompletionBody, data)
    front.ignored.note(unknown_fields(CompletionBody, data))
    model, form = front.need_model(body.model), read_form(body)
    wish = completion_wish(body, front.facts, form.grammar)
    max_len = front.facts.max_model_len
    given = as_prompts(body.prompt, front.settings.max_prompts, max_len)
    check_samples(len(given), wish.sampling.n, front.settings)
    trimming = front.trims.wish(body, given)
    if form.grammar is not None:
        await front.need_grammar(form.grammar, form.param)
    given, trims = await front.trims.texts(given, trimming)
    prompts = await front.prompts.completion(given, max_len, add_special_tokens=body.add_special_tokens is not False)
    answer_id = f"cmpl-{visit.answer_id}"
    has_tokenizer = front.prompts.tokenizer is not None
    requests = [
        make_request(
            f"{answer_id}-{index}",
            ids,
            wish,
            front.facts,
            prompt_param="prompt",
            has_tokenizer=has_tokenizer,
            trim=None if done is None else done.of(len(ids)),
        )
        for index, ((_, ids), done) in enumerate(zip(prompts, trims, strict=True))
    ]
    check_answer_size(requests, front.facts, front.settings)
    echo = [await front.prompts.echo(text, ids) for text, ids in prompts] if body.echo else None
    shape = CompletionShape(front.texts, requests, echo=echo, is_prompt_only=body.output_limit == 0)
    head = _head(front, answer_id, model)
    return await _respond(front, body, shape, requests, head, visit, trimming)


def _head(front: Front, answer_id: str, model: str) -> Head:
    return Head(answer_id=answer_id, created=int(time.time()), model=model, fingerprint=front.facts.fingerprint)


async def _respond(
    front: Front,
    body: GenerationBody,
    shape: Shape,
    requests: Sequence[Request],
    head: Head,
    visit: AnswerVisit,
    trimming: TrimWish,
) -> Response:
    answer = Answer(
        head=head,
        shape=shape,
        tally=new_tally(front, requests, trimming, visit),
        offload=front.prompts.offload,
        has_usage=body.has_usage,
        has_running_usage=body.has_running_usage,
    )
    steps = run(front, requests, visit)
    if not body.stream:
        return Response(await answer.whole(steps), media_type="application/json")
    return await stream(front, answer.chunks(steps), visit)


def _model(front: Front, name: str) -> dict[str, Any]:
    facts = front.facts
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "snapstream",
        "root": facts.name,
        "parent": None,
        "max_model_len": facts.max_model_len,
        "snapstream": _limits(front),
    }


def _limits(front: Front) -> dict[str, Any]:
    """Ours: what a client must know to choose a budget."""
    facts, tokenizer = front.facts, front.prompts.tokenizer
    engine = facts.engine
    return {
        "max_budget": engine.budget.capacity,
        "min_budget": DEFAULT_SINK + engine.selector.observation_len,
        "max_rows": engine.max_rows,
        "num_layers": facts.num_layers,
        "num_kv_heads": facts.num_kv_heads,
        "max_kept_bits": front.settings.max_kept_bits,
        "has_draft": front.trims.has_draft,
        "prompt_compression": told(front.settings.prompt_compression),  # of requests that bring none
        "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
        "has_examples": facts.has_examples and front.settings.has_page,
    }
