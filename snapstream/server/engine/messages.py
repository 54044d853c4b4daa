"""The messages between the front and the engine process: frozen data, nothing else.

The front sends ``Submit``, ``Abort``, ``Stop``; the engine answers with ``Ready`` once, then ``Deltas``, ``Refused``
and ``Stats``, and with ``Failed`` as its last word if it can still speak. Messages keep their order in each direction.
Invariant: nothing here imports torch. The front loads it only together with a tokenizer, whose library brings it, and
holds no weights but those of a draft. ``worker.py`` and ``child.py`` are the two ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Protocol

from snapstream.config import EngineConfig, EngineOptions, ModelConfig
from snapstream.plan.draft_memory import DraftMemory
from snapstream.request import FinishReason, Logprob, Request
from snapstream.server.engine.api import EngineStats, RequestDelta, SampleDelta


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """All that the engine process needs to build its engine."""

    model: str  # checkpoint folder
    options: EngineOptions = field(default_factory=EngineOptions)
    num_threads: int | None = None  # of torch on the CPU; None means its default
    beside: DraftMemory | None = None  # the front's draft on the same device


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts about the loaded engine."""

    model: str
    engine: EngineConfig
    architecture: ModelConfig
    has_tokenizer: bool
    pid: int
    notes: tuple[str, ...] = ()  # lines about choices that were made at the start

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


# front -> engine


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End now, whatever still runs."""


# engine -> front


@dataclass(frozen=True, slots=True)
class Ready:
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Deltas:
    """All that one step brought. Every step pays for its pickling, so it is pickled as bare tuples."""

    deltas: tuple[RequestDelta, ...]

    def __reduce__(self) -> tuple[Callable[..., Deltas], tuple[object, ...]]:
        packed = [
            (*_REQUEST_VALUES(delta), [_SAMPLE_VALUES(sample) for sample in delta.samples]) for delta in self.deltas
        ]
        return _unpack, (packed,)


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken: it can never be served ("value"), or not now ("queue_full")."""

    request_id: str
    kind: Literal["value", "queue_full"]
    message: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals count from the start of this engine process."""

    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built, or broke; its process ends. "value": the settings are wrong."""

    kind: Literal["value", "error"]
    message: str


ToEngine = Submit | Abort | Stop
FromEngine = Ready | Deltas | Refused | Stats | Failed


# the order in which _unpack takes them
_REQUEST_VALUES = attrgetter("request_id", "is_finished", "prompt_logprobs", "compression", "timings")
_SAMPLE_VALUES = attrgetter("index", "text", "token_ids", "logprobs", "finish_reason", "stop_reason")


def _unpack(packed: list[tuple[Any, ...]]) -> Deltas:
    return Deltas(
        tuple(
            RequestDelta(
                request_id=request_id,
                is_finished=is_finished,
                prompt_logprobs=prompt_logprobs,
                compression=compression,
                timings=timings,
                samples=tuple(_unpack_sample(*values) for values in samples),
            )
            for request_id, is_finished, prompt_logprobs, compression, timings, samples in packed
        )
    )


def _unpack_sample(
    index: int,
    text: str,
    token_ids: tuple[int, ...],
    logprobs: tuple[Logprob, ...] | None,
    finish_reason: FinishReason | None,
    stop_reason: int | str | None,
) -> SampleDelta:
    return SampleDelta(
        index=index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )


class Port(Protocol):
    """The engine's end of the border."""

    def receive(self, *, block: bool) -> ToEngine | None:
        """The next message; None if there is none and ``block`` is false."""
        ...

    def send(self, message: FromEngine) -> None: ...
