"""From a conversation of any API (as a ``ChatBody``) to a request for the engine, and from its deltas to the response.

    body -> plan (tools, format) -> options (sampling) -> compressed by the draft, if requested -> token ids -> request
    deltas -> ``Answer``, which each API writes -> response, whole or streamed

Invariant: what ``prepare_chat`` and ``make_request`` return can be served (``engine/validate.py`` has checked it),
within the server's limits; everything else is a 400 that names a field of the body. Defaults are those of the OpenAI
API, except that a chat answer may fill max_model_len.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from fastapi import Response
from pydantic_core import to_json

from snapstream.config import InvalidValue, KVBudget, Selector, make_selector
from snapstream.engine.validate import check_request
from snapstream.server.engine.api import EngineDead, ModelMetadata, RequestDelta, SampleDelta
from snapstream.server.http.errors import ApiError, bad_value, not_finite
from snapstream.server.http.prompt_compression import compression_field, uncompressed
from snapstream.server.http.requests import DONE, EventStream
from snapstream.server.openai.answer_reader import (
    TAGS,
    AnswerReader,
    AnswerStart,
    Event,
    allow_reasoning,
    find_answer_start,
    unused_options,
)
from snapstream.server.openai.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TemplateOptions,
    check_count,
    too_long,
)
from snapstream.server.openai.state import AnswerContext, ServerState, Usage
from snapstream.server.openai.tools import plan_answer, template_tools, tools_of
from snapstream.server.options import ServerSettings
from snapstream.server.telemetry import RequestWatch
from snapstream.spec_prefill.settings import PromptCompression, why_uncompressed
from snapstream.startup.resolve import resolve_budget
from snapstream.types import (
    MAX_LOGPROBS,
    NOT_FINITE,
    CompressionSummary,
    FinishReason,
    Grammar,
    QueueFull,
    Request,
    SamplingParams,
)

Json = dict[str, Any]
COMPLETION_MAX_TOKENS = 16  # the OpenAI API's own default for /v1/completions

# Fields of ``SamplingParams`` with the same name in the API; null is the default.
_SAME_NAME = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
# Fields of ``Request`` and ``SamplingParams`` that have another name in the API.
_API_NAMES = {
    "budget": "kv_cache",
    "grammar": "response_format",
    "include_stop": "include_stop_str_in_output",
    "prompt_logprobs": "logprobs",
    "return_kept": "kv_cache",
    "selector": "kv_cache.selector",
}


@dataclass(frozen=True, slots=True)
class RequestedOptions:
    """The options of a body, before its prompts are tokenized. ``max_tokens`` None: the rest of max_model_len."""

    sampling: SamplingParams
    max_tokens: int | None
    budget: KVBudget | None
    selector: Selector | None = None
    priority: int = 0


def chat_options(
    body: ChatBody, metadata: ModelMetadata, grammar: Grammar | None, *, shows_special: bool
) -> RequestedOptions:
    """``shows_special``: special tokens belong to the answer's text unless the request says otherwise."""
    top = body.top_logprobs
    if top and not body.logprobs:
        raise bad_value("top_logprobs needs logprobs to be true", "top_logprobs")
    check_count("top_logprobs", top or 0, 0, MAX_LOGPROBS)  # ``SamplingParams`` would name logprobs
    if shows_special and body.skip_special_tokens is None:
        body = body.model_copy(update={"skip_special_tokens": False})
    logprobs = (top or 0) if body.logprobs else None
    return _options(body, metadata, body.output_limit, logprobs=logprobs, prompt_logprobs=None, grammar=grammar)


def completion_options(
    body: CompletionBody, metadata: ModelMetadata, grammar: Grammar | None = None
) -> RequestedOptions:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_value(f"best_of {body.best_of} differs from n; choosing among samples is not supported", "best_of")
    max_tokens = COMPLETION_MAX_TOKENS if body.output_limit is None else body.output_limit
    if max_tokens == 0 and body.echo:
        # The engine generates at least a token, which ``CompletionAnswer`` drops; only the length may end it.
        max_tokens = 1
        body = body.model_copy(update={"ignore_eos": True, "stop": None, "stop_token_ids": None, "min_tokens": None})
    prompt_logprobs = body.logprobs if body.echo else None
    return _options(
        body, metadata, max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar
    )


