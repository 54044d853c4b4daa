"""Every HTTP request that computes, from its arrival to the last byte of its answer: counted, bounded, logged once.

Invariant: a visit that was let in ends exactly once, whatever becomes of it, and leaves one line in the log. A drain
waits for the count to reach 0, so a request whose prompts still wait in the front is not lost to it.
``gate.py`` lets visits in and ends them; ``sse.py`` ends those of streams.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from snapstream.server.http.errors import queue_full

log = logging.getLogger(__name__)


class Visits:
    """The visits of one application."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_bytes = 0  # of the bodies of open requests
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    def check_room(self, num_bytes: int, limit: int, retry_after_s: int) -> None:
        """ApiError 429 where bodies of open requests would hold more than ``limit`` bytes together."""
        if self.num_bytes + num_bytes > limit:
            raise queue_full(f"the bodies of open requests reach the limit of {limit} bytes", retry_after_s)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if some still are."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()


@dataclass
class Visit:
    """One HTTP request. ``answer_id`` is ours and unique; ``request_id`` may be the client's."""

    visits: Visits
    answer_id: str
    request_id: str
    path: str
    born: float = field(default_factory=monotonic)
    is_open: bool = False
    num_bytes: int = 0

    def enter(self) -> None:
        self.is_open = True
        self.visits.enter()

    def take(self, num_bytes: int) -> None:
        """Hold so many bytes of body until the end: what was parsed from them lives as long as the answer."""
        self.num_bytes += num_bytes
        self.visits.num_bytes += num_bytes

    def end(self, status: int, how: str = "") -> None:
        """``how``: why a stream stopped, if not because it was complete. Also for visits that were not let in."""
        if self.is_open:
            self.is_open = False
            self.visits.leave()
            self.visits.num_bytes -= self.num_bytes
        log.info("answered", extra={"fields": self.fields(status, how)})

    def fields(self, status: int, how: str) -> dict[str, Any]:
        """For the log. Nothing of a prompt or an answer is in it."""
        return {
            "request": self.request_id,
            "path": self.path,
            "status": status,
            "end": how or None,
            "ms": 1e3 * (monotonic() - self.born),
        }
