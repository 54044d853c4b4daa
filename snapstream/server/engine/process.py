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
import multiprocessing
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from queue import SimpleQueue
from time import monotonic
from typing import Any

from snapstream.config.engine import STALL_TIMEOUT_S
from snapstream.engine.client import Channel, EngineClient, Item, News, Reader
from snapstream.engine.stats import add_totals, without_gauges
from snapstream.engine.transfers import TicketIssued
from snapstream.engine.worker import (
    Deltas,
    Ping,
    Refused,
    Reply,
    Stats,
    Stop,
    ToEngine,
)
from snapstream.server.engine.api import (
    EngineDead,
    EngineFacts,
    EngineSpec,
    EngineStats,
    Failed,
    FromProcess,
    Loading,
    Ready,
    RequestDelta,
)
from snapstream.server.engine.process_main import child_main
from snapstream.server.engine.remote_prefill import Elsewhere, PromptReaders
from snapstream.step import KVTransferFailed
from snapstream.types import Request


class DeltaReader(Reader):
    """A queue of the deltas of one request, on the reader's event loop."""

    def __init__(self, request_id: str, channel: Channel) -> None:
        super().__init__(request_id, channel)
        self.items: asyncio.Queue[Item] = asyncio.Queue()

    def take(self, item: Item) -> None:
        self.items.put_nowait(item)


@dataclass(frozen=True)
class SameLoop:
    """The channel of an ``EngineClient`` whose ``deliver`` is called on the readers' event loop."""

    def put(self, news: News) -> None:
        for reader, item in news:
            reader.take(item)


async def read_deltas(client: EngineClient, request: Request, channel: Channel) -> AsyncGenerator[RequestDelta, None]:
    """Submit a request and yield its deltas; leaving early aborts it."""
    reader = DeltaReader(request.request_id, channel)
    try:
        client.submit(replace(request, prompt=None), reader)  # the engine would only echo the text
        is_finished = False
        while not is_finished:
            item = await reader.items.get()
            if isinstance(item, Exception):
                raise item
            is_finished = item.is_finished
            yield item
    finally:
        client.leave([reader])


# One life of the engine process, seen from the front: started once, ends once, carries messages in between.
#
#       event loop --outbox--> writer thread ==pipe==> child
#       event loop <--call_soon-- reader thread <==pipe== child
#
# Pickling and the waits for the pipe happen on the two threads, never on the loop. Invariant: every message that the
# child sent whole is delivered before ``ended`` is set, and when it is set the process has been reaped. ``process.py``
# decides when to start another.

LINGER_S = 1.0  # how long a child that has closed its pipe may take to end


