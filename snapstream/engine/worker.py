"""The engine's side of the border: read messages, step, send what is new, until told to stop.

            callers ---Submit, Abort, Stop--->  |         |
                                                | worker  |--> Engine.step
            callers <--Deltas, Refused, Stats-  |         |

Invariant: while there is work the loop never waits for a message, and while there is none it does nothing else; rows
that came from other engines wake the port.
It knows neither process nor thread: ``thread.py`` runs it on a thread, the server in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from snapstream.engine.core import Engine
from snapstream.engine.delta import DeltaTracker
from snapstream.engine.messages import (
    Abort,
    Beat,
    Deltas,
    Ping,
    Port,
    Probe,
    Probed,
    Refused,
    Reissue,
    ResetPrefixes,
    Stats,
    Stop,
    Submit,
)
from snapstream.engine.stats import EngineStats, StatsCounter
from snapstream.engine.validate import QueueFull
from snapstream.request import Request

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
            for notice in self._engine.take_notices():
                self._port.send(notice)
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
                case Reissue(request_id, key):
                    self._engine.reissue(request_id, key)
                case ResetPrefixes(namespace):
                    self._engine.reset_prefix_store(namespace)
                case Probe(number, token_ids, namespace):
                    self._port.send(Probed(number, self._engine.num_stored(token_ids, namespace)))
                case Ping():
                    self._port.send(Beat())
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
