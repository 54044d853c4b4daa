"""The engine in a separate process: the ``AsyncEngine`` that the server uses, and the process itself (``child_main``),
which loads the model, reports it, and serves until it is stopped or the server exits.

              start        ready           death
      (none) -------> loading ---> serving -------> backoff --> loading ...      shutdown: from anywhere to ended
                                      |    every stream: EngineDead

Invariant: a request gets either deltas up to ``is_finished`` or an exception, also when the child is killed, stopped or
stuck; at most one child exists at a time. Messages pass two threads, so that the event loop never pickles or waits:

          event loop --outbox--> writer thread ==pipe==> child
          event loop <--call_soon-- reader thread <==pipe== child
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from snapstream.config.engine import STALL_TIMEOUT_S
from snapstream.disaggregation.connector import TcpConnector
from snapstream.engine.client import Channel, EngineClient, Item, News, Reader
from snapstream.engine.core import TicketIssued
from snapstream.engine.worker import (
    Beat,
    Deltas,
    EngineWorker,
    Ping,
    Refused,
    Reply,
    Stop,
    ToEngine,
    add_totals,
    without_gauges,
)
from snapstream.grammar import end_with_parent
from snapstream.server.engine.api import (
    EngineDead,
    EngineMetadata,
    EngineSpec,
    EngineStats,
    Failed,
    FromProcess,
    Loading,
    Ready,
    RequestDelta,
)
from snapstream.server.engine.remote_prefill import PrefillBackend, RemotePrefills
from snapstream.startup.build import make_connector
from snapstream.step import KVTransferFailed
from snapstream.types import Request

if TYPE_CHECKING:
    from snapstream.config import EngineOptions
    from snapstream.llm import LLM
    from snapstream.step import Runner


BEAT_S = 0.1


class ServerGone(Exception):
    """The other end of the pipe is closed."""


class Heartbeat:
    """Reports to the server, at most every ``BEAT_S``, that a long step makes progress."""

    def __init__(self, send: Callable[[Beat], None], *, clock: Callable[[], float] = monotonic) -> None:
        self._send, self._clock = send, clock
        self._at = clock()

    def note(self) -> None:
        now = self._clock()
        if now - self._at >= BEAT_S:
            self._at = now
            self._send(Beat())


class PipePort:
    """The engine loop's port: a pipe, and a socket pair by which other threads wake it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # the loss of a rank is reported on another thread
        self._wake_send, self._wake_receive = socket.socketpair()
        for end in (self._wake_send, self._wake_receive):
            end.setblocking(False)

    def wake(self) -> None:
        """Wake the loop for an event that is not a message. Thread-safe."""
        with suppress(BlockingIOError):  # a wake-up is pending
            self._wake_send.send(b"\0")

    def receive(self, *, block: bool) -> ToEngine | None:
        try:
            if block and self._connection not in wait([self._connection, self._wake_receive]):
                self._wake_receive.recv(4096)
                return None
            if not block and not self._connection.poll():
                return None
            message: ToEngine = self._connection.recv()
        except (EOFError, OSError) as error:
            raise ServerGone from error
        return message

    def send(self, message: FromProcess) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise ServerGone from error


