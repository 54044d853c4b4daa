"""The engine's side of the border: read messages, step, send what is new, until told to stop.

            front ----Submit, Abort, Stop---->  |         |
                                                | worker  |--> Engine.step
            front <--Deltas, Refused, Stats---  |         |

Invariant: while there is work the loop never waits for a message, and while there is none it does nothing else.
``EngineWorker`` knows no process: ``child_main`` runs it at the end of a pipe, ``local.py`` on a thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING

from snapstream.engine.core import Engine
from snapstream.engine.validate import QueueFull
from snapstream.request import Request
from snapstream.server.engine.api import EngineStats
from snapstream.server.engine.delta import DeltaTracker
from snapstream.server.engine.messages import (
    Abort,
    Deltas,
    EngineFacts,
    EngineSpec,
    Failed,
    FromEngine,
    Port,
    Ready,
    Refused,
    Stats,
    Stop,
    Submit,
    ToEngine,
)
from snapstream.server.engine.stats import StatsCounter

if TYPE_CHECKING:
    from snapstream.llm import LLM

STATS_INTERVAL_S = 0.1
MAX_MESSAGES = 64  # read between two steps, so that a flood of requests cannot stop the running ones


class EngineWorker:
    """Drives one engine from one thread."""

    def __init__(self, engine: Engine, rows_total: int, port: Port, *, clock: Callable[[], float] = monotonic) -> None:
        self._engine = engine
        self._rows_total = rows_total
        self._port = port
        self._clock = clock
        self._tracker = DeltaTracker()
        self._counter = StatsCounter()
        self._reported: EngineStats | None = None
        self._reported_at = -STATS_INTERVAL_S
        self._was_at_rest = False

    def run(self) -> None:
        """Until ``Stop``; errors of the engine and of the port end it too."""
        self._report()
        while self._read():
            self._report()  # before the step: a request is seen to run before it is seen to answer
            if self._engine.has_work:
                self._step()
            self._report()

    def _read(self) -> bool:
        """Handle what has come; without work, wait for something to come. False: stop."""
        block = not self._engine.has_work
        for _ in range(MAX_MESSAGES):
            message = self._port.receive(block=block)
            block = False
            match message:
                case None:
                    break
                case Stop():
                    return False
                case Submit(request):
                    self._submit(request)
                case Abort(request_id):
                    self._engine.abort(request_id)
        return True

    def _submit(self, request: Request) -> None:
        try:
            self._engine.add_request(request)
        except ValueError as error:
            self._port.send(Refused(request.request_id, "value", str(error)))
        except QueueFull as error:
            self._port.send(Refused(request.request_id, "queue_full", str(error)))

    def _step(self) -> None:
        deltas = tuple(self._tracker.take(output) for output in self._engine.step())
        if deltas:
            self._counter.count(deltas)
            self._port.send(Deltas(deltas))

    def _report(self) -> None:
        """Send the figures if they changed: at once when the engine comes to rest or leaves it, else now and then."""
        now, is_at_rest = self._clock(), not self._engine.has_work
        if is_at_rest == self._was_at_rest and now - self._reported_at < STATS_INTERVAL_S:
            return
        self._reported_at, self._was_at_rest = now, is_at_rest
        stats = self._counter.stats(self._engine, self._rows_total)
        if stats != self._reported:
            self._reported = stats
            self._port.send(Stats(stats))


class FrontGone(Exception):
    """The other end of the pipe is closed: nobody is left to answer."""


class PipePort:
    """A port at the end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self, *, block: bool) -> ToEngine | None:
        try:
            if not block and not self._connection.poll():
                return None
            message: ToEngine = self._connection.recv()
        except (EOFError, OSError) as error:
            raise FrontGone from error
        return message

    def send(self, message: FromEngine) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise FrontGone from error


def build(spec: EngineSpec) -> LLM:
    """Load the model and build everything around it."""
    from snapstream.llm import LLM

    if spec.num_threads is not None:
        import torch

        torch.set_num_threads(spec.num_threads)
    return LLM(spec.model, spec.options, progress=False, beside=spec.beside)


def child_main(connection: Connection, spec: EngineSpec) -> None:
    """Life of the engine process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the whole group; the front drains, then says Stop
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    port = PipePort(connection)
    is_loaded = False
    try:
        with build(spec) as llm:
            is_loaded = True
            port.send(Ready(_facts(spec, llm)))
            EngineWorker(llm.engine, llm.config.max_rows, port).run()
    except FrontGone:
        return
    except Exception as error:
        if not is_loaded and isinstance(error, (ValueError, FileNotFoundError)):
            port.send(Failed("value", str(error)))
        else:
            port.send(Failed("error", f"the engine failed: {type(error).__name__}: {error}"))
            if is_loaded:  # else the front ends with that one line
                raise
            sys.exit(1)


def _facts(spec: EngineSpec, llm: LLM) -> EngineFacts:
    return EngineFacts(
        model=spec.model,
        engine=llm.config,
        architecture=llm.model_config,
        has_tokenizer=llm.tokenizer is not None,
        pid=os.getpid(),
        notes=llm.notes,
    )


def _end_with_parent() -> None:
    """A front that is killed leaves no engine behind, not even one that is loading or in a long step."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
