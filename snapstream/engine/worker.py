"""The engine loop, the messages between it and its clients, and its statistics: read messages, step, send deltas.

The loop runs on a thread (``client.py``) or in the server's engine process. Messages are frozen data and keep their
order, each way. Invariants: while there is work the loop never waits for a message; without work it does nothing else.
Received KV wakes the port. Totals never shrink; what an engine counted since its last report (``STATS_INTERVAL_S``) is
lost when it is killed, and the process that restarts it adds up the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from time import monotonic
from typing import Any, Literal, Protocol

from snapstream.engine.core import Engine, TicketIssued
from snapstream.engine.prefix_cache import PrefixStats
from snapstream.engine.request_state import DeltaTracker, RequestDelta, SampleDelta
from snapstream.step import KVTransferFailed
from snapstream.types import QueueFull, Request, RequestOutput


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Gauges and totals for /metrics; a message of the engine, with totals since its start."""

    num_running: int = 0
    num_waiting: int = 0
    rows_free: int = 0
    rows_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    drafted_tokens_total: int = 0  # by speculative decoding, of finished requests
    accepted_tokens_total: int = 0
    evicted_tokens_total: int = 0
    compressions_total: int = 0
    compression_seconds_total: float = 0.0
    restarts_total: int = 0
    prefix_blocks_used: int = 0  # of the prefix store; all 0 where there is none
    prefix_blocks_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens that were looked up
    prefix_hits_total: int = 0  # of those, tokens that were cached
    prefix_answer_hits_total: int = 0  # of those, tokens of blocks that were copied from rows
    prefix_idle_hits_total: int = 0  # of those, tokens that were prefilled in idle time
    prefix_saved_total: int = 0  # tokens
    prefix_lost_answers_total: int = 0  # generated tokens that could not be stored
    prefix_evicted_blocks_total: int = 0
    stalls_total: int = 0  # engines that were killed because they did not respond
    rows_sent_total: int = 0  # to other engines
    rows_received_total: int = 0  # from them
    rows_lost_total: int = 0  # failed transfers, in either direction
    row_bytes_received_total: int = 0


_GAUGES = ("num_running", "num_waiting", "rows_free", "rows_total", "prefix_blocks_used", "prefix_blocks_total")


class StatsCounter:
    """Totals of one engine since its start."""

    def __init__(self) -> None:
        self._totals = EngineStats()

    def count(self, deltas: Iterable[RequestDelta]) -> None:
        totals = self._totals
        for delta in deltas:
            for sample in delta.samples:
                totals.generation_tokens_total += len(sample.token_ids)
            if delta.timings is not None:
                totals.drafted_tokens_total += delta.timings.drafted_tokens
                totals.accepted_tokens_total += delta.timings.accepted_tokens
            done = delta.compression
            if done is None:
                continue
            totals.prompt_tokens_total += done.prompt_tokens
            totals.evicted_tokens_total += done.evicted_tokens
            if done.evicted_tokens:  # else the row holds the whole prompt
                totals.compressions_total += 1
                totals.compression_seconds_total += done.compress_ms / 1e3

    def stats(self, engine: Engine, rows_total: int) -> EngineStats:
        prefix, rows = engine.prefix_stats or PrefixStats(), engine.transfer_stats
        return replace(
            self._totals,
            rows_sent_total=rows.num_sent,
            rows_received_total=rows.num_received,
            rows_lost_total=rows.num_failed,
            row_bytes_received_total=rows.num_bytes,
            prefix_blocks_used=prefix.used_blocks,
            prefix_blocks_total=prefix.num_blocks,
            prefix_queries_total=prefix.queries,
            prefix_hits_total=prefix.hits,
            prefix_answer_hits_total=prefix.answer_hits,
            prefix_idle_hits_total=prefix.idle_hits,
            prefix_saved_total=prefix.saved,
            prefix_lost_answers_total=prefix.lost_answers,
            prefix_evicted_blocks_total=prefix.evicted_blocks,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            rows_free=engine.rows_free,
            rows_total=rows_total,
        )


def without_gauges(stats: EngineStats) -> EngineStats:
    """The totals of an engine that has ended."""
    return replace(stats, **dict.fromkeys(_GAUGES, 0))


