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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapstream.server.answers import Answer

log = logging.getLogger(__name__)


class Visits:
    """The visits of one application."""

    def __init__(self) -> None:
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

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

    def enter(self) -> None:
        self.is_open = True
        self.visits.enter()

    def end(self, status: int, how: str = "") -> None:
        """``how``: why a stream stopped, if not because it was complete. Also for visits that were not let in."""
        if self.is_open:
            self.is_open = False
            self.visits.leave()
        usage = self.answer.usage if self.answer is not None else {}
        log.info(
            "request=%s answer=%s path=%s status=%d end=%s prompt_tokens=%d completion_tokens=%d ms=%.1f",
            self.request_id,
            self.answer_id,
            self.path,
            status,
            how or (self.answer.ends if self.answer is not None and status == 200 else "-"),
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", 0),
            1e3 * (monotonic() - self.born),
        )
