"""An engine on a thread of its own, for callers on any other: ``EngineWorker`` between two queues.

Invariant: this thread alone touches the engine, from its start to its end. What it delivers is called on it, and has to
hand over to whatever loop or thread waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from snapstream.engine.core import Engine
from snapstream.engine.messages import FromEngine, Stop, ToEngine
from snapstream.engine.worker import EngineWorker

Deliver = Callable[[FromEngine], None]


class _QueuePort:
    """Messages as objects, through a queue one way and a call the other."""

    def __init__(self, deliver: Deliver) -> None:
        self.inbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        self._deliver = deliver

    def receive(self, *, block: bool) -> ToEngine | None:
        try:
            return self.inbox.get(block=block)
        except Empty:
            return None

    def send(self, message: FromEngine) -> None:
        self._deliver(message)


class EngineThread:
    """It runs from the first moment on; ``died`` is called, on it, if a step fails: nothing is run after that."""

    def __init__(self, engine: Engine, rows_total: int, deliver: Deliver, died: Callable[[Exception], None]) -> None:
        self._died = died
        self._port = _QueuePort(deliver)
        self._worker = EngineWorker(engine, rows_total, self._port)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """From any thread; without effect once it has ended."""
        self._port.inbox.put(message)

    def wake(self) -> None:
        """From any thread: there is news that came beside the messages."""
        self._port.inbox.put(None)

    def stop(self) -> None:
        """End after the step that runs, and wait for it."""
        self.send(Stop())
        self._thread.join()

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            self._died(error)