def add_totals(stats: EngineStats, earlier: EngineStats) -> EngineStats:
    """``stats`` plus the totals of ``earlier``."""
    totals = [field.name for field in fields(EngineStats) if field.name not in _GAUGES]
    return replace(stats, **{name: getattr(stats, name) + getattr(earlier, name) for name in totals})


# to the engine


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request; refused if the queue is full."""

    request: Request


@dataclass(frozen=True, slots=True)
class SubmitBatch:
    """Run requests from the same step on. They wait while the queue is full; each gets one delta, at its end."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End requests; ids that are not open are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reissue:
    """The transfer of this ticket failed: issue another, unless the KV was received meanwhile."""

    request_id: str
    key: str


@dataclass(frozen=True, slots=True)
class ResetPrefixes:
    """Clear a namespace of the prefix store and those below it, or all; the reply is the number of blocks."""

    number: int  # of the reply
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Reply with the tokens of a prompt that are in the prefix store now."""

    number: int
    token_ids: tuple[int, ...]
    namespace: str


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """Reply with 0 once the engine has no work."""

    number: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with a ``Beat``."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End now."""


# from the engine


@dataclass(frozen=True, slots=True)
class Deltas:
    """The output of one step, or of steps that were sent together; pickled as bare tuples, which is faster."""

    deltas: tuple[RequestDelta, ...]

    def __reduce__(self) -> tuple[Callable[..., Deltas], tuple[object, ...]]:
        packed = [(*_REQUEST_VALUES(delta), [*map(_SAMPLE_VALUES, delta.samples)]) for delta in self.deltas]
        return _unpack, (packed,)


@dataclass(frozen=True, slots=True)
class Refused:
    """The request can never be served ("value"), or not now ("queue_full")."""

    request_id: str
    kind: Literal["value", "queue_full"]
    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to the ``Probe``, ``ResetPrefixes`` or ``WhenIdle`` of that number."""

    number: int
    value: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The loop runs, or has run another unit of prefill."""


ToEngine = Submit | SubmitBatch | Abort | Reissue | ResetPrefixes | Probe | WhenIdle | Ping | Stop
FromEngine = Deltas | Refused | TicketIssued | KVTransferFailed | Reply | Beat | EngineStats


# in the order of the fields, but for the samples
_REQUEST_VALUES = attrgetter(*(field.name for field in fields(RequestDelta) if field.name != "samples"))
_SAMPLE_VALUES = attrgetter(*(field.name for field in fields(SampleDelta)))


def _unpack(packed: list[tuple[Any, ...]]) -> Deltas:
    return Deltas(
        tuple(
            RequestDelta(request_id, tuple(SampleDelta(*values) for values in samples), *rest)
            for request_id, *rest, samples in packed
        )
    )


class Port(Protocol):
    """The engine's end of the connection."""

    def receive(self, *, block: bool) -> ToEngine | None:
        """The next message. None if there is none and ``block`` is false, or if something woke the port."""
        ...

    def send(self, message: FromEngine) -> None: ...


STATS_INTERVAL_S = 0.1
MAX_MESSAGES = 64  # read between two steps, so that a flood of requests cannot stop the running ones


