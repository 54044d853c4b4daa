"""An application on uvicorn that ends in order: the first signal drains it, a second one ends it at once."""

from __future__ import annotations

import asyncio
import logging
from types import FrameType
from typing import Protocol

import uvicorn

log = logging.getLogger(__name__)

LAST_FRAMES_S = 5  # for error frames to leave after draining


def check_place(port: int, drain_timeout_s: float) -> None:
    """ValueError for a port that is none, or a drain without an end."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port is {port}; it must be a number from 0 to 65535")
    if not 0 <= drain_timeout_s < 86400:
        raise ValueError(f"the drain timeout is {drain_timeout_s} s; it must be from 0 to 86400")


class Drainable(Protocol):
    """The state of an application that ends in order."""

    is_draining: bool

    async def drain(self, timeout_s: float) -> None: ...


class DrainingServer(uvicorn.Server):
    """uvicorn, except that the first signal drains: it goes on answering until ``front`` has let its streams go."""

    def __init__(self, config: uvicorn.Config, front: Drainable, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._front = front
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in a signal handler: between any two instructions of the loop's thread."""
        if self._front.is_draining:
            # Not through uvicorn's own handler: it would raise the signal again before the engine is shut down.
            self.should_exit = self.force_exit = True
            return
        self._front.is_draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        log.info("draining for at most %g s; a second signal ends at once", self._drain_timeout_s)
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._front.drain(self._drain_timeout_s)
        finally:
            self.should_exit = True
