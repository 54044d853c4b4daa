"""``AsyncLLM``: the methods of ``LLM`` for asyncio.

Prompts are tokenized and compressed on one thread, off the event loops. Only an output's own loop modifies it.
Invariant: a request without a reader is aborted, whether by a closed generator, a cancelled task or a closed loop. An
exception reaches the task whose request it ended; only that of a failed engine reaches all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from snapstream.config import EngineOptions
from snapstream.engine.client import News, OutputReader
from snapstream.engine.worker import EngineStats
from snapstream.llm import LLM, Message, Prompt, RequestOptions
from snapstream.types import Request, RequestOutput, SamplingParams, only

if TYPE_CHECKING:
    from snapstream.spec_prefill.compressor import PromptCompressor


T = TypeVar("T")


@dataclass(frozen=True)
class LoopChannel:
    """Delivers to an event loop, which is woken once for all of its readers."""

    loop: asyncio.AbstractEventLoop

    def put(self, news: News) -> None:
        self.loop.call_soon_threadsafe(_take_all, news)


def _take_all(news: News) -> None:
    for reader, item in news:
        reader.take(item)


class _LLM(LLM):
    name = "AsyncLLM"


class AsyncLLM:
    """``LLM`` for event loops, with the same arguments and errors.

    The constructor loads the model and blocks: call it before the loop starts, or in a thread. Tasks share the steps of
    one engine, also tasks of several loops and threads. ``async with`` closes it; so does ``await close()``.
    """

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions | None = None,
        *,
        draft: PromptCompressor | str | Path | None = None,
        progress: bool = True,
        **fields: Any,
    ) -> None:
        self._llm = _LLM(model, EngineOptions.of(options, fields), draft=draft, progress=progress)
        self.config, self.model_config, self.tokenizer = self._llm.config, self._llm.model_config, self._llm.tokenizer
        self.options, self.notes = self._llm.options, self._llm.notes
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    @property
    def stats(self) -> EngineStats:
        """As the engine last reported: at once when work begins or ends, otherwise several times a second.

        Tokens of ``generate`` and ``chat`` count when their request ends.
        """
        return self._llm.engine_thread.stats

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the same ``RequestOutput`` each time it has grown; a slow reader gets more new text at once.

        Nothing happens before it is iterated. Leaving it - closed, cancelled, or broken out of - aborts the request.
        Queued requests with a lower ``priority`` run first. ValueError for wrong input; QueueFull if ``max_waiting``
        requests are already queued.
        """
        requests = await self._prepare(lambda: self._llm.requests(prompt, params, **options))
        async with aclosing(self._run(replace(only(requests), priority=priority))) as outputs:
            async for output in outputs:
                yield output

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Answer every prompt, in their order. If the queue is full, wait for a place."""
        return await self._answer(await self._prepare(lambda: self._llm.requests(prompts, params, **options)), priority)

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        work = partial(self._llm.chat_requests, messages, params, **options)
        return await self._answer(await self._prepare(work), priority)

    async def chat_token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer; ``stream`` takes them as a prompt."""
        return await self._prepare(lambda: self._llm.chat_token_ids(messages))

    async def close(self) -> None:
        """End open requests with a RuntimeError, and drop weights and rows. May be repeated."""
        self._llm.engine_thread.end_requests()
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _prepare(self, work: Callable[[], T]) -> T:
        """Run the tokenizer or the draft on their thread."""
        self._llm.engine_thread.check()
        future = asyncio.get_running_loop().run_in_executor(self._preparing, work)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # close() cancelled the work
                self._llm.engine_thread.check()
            raise

    async def _run(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        client, news = self._llm.engine_thread.client, asyncio.Event()
        reader = OutputReader(request, LoopChannel(asyncio.get_running_loop()), news.set)
        try:
            client.submit(request, reader)
            is_finished = False
            while not is_finished:
                await news.wait()
                news.clear()
                output = reader.result()
                is_finished = output.is_finished
                yield output
        finally:
            client.leave([reader])

    async def _answer(self, requests: Sequence[Request], priority: int) -> list[RequestOutput]:
        """All outputs; at the first error the other requests are aborted."""
        if not requests:
            return []
        requests = [replace(request, priority=priority) for request in requests]
        client, ended = self._llm.engine_thread.client, asyncio.Queue[OutputReader]()
        channel = LoopChannel(asyncio.get_running_loop())
        readers = [OutputReader(request, channel) for request in requests]
        for reader in readers:
            reader.notify = partial(ended.put_nowait, reader)
        try:
            client.submit_batch(requests, readers)
            for _ in readers:
                (await ended.get()).result()
            return [reader.output for reader in readers]
        finally:
            client.leave(readers)

    def _close(self) -> None:
        self._preparing.shutdown(cancel_futures=True)
        self._llm.close()
