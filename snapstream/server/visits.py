"""Every HTTP request that computes, from its arrival to the last byte of its answer: counted, bounded, logged once.

Invariant: a visit that was let in ends exactly once, whatever becomes of it, and leaves one line in the log. A drain
waits for the count to reach 0, so a request whose prompts still wait in the front is not lost to it.
``front.py`` opens visits; ``sse.py`` ends those of streams.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from snapstream.server.errors import queue_full

if TYPE_CHECKING:
    from snapstream.server.answers import Answer

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
    """One HTTP request. ``answer`` is set once its prompts are known; the log takes its figures from there."""

    visits: Visits
    answer_id: str
    request_id: str
    path: str
    answer: Answer | None = None
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
        log.info("answered", extra={"fields": self._fields(status, how)})

    def _fields(self, status: int, how: str) -> dict[str, Any]:
        """For the log. Nothing of what was asked or answered is in it."""
        answer = self.answer
        usage = {} if answer is None else answer.usage
        first_at = None if answer is None else answer.first_at
        return {
            "request": self.request_id,
            "answer": self.answer_id,
            "path": self.path,
            "status": status,
            "end": how or (answer.ends if answer is not None and status == 200 else None),
            "prompt_tokens": usage.get("prompt_tokens", 0),
            "trimmed_tokens": 0 if answer is None else answer.trimmed_tokens,
            "kept_tokens": 0 if answer is None else answer.kept_tokens,
            "completion_tokens": usage.get("completion_tokens", 0),
            "queue_ms": None if answer is None else answer.queue_ms,
            "ttft_ms": None if first_at is None else 1e3 * (first_at - self.born),
            "ms": 1e3 * (monotonic() - self.born),
        }