class EngineWorker:
    """Drives one engine from one thread."""

    def __init__(
        self,
        engine: Engine,
        rows_total: int,
        port: Port,
        *,
        delta_interval_s: float = 0.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``delta_interval_s``: tokens of steps that follow each other faster are sent together; 0 sends each step's.
        A request's first and last tokens are sent with their step.
        """
        self._delta_interval_s = delta_interval_s
        self._sent_at = -delta_interval_s  # deltas
        self._grown: dict[str, RequestOutput] = {}  # outputs with tokens that are not sent
        self._engine = engine
        self._rows_total = rows_total
        self._port = port
        self._clock = clock
        self._tracker = DeltaTracker()
        self._counter = StatsCounter()
        self._reported: EngineStats | None = None
        self._reported_at = -STATS_INTERVAL_S
        self._was_at_rest = False
        self._backlog: dict[str, Request] = {}  # of batches, waiting for a place in the queue
        self._batched: set[str] = set()  # open requests that get one delta, at their end
        self._idle_waiters: list[int] = []  # numbers of ``WhenIdle``
        self._is_lent = False  # from the reply to ``WhenIdle`` to the next request, others may step the engine

    def run(self) -> None:
        """Run until ``Stop``, or until the engine or the port raises."""
        self._report()
        while self._read():
            if self._is_lent:
                continue
            self._feed()
            self._report()  # before the step: a request is seen to run before it is seen to answer
            if self._engine.has_work:
                self._step()
            for notice in self._engine.take_notices():
                self._port.send(notice)
            self._report()

    def _read(self) -> bool:
        """Handle messages; without work, wait for one. False: stop."""
        block = self._is_lent or not self._engine.has_work
        while block and self._idle_waiters:
            self._is_lent = True
            self._port.send(Reply(self._idle_waiters.pop(), 0))
        for _ in range(MAX_MESSAGES):
            message = self._port.receive(block=block)
            block = False
            match message:
                case None:
                    break
                case Stop():
                    return False
                case Submit(request):
                    self._is_lent = False
                    self._submit(request)
                case SubmitBatch(requests):
                    self._is_lent = False
                    self._batched.update([request.request_id for request in requests])
                    self._backlog.update((request.request_id, request) for request in requests)
                    self._feed()  # before later submissions
                case Abort(request_ids):
                    self._abort(request_ids)
                case Reissue(request_id, key):
                    self._engine.reissue(request_id, key)
                case ResetPrefixes(number, namespace):
                    self._port.send(Reply(number, self._engine.reset_prefix_store(namespace)))
                case Probe(number, token_ids, namespace):
                    self._port.send(Reply(number, self._engine.num_stored(token_ids, namespace)))
                case WhenIdle(number):
                    self._idle_waiters.append(number)
                case Ping():
                    self._port.send(Beat())
        return True

    def _submit(self, request: Request) -> None:
        try:
            self._engine.add_request(request)
        except ValueError as error:
            self._port.send(Refused(request.request_id, "value", str(error)))
        except QueueFull as error:
            self._port.send(Refused(request.request_id, "queue_full", str(error)))

    def _feed(self) -> None:
        """Queue the backlog, in order, as far as there is room. An idle engine always has some."""
        while self._backlog:
            request_id, request = next(iter(self._backlog.items()))
            try:
                self._engine.add_request(request)
            except QueueFull:
                return
            except ValueError as error:
                self._batched.discard(request_id)
                self._port.send(Refused(request_id, "value", str(error)))
            del self._backlog[request_id]

    def _abort(self, request_ids: Sequence[str]) -> None:
        removed = [request_id for request_id in request_ids if self._backlog.pop(request_id, None) is not None]
        if removed:
            self._batched.difference_update(removed)
            self._port.send(Deltas(tuple(RequestDelta(name, (), is_finished=True) for name in removed)))
        for request_id in request_ids:
            self._engine.abort(request_id)

    def _step(self) -> None:
        outputs = self._engine.step()
        if self._batched:
            outputs = [output for output in outputs if output.request_id not in self._batched or output.is_finished]
            self._batched.difference_update([output.request_id for output in outputs])
        self._grown.update([(output.request_id, output) for output in outputs])
        now = self._clock()
        if now - self._sent_at < self._delta_interval_s and self._engine.has_work and not self._is_urgent(outputs):
            return
        deltas = tuple([self._tracker.take(output) for output in self._grown.values()])
        self._grown.clear()
        if deltas:
            self._sent_at = now
            self._counter.count(deltas)
            self._port.send(Deltas(deltas))

    def _is_urgent(self, outputs: Sequence[RequestOutput]) -> bool:
        """Whether one of the outputs begins or ends."""
        return any(output.is_finished or not self._tracker.has_begun(output.request_id) for output in outputs)

    def _report(self) -> None:
        """Send stats that changed: at once when work begins or ends, otherwise every ``STATS_INTERVAL_S``."""
        now, is_at_rest = self._clock(), not self._engine.has_work
        if is_at_rest == self._was_at_rest and now - self._reported_at < STATS_INTERVAL_S:
            return
        self._reported_at, self._was_at_rest = now, is_at_rest
        stats = self._counter.stats(self._engine, self._rows_total)
        if stats != self._reported:
            self._reported = stats
            self._port.send(stats)
