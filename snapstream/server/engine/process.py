"""The engine in a process of its own: the ``AsyncEngine`` that the server uses.

              start        ready           death
      (none) -------> loading ---> serving -------> backoff --> loading ...      shutdown: from anywhere to ended
                                      |    every stream: EngineDead

Invariant: a request either gets deltas up to ``is_finished`` or an exception, also when the child is killed, stopped or
stuck; at most one child exists at a time. ``child.py`` is one life of the child, ``streams.py`` hands out the deltas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from time import monotonic

from snapstream.engine.messages import Deltas, Ping, Probed, Refused, ResetPrefixes, Stats
from snapstream.engine.stats import add_totals, without_gauges
from snapstream.engine.transfers import RowMissed, TicketIssued
from snapstream.request import Request
from snapstream.server.engine.api import EngineDead, EngineStats, RequestDelta
from snapstream.server.engine.child import EngineChild
from snapstream.server.engine.elsewhere import Elsewhere, PromptReaders
from snapstream.server.engine.messages import EngineFacts, EngineSpec, Failed, FromProcess
from snapstream.server.engine.streams import RequestStreams, Send

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0  # large checkpoints on slow disks
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0  # an engine that served this long starts over with the first backoff
STOP_S = 5.0  # for an idle engine to leave after Stop
STALL_TIMEOUT_S = 60.0  # a unit of prefill, or a decode step, takes far less; 0: an engine may be silent for ever
STALL_TICKS = 8  # in that time; see _until_over


class EngineProcess:
    """Start it on the event loop that will use it."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        restart: bool = True,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        first_backoff_s: float = FIRST_BACKOFF_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        make_readers: Callable[[EngineProcess], PromptReaders] | None = None,
    ) -> None:
        """``make_readers``: who reads the prompts, if this engine only answers; its spec has where rows arrive then."""
        self._spec = spec
        self._restart = restart
        self._load_timeout_s = load_timeout_s
        self._first_backoff_s = first_backoff_s
        self._stall_timeout_s = stall_timeout_s
        self._streams = RequestStreams()
        self._elsewhere: Elsewhere | None = None
        if make_readers is not None:
            self._elsewhere = Elsewhere(make_readers(self), self._streams.fail)
        self._child: EngineChild | None = None
        self._facts: EngineFacts | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_serving = False
        self._is_closing = False
        self._absence = "the engine was not started"  # the reason that requests get while it is not serving
        self._is_final = False  # it died and is not restarted
        self._earlier = EngineStats()  # totals of the children before this one
        self._now = EngineStats()

    @property
    def is_ready(self) -> bool:
        return self._is_serving and not self._is_closing

    @property
    def absence(self) -> EngineDead | None:
        if self.is_ready:
            return None
        if self._is_closing:
            return EngineDead("the engine is shutting down")
        return EngineDead(self._absence, is_final=self._is_final)

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine, as of its last start."""
        if self._facts is None:
            raise EngineDead("the engine has not been loaded yet")
        return self._facts

    async def start(self) -> EngineFacts:
        """Load the engine. ValueError: it cannot be built like this. EngineDead: it failed or took too long."""
        if self._child is not None:
            raise ValueError("the engine was started before; make another EngineProcess")
        child = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(child), name="engine-supervisor")
        return self.facts

    def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request. ValueError: can never be served. QueueFull: try later. EngineDead: lost.

        Nothing happens, and nothing is raised, before the first delta is asked for.
        """
        return self._streams.run(request, self._connect) if self._elsewhere is None else self._run_read(request)

    async def _run_read(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request whose prompt others read."""
        assert self._elsewhere is not None
        self._elsewhere.begin(request)
        try:
            async with aclosing(self._streams.run(replace(request, arrives=True), self._connect)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._elsewhere.end(request.request_id)

    def stats(self) -> EngineStats:
        totals = add_totals(self._now, self._earlier)
        return totals if self._is_serving else without_gauges(totals)

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Tokens at the beginning of a prompt that lie in the prefix store; EngineDead if there is no engine."""
        return await self._streams.probe(token_ids, namespace, self._connect)

    def reset_prefixes(self, namespace: str | None) -> None:
        """Forget the stored beginnings of a namespace's prompts, or of all; EngineDead if there is no engine."""
        if self._elsewhere is not None:
            raise ValueError("other servers read the prompts, and store them: this one has nothing to forget")
        self._connect()(ResetPrefixes(namespace))

    async def shutdown(self, drain_s: float) -> None:
        """Take no more requests, let running ones finish for at most ``drain_s``, end the process. May be repeated."""
        self._is_closing = True
        if not await self._streams.wait_idle(drain_s):
            log.warning("requests still run at the end of the drain; they are ended")
        self._streams.fail_all("the server was shut down before the answer was complete")
        if self._elsewhere is not None:
            await self._elsewhere.close()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._child is not None:
            await self._child.end(STOP_S if self._is_serving else 0.0)  # one that loads does not listen
        self._is_serving = False

    def _connect(self) -> Send:
        absence = self.absence
        if absence is not None:
            raise absence
        assert self._child is not None
        return self._child.send

    async def _launch(self) -> EngineChild:
        """Start a child and wait until it serves; whatever goes wrong, none is left behind."""
        self._absence = "the engine is loading"
        parallel = self._spec.options.parallel
        if parallel.ranks_here < parallel.size:
            log.info("the engine waits for %d ranks at %s", parallel.size - parallel.ranks_here, parallel.address)
        child = self._child = EngineChild(self._spec, self._deliver)
        try:
            self._facts = await child.facts(self._load_timeout_s)
        except BaseException:
            child.kill()
            await asyncio.wait([child.ended])
            raise
        self._is_serving = True
        facts = self._facts
        rows = f"{facts.max_rows} rows of {facts.budget_slots:,} slots"
        log.info("engine process %s serves %s in %s", child.pid, self._spec.model, rows)
        for note in facts.notes:
            log.info("%s", note)
        return child

    async def _supervise(self, child: EngineChild) -> None:
        """Wait for the child's end, and start the next one."""
        num_failures = 0
        while True:
            born = monotonic()
            await self._until_over(child)
            self._bury(child.ended.result())
            if self._is_closing or not self._restart:
                return
            num_failures = 0 if monotonic() - born >= STABLE_S else num_failures
            while True:
                await self._back_off(num_failures)
                num_failures += 1
                try:
                    child = await self._launch()
                    break
                except (EngineDead, ValueError, OSError) as error:
                    self._absence = str(error)
                    log.error("the engine could not be restarted: %s", error)

    async def _until_over(self, child: EngineChild) -> None:
        """Wait for the child's end, and bring it about when the child is stuck.

        It is asked whether its loop goes round, and has so many ticks to say anything at all. Ticks and not seconds: a
        front that was itself stopped, or whose machine slept, makes one tick of the gap and blames nobody.
        """
        num_silent = 0
        while not child.ended.done():
            # Not the future itself: shutdown cancels this task, not the child's end.
            await asyncio.wait([child.ended], timeout=self._stall_timeout_s / STALL_TICKS or None)
            if child.take_heard():
                num_silent = 0
                child.send(Ping())
            else:
                num_silent += 1
            if num_silent == STALL_TICKS and not child.ended.done():
                self._end_stuck(child)

    def _end_stuck(self, child: EngineChild) -> None:
        why = f"the engine did not get on for {self._stall_timeout_s:g} s"
        log.error("%s; process %s is killed", why, child.pid)
        self._earlier = replace(self._earlier, stalls_total=self._earlier.stalls_total + 1)
        self._lose(why)
        child.kill_for(why)

    def _bury(self, why: str) -> None:
        """Tell every request, and keep the totals."""
        if not self._is_closing:
            log.error("%s; running requests are lost", why)
        self._lose(why)
        self._earlier = self.stats()
        self._now = EngineStats()

    def _lose(self, why: str) -> None:
        """No engine from here on; requests end, and are told whether there will be one again."""
        self._is_serving = False
        self._is_final = not self._restart
        self._absence = f"{why}; it is not restarted" if self._is_final else why
        self._streams.fail_all(self._absence, is_final=self._is_final)

    async def _back_off(self, num_failures: int) -> None:
        delay = min(self._first_backoff_s * 2**num_failures, MAX_BACKOFF_S)
        self._absence = f"{self._absence}; it is restarted in {delay:g} s"
        self._earlier = replace(self._earlier, restarts_total=self._earlier.restarts_total + 1)
        log.info("the engine is restarted in %g s", delay)
        await asyncio.sleep(delay)

    def _deliver(self, message: FromProcess) -> None:
        match message:
            case Stats(stats):
                self._now = stats
            case Deltas() | Refused() | Probed():
                self._streams.deliver(message)
            case TicketIssued() | RowMissed() if self._elsewhere is not None and self._child is not None:
                self._elsewhere.deliver(message, self._child.send)
            case Failed(_, why):  # its process ends; requests need not wait until it has
                self._lose(why)
