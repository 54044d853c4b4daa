"""The interface between the HTTP server and an engine in any process.

``AsyncEngine`` is implemented by a child process (``process.py``), by Ray replicas and by tests in process. Requests
are sent whole, answers come back as deltas. Besides the messages of every engine (``snapstream/engine/worker.py``) the
engine process sends ``Loading``, ``Ready`` once, and ``Failed`` before it ends, if it still can. Nothing here imports
torch: the server loads it only with a tokenizer, whose library does, and holds no weights but those of a draft.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

from snapstream.assets import TINY_MODEL
from snapstream.config import EngineConfig, EngineOptions, ModelConfig
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.engine.request_state import RequestDelta, SampleDelta
from snapstream.engine.worker import EngineStats, FromEngine
from snapstream.plan.memory import DraftMemory
from snapstream.server.options import STREAM_INTERVAL_MS
from snapstream.types import Request
from snapstream.version import __version__

__all__ = ["AsyncEngine", "EngineDead", "EngineStats", "RequestDelta", "SampleDelta"]


class EngineDead(RuntimeError):
    """The engine process ended, or is being restarted; the request may be tried again unless ``is_final``."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final  # it will not come back


class AsyncEngine(Protocol):
    """The engine as seen from an event loop."""

    @property
    def unavailable(self) -> EngineDead | None:
        """The error that requests get while none are taken; None if the engine is loaded, alive and not draining."""
        ...

    def generate(self, request: Request) -> AsyncIterator[RequestDelta]:
        """Run a request. ValueError: can never be served. QueueFull: try later. EngineDead: lost.

        Closing the iterator early aborts the request.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def check_prefill(self) -> None:
        """As ``PrefillBackend.check``; nothing for an engine that prefills itself."""
        ...

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """Leading tokens of a prompt that the prefix store holds when the engine reads this. EngineDead."""
        ...

    def reset_prefixes(self, namespace: str | None) -> None:
        """Drop the stored prefixes of a namespace, or all, before any later request runs. EngineDead."""
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Take no more requests, let running ones finish for at most ``drain_s``, end the engine."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What the engine process needs to build its engine."""

    model: str  # checkpoint folder
    options: EngineOptions = field(default_factory=EngineOptions)
    num_threads: int | None = None  # of torch on the CPU; None means its default
    draft_memory: DraftMemory | None = None  # of the server's draft on the same device
    transfer: TransferSettings | None = None  # to send rows to other engines, or to receive some
    stream_interval_ms: float = STREAM_INTERVAL_MS  # tokens of steps that follow each other faster are sent together


@dataclass(frozen=True, kw_only=True)
class EngineMetadata:
    model: str  # checkpoint folder
    engine: EngineConfig  # limits: max_model_len, rows, largest budget
    architecture: ModelConfig
    pid: int
    notes: tuple[str, ...] = ()  # for the log: what was decided at the start
    transfer_fingerprint: dict[str, str] = field(default_factory=dict)  # both sides of a KV transfer must have it


@dataclass(frozen=True, kw_only=True)
class ModelMetadata(EngineMetadata):
    """The model as callers of the API see it."""

    names: tuple[str, ...]  # the first is the one we answer with where a request names none
    created: int = 0  # seconds since the epoch

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"served model names are {self.names!r}; at least one, none empty, is needed")

    @classmethod
    def of(cls, metadata: EngineMetadata, names: tuple[str, ...], created: int) -> ModelMetadata:
        return cls(**vars(metadata), names=names, created=created)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of adapters."""
        return tuple(own.name for own in self.engine.loras)

    @property
    def fingerprint(self) -> str:
        """Hash of model, version and engine settings; if it changes, answers may change."""
        model = self.architecture
        parts = (__version__, self.name, model.vocab_size, model.num_layers, model.num_kv_heads, self.engine)
        return f"fp_{sha256(repr(parts).encode()).hexdigest()[:12]}"

    @property
    def has_examples(self) -> bool:
        """It is the shipped model, which answers questions on the package's own documents."""
        return Path(self.model).resolve() == TINY_MODEL.resolve()

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len


@dataclass(frozen=True, slots=True)
class Loading:
    """The stage of loading, for the log."""

    stage: str


@dataclass(frozen=True, slots=True)
class Ready:
    metadata: EngineMetadata


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built, or failed; its process ends. "value": the settings are wrong."""

    kind: Literal["value", "error"]
    message: str


FromProcess = Loading | Ready | Failed | FromEngine
