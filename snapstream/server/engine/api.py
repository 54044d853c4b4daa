"""The interface between the HTTP front and an engine, whatever process the engine lives in.

``process.py`` implements it with a child process, tests with the engine in-process. Requests go over whole,
answers come back as deltas: only what is new crosses the border.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from snapstream.request import Compression, FinishReason, Logprob, Request, Timings


class EngineDead(RuntimeError):
    """The engine process ended, or is being restarted; the request may be tried again unless ``is_final``."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final  # it will not come back


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """What one sample gained since the last delta."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None  # aligned with token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """What one request gained since the last delta."""

    request_id: str
    samples: tuple[SampleDelta, ...]
    is_finished: bool = False
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # once, with the first token
    compression: Compression | None = None  # once, with the first token
    timings: Timings | None = None  # once, with the last delta


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and totals for /metrics; totals only ever grow, also over a restart of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    rows_free: int = 0
    rows_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    evicted_tokens_total: int = 0
    compressions_total: int = 0
    compression_seconds_total: float = 0.0
    restarts_total: int = 0


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

    async def shutdown(self, drain_s: float) -> None:
        """Take no more requests, let running ones finish for at most ``drain_s``, end the engine."""
        ...