def make_request(
    server: ServerState,
    request_id: str,
    ids: tuple[int, ...],
    options: RequestedOptions,
    report: CompressionSummary | None,
    *,
    param: str,
) -> Request:
    """One prompt, of the field ``param``, as the engine takes it; 400 for what it would never serve."""
    metadata = server.metadata
    rest = metadata.max_model_len - len(ids)
    if rest < (options.max_tokens or 1):
        raise too_long(len(ids), options.max_tokens, metadata.max_model_len, param)
    try:
        sampling = options.sampling if options.max_tokens is not None else replace(options.sampling, max_tokens=rest)
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            budget=options.budget,
            selector=options.selector,
            prompt_compression=None if report is None else report.summary(len(ids)),
            priority=options.priority,
        )
        has_tokenizer = server.prompts.tokenizer is not None
        vocab_size = metadata.architecture.vocab_size
        check_request(request, metadata.engine, vocab_size=vocab_size, has_tokenizer=has_tokenizer)
    except ValueError as error:
        raise _fault(error, param) from None
    return request


def check_samples(num_prompts: int, n: int, settings: ServerSettings) -> None:
    """400 for too many samples, before anything is tokenized."""
    if num_prompts * n > settings.max_samples:
        raise bad_value(
            f"{num_prompts} prompts and n {n} make {num_prompts * n} samples; the limit is {settings.max_samples}",
            "n" if n > 1 else "prompt",
        )


def check_answer_size(server: ServerState, requests: Sequence[Request]) -> None:
    """400 for an answer too large for memory: it is built before it is sent."""
    settings, sampling = server.settings, requests[0].sampling
    if sampling.prompt_logprobs is not None:
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        entries = num_tokens * (1 + sampling.prompt_logprobs) * sampling.n
        if entries > settings.max_prompt_logprobs:
            raise bad_value(
                f"echo with logprobs would list {entries} log-probabilities of {num_tokens} prompt tokens; "
                f"the limit is {settings.max_prompt_logprobs}",
                "logprobs",
            )
    if sampling.return_kept:
        size = sum(_num_kept(request, server.metadata) for request in requests)
        made, what, limit = (
            ("send", "bits", settings.max_kept_bits)
            if sampling.return_kept == "bitmap"
            else ("list", "positions", settings.max_kept_positions)
        )
        if size > limit:
            raise bad_value(f"return_kept would {made} {size} {what}; the limit is {limit}", "kv_cache")


def _num_kept(request: Request, metadata: ModelMetadata) -> int:
    """Positions that the answer would list of this prompt, or bits that it would have, at most."""
    prompt_len, budget = len(request.prompt_token_ids), request.budget or metadata.engine.budget
    if prompt_len <= budget.capacity:  # the row keeps the whole prompt
        return 0
    num_each = prompt_len if request.sampling.return_kept == "bitmap" else budget.num_topk
    return metadata.architecture.num_layers * metadata.architecture.num_kv_heads * num_each


