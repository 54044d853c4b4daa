"""``ReplicatedEngine``: the replicas as one ``AsyncEngine``, for the HTTP server. No ray.

      generate -> the best replica -> batches -> deltas         lost before the first delta: retried on another replica
                                                                lost after it: EngineDead, an error frame

Invariant: a request with a delta is never retried, so no stream repeats itself; one without is retried at most
``MAX_TRIES - 1`` times. Callers are the ingress and, for remote prefill, decode replicas; each has a name, and holds
its requests by asking for reports (``Leases``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from typing import Protocol
from uuid import uuid4

from snapstream.config import EngineConfig
from snapstream.disaggregation.protocol import prefill_request, prefill_request_id
from snapstream.integrations.ray.registry import DeltaBatch, ReplicaRegistry, Report, Route, route_key
from snapstream.server.engine.api import EngineDead, EngineMetadata, EngineStats, RequestDelta
from snapstream.server.engine.remote_prefill import AVOID_S, PrefillFailed, transfer_error
from snapstream.types import QueueFull, Request, RowTicket

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
        """Poll every replica, forever."""
        while True:
            await self.look()
            await asyncio.sleep(SOON_S if self.registry.unavailable_reasons else POLL_S)

    async def look(self) -> None:
        """Poll every replica once; if none is known, whichever Ray chooses."""
        await asyncio.gather(*(self._ask(name) for name in self.registry.names or ("",)))

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
    """Make it on the event loop that will use it, and run ``watch`` there as long as it lives."""

    def __init__(self, replicas: Replicas) -> None:
        self._registry = ReplicaRegistry()
        self._replicas = WatchedReplicas(replicas, self._registry)
        self._is_closing = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._resets: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        return self.unavailable is None

    @property
    def unavailable(self) -> EngineDead | None:
        if self._is_closing:
            return EngineDead("the engine is shutting down")
        if self._replicas.metadata is not None and self._registry.num_ready:
            return None
        reasons = self._registry.unavailable_reasons
        return EngineDead(f"no replica takes requests: {reasons[0]}" if reasons else "no replica has been started yet")

    @property
    def metadata(self) -> EngineMetadata:
        """The engine of the replica that reported last."""
        if self._replicas.metadata is None:
            raise EngineDead("no replica has been loaded yet")
        return self._replicas.metadata

    async def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request on one replica, or on another if the first is lost before its first delta."""
        if self._is_closing:
            raise EngineDead("the engine is shutting down")
        if self._resets:  # they must arrive before later requests, even if the caller has left
            await asyncio.wait(self._resets)
        metadata = self._replicas.metadata
        key = route_key(request, None if metadata is None else metadata.engine)
        avoid: set[str] = set()
        num_rows = request.sampling.n
        self._open()
        try:
            for num_tries in range(1, MAX_TRIES + 1):
                claim = self._registry.claim(num_rows)
                route = Route(
                    self._registry,
                    self._replicas.caller,
                    key=key,
                    size=num_rows,
                    avoid=frozenset(avoid),
                    on_taken=claim.take,
                )
                has_begun = False
                try:
                    async with aclosing(self._replicas.run(request, route)) as deltas:
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
            self._close()

    def stats(self) -> EngineStats:
        return self._registry.stats()

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """0: which replica gets the prompt is decided later."""
        return 0

    def reset_prefixes(self, namespace: str | None) -> None:
        """Drop the stored prefixes of a namespace, or all, on every replica. EngineDead if there is none."""
        if self.unavailable is not None:
            raise self.unavailable
        for name in self._registry.names:
            task = asyncio.create_task(self._replicas.reset_prefixes(namespace, name))
            self._resets.add(task)
            task.add_done_callback(self._resets.discard)

    async def shutdown(self, drain_s: float) -> None:
        """Refuse requests, and let running ones finish for at most ``drain_s``. Ray ends the replicas."""
        self._is_closing = True
        try:
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except TimeoutError:
            log.warning("requests still run at the end of the drain")

    async def watch(self) -> None:
        """Poll every replica, forever."""
        await self._replicas.watch()

    async def look(self) -> None:
        """Poll every replica once."""
        await self._replicas.look()

    def _has_other(self, avoid: set[str], error: Exception) -> bool:
        """Whether a repeat can do better. A replica that is gone will be replaced: Ray holds the request until then."""
        others = [name for name in self._registry.names if name not in avoid]
        return bool(others) or (isinstance(error.__cause__, ReplicaLost))

    def _open(self) -> None:
        self._num_open += 1
        self._idle.clear()

    def _close(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()


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
        asked = replace(
            prefill_request(request, ticket),
            request_id=prefill_request_id(ticket),
            budget=request.budget or config.budget,  # its own may differ, on a machine of another size
            selector=request.selector or config.selector,
        )
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
        metadata = self._watched.metadata
        return Route(
            self._registry,
            self._watched.caller,
            key=route_key(request, None if metadata is None else metadata.engine),
            size=len(request.prompt_token_ids),
            avoid=tried | self._avoided.keys(),
        )

    async def _until_ready(self) -> None:
        """Wait for a replica: known ones may be loading."""
        deadline = monotonic() + ACCEPT_S
        while self.unavailable is not None and monotonic() < deadline:
            await asyncio.sleep(SOON_S)
