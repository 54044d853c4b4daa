"""POST /v1/chat/completions, /v1/completions, /tokenize and /detokenize; GET /v1/models and /tokenizer_info.

body (``http/requests.py``) -> fields (``protocol.py``) -> engine requests (``generation.py``) -> deltas ->
``ChoicesAnswer``, whole or as chunks, whose subclasses write the choices

Invariant: a chunk with choices has text, or ends a choice; usage comes once, in a chunk without choices, unless running
usage was requested.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic_core import to_json

from snapstream.config import DEFAULT_SINK
from snapstream.server.engine.api import RequestDelta, SampleDelta
from snapstream.server.http.errors import bad_value
from snapstream.server.http.openapi import answers
from snapstream.server.http.prompt_compression import compression_field
from snapstream.server.openai import protocol
from snapstream.server.openai.answer_reader import (
    AnswerReader,
    AnswerStart,
    CallPiece,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from snapstream.server.openai.generation import (
    Answer,
    PreparedChat,
    Step,
    check_answer_size,
    check_samples,
    completion_options,
    make_request,
    new_usage,
    prepare_chat,
    prompt_ids,
    respond,
)
from snapstream.server.openai.prompts import Offsets, TokenText, as_prompts
from snapstream.server.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizePromptBody,
)
from snapstream.server.openai.state import AnswerContext, ServerState, Usage
from snapstream.server.openai.tools import read_structured_output
from snapstream.types import CompressionSummary, FinishReason, Logprob

LEAST = -9999.0  # JSON has no minus infinity; OpenAI uses this


def finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def chat_entries(logprobs: Iterable[Logprob], texts: TokenText) -> list[dict[str, Any]]:
    """Log-probabilities as chat lists them."""
    return [
        {
            **_entry(one.token_id, one.logprob, texts),
            "top_logprobs": [_entry(token, value, texts) for token, value in one.top],
        }
        for one in logprobs
    ]


def _entry(token: int, value: float, texts: TokenText) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": finite(value), "bytes": list(texts.raw(token))}


class CompletionLogprobs:
    """The four aligned lists of a completion's choice, piece by piece; offsets continue from the last piece."""

    def __init__(self, texts: TokenText, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skips_special = skip_special_tokens
        self._offsets = Offsets()
        self._lists = _empty()

    def add_prompt(self, ids: tuple[int, ...], logprobs: Iterable[Logprob | None], text: str) -> None:
        """Every prompt token; entry 0 is null, because nothing precedes it."""
        offsets, starts = Offsets(), []
        for token in ids:
            raw = self._texts.raw(token)
            if self._texts.is_special(token) and not text.startswith(raw.decode(), offsets.num_chars):
                raw = b""  # added by the tokenizer, like a beginning-of-text token
            starts.append(offsets.push(raw))
        lead = max(0, offsets.num_chars - len(text))  # a space that the tokenizer adds before the text
        for token, start, logprob in zip(ids, starts, logprobs, strict=True):
            self._add(token, max(0, start - lead), logprob)
        self._offsets = Offsets(len(text))

    def add(self, logprobs: Iterable[Logprob]) -> None:
        for one in logprobs:
            self._add(one.token_id, self._offsets.push(self._shown(one.token_id)), one)

    def take(self) -> dict[str, Any]:
        """What came since the last call."""
        lists, self._lists = self._lists, _empty()
        return lists

    def _add(self, token: int, offset: int, logprob: Logprob | None) -> None:
        self._lists["tokens"].append(self._texts.text(token))
        self._lists["text_offset"].append(offset)
        self._lists["token_logprobs"].append(None if logprob is None else finite(logprob.logprob))
        self._lists["top_logprobs"].append(None if logprob is None else self._top(logprob))

    def _top(self, logprob: Logprob) -> dict[str, float]:
        """The likeliest tokens and always the chosen one, as in OpenAI's completions."""
        top: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._texts.text(token), finite(value))
        return top

    def _shown(self, token: int) -> bytes:
        return b"" if self._skips_special and self._texts.is_special(token) else self._texts.raw(token)


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


LARGE = 4096  # log-probabilities or positions; larger answers are built off the event loop


