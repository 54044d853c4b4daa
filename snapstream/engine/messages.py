"""What goes to an engine that another thread or process drives, and what comes back: frozen data, nothing else.

Its callers send ``Submit``, ``Abort``, ``Reissue``, ``ResetPrefixes``, ``Probe``, ``Ping`` and ``Stop``; it answers
with ``Deltas``, ``Refused``, ``TicketIssued``, ``RowMissed``, ``Probed``, ``Beat`` and ``Stats``. Messages keep their
order, each way. ``worker.py`` is the engine's end; ``thread.py`` and the process of the server bring them to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol

from snapstream.engine.delta import RequestDelta, SampleDelta
from snapstream.engine.stats import EngineStats
from snapstream.engine.transfers import RowMissed, TicketIssued
from snapstream.request import FinishReason, Logprob, Request

# to the engine


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Reissue:
    """A row will not come for this ticket: void it and issue another, unless the row is there by now."""

    request_id: str
    key: str


@dataclass(frozen=True, slots=True)
class ResetPrefixes:
    """Forget the stored beginnings of prompts, of a namespace and those below it, or of all."""

    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Say how much of a prompt lies in the prefix store now."""

    number: int
    token_ids: tuple[int, ...]
    namespace: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Say that the loop goes round."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End now, whatever still runs."""


# from the engine


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
class Probed:
    """The answer to the probe of that number."""

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The loop goes round, or has run another unit of prefill: it is not stuck."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals count from the start of this engine."""

    stats: EngineStats


ToEngine = Submit | Abort | Reissue | ResetPrefixes | Probe | Ping | Stop
FromEngine = Deltas | Refused | TicketIssued | RowMissed | Probed | Beat | Stats


# the order in which _unpack takes them
_REQUEST_VALUES = attrgetter("request_id", "is_finished", "prompt_logprobs", "compression", "timings", "prefix")
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
                prefix=prefix,
                samples=tuple(_unpack_sample(*values) for values in samples),
            )
            for request_id, is_finished, prompt_logprobs, compression, timings, prefix, samples in packed
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
        """The next message. None if there is none and ``block`` is false, or if something woke the port."""
        ...

    def send(self, message: FromEngine) -> None: ...
