"""The replica registry: which replicas there are, their load, and which one gets the next request. No ray, no clock.

A prompt whose prefix may be cached goes to the replica that has it: replicas are ordered by the hash of key and replica
(highest random weight), which is the same at every ingress and changes only for the keys of a replica that comes or
goes. The first in that order takes the request unless it is overloaded: consistent hashing with bounded loads (Mirrokni
et al., arXiv 1608.01350). Any other prompt goes where most rows are free; for prefill, where the fewest prompt tokens
wait.

Invariant: a request of this caller counts as soon as a replica was chosen, not when the replica reports it. Ray's
router runs on another thread, so every method takes the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import ceil
from threading import Lock
from typing import Any, Literal, Protocol

from snapstream.config import EngineConfig
from snapstream.engine.prefix_cache import chain_of
from snapstream.engine.worker import Deltas, add_totals, without_gauges
from snapstream.server.engine.api import EngineDead, EngineMetadata, EngineStats
from snapstream.types import QueueFull, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A replica's load at this moment."""

    rows: int = 0  # that its engine has
    open_rows: int = 0  # asked for by its open requests; may be more than ``rows``
    queued_tokens: int = 0  # prompt tokens of requests without a generated token
    unavailable: str = ""  # why its engine takes no requests; "" where it does

    @property
    def free_rows(self) -> int:
        return max(0, self.rows - self.open_rows)


@dataclass(frozen=True, slots=True)
class Fault:
    """The error that ended a request, as data: Ray would replace the message of an exception by a remote traceback."""

    kind: Literal["value", "queue_full", "dead"]
    message: str

    @classmethod
    def of(cls, error: ValueError | QueueFull | EngineDead) -> Fault:
        kinds: dict[type[Exception], Literal["queue_full", "dead"]] = {QueueFull: "queue_full", EngineDead: "dead"}
        return cls(next((name for kind, name in kinds.items() if isinstance(error, kind)), "value"), str(error))

    def error(self) -> Exception:
        """As an exception. A lost engine is never final here: there are other replicas, or will be."""
        if self.kind == "value":
            return ValueError(self.message)
        return QueueFull(self.message) if self.kind == "queue_full" else EngineDead(self.message)


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """Deltas of one request since the last batch. The first has none: it reports which replica has the request."""

    replica: str
    load: Load
    deltas: Deltas = Deltas(())
    fault: Fault | None = None  # then this batch is the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A replica's state."""

    replica: str
    load: Load
    stats: EngineStats
    metadata: EngineMetadata
    pid: int  # of the replica's process; that of its engine is in ``metadata``


