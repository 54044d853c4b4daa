"""The same ``AsyncEngine`` on a thread of this process: for tests, and to measure what the other process costs.

It runs the same ``EngineWorker``; only the port differs. There is nothing to restart: an error in the engine ends it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from snapstream.llm import LLM
from snapstream.request import Request
from snapstream.server.engine.api import EngineDead, EngineStats, RequestDelta
from snapstream.server.engine.messages import Deltas, FromEngine, Refused, Stats, Stop, ToEngine
from snapstream.server.engine.stats import without_gauges
from snapstream.server.engine.streams import RequestStreams, Send
from snapstream.server.engine.worker import EngineWorker

log = logging.getLogger(__name__)


class _ThreadPort:
    """Messages as objects, through a queue one way and the event loop the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[FromEngine], None]) -> None:
        self.inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self._loop = loop
        self._deliver = deliver

    def receive(self, *, block: bool) -> ToEngine | None:
        try:
            return self.inbox.get(block=block)
        except Empty:
            return None

    def send(self, message: FromEngine) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver, message)


class LocalEngine:
    """Make it on the event loop that will use it; nothing else may use the ``llm`` until ``shutdown``."""

    def __init__(self, llm: LLM) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = RequestStreams()
        self._stats = EngineStats()
        self._absence: EngineDead | None = None
        self._port = _ThreadPort(self._loop, self._deliver)
        self._worker = EngineWorker(llm.engine, llm.config.max_rows, self._port)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

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

    async def shutdown(self, drain_s: float) -> None:
        self._absence = EngineDead("the engine is shutting down")
        await self._streams.wait_idle(drain_s)
        self._streams.fail_all("the server was shut down before the answer was complete")
        self._port.inbox.put(Stop())
        await asyncio.to_thread(self._thread.join)

    def _connect(self) -> Send:
        if self._absence is not None:
            raise self._absence
        return self._port.inbox.put

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            log.exception("the engine failed")
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._die, f"the engine failed: {type(error).__name__}: {error}")

    def _die(self, why: str) -> None:
        self._absence = EngineDead(why, is_final=True)
        self._stats = without_gauges(self._stats)
        self._streams.fail_all(why, is_final=True)

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Stats(stats):
                self._stats = stats
            case Deltas() | Refused():
                self._streams.deliver(message)
