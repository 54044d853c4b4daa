"""POST /tokenize, POST /detokenize, GET /tokenizer_info: the tokenizer from afar, as vLLM has it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from snapstream.server.http.errors import bad_value
from snapstream.server.http.openapi import answers, body_schema
from snapstream.server.openai import schemas
from snapstream.server.openai.front import Front
from snapstream.server.openai.parsing import (
    CHAT_ONLY_REFUSED,
    COMPLETION_ONLY_REFUSED,
    REFUSED,
    check_fields,
    parse,
    unknown_fields,
)
from snapstream.server.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
)
from snapstream.server.openai.tools.plan import tools_of


def tokenizer_routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/tokenize",
        openapi_extra=body_schema(TokenizePromptBody, TokenizeChatBody),
        responses=answers(schemas.TOKENIZED),
    )
    async def tokenize(request: HttpRequest) -> Response:
        return await front.answer(request, lambda data, *_: _tokenize(front, data))

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody), responses=answers(schemas.DETOKENIZED))
    async def detokenize(request: HttpRequest) -> Response:
        return await front.answer(request, lambda data, *_: _detokenize(front, data))

    @router.get("/tokenizer_info", responses=answers(schemas.TOKENIZER))
    async def tokenizer_info() -> Response:
        return JSONResponse(_tokenizer_info(front))

    @router.post("/reset_prefix_cache", responses=answers({}))
    async def reset_prefix_cache(request: HttpRequest) -> Response:
        front.need_engine()
        is_admin = getattr(request.state, "is_admin", False)
        try:
            front.engine.reset_prefixes(None if is_admin else front.namespace(request))
        except ValueError as error:  # other servers store the prompts
            raise bad_value(str(error), None) from None
        return JSONResponse({})

    return router


async def _tokenize(front: Front, data: dict[str, Any]) -> Response:
    """The prompt as its own endpoint would take it: whatever that refuses is refused here, too."""
    max_len = front.facts.max_model_len
    body: TokenizeChatBody | TokenizePromptBody
    if "messages" in data:
        check_fields(data, {**REFUSED, **CHAT_ONLY_REFUSED})
        body = parse(TokenizeChatBody, data)
        # Clients may send a whole chat request to be counted: fields that only its answer would need are known, too.
        front.ignored.note(unknown_fields(TokenizeChatBody, data) & unknown_fields(ChatBody, data))
        front.need_model(body.model)
        tools = tools_of(body, front.call_format, has_place=front.tells_tools)
        ids = (await front.prompts.chat(body, max_len, has_tools=not tools.is_off)).ids
    else:
        check_fields(data, {**REFUSED, **COMPLETION_ONLY_REFUSED})
        body = parse(TokenizePromptBody, data)
        front.ignored.note(unknown_fields(TokenizePromptBody, data) & unknown_fields(CompletionBody, data))
        front.need_model(body.model)
        has_special = body.add_special_tokens is not False
        ids = await front.prompts.encode(body.prompt, max_len, add_special_tokens=has_special)
    strings = await front.prompts.token_strings(ids) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": max_len, "tokens": ids, "token_strs": strings}
    if body.return_token_texts:
        answer["token_texts"] = await front.prompts.offload(lambda: front.texts.pieces(ids))
    return JSONResponse(answer)


async def _detokenize(front: Front, data: dict[str, Any]) -> Response:
    body = parse(DetokenizeBody, data)
    front.ignored.note(unknown_fields(DetokenizeBody, data))
    front.need_model(body.model)
    return JSONResponse({"prompt": await front.prompts.decode(body.tokens)})


def _tokenizer_info(front: Front) -> dict[str, Any]:
    """What lm-eval's remote tokenizer reads."""
    tokenizer: Any = front.prompts.tokenizer
    if tokenizer is None:
        raise bad_value("this checkpoint has no tokenizer", None)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": front.facts.max_model_len,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "chat_template": tokenizer.chat_template,
    }