def build(
    spec: EngineSpec,
    on_unit: Callable[[], None] = lambda: None,
    on_lost: Callable[[str], None] = lambda why: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> LLM:
    """Load the model and build everything around it; ``on_unit`` and ``on_lost`` as in ``build_ranks``. ``on_stage``
    receives the current stage."""
    from snapstream.llm import LLM
    from snapstream.startup.build import build_ranks

    if spec.num_threads is not None:
        import torch

        torch.set_num_threads(spec.num_threads)

    def make_runner(*given: Any) -> Runner:
        last = -1

        def note(share: float) -> None:
            nonlocal last
            if (percent := int(100 * share)) > last:
                last = percent
                on_stage(f"reading the weights, {percent} %" if percent < 100 else "preparing the engine")

        note(0.0)
        folder, model, config, grammars, _ = given
        return build_ranks(folder, model, config, grammars, note, on_unit=on_unit, on_lost=on_lost)

    on_stage("choosing and compiling kernels")
    options, about_heads = spec.options, ""
    if options.has_automatic_heads:
        options, about_heads = _automatic_heads(spec, on_stage)
    llm = LLM(spec.model, options, progress=False, draft_memory=spec.draft_memory, make_runner=make_runner)
    if about_heads:
        llm.notes = (about_heads, *llm.notes)
    return llm


def _automatic_heads(spec: EngineSpec, on_stage: Callable[[str], None]) -> tuple[EngineOptions, str]:
    if spec.transfer is not None:  # both engines must have the same, and each would find its own
        why = "engines that transfer rows need the same profile: name a file for both"
        return replace(spec.options, heads="none"), f"heads: equal; {why}"
    from snapstream.calibration import automatic_heads
    from snapstream.models.hub import local_folder
    from snapstream.models.registry import read_model_config

    folder = local_folder(spec.model, progress=False)
    return automatic_heads(Path(folder), read_model_config(folder), spec.options, on_stage=on_stage)


def child_main(connection: Connection, spec: EngineSpec) -> None:
    """Entry point of the engine process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the process group; the server drains, then sends Stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    port = PipePort(connection)
    is_loaded = False
    try:
        with build(
            spec, Heartbeat(port.send).note, partial(_end_without_rank, port), lambda stage: port.send(Loading(stage))
        ) as llm:
            connector = None
            if spec.transfer is not None:
                connector = make_connector(Path(spec.model), llm.model_config, llm.config, spec.transfer, port.wake)
                llm.engine.connect(connector)
            is_loaded = True
            port.send(Ready(_metadata(spec, llm, connector)))
            interval_s = spec.stream_interval_ms / 1e3
            EngineWorker(llm.engine, llm.config.max_rows, port, delta_interval_s=interval_s).run()
    except ServerGone:
        return
    except Exception as error:
        if not is_loaded and isinstance(error, (ValueError, FileNotFoundError)):
            port.send(Failed("value", str(error)))
        else:
            port.send(Failed("error", f"the engine failed: {type(error).__name__}: {error}"))
            if is_loaded:  # else the server ends with that one line
                raise
            sys.exit(1)


def _transfer_notes(spec: EngineSpec, connector: TcpConnector | None) -> tuple[str, ...]:
    """Lines for the log about KV transfer."""
    if connector is None or spec.transfer is None:
        return ()
    if connector.address is None:
        return ("rows go to the servers that ask for them",)
    how = "TLS" if spec.transfer.cert is not None else "no TLS"
    return (f"rows arrive at {connector.address[0]} port {connector.address[1]}, {how}",)


def _metadata(spec: EngineSpec, llm: LLM, connector: TcpConnector | None) -> EngineMetadata:
    return EngineMetadata(
        model=spec.model,
        engine=llm.config,
        architecture=llm.model_config,
        pid=os.getpid(),
        notes=(*llm.notes, *_transfer_notes(spec, connector)),
        transfer_fingerprint={} if connector is None else dict(connector.fingerprint),
    )


def _end_without_rank(port: PipePort, why: str) -> None:
    """Exit at once, in a step or idle: a collective without that rank may hang."""
    with suppress(ServerGone):
        port.send(Failed("error", f"the engine failed: {why}"))
    os._exit(1)


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


LINGER_S = 1.0  # how long a child that has closed its pipe may take to end


class EngineChild:
    """One engine process: started once, ends once. Make it on the event loop.

    Invariant: every message that the child sent whole is delivered before ``ended`` is set; then it has been reaped.
    """

    def __init__(self, spec: EngineSpec, deliver: Callable[[FromProcess], None]) -> None:
        """``deliver`` is called on the event loop with each message but ``Loading`` and ``Ready``."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._metadata: asyncio.Future[EngineMetadata] = self._loop.create_future()
        self._failure: Failed | None = None
        self.stage = "starting the process"  # until it is ready
        self._has_activity = False  # set by the reader thread: so a blocked event loop is not taken for a silent child
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
        """Queue a message for the writer; no effect once the child is dead."""
        self._outbox.put(message)

    def take_activity(self) -> bool:
        """Whether it sent anything since the last call."""
        is_heard, self._has_activity = self._has_activity, False
        return is_heard

    async def metadata(self, timeout_s: float) -> EngineMetadata:
        """Wait until the engine is loaded. ValueError: it cannot be, with these settings. EngineDead: it failed."""
        outcomes: list[asyncio.Future[Any]] = [self._metadata, self.ended]
        await asyncio.wait(outcomes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._metadata.done():
            return self._metadata.result()
        if not self.ended.done():
            raise EngineDead(f"the engine was not ready within {timeout_s:g} s")
        if self._failure is not None and self._failure.kind == "value":
            raise ValueError(self._failure.message)
        raise EngineDead(self.ended.result())

    async def end(self, grace_s: float) -> None:
        """Ask it to stop, kill it after ``grace_s``; return when it is reaped."""
        self.send(Stop())
        await asyncio.wait([self.ended], timeout=grace_s)
        self.kill()
        await asyncio.wait([self.ended])

    def kill_for(self, why: str) -> None:
        """Kill it, and report ``why`` as the reason of its end."""
        self._failure = Failed("error", why)
        self.kill()

    def kill(self) -> None:
        """SIGKILL: the child ignores other signals and has nothing to save."""
        if not self.ended.done():
            with suppress(ValueError):  # reaped and closed a moment ago
                self._process.kill()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with suppress(OSError):  # the child has ended; the reader reports it
                self._connection.send(message)

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while self._connection in wait([self._connection, self._process.sentinel]):  # else dead, nothing left
                    message: FromProcess = self._connection.recv()
                    self._has_activity = True
                    self._call(self._take, message)
        finally:  # also after a message that cannot be unpickled: streams must not wait forever
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
        with suppress(ValueError):  # another thread has just reaped it
            self._process.close()
        self._call(self._end, how)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            self._loop.call_soon_threadsafe(function, *args)

    def _take(self, message: FromProcess) -> None:
        if isinstance(message, Loading):
            self.stage = message.stage
            return
        if isinstance(message, Ready):
            if not self._metadata.done():
                self._metadata.set_result(message.metadata)
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
STABLE_S = 60.0  # after serving this long, the backoff starts over
STOP_S = 5.0  # for an idle engine to exit after Stop
STALL_TICKS = 8  # per stall timeout; see _wait_exit


class EngineProcess:
    """An ``AsyncEngine``. Start it on the event loop that will use it."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        restart: bool = True,
        first_backoff_s: float = FIRST_BACKOFF_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        prefill: PrefillBackend | None = None,
    ) -> None:
        """``prefill``: the engines that prefill, if this one only decodes; rows arrive at ``spec.transfer``."""
        self._spec = spec
        self._restart = restart
        self._first_backoff_s = first_backoff_s
        self._stall_timeout_s = stall_timeout_s
        self._idle = asyncio.Event()
        self._client = EngineClient(self._send, self._idle.set)
        self._remote = None if prefill is None else RemotePrefills(prefill, self._client.fail)
        self._child: EngineChild | None = None
        self._metadata: EngineMetadata | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_serving = False
        self._is_closing = False
        self._unavailable_reason = "the engine was not started"  # the reason that requests get while it is not serving
        self._is_final = False  # it died and is not restarted
        self._earlier = EngineStats()  # totals of the children before this one
        self._now = EngineStats()

    @property
    def is_ready(self) -> bool:
        return self._is_serving and not self._is_closing

    @property
    def unavailable(self) -> EngineDead | None:
        if self.is_ready:
            return None
        if self._is_closing:
            return EngineDead("the engine is shutting down")
        return EngineDead(self._unavailable_reason, is_final=self._is_final)

    @property
    def metadata(self) -> EngineMetadata:
        """The engine, as of its last start."""
        if self._metadata is None:
            raise EngineDead("the engine has not been loaded yet")
        return self._metadata

    async def start(self) -> EngineMetadata:
        """Load the engine. ValueError: it cannot be built like this. EngineDead: it failed or took too long."""
        if self._child is not None:
            raise ValueError("the engine was started before; make another EngineProcess")
        child = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(child), name="engine-supervisor")
        return self.metadata

    def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Nothing happens, and nothing is raised, before the first delta is asked for."""
        return self._run(request) if self._remote is None else self._run_remote(request)

    async def _run(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        self._check_ready()
        async with aclosing(read_deltas(self._client, request, SameLoop())) as deltas:
            async for delta in deltas:
                yield delta

    async def _run_remote(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request that another engine prefills."""
        assert self._remote is not None
        self._remote.begin(request)
        has_row = False
        try:
            async with aclosing(self._run(replace(request, is_prefilled_remotely=True))) as deltas:
                async for delta in deltas:
                    has_row = has_row or any(sample.token_ids for sample in delta.samples)
                    yield delta
        finally:
            self._remote.end(request.request_id, has_row=has_row)

    async def check_prefill(self) -> None:
        if self._remote is not None:
            await self._remote.check()

    def stats(self) -> EngineStats:
        totals = add_totals(self._now, self._earlier)
        return totals if self._is_serving else without_gauges(totals)

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        self._check_ready()
        return await asyncio.wrap_future(self._client.num_stored(token_ids, namespace))

    def reset_prefixes(self, namespace: str | None) -> None:
        if self._remote is not None:
            raise ValueError("the prefill servers store prefixes, not this one; reset them there")
        self._check_ready()
        self._client.reset_prefixes(namespace)

    async def shutdown(self, drain_s: float) -> None:
        """May be repeated."""
        self._is_closing = True
        if self._client.num_open:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        if self._client.num_open:
            log.warning("requests still run at the end of the drain; they are ended")
        self._client.fail_all(lambda: EngineDead("the server was shut down before the answer was complete"))
        if self._remote is not None:
            await self._remote.close()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._child is not None:
            await self._child.end(STOP_S if self._is_serving else 0.0)  # while it loads, it reads no messages
        self._is_serving = False

    def _check_ready(self) -> None:
        if (unavailable := self.unavailable) is not None:
            raise unavailable

    def _send(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.send(message)

    async def _launch(self) -> EngineChild:
        """Start a child and wait until it serves; on any error no child is left."""
        self._unavailable_reason = "the engine is loading"
        parallel = self._spec.options.parallel
        if parallel.ranks_here < parallel.size:
            log.info("the engine waits for %d ranks at %s", parallel.size - parallel.ranks_here, parallel.address)
        child = self._child = EngineChild(self._spec, self._deliver)
        notes = asyncio.create_task(_note_loading(child))
        try:
            self._metadata = await child.metadata(LOAD_TIMEOUT_S)
        except BaseException:
            child.kill()
            await asyncio.wait([child.ended])
            raise
        finally:
            notes.cancel()
        self._is_serving = True
        metadata = self._metadata
        rows = f"{metadata.engine.max_rows} rows of {metadata.engine.budget.capacity:,} slots"
        log.info("engine process %s serves %s in %s", child.pid, self._spec.model, rows)
        for note in metadata.notes:
            log.info("%s", note)
        return child

    async def _supervise(self, child: EngineChild) -> None:
        """Wait for the child's end, and start the next one."""
        num_failures = 0
        while True:
            born = monotonic()
            await self._wait_exit(child)
            self._on_exit(child.ended.result())
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
                    self._unavailable_reason = str(error)
                    log.error("the engine could not be restarted: %s", error)

    async def _wait_exit(self, child: EngineChild) -> None:
        """Wait for the child's end; kill it if it stalls.

        It is pinged, and has ``STALL_TICKS`` ticks to send anything. Ticks and not seconds: a server that was itself
        stopped, or whose machine slept, counts the gap as one tick and kills no engine.
        """
        num_silent = 0
        while not child.ended.done():
            # Not the future itself: shutdown cancels this task, not the child's end.
            await asyncio.wait([child.ended], timeout=self._stall_timeout_s / STALL_TICKS or None)
            if child.take_activity():
                num_silent = 0
                child.send(Ping())
            else:
                num_silent += 1
            if num_silent == STALL_TICKS and not child.ended.done():
                self._kill_stalled(child)

    def _kill_stalled(self, child: EngineChild) -> None:
        why = f"the engine made no progress for {self._stall_timeout_s:g} s"
        log.error("%s; process %s is killed", why, child.pid)
        self._earlier = replace(self._earlier, stalls_total=self._earlier.stalls_total + 1)
        self._fail_requests(why)
        child.kill_for(why)

    def _on_exit(self, why: str) -> None:
        """Fail the open requests, and keep the totals."""
        if not self._is_closing:
            log.error("%s; running requests are lost", why)
        self._fail_requests(why)
        self._earlier = self.stats()
        self._now = EngineStats()

    def _fail_requests(self, why: str) -> None:
        """There is no engine now: open requests fail, and report whether it will be restarted."""
        self._is_serving = False
        self._is_final = not self._restart
        self._unavailable_reason = f"{why}; it is not restarted" if self._is_final else why
        self._client.fail_all(lambda: EngineDead(self._unavailable_reason, is_final=self._is_final))

    async def _back_off(self, num_failures: int) -> None:
        delay = min(self._first_backoff_s * 2**num_failures, MAX_BACKOFF_S)
        self._unavailable_reason = f"{self._unavailable_reason}; it is restarted in {delay:g} s"
        self._earlier = replace(self._earlier, restarts_total=self._earlier.restarts_total + 1)
        log.info("the engine is restarted in %g s", delay)
        await asyncio.sleep(delay)

    def _deliver(self, message: FromProcess) -> None:
        match message:
            case EngineStats():
                self._now = message
            case Deltas() | Refused() | Reply():
                self._client.deliver(message)
            case TicketIssued() | KVTransferFailed() if self._remote is not None and self._child is not None:
                self._remote.deliver(message, self._child.send)
            case Failed(_, why):  # its process is ending
                self._fail_requests(why)


async def _note_loading(child: EngineChild) -> None:
    """Log lines while the engine loads, until cancelled."""
    started = monotonic()
    while True:
        await asyncio.sleep(LOADING_NOTE_S)
        log.info("still loading after %.0f s: %s", monotonic() - started, child.stage)
