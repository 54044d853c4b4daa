"""The interface between the HTTP front and an engine, whatever process the engine lives in.

``process.py`` implements it with a child process, tests with the engine in-process. Requests go over whole,
answers come back as deltas: only what is new crosses the border.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from snapstream.engine.delta import RequestDelta, SampleDelta
from snapstream.engine.stats import EngineStats
from snapstream.request import Request

__all__ = ["AsyncEngine", "EngineDead", "EngineStats", "RequestDelta", "SampleDelta"]


class EngineDead(RuntimeError):
    """The engine process ended, or is being restarted; the request may be tried again unless ``is_final``."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final  # it will not come back


class AsyncEngine(Protocol):
    """The engine as seen from an event loop."""

    @property
    def is_ready(self) -> bool:
        """True while requests are taken: loaded, alive, not draining."""
        ...

    @property
    def absence(self) -> EngineDead | None:
        """Why it is not ready; None if it is."""
        ...

    def generate(self, request: Request) -> AsyncIterator[RequestDelta]:
        """Run a request. ValueError: can never be served. QueueFull: try later. EngineDead: lost.

        Closing the iterator early aborts the request.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Tokens at the beginning of a prompt that lie in the prefix store when the engine reads this. EngineDead."""
        ...

    def reset_prefixes(self, namespace: str | None) -> None:
        """Forget the stored beginnings of a namespace's prompts, or of all, before any request that follows.

        EngineDead.
        """
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Take no more requests, let running ones finish for at most ``drain_s``, end the engine."""
        ...
