"""POST /v1/chat/completions, /v1/completions, /tokenize and /detokenize; GET /v1/models and /tokenizer_info.

body (``http/admission.py``) -> fields (``protocol.py``) -> engine requests (``generation.py``) -> deltas -> answer
(``chat.py``), whole or as frames (``http/sse.py``)
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from snapstream.config import DEFAULT_SINK
from snapstream.server.http.errors import bad_value
from snapstream.server.http.openapi import answers, body_schema
from snapstream.server.http.prompt_compression import compression_field
from snapstream.server.openai import protocol
from snapstream.server.openai.chat import Answer, ChatAnswer, CompletionAnswer
from snapstream.server.openai.generation import new_usage, prepare_chat, run, stream
from snapstream.server.openai.prompts import as_prompts
from snapstream.server.openai.protocol import (
    CHAT_ONLY_REFUSED,
    COMPLETION_ONLY_REFUSED,
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizePromptBody,
    check_fields,
    parse,
    unknown_fields,
)
from snapstream.server.openai.sampling import (
    check_answer_size,
    check_samples,
    completion_options,
    make_request,
    read_structured_output,
)
from snapstream.server.openai.state import AnswerContext, ServerState
from snapstream.server.openai.tools import tools_of
from snapstream.types import CompressionSummary


def tokenizer_routes(server: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/tokenize",
        openapi_extra=body_schema(TokenizePromptBody, TokenizeChatBody),
        responses=answers(protocol.TOKENIZED),
    )
    async def tokenize(request: HttpRequest) -> Response:
        return await server.answer(request, lambda data, *_: _tokenize(server, data))

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody), responses=answers(protocol.DETOKENIZED))
    async def detokenize(request: HttpRequest) -> Response:
        return await server.answer(request, lambda data, *_: _detokenize(server, data))

    @router.get("/tokenizer_info", responses=answers(protocol.TOKENIZER))
    async def tokenizer_info() -> Response:
        return JSONResponse(_tokenizer_info(server))

    @router.post("/reset_prefix_cache", responses=answers({}))
    async def reset_prefix_cache(request: HttpRequest) -> Response:
        server.require_engine()
        is_admin = getattr(request.state, "is_admin", False)
        try:
            server.engine.reset_prefixes(None if is_admin else server.namespace(request))
        except ValueError as error:  # the prefill servers store prefixes
            raise bad_value(str(error), None) from None
        return JSONResponse({})

    return router


async def _tokenize(server: ServerState, data: dict[str, Any]) -> Response:
    """The prompt as its own endpoint would tokenize it, with the same errors."""
    max_len = server.metadata.max_model_len
    body: TokenizeChatBody | TokenizePromptBody
    if "messages" in data:
        check_fields(data, {**REFUSED, **CHAT_ONLY_REFUSED})
        body = parse(TokenizeChatBody, data)
        # Clients may send a whole chat request to be counted: its other fields are known, too.
        server.ignored.note(unknown_fields(TokenizeChatBody, data) & unknown_fields(ChatBody, data))
        server.require_model(body.model)
        tools = tools_of(body, server.call_format, template_has_tools=server.template_has_tools)
        ids = (await server.prompts.chat(body, max_len, has_tools=not tools.is_off)).ids
    else:
        check_fields(data, {**REFUSED, **COMPLETION_ONLY_REFUSED})
        body = parse(TokenizePromptBody, data)
        server.ignored.note(unknown_fields(TokenizePromptBody, data) & unknown_fields(CompletionBody, data))
        server.require_model(body.model)
        has_special = body.add_special_tokens is not False
        ids = await server.prompts.encode(body.prompt, max_len, add_special_tokens=has_special)
    strings = await server.prompts.token_strings(ids) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": max_len, "tokens": ids, "token_strs": strings}
    if body.return_token_texts:
        answer["token_texts"] = await server.prompts.offload(lambda: server.texts.pieces(ids))
    return JSONResponse(answer)


async def _detokenize(server: ServerState, data: dict[str, Any]) -> Response:
    body = parse(DetokenizeBody, data)
    server.ignored.note(unknown_fields(DetokenizeBody, data))
    server.require_model(body.model)
    return JSONResponse({"prompt": await server.prompts.decode(body.tokens)})


def _tokenizer_info(server: ServerState) -> dict[str, Any]:
    """What lm-eval's remote tokenizer needs."""
    tokenizer: Any = server.prompts.tokenizer
    if tokenizer is None:
        raise bad_value("this checkpoint has no tokenizer", None)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": server.metadata.max_model_len,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "chat_template": tokenizer.chat_template,
    }


