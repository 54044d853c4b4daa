"""From a conversation of any API (as a ``ChatBody``) to a request for the engine, and to the deltas of its answer.

    body -> plan (tools, format) -> options (sampling) -> compressed by the draft, if requested -> token ids -> request

Invariant: what ``prepare_chat`` returns can be served; everything else is a 400 that names a field of the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, cast

from fastapi import Response

from snapstream.server.engine.api import AsyncEngine, EngineDead, RequestDelta
from snapstream.server.http.errors import ApiError, not_finite
from snapstream.server.http.prompt_compression import compression_field
from snapstream.server.http.requests import DONE, EventStream
from snapstream.server.openai.answer_reader import (
    AnswerReader,
    AnswerStart,
    ToolCallParser,
    allow_reasoning,
    closing_of,
    find_answer_start,
    unused_options,
)
from snapstream.server.openai.protocol import ChatBody, not_followed
from snapstream.server.openai.sampling import chat_options, check_answer_size, check_samples, make_request
from snapstream.server.openai.state import AnswerContext, ServerState, Usage
from snapstream.server.openai.tools import plan_answer, template_tools
from snapstream.server.telemetry import Metrics, RequestWatch
from snapstream.spec_prefill.settings import PromptCompression
from snapstream.types import NOT_FINITE, CompressionSummary, FinishReason, QueueFull, Request

RETRY_S = 0.05  # how long a later prompt of a request waits when the queue is full; doubles up to
MAX_RETRY_S = 1.0

Step = tuple[int, RequestDelta]  # index of the prompt, its delta


async def run_prompts(
    engine: AsyncEngine, metrics: Metrics, requests: Sequence[Request], arrived_at: float, *, max_at_once: int
) -> AsyncGenerator[Step, None]:
    """Deltas of all prompts in order of arrival. ValueError, QueueFull, EngineDead as in ``engine/api.py``.

    At most ``max_at_once`` prompts are submitted at a time: more would only fill the queue for other requests. Closing
    or cancelling it closes every engine iterator, which frees every row.
    """
    if len(requests) == 1:  # the common case needs no tasks
        async with aclosing(_run(engine, metrics, requests[0], arrived_at)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[Step | Exception] = asyncio.Queue()
    waiting = iter(enumerate(requests))  # the tasks take from it in turn
    tasks = [
        asyncio.create_task(_run_waiting(engine, metrics, waiting, arrived_at, queue))
        for _ in range(min(len(requests), max_at_once))
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
    engine: AsyncEngine,
    metrics: Metrics,
    waiting: Iterator[tuple[int, Request]],
    arrived_at: float,
    queue: asyncio.Queue[Step | Exception],
) -> None:
    """Put the deltas of one prompt after the other into the queue, until none is left."""
    try:
        for index, request in waiting:
            async with aclosing(_run_retrying(engine, metrics, index, request, arrived_at)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((index, delta))
    except Exception as error:
        queue.put_nowait(error)


async def _run_retrying(
    engine: AsyncEngine, metrics: Metrics, index: int, request: Request, arrived_at: float
) -> AsyncGenerator[RequestDelta, None]:
    """One prompt. A full queue refuses the first one, and so the whole HTTP request, at once; later ones wait."""
    delay = RETRY_S
    while True:
        try:
            async with aclosing(_run(engine, metrics, request, arrived_at)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        except QueueFull:
            if index == 0:
                raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_S)


async def _run(
    engine: AsyncEngine, metrics: Metrics, request: Request, arrived_at: float
) -> AsyncGenerator[RequestDelta, None]:
    watch: RequestWatch | None = None
    is_finished, open_reason = False, FinishReason.ABORT
    try:
        iterator = cast("AsyncGenerator[RequestDelta, None]", engine.generate(request))
        async with aclosing(iterator) as deltas:
            # The request counts from here on; if it is refused, the first step raises.
            async for delta in deltas:
                if watch is None:
                    watch = _watch(metrics, request, arrived_at)
                if any(sample.finish_reason is FinishReason.ABORT for sample in delta.samples):
                    raise EngineDead("the engine ended the request before its answer was complete")
                watch.see(delta)
                for sample in delta.samples:
                    if sample.finish_reason is FinishReason.ERROR:
                        raise not_finite() if sample.stop_reason == NOT_FINITE else not_followed(sample.stop_reason)
                is_finished = is_finished or delta.is_finished
                yield delta
                if is_finished:
                    return
        raise EngineDead("the engine's answer ended early")
    except (QueueFull, ValueError):
        raise
    except BaseException as error:
        watch = watch or _watch(metrics, request, arrived_at)
        if isinstance(error, Exception):  # not a disconnect
            open_reason = FinishReason.ERROR
        raise
    finally:
        if watch is not None:
            watch.end(open_reason)


def _watch(metrics: Metrics, request: Request, arrived_at: float) -> RequestWatch:
    return RequestWatch(
        metrics,
        num_prompt=request.num_prompt_tokens,
        num_samples=request.sampling.n,
        arrived_at=arrived_at or monotonic(),
    )


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """A request for the engine, and how its answer is parsed."""

    model: str  # the served name that the request means
    request: Request
    compression: PromptCompression | None
    beginning: AnswerStart
    closing_id: int | None  # the token that ends reasoning, if it is one
    make_calls: Callable[[], ToolCallParser] | None  # for each choice; None: calls are text

    def reader(self) -> AnswerReader:
        return AnswerReader(self.beginning, self.closing_id, self.make_calls() if self.make_calls else None)


async def prepare_chat(server: ServerState, body: ChatBody, answer_id: str, namespace: str) -> PreparedChat:
    """A conversation of a caller in ``namespace`` as a request; ApiError for what cannot be served."""
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
        report = await left_uncompressed(server, body, compression, namespace, has_tools=plan.has_tools)
        if report is None:
            messages, tools = await server.prompts.conversation(body.messages), template_tools(body.tools)
            messages, report = await server.compression.compress(
                messages,
                compression,
                tools if plan.has_tools else None,
                namespace,
                is_requested=body.prompt_compression is not None,
            )
            body = body.model_copy(update={"messages": messages})
    prompt = await server.prompts.chat(body, server.metadata.max_model_len, has_tools=plan.has_tools)
    beginning, ids = find_answer_start(server.reasoning, prompt.ending, prompt.prefix), prompt.ids
    if body.prediction is not None:
        predicted = await server.prompts.encode(
            body.prediction.text, server.metadata.max_model_len, add_special_tokens=False, param="prediction"
        )
        options = replace(options, sampling=replace(options.sampling, prediction=predicted))
    if plan.grammar is not None and beginning is not AnswerStart.ANSWER:
        grammar = allow_reasoning(plan.grammar, beginning, server.texts.symbols, has_heads=plan.has_heads)
        await server.require_grammar(grammar, plan.grammar_param)
        options = replace(options, sampling=replace(options.sampling, grammar=grammar))
    request = make_request(
        answer_id,
        ids,
        options,
        server.metadata,
        prompt_param="messages",
        has_tokenizer=True,
        prompt_compression=None if report is None else report.summary(len(ids)),
    )
    check_answer_size([request], server.metadata, server.settings)
    return PreparedChat(
        model=model,
        request=request,
        compression=compression,
        beginning=beginning,
        closing_id=server.texts.id_of(closing_of(server.reasoning)),
        make_calls=plan.make_parser,
    )


async def left_uncompressed(
    server: ServerState, body: ChatBody, compression: PromptCompression, namespace: str, *, has_tools: bool
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
    return server.compression.left_uncompressed(len(ids), await server.engine.num_stored(ids, namespace), compression)


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


def run(server: ServerState, requests: Sequence[Request], context: AnswerContext) -> AsyncGenerator[Step, None]:
    """The engine's steps; nothing runs before the first is asked for."""
    max_rows = server.metadata.engine.max_rows
    requests = [replace(request, namespace=context.namespace) for request in requests]
    return run_prompts(server.engine, server.metrics, requests, context.arrived_at, max_at_once=max_rows)


async def stream(
    server: ServerState,
    items: AsyncGenerator[Any, None],
    context: AnswerContext,
    fault_item: Callable[[ApiError], dict[str, Any]] | None = None,
    end: bytes = DONE,
) -> Response:
    """A streamed answer. It begins with the first item: what fails before it has a status of its own.

    ``fault_item``: the item for an error later on; by default the API's error body.
    """
    try:
        first = await anext(items)
    except StopAsyncIteration:
        raise RuntimeError("the engine's answer had no samples") from None
    except BaseException:
        await items.aclose()
        raise
    fault_item = fault_item or (lambda error: error.body_for(context.api))
    return EventStream(first, items, server.error, context.end, fault_item, end)