def _options(
    body: GenerationBody,
    metadata: ModelMetadata,
    max_tokens: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None = None,
) -> RequestedOptions:
    if body.max_completion_tokens is not None and max_tokens is not None:  # an error names the field that was sent
        check_count("max_completion_tokens", max_tokens, 1)
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    try:
        if body.include_stop_str_in_output is not None:
            given["include_stop"] = body.include_stop_str_in_output
        sampling = SamplingParams(
            # Without a limit the rest of max_model_len is set later; min_tokens must pass until then.
            max_tokens=metadata.max_model_len if max_tokens is None else max_tokens,
            logit_bias=_logit_bias(body.logit_bias),
            stop=() if body.stop is None else body.stop,
            stop_token_ids=body.stop_token_ids or (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            return_kept=False if body.kv_cache is None else body.kv_cache.return_kept,
            **given,
        )
        named = None if body.kv_cache is None else body.kv_cache.selector
        selector = None if named is None else make_selector(named)
    except ValueError as error:
        raise _fault(error) from None
    return RequestedOptions(sampling, max_tokens, _budget(body, metadata, selector), selector, body.priority or 0)


def _budget(body: GenerationBody, metadata: ModelMetadata, selector: Selector | None) -> KVBudget | None:
    """The request's budget; the server's is the maximum."""
    if body.kv_cache is None or body.kv_cache.budget is None:
        return None
    given, most = body.kv_cache.budget, metadata.engine.budget.capacity
    # Else the error would name max_model_len, not the budget.
    if given != "full" and most < metadata.max_model_len <= given:
        raise bad_value(f"a budget of {given} slots is larger than a row of this engine ({most})", "kv_cache")
    try:
        observation_len = (selector or metadata.engine.selector).observation_len
        budget = resolve_budget(given, metadata.max_model_len, observation_len)
        metadata.engine.check_budget(budget, selector)
    except ValueError as error:
        raise bad_value(str(error), "kv_cache") from None
    return budget


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    try:
        return {int(token): bias for token, bias in given.items()} if given else None
    except ValueError:
        raise InvalidValue("logit_bias has a key that is not a token id", "logit_bias") from None


def _fault(error: ValueError, prompt_param: str | None = None) -> ApiError:
    """An error of ``SamplingParams`` or ``check_request``, with the API's name of the field at fault."""
    field = error.field if isinstance(error, InvalidValue) else None
    if field in ("prompt_token_ids", "positions"):
        return bad_value(str(error), prompt_param)
    return bad_value(str(error), None if field is None else _API_NAMES.get(field, field))


RETRY_S = 0.05  # how long a later prompt of a request waits when the queue is full; doubles up to
MAX_RETRY_S = 1.0

Step = tuple[int, RequestDelta]  # index of the prompt, its delta


async def run_prompts(
    server: ServerState, requests: Sequence[Request], context: AnswerContext
) -> AsyncGenerator[Step, None]:
    """Deltas of all prompts in order of arrival. ValueError, QueueFull, EngineDead as in ``engine/api.py``.

    At most as many prompts as there are rows are submitted at a time: more would only fill the queue for other
    requests. Closing or cancelling it closes every engine iterator, which frees every row.
    """
    lora = server.lora_of(context)
    requests = [replace(request, namespace=context.namespace, lora=lora) for request in requests]
    if len(requests) == 1:  # the common case needs no tasks
        async with aclosing(_run(server, requests[0], context.arrived_at)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[Step | Exception] = asyncio.Queue()
    waiting = iter(enumerate(requests))  # the tasks take from it in turn
    tasks = [
        asyncio.create_task(_run_waiting(server, waiting, context.arrived_at, queue))
        for _ in range(min(len(requests), server.metadata.engine.max_rows))
    ]
    num_open = len(requests)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item[1].is_finished
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_waiting(
    server: ServerState,
    waiting: Iterator[tuple[int, Request]],
    arrived_at: float,
    queue: asyncio.Queue[Step | Exception],
) -> None:
    """Put the deltas of one prompt after the other into the queue, until none is left.

    A full engine queue refuses the first prompt, and so the whole HTTP request, at once; later ones wait.
    """
    try:
        for index, request in waiting:
            delay = RETRY_S
            while True:
                try:
                    async with aclosing(_run(server, request, arrived_at)) as deltas:
                        async for delta in deltas:
                            queue.put_nowait((index, delta))
                    break
                except QueueFull:
                    if index == 0:
                        raise
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, MAX_RETRY_S)
    except Exception as error:
        queue.put_nowait(error)


async def _run(server: ServerState, request: Request, arrived_at: float) -> AsyncGenerator[RequestDelta, None]:
    watch = RequestWatch(metrics=server.metrics, request=request, arrived_at=arrived_at)
    is_counted, open_reason = False, FinishReason.ABORT
    try:
        iterator = cast("AsyncGenerator[RequestDelta, None]", server.engine.generate(request))
        async with aclosing(iterator) as deltas:
            async for delta in deltas:  # if the request is refused, the first step raises
                is_counted = True
                if any(sample.finish_reason is FinishReason.ABORT for sample in delta.samples):
                    raise EngineDead("the engine ended the request before its answer was complete")
                watch.see(delta)
                for sample in delta.samples:
                    if sample.finish_reason is FinishReason.ERROR:
                        if sample.stop_reason == NOT_FINITE:
                            raise not_finite()
                        # The request's grammar, within its limits, allowed no next token.
                        message = f"the answer could not satisfy its grammar: {sample.stop_reason}"
                        raise bad_value(message, None, "grammar_failed")
                yield delta
                if delta.is_finished:
                    return
        raise EngineDead("the engine's answer ended early")
    except (QueueFull, ValueError):
        raise
    except BaseException as error:
        is_counted = True
        if isinstance(error, Exception):  # not a disconnect
            open_reason = FinishReason.ERROR
        raise
    finally:
        if is_counted:
            watch.end(open_reason)


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """A request for the engine, and how its answer is parsed."""

    model: str  # the served name that the request means
    request: Request
    usage: Usage
    beginning: AnswerStart
    make_reader: Callable[[], AnswerReader]  # for each choice


async def prepare_chat(server: ServerState, body: ChatBody, kind: str, context: AnswerContext) -> PreparedChat:
    """A conversation as a request; ``kind`` begins its id. ApiError for what cannot be served."""
    model = server.require_model(body.model)
    plan = plan_answer(body, server.call_format, server.texts, template_has_tools=server.template_has_tools)
    server.ignored.note(unused_options(server.template, body))
    options = chat_options(
        body, server.metadata, plan.grammar, shows_special=plan.shows_special or server.shows_special
    )
    check_samples(1, options.sampling.n, server.settings)
    compression = server.compression.requested(body.prompt_compression, body.compression_obstacle, is_conversation=True)
    if plan.grammar is not None:
        await server.require_grammar(plan.grammar, plan.grammar_param)
    report = None
    if compression is not None:
        report = await left_uncompressed(server, body, compression, context, has_tools=plan.has_tools)
        if report is None:
            messages, tools = await server.prompts.conversation(body.messages), template_tools(body.tools)
            messages, report = await server.compression.compress(
                messages,
                compression,
                tools if plan.has_tools else None,
                context.namespace,
                is_requested=body.prompt_compression is not None,
            )
            body = body.model_copy(update={"messages": messages})
    prompt = await server.prompts.chat(body, server.metadata.max_model_len, has_tools=plan.has_tools)
    beginning, ids = find_answer_start(server.reasoning, prompt.ending, prompt.prefix), prompt.ids
    tags = TAGS[server.reasoning]
    if body.prediction is not None:
        predicted = await server.prompts.encode(
            body.prediction.text, server.metadata.max_model_len, add_special_tokens=False, param="prediction"
        )
        options = replace(options, sampling=replace(options.sampling, prediction=predicted))
    if plan.grammar is not None:
        grammar = allow_reasoning(plan.grammar, beginning, server.texts.symbols, tags=tags, has_heads=plan.has_heads)
        if grammar is not plan.grammar:
            await server.require_grammar(grammar, plan.grammar_param)
            options = replace(options, sampling=replace(options.sampling, grammar=grammar))
    request = make_request(server, kind + context.answer_id, ids, options, report, param="messages")
    check_answer_size(server, [request])
    closing_id = server.texts.id_of(tags.closing)
    return PreparedChat(
        model=model,
        request=request,
        usage=new_usage(server, [request], compression, context),
        beginning=beginning,
        make_reader=lambda: AnswerReader(beginning, tags, closing_id, plan.make_parser and plan.make_parser()),
    )


async def prompt_ids(server: ServerState, body: TemplateOptions) -> tuple[int, ...]:
    """The prompt of a conversation whose tokens are to be counted."""
    tools = tools_of(body, server.call_format, template_has_tools=server.template_has_tools)
    return (await server.prompts.chat(body, server.metadata.max_model_len, has_tools=not tools.is_off)).ids


async def left_uncompressed(
    server: ServerState, body: ChatBody, compression: PromptCompression, context: AnswerContext, *, has_tools: bool
) -> CompressionSummary | None:
    """Why a conversation stays uncompressed: most of it is in the prefix cache. None where it does not.

    A prompt that is too long may fit once it is compressed, so that is no error here.
    """
    if compression.keep is None or server.metadata.engine.prefix_store is None:
        return None
    try:
        ids = (await server.prompts.chat(body, server.metadata.max_model_len, has_tools=has_tools)).ids
    except ApiError:
        return None
    namespace = server.metadata.engine.prefix_namespace(context.namespace, server.lora_of(context))
    num_stored = await server.engine.num_stored(ids, namespace)
    reason = why_uncompressed(len(ids), num_stored, compression, server.compression.threshold)
    return uncompressed(reason) if reason else None


def new_usage(
    server: ServerState, requests: Sequence[Request], compression: PromptCompression | None, context: AnswerContext
) -> Usage:
    """The usage of an answer, which the request's log line reports."""
    context.usage = Usage(
        requests=requests,
        budget=requests[0].budget or server.metadata.engine.budget,
        selector=requests[0].selector or server.metadata.engine.selector,
        prompt_compression=compression_field(compression),
    )
    return context.usage


class Answer(ABC):
    """The answer to one HTTP request as it grows, in the form of its API."""

    usage: Usage

    @abstractmethod
    async def whole(self, steps: AsyncGenerator[Step, None]) -> bytes:
        """The body of an answer that is not streamed, as JSON."""

    @abstractmethod
    def events(self, steps: AsyncGenerator[Step, None]) -> AsyncGenerator[Json, None]:
        """What is streamed."""


class EventAnswer(Answer):
    """An answer of one choice whose events add up to it: what Messages and Responses have in common."""

    def __init__(self, prepared: PreparedChat) -> None:
        self.usage = prepared.usage
        self.reader = prepared.make_reader()

    @property
    @abstractmethod
    def result(self) -> Json:
        """The whole answer."""

    @abstractmethod
    def start(self) -> list[Json]:
        """The first events."""

    @abstractmethod
    def take(self, sample: SampleDelta, read: list[Event]) -> list[Json]:
        """The events of a delta, whose text was ``read``."""

    @abstractmethod
    def end(self) -> list[Json]:
        """The last events."""

    async def whole(self, steps: AsyncGenerator[Step, None]) -> bytes:
        async with aclosing(self.events(steps)) as events:
            async for _ in events:
                pass
        return to_json(self.result)

    async def events(self, steps: AsyncGenerator[Step, None]) -> AsyncGenerator[Json, None]:
        has_started = False
        async with aclosing(steps):
            async for prompt, delta in steps:
                self.usage.take(prompt, delta)
                for event in () if has_started else self.start():
                    yield event
                has_started = True
                for sample in delta.samples:
                    self.usage.count(0, 0, sample)
                    read = self.reader.take(sample)
                    self.usage.reasoning_tokens = self.reader.num_reasoning_tokens
                    for event in self.take(sample, read):
                        yield event
        for event in self.end():
            yield event


async def respond(
    server: ServerState,
    answer: Answer,
    context: AnswerContext,
    *,
    is_streamed: bool | None,
    fault_item: Callable[[ApiError], Json] | None = None,
    end: bytes = DONE,
) -> Response:
    """Run the requests of an answer, and send it: whole, or as a stream from its first event on. An error before that
    has its own HTTP status.

    ``fault_item``: the event for an error later on; by default the API's error body. ``end`` follows the last event.
    """
    steps = run_prompts(server, answer.usage.requests, context)
    if not is_streamed:
        return Response(await answer.whole(steps), media_type="application/json")
    events = answer.events(steps)
    try:
        first = await anext(events)
    except StopAsyncIteration:
        raise RuntimeError("the engine's answer had no samples") from None
    except BaseException:
        await events.aclose()
        raise
    fault_item = fault_item or (lambda error: error.body_for(context.api))
    return EventStream(first, events, server.error, context.end, fault_item, end)