class ChoicesAnswer(Answer):
    """An answer of several choices; a subclass for each endpoint's."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    is_prompt_only = False  # the engine's one token is dropped

    def __init__(self, server: ServerState, body: GenerationBody, answer_id: str, model: str, usage: Usage) -> None:
        self.body, self.usage, self.texts = body, usage, server.texts
        self._offload = server.prompts.offload
        self._id = answer_id
        self._about = {
            "created": int(time.time()), "model": model, "system_fingerprint": server.metadata.fingerprint
        }  # fmt: skip
        self._is_large = False

    @abstractmethod
    def add(self, choice: int, prompt: int, request_delta: RequestDelta, delta: SampleDelta) -> None:
        """Add a delta of a choice."""

    @abstractmethod
    def has_output(self, choice: int) -> bool:
        """Whether a chunk can be sent."""

    @abstractmethod
    def chunk_choice(self, choice: int) -> dict[str, Any]:
        """What was added since the last call, without index and finish_reason."""

    @abstractmethod
    def whole_choice(self, choice: int) -> dict[str, Any]:
        """The whole choice of an answer that is not streamed."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None if no reasoning is parsed."""
        return None

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        return reason.value

    async def whole(self, steps: AsyncGenerator[Step, None]) -> bytes:
        async with aclosing(steps):
            async for prompt, delta in steps:
                await self._take(prompt, delta)
        is_large = self._is_large or self.usage.has_listed_kept or self.usage.num_listed > LARGE
        return await self._offload(self._body) if is_large else self._body()

    def _body(self) -> bytes:
        ends = self.usage.ends
        choices = [{"index": index, **self.whole_choice(index), **ends[index]} for index in sorted(ends)]
        head = self._base(self.whole_object)
        return to_json({**head, "choices": choices, "usage": self.usage.as_openai, "snapstream": self.usage.metadata})

    async def events(self, steps: AsyncGenerator[Step, None]) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(steps):
            async for prompt, delta in steps:
                chunks = [self._chunk(index) for index in await self._take(prompt, delta)]
                if chunks and self.usage.num_open == 0:
                    chunks[-1]["snapstream"] = self.usage.metadata
                for chunk in chunks:
                    yield chunk
        if self.body.has_usage:
            yield {**self._base(self.chunk_object), "choices": [], "usage": self.usage.as_openai}

    async def _take(self, prompt: int, delta: RequestDelta) -> list[int]:
        """``_add``, off the event loop if it takes long."""
        if delta.prompt_logprobs is None or len(delta.prompt_logprobs) <= LARGE:
            return self._add(prompt, delta)
        self._is_large = True
        return await self._offload(lambda: self._add(prompt, delta))

    def _add(self, prompt: int, delta: RequestDelta) -> list[int]:
        """Add a delta; the choices that have something to send."""
        usage = self.usage
        usage.take(prompt, delta)
        ready = []
        for sample in delta.samples:
            index = prompt * usage.requests[prompt].sampling.n + sample.index
            usage.count(prompt, index, sample, is_answer=not self.is_prompt_only)
            self.add(index, prompt, delta, sample)
            if sample.finish_reason is not None:
                reason = self.finish_reason(index, sample.finish_reason)
                usage.ends[index] = {"finish_reason": reason, "stop_reason": sample.stop_reason}
            if index in usage.ends or self.has_output(index):
                ready.append(index)
        usage.reasoning_tokens = self.num_reasoning_tokens
        return ready

    def _chunk(self, index: int) -> dict[str, Any]:
        end = self.usage.ends.get(index, {"finish_reason": None})
        chunk = self._base(self.chunk_object)
        chunk["choices"] = [{"index": index, **self.chunk_choice(index), **end}]
        if self.body.has_running_usage:
            chunk["usage"] = self.usage.as_openai
        elif self.body.has_usage:
            chunk["usage"] = None
        return chunk

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._about}


@dataclass
class _CompletionChoice:
    logprobs: CompletionLogprobs
    text: str = ""
    has_echo: bool = False