def openai_routes(server: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        openapi_extra=body_schema(ChatBody),
        responses=answers(protocol.CHAT, can_stream=True),
    )
    async def chat_completions(request: HttpRequest) -> Response:
        return await server.answer(request, lambda data, context: _chat(server, data, context))

    @router.post(
        "/v1/completions",
        openapi_extra=body_schema(CompletionBody),
        responses=answers(protocol.COMPLETION, can_stream=True),
    )
    async def completions(request: HttpRequest) -> Response:
        return await server.answer(request, lambda data, context: _completion(server, data, context))

    @router.get("/v1/models", responses=answers(protocol.MODELS))
    async def models() -> Response:
        names = server.metadata.names
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # the members of Anthropic's list
        return JSONResponse({"object": "list", "data": [_model(server, name) for name in names], **ends})

    @router.get("/v1/models/{name:path}", responses=answers(protocol.MODEL))
    async def model(name: str) -> Response:
        return JSONResponse(_model(server, server.require_model(name)))

    return router


async def _chat(server: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
    server.require_engine()
    check_fields(data, {**REFUSED, **CHAT_ONLY_REFUSED})
    body = parse(ChatBody, data)
    server.ignored.note(unknown_fields(ChatBody, data))
    prepared = await prepare_chat(server, body, f"chatcmpl-{context.answer_id}", context.namespace)
    answer = ChatAnswer(
        answer_id=prepared.request.request_id,
        model=prepared.model,
        usage=new_usage(server, [prepared.request], prepared.compression, context),
        prepared=prepared,
        has_logprobs=bool(body.logprobs),
        **_shared(server, body),
    )
    return await _respond(server, body, answer, context)


async def _completion(server: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
    server.require_engine()
    check_fields(data, {**REFUSED, **COMPLETION_ONLY_REFUSED})
    body = parse(CompletionBody, data)
    server.ignored.note(unknown_fields(CompletionBody, data))
    model, (grammar, param) = server.require_model(body.model), read_structured_output(body)
    options = completion_options(body, server.metadata, grammar)
    max_len = server.metadata.max_model_len
    given = as_prompts(body.prompt, server.settings.max_prompts, max_len)
    check_samples(len(given), options.sampling.n, server.settings)
    compression = server.compression.requested(
        body.prompt_compression, body.compression_obstacle, is_conversation=False
    )
    if grammar is not None:
        await server.require_grammar(grammar, param)
    reports: list[CompressionSummary | None] = [None] * len(given)
    if compression is not None:
        is_requested = body.prompt_compression is not None
        for index, text in enumerate(given):
            given[index], reports[index] = await server.compression.compress(
                text, compression, is_requested=is_requested
            )
    prompts = await server.prompts.completion(given, max_len, add_special_tokens=body.add_special_tokens is not False)
    answer_id = f"cmpl-{context.answer_id}"
    has_tokenizer = server.prompts.tokenizer is not None
    requests = [
        make_request(
            f"{answer_id}-{index}",
            ids,
            options,
            server.metadata,
            prompt_param="prompt",
            has_tokenizer=has_tokenizer,
            prompt_compression=None if report is None else report.summary(len(ids)),
        )
        for index, ((_, ids), report) in enumerate(zip(prompts, reports, strict=True))
    ]
    check_answer_size(requests, server.metadata, server.settings)
    echo = [await server.prompts.echo(text, ids) for text, ids in prompts] if body.echo else None
    answer = CompletionAnswer(
        answer_id=answer_id,
        model=model,
        usage=new_usage(server, requests, compression, context),
        echo=echo,
        is_prompt_only=body.output_limit == 0,
        **_shared(server, body),
    )
    return await _respond(server, body, answer, context)


def _shared(server: ServerState, body: GenerationBody) -> dict[str, Any]:
    return {
        "fingerprint": server.metadata.fingerprint,
        "texts": server.texts,
        "offload": server.prompts.offload,
        "has_usage": body.has_usage,
        "has_running_usage": body.has_running_usage,
    }


async def _respond(server: ServerState, body: GenerationBody, answer: Answer, context: AnswerContext) -> Response:
    steps = run(server, answer.usage.requests, context)
    if not body.stream:
        return Response(await answer.whole(steps), media_type="application/json")
    return await stream(server, answer.chunks(steps), context)


def _model(server: ServerState, name: str) -> dict[str, Any]:
    metadata = server.metadata
    return {
        "id": name,
        "object": "model",
        "created": metadata.created,
        "type": "model",  # this and the next two for Anthropic's SDKs
        "display_name": name,
        "created_at": datetime.fromtimestamp(metadata.created, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "snapstream",
        "root": metadata.name,
        "parent": None,
        "max_model_len": metadata.max_model_len,
        "snapstream": _limits(server),
    }


def _limits(server: ServerState) -> dict[str, Any]:
    """Ours: limits by which a client chooses a budget."""
    metadata, tokenizer = server.metadata, server.prompts.tokenizer
    engine = metadata.engine
    return {
        "max_budget": engine.budget.capacity,
        "min_budget": DEFAULT_SINK + engine.selector.observation_len,
        "max_rows": engine.max_rows,
        "num_layers": metadata.num_layers,
        "num_kv_heads": metadata.num_kv_heads,
        "max_kept_bits": server.settings.max_kept_bits,
        "has_draft": server.compression.has_draft,
        "prompt_compression": compression_field(server.settings.prompt_compression),  # of requests that bring none
        "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
        "has_examples": metadata.has_examples and server.settings.has_page,
    }
