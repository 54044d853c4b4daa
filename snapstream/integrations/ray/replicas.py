"""The replicas of a deployment: their load, which one gets the next request, and all of them as one ``AsyncEngine``.
No ray.

A prompt whose prefix may be cached goes to the replica that has it: replicas are ordered by the hash of key and replica
(highest random weight), which is the same at every ingress and changes only for the keys of a replica that comes or
goes. The first in that order takes the request unless it is overloaded: consistent hashing with bounded loads (Mirrokni
et al., arXiv 1608.01350). Any other prompt goes where most rows are free; for prefill, where the fewest prompt tokens
wait.

Invariant: a request of this caller counts as soon as a replica was chosen, not when the replica reports it. Ray's
router runs on another thread, so every method takes the lock.

``ReplicatedEngine``, for the HTTP server:

      generate -> the best replica -> batches -> deltas         lost before the first delta: retried on another replica
                                                                lost after it: EngineDead, an error frame

Invariant: a request with a delta is never retried, so no stream repeats itself; one without is retried at most
``MAX_TRIES - 1`` times. Callers are the ingress and, for remote prefill, decode replicas; each has a name, and holds
its requests by asking for reports (``Leases``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from math import ceil
from threading import Lock
from time import monotonic
from typing import Any, Literal, Protocol
from uuid import uuid4

from snapstream.config import EngineConfig
from snapstream.disaggregation.protocol import prefill_request
from snapstream.engine.prefix_cache import chain_of
from snapstream.engine.worker import Deltas, add_totals, without_gauges
from snapstream.server.engine.api import EngineDead, EngineMetadata, EngineStats, RequestDelta
from snapstream.server.engine.remote_prefill import AVOID_S, PrefillFailed, transfer_error
from snapstream.server.http.requests import OpenRequests
from snapstream.types import QueueFull, Request, RowTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    rows: int = 0  # that its engine has
    open_rows: int = 0  # asked for by its open requests; may be more than ``rows``
    queued_tokens: int = 0  # prompt tokens of requests without a generated token
    unavailable: str = ""  # why its engine takes no requests; "" where it does

    @property
    def free_rows(self) -> int:
        return max(0, self.rows - self.open_rows)


FaultKind = Literal["value", "queue_full", "dead"]
_FAULTS: dict[FaultKind, type[Exception]] = {"value": ValueError, "queue_full": QueueFull, "dead": EngineDead}


@dataclass(frozen=True, slots=True)
class Fault:
    """The error that ended a request, as data: Ray would replace the message of an exception by a remote traceback."""

    kind: FaultKind
    message: str

    @classmethod
    def of(cls, error: ValueError | QueueFull | EngineDead) -> Fault:
        return cls(next(kind for kind, own in _FAULTS.items() if isinstance(error, own)), str(error))

    def error(self) -> Exception:
        """As an exception. A lost engine is never final here: there are other replicas, or will be."""
        return _FAULTS[self.kind](self.message)


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """Deltas of one request since the last batch. The first has none: it reports which replica has the request."""

    replica: str
    load: Load
    deltas: Deltas = Deltas(())
    fault: Fault | None = None  # then this batch is the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
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
    """Where one call may go: an argument of the call; the replica gets only its ``caller``."""

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
    if store is None:
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
    used = {name: load.open_rows for name, load in loads.items()}
    return _by_key(used, key, num_rows, freest, lambda name: loads[name].free_rows >= num_rows)


def rank_for_prefill(loads: Mapping[str, Load], key: bytes, num_tokens: int) -> list[str]:
    """Prefill replicas for a prompt of ``num_tokens``, the best first."""
    idlest = sorted(loads, key=lambda name: (loads[name].queued_tokens, loads[name].open_rows, name))
    return _by_key({name: load.queued_tokens for name, load in loads.items()}, key, num_tokens, idlest)


def _by_key(
    used: Mapping[str, int], key: bytes, size: int, others: list[str], has_room: Callable[[str], bool] = lambda _: True
) -> list[str]:
    """Replicas by the hash of the key, those first that ``size`` more does not overload; then the ``others``."""
    if not key:
        return others
    most = max(size, ceil(MAX_OVER_MEAN * (sum(used.values()) + size) / max(1, len(used))))
    by_hash = sorted(used, key=lambda name: blake2b(key + name.encode(), digest_size=8).digest())
    near = [name for name in by_hash if has_room(name) and used[name] + size <= most]
    return [*near, *(name for name in others if name not in near)]


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
        self._prefill_only = prefill_only
        self._lock = Lock()
        self._reports: dict[str, Report] = {}
        self.names: tuple[str, ...] = ()  # of Ray's replicas; some may not have reported yet
        self._loads: dict[str, Load] = {}
        self._own: Counter[str] = Counter()  # rows, or tokens, of requests that this caller has open
        self._gone = EngineStats()  # totals of earlier replicas

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
            loads = {name: self._load(name) for name in self.names}
            ready = {name: load for name, load in loads.items() if not load.unavailable}
            usable = {name: load for name, load in ready.items() if name not in route.avoid} or ready
            return self._order(usable, route)[0] if usable else ""

    def note_load(self, name: str, load: Load) -> None:
        with self._lock:
            if name in self.names:
                self._loads[name] = load

    def note_report(self, report: Report) -> None:
        with self._lock:
            if report.replica in self.names:
                self._loads[report.replica] = report.load
                self._reports[report.replica] = report

    def mark_unavailable(self, name: str, why: str) -> None:
        """It does not answer; Ray will start another one, or it will report again."""
        with self._lock:
            if name in self.names:
                self._loads[name] = replace(self._loads.get(name, Load()), unavailable=why)

    def claim(self, size: int) -> Claim:
        """Claim capacity for a request that is about to be sent to a replica."""
        return Claim(self._lock, self._own, size)

    def stats(self) -> EngineStats:
        """Gauges of the present replicas; totals also of earlier ones."""
        with self._lock:
            own = [self._gone, *(self._reports[name].stats for name in self.names if name in self._reports)]
            sums = {each.name: sum(getattr(stats, each.name) for stats in own) for each in fields(EngineStats)}
            return EngineStats(**sums)

    def _order(self, loads: Mapping[str, Load], route: Route) -> list[str]:
        order = rank_for_prefill if self._prefill_only else rank_for_decode
        return order(loads, route.key, route.size)

    def _load(self, name: str) -> Load:
        """As reported, or as this caller knows better; one that never reported is tried."""
        load = self._loads.get(name, Load())
        if self._prefill_only:
            return replace(load, queued_tokens=max(load.queued_tokens, self._own[name]))
        return replace(load, open_rows=max(load.open_rows, self._own[name]))

    def _keep(self, present: Collection[str]) -> None:
        if set(present) == set(self.names):
            return
        for name in set(self.names) - set(present):
            report = self._reports.pop(name, None)
            self._loads.pop(name, None)
            if report is not None:
                self._gone = add_totals(without_gauges(report.stats), self._gone)
        self.names = tuple(sorted(present))


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


log = logging.getLogger(__name__)

ACCEPT_S = 30.0  # for Ray to find a replica that takes a request
POLL_S = 1.0  # between two reports of a replica
SOON_S = 0.2  # the same while a replica takes no requests
REPORT_S = 10.0  # for a replica to report; one that takes longer keeps its last report, and Ray judges its health


class ReplicaLost(RuntimeError):
    """The replica died, or Ray could not reach it; what it had not sent is lost."""


class Replicas(Protocol):
    """Calls to replicas. Each goes where the registry of its route says."""

    def generate(self, request: Request, route: Route) -> AsyncGenerator[DeltaBatch, None]:
        """Batches of a request; the first has no deltas. ReplicaLost. Closing it early aborts the request."""
        ...

    async def report(self, route: Route) -> Report:
        """ReplicaLost."""
        ...

    async def reset_prefixes(self, namespace: str | None, route: Route) -> None:
        """ReplicaLost."""
        ...


class WatchedReplicas:
    """The replicas, and a registry that is kept up to date as long as ``watch`` runs."""

    def __init__(self, replicas: Replicas, registry: ReplicaRegistry) -> None:
        self._replicas, self.registry = replicas, registry
        self.caller = uuid4().hex
        self.metadata: EngineMetadata | None = None  # of the engine of the replica that reported last

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(SOON_S if self.registry.unavailable_reasons else POLL_S)

    async def look(self) -> None:
        """Poll every replica once; if none is known, whichever Ray chooses."""
        await asyncio.gather(*(self._ask(name) for name in self.registry.names or ("",)))

    def route(self, request: Request, size: int, avoid: Collection[str]) -> Route:
        """Where a request of this ``size`` may go."""
        key = route_key(request, None if self.metadata is None else self.metadata.engine)
        return Route(self.registry, self.caller, key=key, size=size, avoid=frozenset(avoid))

    async def run(self, request: Request, route: Route) -> AsyncGenerator[RequestDelta, None]:
        """The deltas of one replica, up to the last. EngineDead or QueueFull if there is no last one; ValueError."""
        name = ""
        try:
            async with aclosing(self._replicas.generate(request, route)) as batches:
                try:
                    async with asyncio.timeout(ACCEPT_S):
                        batch = await anext(batches)
                except TimeoutError:
                    raise EngineDead(f"no replica took the request within {ACCEPT_S:g} s") from None
                while True:
                    name = batch.replica
                    self.registry.note_load(name, batch.load)
                    for delta in batch.deltas.deltas:
                        yield delta
                        if delta.is_finished:
                            return
                    if batch.fault is not None:
                        raise batch.fault.error()
                    batch = await anext(batches)
        except StopAsyncIteration:
            raise EngineDead("a replica's answer ended early") from None
        except ReplicaLost as error:
            if name:
                self.registry.mark_unavailable(name, str(error))
            raise EngineDead(f"the replica was lost: {error}") from error

    async def reset_prefixes(self, namespace: str | None, name: str) -> None:
        """Drop stored prefixes of one replica; one that is lost has none."""
        try:
            async with asyncio.timeout(REPORT_S):
                await self._replicas.reset_prefixes(namespace, Route(self.registry, to=name))
        except (ReplicaLost, TimeoutError) as error:
            log.warning("could not reset the prefix store of replica %s: %s", name, error)

    async def _ask(self, name: str) -> None:
        try:
            async with asyncio.timeout(REPORT_S):
                report = await self._replicas.report(Route(self.registry, self.caller, to=name))
        except TimeoutError:
            return
        except ReplicaLost as error:
            self.registry.mark_unavailable(name, str(error))
            return
        except Exception as error:  # a bug, here or there: the watch must go on
            log.error("replica %s could not be polled: %r", name or "?", error)
            return
        self.registry.note_report(report)
        self.metadata = report.metadata


MAX_TRIES = 3


class ReplicatedEngine:
    """Make it on the event loop that will use it, and run ``replicas.watch`` there as long as it lives."""

    def __init__(self, replicas: Replicas) -> None:
        self._registry = ReplicaRegistry()
        self.replicas = WatchedReplicas(replicas, self._registry)
        self._is_closing = False
        self._open = OpenRequests()
        self._resets: set[asyncio.Task[None]] = set()

    @property
    def unavailable(self) -> EngineDead | None:
        if self._is_closing:
            return EngineDead("the engine is shutting down")
        if self.replicas.metadata is not None and self._registry.num_ready:
            return None
        reasons = self._registry.unavailable_reasons
        return EngineDead(f"no replica takes requests: {reasons[0]}" if reasons else "no replica has been started yet")

    @property
    def metadata(self) -> EngineMetadata:
        """The engine of the replica that reported last."""
        if self.replicas.metadata is None:
            raise EngineDead("no replica has been loaded yet")
        return self.replicas.metadata

    async def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request on one replica, or on another if the first is lost before its first delta."""
        if self._is_closing:
            raise EngineDead("the engine is shutting down")
        if self._resets:  # they must arrive before later requests, even if the caller has left
            await asyncio.wait(self._resets)
        avoid: set[str] = set()
        num_rows = request.sampling.n
        self._open.enter()
        try:
            for num_tries in range(1, MAX_TRIES + 1):
                claim = self._registry.claim(num_rows)
                route = replace(self.replicas.route(request, num_rows, avoid), on_taken=claim.take)
                has_begun = False
                try:
                    async with aclosing(self.replicas.run(request, route)) as deltas:
                        async for delta in deltas:
                            has_begun = True
                            yield delta
                    return
                except (EngineDead, QueueFull) as error:
                    avoid.update(claim.names)
                    is_last = has_begun or num_tries == MAX_TRIES or not self._has_other(avoid, error)
                    if is_last:
                        raise
                    log.warning("request=%s is repeated on another replica: %s", request.request_id, error)
                finally:
                    claim.give_back()
        finally:
            self._open.leave()

    def stats(self) -> EngineStats:
        return self._registry.stats()

    async def check_prefill(self) -> None:
        """Nothing: a replica whose prefill replicas are gone reports that it takes no requests."""

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """0: which replica gets the prompt is decided later."""
        return 0

    def reset_prefixes(self, namespace: str | None) -> None:
        """Drop the stored prefixes of a namespace, or all, on every replica. EngineDead if there is none."""
        if self.unavailable is not None:
            raise self.unavailable
        for name in self._registry.names:
            task = asyncio.create_task(self.replicas.reset_prefixes(namespace, name))
            self._resets.add(task)
            task.add_done_callback(self._resets.discard)

    async def shutdown(self, drain_s: float) -> None:
        """Refuse requests, and let running ones finish for at most ``drain_s``. Ray ends the replicas."""
        self._is_closing = True
        if not await self._open.wait_idle(drain_s):
            log.warning("requests still run at the end of the drain")

    def _has_other(self, avoid: set[str], error: Exception) -> bool:
        """Whether a repeat can do better. A replica that is gone will be replaced: Ray holds the request until then."""
        others = [name for name in self._registry.names if name not in avoid]
        return bool(others) or (isinstance(error.__cause__, ReplicaLost))