class CompletionAnswer(ChoicesAnswer):
    """/v1/completions: text, after the prompt with ``echo``.

    With ``echo`` and ``logprobs`` every prompt token has its exact log-probability, from the uncompressed prefill;
    harnesses compute likelihoods from it.
    """

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        server: ServerState,
        body: CompletionBody,
        answer_id: str,
        model: str,
        usage: Usage,
        echo: Sequence[str] | None,
    ) -> None:
        """``echo``: the prompts' texts."""
        super().__init__(server, body, answer_id, model, usage)
        self.echo, self.is_prompt_only = echo, body.output_limit == 0
        sampling = usage.requests[0].sampling
        self._has_logprobs = sampling.logprobs is not None
        self._prompt_logprobs: dict[int, tuple[Logprob | None, ...]] = {}
        self._choices: defaultdict[int, _CompletionChoice] = defaultdict(
            lambda: _CompletionChoice(CompletionLogprobs(self.texts, skip_special_tokens=sampling.skip_special_tokens))
        )

    def add(self, choice: int, prompt: int, request_delta: RequestDelta, delta: SampleDelta) -> None:
        state = self._choices[choice]
        if self.echo is not None and not state.has_echo:
            state.has_echo = True
            state.text = self.echo[prompt]
            if self._has_logprobs:
                self._echo_logprobs(state, prompt, request_delta)
        if self.is_prompt_only:
            return
        state.text += delta.text
        if self._has_logprobs and delta.logprobs:
            state.logprobs.add(delta.logprobs)

    def has_output(self, choice: int) -> bool:
        return bool(self._choices[choice].text)

    def chunk_choice(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        text, state.text = state.text, ""
        return {"text": text, "logprobs": state.logprobs.take() if self._has_logprobs else None}

    def whole_choice(self, choice: int) -> dict[str, Any]:
        return self.chunk_choice(choice)

    def _echo_logprobs(self, state: _CompletionChoice, prompt: int, delta: RequestDelta) -> None:
        assert self.echo is not None
        if delta.prompt_logprobs is not None:  # sent once per request, while its samples may start one by one
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        if prompt not in self._prompt_logprobs:  # never answer with fewer: harnesses would compute wrong scores
            raise RuntimeError("the engine sent no prompt logprobs with the first token")
        state.logprobs.add_prompt(
            self.usage.requests[prompt].prompt_token_ids, self._prompt_logprobs[prompt], self.echo[prompt]
        )


@dataclass
class _Choice:
    """One choice; reasoning, text, log-probabilities and calls are those not sent yet."""

    reader: AnswerReader
    reasoning: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index
    kinds: dict[int, tuple[str, str]] = field(default_factory=dict)  # of all calls: members that their pieces extend
    has_role: bool = False
    has_parts: bool = False  # reasoning or calls: then content without text is null


class ChatAnswer(ChoicesAnswer):
    """/v1/chat/completions: messages, or deltas that add up to them.

    The role comes with the first text, not before it: clients take the first chunk with choices for the first token.
    """

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, server: ServerState, body: ChatBody, prepared: PreparedChat) -> None:
        super().__init__(server, body, prepared.request.request_id, prepared.model, prepared.usage)
        self._has_logprobs, self._beginning = bool(body.logprobs), prepared.beginning
        self._choices: defaultdict[int, _Choice] = defaultdict(lambda: _Choice(prepared.make_reader()))

    @property
    def num_reasoning_tokens(self) -> int | None:
        if self._beginning is AnswerStart.ANSWER:
            return None
        return sum(choice.reader.num_reasoning_tokens for choice in self._choices.values())

    def add(self, choice: int, prompt: int, request_delta: RequestDelta, delta: SampleDelta) -> None:
        state = self._choices[choice]
        _take_events(state, state.reader.take(delta))
        if self._has_logprobs and delta.logprobs:
            state.logprobs += chat_entries(delta.logprobs, self.texts)

    def has_output(self, choice: int) -> bool:
        state = self._choices[choice]
        return bool(state.reasoning or state.text or state.calls)

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        has_calls = self._choices[choice].reader.has_calls
        return "tool_calls" if reason is FinishReason.STOP and has_calls else reason.value

    def chunk_choice(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        delta: dict[str, Any] = {} if state.has_role else {"role": "assistant"}
        if state.reasoning:
            delta["reasoning_content"] = state.reasoning
        if state.text or not state.has_parts:
            delta["content"] = state.text
        elif not state.has_role:
            delta["content"] = None
        if state.calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in state.calls.items()]
        result = {"delta": delta, "logprobs": self._logprobs(state)}
        self._choices[choice] = _Choice(state.reader, kinds=state.kinds, has_role=True, has_parts=state.has_parts)
        return result

    def whole_choice(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        message: dict[str, Any] = {"role": "assistant", "content": state.text, "refusal": None}
        if state.reasoning:
            message["reasoning_content"] = state.reasoning
        if state.has_parts:
            message["content"] = state.text or None
        if state.calls:
            message["tool_calls"] = list(state.calls.values())
        return {"message": message, "logprobs": self._logprobs(state)}

    def _logprobs(self, state: _Choice) -> dict[str, Any] | None:
        return {"content": state.logprobs, "refusal": None} if self._has_logprobs else None


def _take_events(state: _Choice, events: Sequence[Event]) -> None:
    for event in events:
        state.has_parts |= not isinstance(event, Content)
        match event:
            case Reasoning(text):
                state.reasoning += text
            case Content(text):
                state.text += text
            case CallStart(index, name, call_id, is_custom):
                kind, key = ("custom", "input") if is_custom else ("function", "arguments")
                state.kinds[index] = (kind, key)
                state.calls[index] = {"id": call_id, "type": kind, kind: {"name": name, key: ""}}
            case CallPiece(index, text):
                kind, key = state.kinds[index]
                state.calls.setdefault(index, {kind: {key: ""}})[kind][key] += text


def tokenizer_routes(server: ServerState) -> APIRouter:
    router = APIRouter()

    kinds = (TokenizePromptBody, TokenizeChatBody)
    server.add_post(router, "/tokenize", tokenize, *kinds, responses=answers(protocol.TOKENIZED))
    server.add_post(router, "/detokenize", detokenize, DetokenizeBody, responses=answers(protocol.DETOKENIZED))

    @router.get("/tokenizer_info", responses=answers(protocol.TOKENIZER))
    async def tokenizer_info() -> Response:
        tokenizer: Any = server.prompts.tokenizer
        if tokenizer is None:
            raise bad_value("this checkpoint has no tokenizer", None)
        # What lm-eval's remote tokenizer needs.
        words = ("bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id", "chat_template")
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": len(tokenizer),
                "model_max_length": server.metadata.max_model_len,
                **{name: getattr(tokenizer, name) for name in words},
            }
        )

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