class EngineChild:
    """Make it on the event loop; ``deliver`` is called there with each message but ``Ready``."""

    def __init__(self, spec: EngineSpec, deliver: Callable[[FromProcess], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._facts: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._failure: Failed | None = None
        self.stage = "starting the process"  # until it is ready
        self._is_heard = False  # set by the reader's thread: that this loop hangs is no silence of the child's
        self.ended: asyncio.Future[str] = self._loop.create_future()  # why
        context = multiprocessing.get_context("spawn")  # never fork: torch has threads
        self._connection, theirs = context.Pipe()
        # daemon: an interpreter that exits without shutdown() ends it instead of waiting for it
        self._process = context.Process(target=child_main, args=(theirs, spec), name="snapstream-engine", daemon=True)
        self._process.start()
        self.pid = self._process.pid
        theirs.close()  # else its end would be open here too, and the pipe would never report the child's death
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Hand a message to the writer; without effect once the child is dead."""
        self._outbox.put(message)

    def take_heard(self) -> bool:
        """Whether anything came from it since the last time."""
        is_heard, self._is_heard = self._is_heard, False
        return is_heard

    async def facts(self, timeout_s: float) -> EngineFacts:
        """Wait until the engine is loaded. ValueError: it cannot be, with these settings. EngineDead: it failed."""
        outcomes: list[asyncio.Future[Any]] = [self._facts, self.ended]
        await asyncio.wait(outcomes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._facts.done():
            return self._facts.result()
        if not self.ended.done():
            raise EngineDead(f"the engine was not ready within {timeout_s:g} s")
        if self._failure is not None and self._failure.kind == "value":
            raise ValueError(self._failure.message)
        raise EngineDead(self.ended.result())

    async def end(self, grace_s: float) -> None:
        """Ask it to stop, kill it after ``grace_s``; returns when the process is reaped."""
        self.send(Stop())
        await asyncio.wait([self.ended], timeout=grace_s)
        self.kill()
        await asyncio.wait([self.ended])

    def kill_for(self, why: str) -> None:
        """Kill it, and let that be the reason of its end."""
        self._failure = Failed("error", why)
        self.kill()

    def kill(self) -> None:
        """SIGKILL: the child ignores the milder ones, and there is nothing in it to save."""
        if not self.ended.done():
            with suppress(ValueError):  # reaped and closed a moment ago
                self._process.kill()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with suppress(OSError):  # the child is gone; the reader reports it
                self._connection.send(message)

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while self._connection in wait([self._connection, self._process.sentinel]):  # else dead, nothing left
                    message: FromProcess = self._connection.recv()
                    self._is_heard = True
                    self._call(self._take, message)
        finally:  # also after a message that cannot be read: streams must not wait for ever
            self._reap()

    def _reap(self) -> None:
        self._process.join(LINGER_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        how = _describe(self._process.exitcode)
        self._outbox.put(None)
        self._writer.join()
        self._connection.close()
        with suppress(ValueError):  # another thread of ours collected it in this moment, and has not noted it yet
            self._process.close()
        self._call(self._end, how)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _take(self, message: FromProcess) -> None:
        if isinstance(message, Loading):
            self.stage = message.stage
            return
        if isinstance(message, Ready):
            if not self._facts.done():
                self._facts.set_result(message.facts)
            return
        if isinstance(message, Failed):
            self._failure = message
        self._deliver(message)

    def _end(self, how: str) -> None:
        why = how if self._failure is None else self._failure.message
        if not self.ended.done():
            self.ended.set_result(why)


def _describe(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"the engine process ended with code {exitcode}"
    return f"the engine process was killed by {signal.Signals(-exitcode).name}"


log = logging.getLogger(__name__)

LOADING_NOTE_S = 10.0  # between lines of the log while the engine loads
LOAD_TIMEOUT_S = 1800.0  # large checkpoints on slow disks
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0  # an engine that served this long starts over with the first backoff
STOP_S = 5.0  # for an idle engine to leave after Stop
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
        self._idle = asyncio.Event()
        self._client = EngineClient(self._send, self._idle.set)
        self._elsewhere: Elsewhere | None = None
        if make_readers is not None:
            self._elsewhere = Elsewhere(make_readers(self), self._client.fail)
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
        return self._run(request) if self._elsewhere is None else self._run_read(request)

    async def _run(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        self._check_ready()
        async with aclosing(read_deltas(self._client, request, SameLoop())) as deltas:
            async for delta in deltas:
                yield delta

    async def _run_read(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request whose prompt others read."""
        assert self._elsewhere is not None
        self._elsewhere.begin(request)
        has_row = False
        try:
            async with aclosing(self._run(replace(request, is_prefilled_remotely=True))) as deltas:
                async for delta in deltas:
                    has_row = has_row or any(sample.token_ids for sample in delta.samples)
                    yield delta
        finally:
            self._elsewhere.end(request.request_id, has_row=has_row)

    async def check_readers(self) -> None:
        """As ``PromptReaders.check``; an engine that reads its own prompts has nothing to check."""
        if self._elsewhere is not None:
            await self._elsewhere.check()

    def stats(self) -> EngineStats:
        totals = add_totals(self._now, self._earlier)
        return totals if self._is_serving else without_gauges(totals)

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Tokens at the beginning of a prompt that lie in the prefix store; EngineDead if there is no engine."""
        self._check_ready()
        return await asyncio.wrap_future(self._client.num_stored(token_ids, namespace))

    def reset_prefixes(self, namespace: str | None) -> None:
        """Forget the stored beginnings of a namespace's prompts, or of all; EngineDead if there is no engine."""
        if self._elsewhere is not None:
            raise ValueError("other servers read the prompts, and store them: this one has nothing to forget")
        self._check_ready()
        self._client.reset_prefixes(namespace)

    async def shutdown(self, drain_s: float) -> None:
        """Take no more requests, let running ones finish for at most ``drain_s``, end the process. May be repeated."""
        self._is_closing = True
        if self._client.num_open:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        if self._client.num_open:
            log.warning("requests still run at the end of the drain; they are ended")
        self._client.fail_all(lambda: EngineDead("the server was shut down before the answer was complete"))
        if self._elsewhere is not None:
            await self._elsewhere.close()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._child is not None:
            await self._child.end(STOP_S if self._is_serving else 0.0)  # one that loads does not listen
        self._is_serving = False

    def _check_ready(self) -> None:
        if (absence := self.absence) is not None:
            raise absence

    def _send(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.send(message)

    async def _launch(self) -> EngineChild:
        """Start a child and wait until it serves; whatever goes wrong, none is left behind."""
        self._absence = "the engine is loading"
        parallel = self._spec.options.parallel
        if parallel.ranks_here < parallel.size:
            log.info("the engine waits for %d ranks at %s", parallel.size - parallel.ranks_here, parallel.address)
        child = self._child = EngineChild(self._spec, self._deliver)
        notes = asyncio.create_task(_note_loading(child))
        try:
            self._facts = await child.facts(self._load_timeout_s)
        except BaseException:
            child.kill()
            await asyncio.wait([child.ended])
            raise
        finally:
            notes.cancel()
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
        front that was itself stopped, or whose machine slept, counts the gap as one tick and ends no engine.
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
        """No engine from here on; requests fail, with whether it will be restarted."""
        self._is_serving = False
        self._is_final = not self._restart
        self._absence = f"{why}; it is not restarted" if self._is_final else why
        self._client.fail_all(lambda: EngineDead(self._absence, is_final=self._is_final))

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
            case Deltas() | Refused() | Reply():
                self._client.deliver(message)
            case TicketIssued() | KVTransferFailed() if self._elsewhere is not None and self._child is not None:
                self._elsewhere.deliver(message, self._child.send)
            case Failed(_, why):  # its process ends; requests need not wait until it has
                self._lose(why)


async def _note_loading(child: EngineChild) -> None:
    """Lines in the log while the engine loads, until cancelled."""
    started = monotonic()
    while True:
        await asyncio.sleep(LOADING_NOTE_S)
        log.info("still loading after %.0f s: %s", monotonic() - started, child.stage)