class Metrics(Protocol):
    """The part of Ray's ``AutoscalingContext`` that is used."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def target_num_replicas(self) -> int: ...


class ScaleByLoad:
    """Autoscaling policy: as many replicas as open rows, or waiting prompt tokens, need.

    Ray runs it in its controller on averages of ``EngineReplica.record_autoscaling_stats``, keeps the result within the
    bounds of the config, and waits before it scales: 30 s up, 600 s down by default.
    """

    def __init__(self, rows_in_use: float | None = None, queued_tokens: int | None = None) -> None:
        """Targets per replica: the share of its rows in use, and the prompt tokens that may wait."""
        self._rows_in_use, self._queued_tokens = rows_in_use, queued_tokens

    def __call__(self, context: Metrics) -> tuple[int, dict[str, Any]]:
        found = context.aggregated_metrics or {}
        rows, open_rows, queued = (found.get(name, {}) for name in ("rows", "open_rows", "queued_tokens"))
        if not rows:  # no replica has reported yet
            return context.target_num_replicas, {}
        rows_each = max(1.0, sum(rows.values()) / len(rows))
        wanted = 1.0
        if self._rows_in_use is not None:
            wanted = max(wanted, sum(open_rows.values()) / (self._rows_in_use * rows_each))
        if self._queued_tokens is not None:
            wanted = max(wanted, sum(queued.values()) / self._queued_tokens)
        return ceil(wanted), {}


MAX_OVER_MEAN = 1.5  # times the mean of open rows, or tokens, that a replica may have before others are preferred


@dataclass(frozen=True, eq=False, slots=True)
class Route:
    """Where one call may go: an argument of the call, of which the replica only gets ``caller``."""

    registry: ReplicaRegistry | None = None
    caller: str = ""  # an ingress, or a replica that answers; it renews its leases by asking for reports
    key: bytes = b""  # of the prompt's prefix; b"": no replica can have it
    size: int = 0  # in what the registry counts: rows, or prompt tokens
    avoid: frozenset[str] = frozenset()  # replicas that have failed this request
    to: str = ""  # this replica and no other, while it lives
    on_taken: Callable[[str], None] | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type[Route], tuple[None, str]]:
        return Route, (None, self.caller)


ROUTED_TOKENS = 1024  # prompts that begin with the same ones go to the same replica; shorter ones to the freest


def route_key(request: Request, config: EngineConfig | None) -> bytes:
    """Hash of the first ``ROUTED_TOKENS`` of a prompt; b"" for a shorter one, or where no replica stores prompts."""
    store = None if config is None else config.prefix_store
    if store is None or request.positions is not None:
        return b""
    num_blocks = max(1, ROUTED_TOKENS // store.block_len)
    chain = chain_of(request.prompt_token_ids[: num_blocks * store.block_len], store.block_len)
    if len(chain) < num_blocks:
        return b""
    digest = blake2b(request.namespace.encode(), digest_size=16)
    for block in chain:
        digest.update(block)
    return digest.digest()


def rank_for_decode(loads: Mapping[str, Load], key: bytes, num_rows: int) -> list[str]:
    """Replicas for a request of ``num_rows``, the best first."""
    freest = sorted(loads, key=lambda name: (-loads[name].free_rows, loads[name].open_rows, name))
    if not key:
        return freest
    total = sum(load.open_rows for load in loads.values())
    most = ceil(MAX_OVER_MEAN * (total + num_rows) / max(1, len(loads)))
    by_hash = sorted(loads, key=lambda name: blake2b(key + name.encode(), digest_size=8).digest())
    near = [name for name in by_hash if _fits(loads[name], num_rows, most)]
    return [*near, *(name for name in freest if name not in near)]


def _fits(load: Load, num_rows: int, most: int) -> bool:
    return load.free_rows >= num_rows and load.open_rows + num_rows <= max(most, num_rows)


def rank_for_prefill(loads: Mapping[str, Load], key: bytes, num_tokens: int) -> list[str]:
    """Prefill replicas for a prompt of ``num_tokens``, the best first."""
    idlest = sorted(loads, key=lambda name: (loads[name].queued_tokens, loads[name].open_rows, name))
    if not key:
        return idlest
    total = sum(load.queued_tokens for load in loads.values())
    most = max(num_tokens, ceil(MAX_OVER_MEAN * (total + num_tokens) / max(1, len(loads))))
    by_hash = sorted(loads, key=lambda name: blake2b(key + name.encode(), digest_size=8).digest())
    near = [name for name in by_hash if loads[name].queued_tokens + num_tokens <= most]
    return [*near, *(name for name in idlest if name not in near)]


class Claim:
    """What one request asks for, counted before its replica reports it: from its choice until it is given back.

    Ray chooses on its own thread, and may do so when the caller has already left: then nothing is counted.
    """

    def __init__(self, lock: Lock, own: Counter[str], size: int) -> None:
        self._lock, self._own, self._size = lock, own, size
        self._is_over = False
        self.names: list[str] = []  # replicas that had the request

    def take(self, name: str) -> None:
        with self._lock:
            if not self._is_over:
                self.names.append(name)
                self._own[name] += self._size

    def give_back(self) -> None:
        with self._lock:
            self._is_over = True
            for name in self.names:
                self._own[name] -= self._size
                if not self._own[name]:
                    del self._own[name]


class ReplicaRegistry:
    """The replicas of a deployment, as one caller knows them."""

    def __init__(self, *, prefill_only: bool = False) -> None:
        """``prefill_only``: the replicas prefill for others, and count waiting tokens; else rows."""
        self._reads_only = prefill_only
        self._lock = Lock()
        self._reports: dict[str, Report] = {}
        self._names: tuple[str, ...] = ()  # of Ray's replicas; some may not have reported yet
        self._loads: dict[str, Load] = {}
        self._own: Counter[str] = Counter()  # rows, or tokens, of requests that this caller has open
        self._gone = EngineStats()  # totals of earlier replicas

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def num_ready(self) -> int:
        with self._lock:
            return sum(not load.unavailable for load in self._loads.values())

    @property
    def unavailable_reasons(self) -> list[str]:
        """Why replicas take no requests."""
        with self._lock:
            return [load.unavailable for load in self._loads.values() if load.unavailable]

    def rank(self, present: Collection[str], route: Route) -> list[str]:
        """Replicas for a call, the best first; those to avoid only if there is no other."""
        with self._lock:
            self._keep(present)
            if route.to in present:
                return [route.to]
            loads = {name: self._load(name) for name in present}
            usable = {name: load for name, load in loads.items() if not load.unavailable and name not in route.avoid}
            usable = usable or {name: load for name, load in loads.items() if name not in route.avoid} or loads
            return self._order(usable, route)

    def best(self, route: Route) -> str:
        """The best replica known to take requests, if possible none to avoid; "" if there is none."""
        with self._lock:
            loads = {name: self._load(name) for name in self._names}
            ready = {name: load for name, load in loads.items() if not load.unavailable}
            usable = {name: load for name, load in ready.items() if name not in route.avoid} or ready
            return self._order(usable, route)[0] if usable else ""

    def note_load(self, name: str, load: Load) -> None:
        with self._lock:
            if name in self._names:
                self._loads[name] = load

    def note_report(self, report: Report) -> None:
        with self._lock:
            if report.replica in self._names:
                self._loads[report.replica] = report.load
                self._reports[report.replica] = report

    def mark_unavailable(self, name: str, why: str) -> None:
        """It does not answer; Ray will start another one, or it will report again."""
        with self._lock:
            if name in self._names:
                self._loads[name] = replace(self._loads.get(name, Load()), unavailable=why)

    def claim(self, size: int) -> Claim:
        """Claim capacity for a request that is about to be sent to a replica."""
        return Claim(self._lock, self._own, size)

    def stats(self) -> EngineStats:
        """Gauges of the present replicas; totals also of earlier ones."""
        with self._lock:
            total = self._gone
            for name in self._names:
                if name in self._reports:
                    total = _sum(total, self._reports[name].stats)
            return total

    def _order(self, loads: Mapping[str, Load], route: Route) -> list[str]:
        order = rank_for_prefill if self._reads_only else rank_for_decode
        return order(loads, route.key, route.size)

    def _load(self, name: str) -> Load:
        """As reported, or as this caller knows better; one that never reported is tried."""
        load = self._loads.get(name, Load())
        if self._reads_only:
            return replace(load, queued_tokens=max(load.queued_tokens, self._own[name]))
        return replace(load, open_rows=max(load.open_rows, self._own[name]))

    def _keep(self, present: Collection[str]) -> None:
        if set(present) == set(self._names):
            return
        for name in set(self._names) - set(present):
            report = self._reports.pop(name, None)
            self._loads.pop(name, None)
            if report is not None:
                self._gone = add_totals(without_gauges(report.stats), self._gone)
        self._names = tuple(sorted(present))


def _sum(one: EngineStats, other: EngineStats) -> EngineStats:
    return replace(
        add_totals(one, other),
        num_running=one.num_running + other.num_running,
        num_waiting=one.num_waiting + other.num_waiting,
        rows_free=one.rows_free + other.rows_free,
        rows_total=one.rows_total + other.rows_total,
        prefix_blocks_used=one.prefix_blocks_used + other.prefix_blocks_used,
        prefix_blocks_total=one.prefix_blocks_total + other.prefix_blocks_total,
    )


TICK_S = 3.0
NUM_TICKS = 10  # without a report asked for: then a caller is gone


class Leases:
    """Which callers of a replica are gone: Ray does not report a killed caller, and continues its calls.

    Every caller asks for a report about once a second; one that is silent while others ask is gone. If none asks, none
    is gone: Ray lets no call through to a replica that drains. Time is counted in ticks, because a replica that was
    itself stopped makes one tick of the gap. A caller without a name has no lease and is trusted to end its requests.
    """

    def __init__(self) -> None:
        self._num_silent: dict[str, int] = {}
        self._is_asked = False  # by any caller, since the last tick

    def open(self, caller: str) -> None:
        """It has a request here."""
        if caller:
            self._num_silent.setdefault(caller, 0)

    def renew(self, caller: str) -> None:
        """It asks for a report."""
        self._is_asked = self._is_asked or bool(caller)
        if caller in self._num_silent:
            self._num_silent[caller] = 0

    def tick(self) -> list[str]:
        """Time passes; returns callers that are gone, each once."""
        if not self._is_asked:
            return []
        self._is_asked = False
        for caller in self._num_silent:
            self._num_silent[caller] += 1
        gone = [caller for caller, num_silent in self._num_silent.items() if num_silent > NUM_TICKS]
        for caller in gone:
            del self._num_silent[caller]
        return gone