async def tokenize(server: ServerState, data: dict[str, Any], _: AnswerContext) -> Response:
    """The prompt as its own endpoint would tokenize it, with the same errors."""
    max_len = server.metadata.max_model_len
    body: TokenizeChatBody | TokenizePromptBody
    if "messages" in data:
        # Clients may send a whole chat request to be counted: its other fields are known, too.
        body = server.ignored.parse(TokenizeChatBody, data, ChatBody.model_fields)
        server.require_model(body.model)
        ids = await prompt_ids(server, body)
    else:
        body = server.ignored.parse(TokenizePromptBody, data, CompletionBody.model_fields)
        server.require_model(body.model)
        has_special = body.add_special_tokens is not False
        ids = await server.prompts.encode(body.prompt, max_len, add_special_tokens=has_special)
    strings = await server.prompts.token_strings(ids) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": max_len, "tokens": ids, "token_strs": strings}
    if body.return_token_texts:
        answer["token_texts"] = await server.prompts.offload(lambda: server.texts.pieces(ids))
    return JSONResponse(answer)


async def detokenize(server: ServerState, data: dict[str, Any], _: AnswerContext) -> Response:
    body = server.ignored.parse(DetokenizeBody, data)
    server.require_model(body.model)
    return JSONResponse({"prompt": await server.prompts.decode(body.tokens)})


def openai_routes(server: ServerState) -> APIRouter:
    router = APIRouter()

    chats, texts = (answers(kind, can_stream=True) for kind in (protocol.CHAT, protocol.COMPLETION))
    server.add_post(router, "/v1/chat/completions", chat_completions, ChatBody, responses=chats)
    server.add_post(router, "/v1/completions", completions, CompletionBody, responses=texts)

    @router.get("/v1/models", responses=answers(protocol.MODELS))
    async def models() -> Response:
        names = (*server.metadata.names, *server.metadata.loras)
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # the members of Anthropic's list
        return JSONResponse({"object": "list", "data": [_model(server, name) for name in names], **ends})

    @router.get("/v1/models/{name:path}", responses=answers(protocol.MODEL))
    async def model(name: str) -> Response:
        return JSONResponse(_model(server, server.require_model(name)))

    return router


async def chat_completions(server: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
    server.require_engine()
    body = server.ignored.parse(ChatBody, data)
    answer = ChatAnswer(server, body, await prepare_chat(server, body, "chatcmpl-", context))
    return await respond(server, answer, context, is_streamed=body.stream)


async def completions(server: ServerState, data: dict[str, Any], context: AnswerContext) -> Response:
    server.require_engine()
    body = server.ignored.parse(CompletionBody, data)
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
    requests = [
        make_request(server, f"{answer_id}-{index}", ids, options, report, param="prompt")
        for index, ((_, ids), report) in enumerate(zip(prompts, reports, strict=True))
    ]
    check_answer_size(server, requests)
    echo = [await server.prompts.echo(text, ids) for text, ids in prompts] if body.echo else None
    usage = new_usage(server, requests, compression, context)
    answer = CompletionAnswer(server, body, answer_id, model, usage, echo)
    return await respond(server, answer, context, is_streamed=body.stream)


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
        "parent": metadata.name if name in metadata.loras else None,
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
        "num_layers": metadata.architecture.num_layers,
        "num_kv_heads": metadata.architecture.num_kv_heads,
        "max_kept_bits": server.settings.max_kept_bits,
        "has_draft": server.compression.draft is not None,
        "prompt_compression": compression_field(server.settings.prompt_compression),  # of requests that bring none
        "has_chat_template": tokenizer is not None and tokenizer.chat_template is not None,
        "has_examples": metadata.has_examples and server.settings.has_page,
    }
