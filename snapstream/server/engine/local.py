"""The same ``AsyncEngine`` on a thread of this process: for tests, and to measure what the other process costs.

It runs the same ``EngineWorker``, on the thread that ``AsyncLLM`` uses. There is nothing to restart: an error in the
engine ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from snapstream.engine.messages import Deltas, FromEngine, Probed, Refused, ResetPrefixes, Stats
from snapstream.engine.stats import without_gauges
from snapstream.engine.thread import EngineThread
from snapstream.llm import LLM
from snapstream.request import Request
from snapstream.server.engine.api import EngineDead, EngineStats, RequestDelta
from snapstream.server.engine.streams import RequestStreams, Send

log = logging.getLogger(__name__)


class LocalEngine:
    """Make it on the event loop that will use it; nothing else may use the ``llm`` until ``shutdown``."""

    def __init__(self, llm: LLM) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = RequestStreams()
        self._stats = EngineStats()
        self._absence: EngineDead | None = None
        self._thread = EngineThread(
            llm.engine, llm.config.max_rows, lambda message: self._on_loop(self._deliver, message), self._break
        )

    @property
    def is_ready(self) -> bool:
        return self._absence is None

    @property
    def absence(self) -> EngineDead | None:
        return self._absence

    def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        return self._streams.run(request, self._connect)

    def stats(self) -> EngineStats:
        return self._stats

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Tokens at the beginning of a prompt that lie in the prefix store; EngineDead if there is no engine."""
        return await self._streams.probe(token_ids, namespace, self._connect)

    def reset_prefixes(self, namespace: str | None) -> None:
        """Forget the stored beginnings of a namespace's prompts, or of all; EngineDead if there is no engine."""
        self._connect()(ResetPrefixes(namespace))

    async def shutdown(self, drain_s: float) -> None:
        self._absence = EngineDead("the engine is shutting down")
        await self._streams.wait_idle(drain_s)
        self._streams.fail_all("the server was shut down before the answer was complete")
        await asyncio.to_thread(self._thread.stop)

    def _connect(self) -> Send:
        if self._absence is not None:
            raise self._absence
        return self._thread.send

    def _break(self, error: Exception) -> None:
        log.error("the engine failed", exc_info=error)
        self._on_loop(self._die, f"the engine failed: {type(error).__name__}: {error}")

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _die(self, why: str) -> None:
        self._absence = EngineDead(why, is_final=True)
        self._stats = without_gauges(self._stats)
        self._streams.fail_all(why, is_final=True)

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Stats(stats):
                self._stats = stats
            case Deltas() | Refused() | Probed():
                self._streams.deliver(message)