class ReplicaPrefill:
    """Prefill replicas of a decode replica; a ``PrefillBackend``. Make it on the event loop that will use it.

    Ray transports the request and the report of its transfer; the row goes from engine to engine. The registry orders
    the replicas; one that lost a row comes last for a while. While there is none, a prompt waits for one as long as its
    ticket is valid.
    """

    def __init__(self, replicas: Replicas, config: Callable[[], EngineConfig]) -> None:
        """``config``: of the engine that answers; its budget and selector are those of requests that name none."""
        self._registry = ReplicaRegistry(prefill_only=True)
        self._watched = WatchedReplicas(replicas, self._registry)
        self._config = config
        self._avoided: dict[str, float] = {}  # until when
        self._watching = asyncio.create_task(self._watched.watch(), name="prefill-watch")

    @property
    def unavailable(self) -> EngineDead | None:
        """The error if no replica prefills; None if one does, or the first is awaited."""
        reasons = self._registry.unavailable_reasons
        return (
            EngineDead(f"no prefill replica takes requests: {reasons[0]}")
            if reasons and not self._registry.num_ready
            else None
        )

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        """The replica to ask; "" for the first to be ready."""
        return self._registry.best(self._route(request, tried))

    async def prefill(self, name: str, request: Request, ticket: RowTicket) -> None:
        """Returns when the row has gone to ``ticket``. PrefillFailed if it could not."""
        config = self._config()
        asked = prefill_request(request, ticket, config.budget, config.selector)
        claim = self._registry.claim(len(request.prompt_token_ids))
        try:
            await self._until_ready()
            to = name if name in self._registry.names else ""
            route = replace(self._route(request, frozenset()), to=to, on_taken=claim.take)
            async with aclosing(self._watched.run(asked, route)) as deltas:
                problem = await transfer_error(deltas)
        except (EngineDead, QueueFull, ValueError) as error:
            problem = str(error)
        finally:
            claim.give_back()
        if problem:
            for name in claim.names:
                self.avoid(name)
            raise PrefillFailed(problem)

    async def check(self) -> None:
        if self.unavailable is not None:
            raise PrefillFailed(str(self.unavailable))

    def avoid(self, name: str) -> None:
        self._avoided[name] = monotonic() + AVOID_S

    async def reset_prefixes(self, namespace: str | None) -> None:
        """Drop the stored prefixes of a namespace on every replica."""
        await asyncio.gather(*(self._watched.reset_prefixes(namespace, name) for name in self._registry.names))

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])

    def _route(self, request: Request, tried: frozenset[str]) -> Route:
        now = monotonic()
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        return self._watched.route(request, len(request.prompt_token_ids), tried | self._avoided.keys())

    async def _until_ready(self) -> None:
        """Wait for a replica: known ones may be loading."""
        deadline = monotonic() + ACCEPT_S
        while self.unavailable is not None and monotonic() < deadline:
            await asyncio.sleep(SOON_S)
