"""What the engine process says beside the messages of every engine (``snapstream/engine/worker.py``), and its orders.

It sends ``Ready`` once, then the answers of its engine, and ``Failed`` as its last word if it can still speak.
Invariant: nothing here imports torch. The front loads it only together with a tokenizer, whose library brings it, and
holds no weights but those of a draft. ``process_main.py`` and ``child.py`` are the two ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from snapstream.config import EngineConfig, EngineOptions, ModelConfig
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.engine.request_state import RequestDelta, SampleDelta
from snapstream.engine.stats import EngineStats
from snapstream.engine.worker import FromEngine
from snapstream.plan.memory import DraftMemory
from snapstream.types import Request

# The interface between the HTTP front and an engine, whatever process the engine lives in.
#
# ``process.py`` implements it with a child process, tests with the engine in-process. Requests go over whole, answers
# come back as deltas: only what is new crosses the border.

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


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """All that the engine process needs to build its engine."""

    model: str  # checkpoint folder
    options: EngineOptions = field(default_factory=EngineOptions)
    num_threads: int | None = None  # of torch on the CPU; None means its default
    beside: DraftMemory | None = None  # the front's draft on the same device
    transfer: TransferSettings | None = None  # to send rows to other engines, or to receive some


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts about the loaded engine."""

    model: str
    engine: EngineConfig
    architecture: ModelConfig
    has_tokenizer: bool
    pid: int
    notes: tuple[str, ...] = ()  # lines about choices that were made at the start
    row_facts: dict[str, str] = field(default_factory=dict)  # what the other side of a KV transfer must agree with

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @property
    def max_rows(self) -> int:
        return self.engine.max_rows

    @property
    def budget_slots(self) -> int:
        """Slots of the largest row."""
        return self.engine.budget.capacity


@dataclass(frozen=True, slots=True)
class Loading:
    """What the engine process does before it is ready."""

    stage: str


@dataclass(frozen=True, slots=True)
class Ready:
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built, or broke; its process ends. "value": the settings are wrong."""

    kind: Literal["value", "error"]
    message: str


FromProcess = Loading | Ready | Failed | FromEngine
