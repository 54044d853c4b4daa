"""Waiting in tests: until something holds, however slow the machine is.

A limit here is for what hangs, so it is far beyond what a busy machine needs. Where a test bounds how long something
takes, ``Lateness`` measures meanwhile what the machine's load adds, and the bound grows by that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType

HANG_S = 300.0
BEAT_S = 0.01
MARGIN = 20  # steps of a chain that each may come late


def until(holds: Callable[[], object], limit_s: float = HANG_S) -> None:
    """Poll until it holds; AssertionError after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come within {limit_s:g} s"
        time.sleep(0.02)


async def until_async(holds: Callable[[], object], limit_s: float = HANG_S) -> None:
    """The same beside what runs on the event loop."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come within {limit_s:g} s"
        await asyncio.sleep(0.01)


class Lateness:
    """Around what is timed: how late this machine wakes a thread that slept. A fault of ours does not make it late."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def allowed(self, bound_s: float) -> float:
        """``bound_s`` on an idle machine, more on a busy one."""
        return bound_s + MARGIN * self.worst_s

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            time.sleep(BEAT_S)
            self.worst_s = max(self.worst_s, time.monotonic() - began - BEAT_S)
