"""``ReplicatedEngine``: many replicas as the one ``AsyncEngine`` that the HTTP front knows. No ray.

      generate -> the best replica -> parcels -> deltas         lost before the first delta: once more, elsewhere
                                                                lost after it: EngineDead, an error frame

Invariant: what a caller has been given a delta of is never begun again, so no stream repeats itself; a request that
was given none is repeated at most ``MAX_TRIES - 1`` times. ``board.py`` chooses, ``handles.py`` calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol
from uuid import uuid4

from snapstream.engine.validate import QueueFull
from snapstream.integrations.ray.board import Board, Route, route_key
from snapstream.integrations.ray.messages import Parcel, Report
from snapstream.request import Request
from snapstream.server.engine.api import EngineDead, EngineStats, RequestDelta
from snapstream.server.engine.messages import EngineFacts

log = logging.getLogger(__name__)

MAX_TRIES = 3
ACCEPT_S = 30.0  # for Ray to find a replica that takes a request
POLL_S = 1.0  # between two reports of a replica
SOON_S = 0.2  # the same while a replica takes no requests
REPORT_S = 10.0  # for a replica to report; one that takes longer keeps its last report, and Ray judges its health


class ReplicaLost(RuntimeError):
    """The replica died, or Ray could not reach it; what it had not said is lost."""


class Replicas(Protocol):
    """Calls to replicas. Each goes where the board of its route says."""

    def generate(self, request: Request, route: Route) -> AsyncGenerator[Parcel, None]:
        """Parcels of a request; the first has no deltas. ReplicaLost. Closing it early aborts the request."""
        ...

    async def report(self, route: Route) -> Report:
        """ReplicaLost."""
        ...

    async def reset_prefixes(self, namespace: str | None, route: Route) -> None:
        """ReplicaLost."""
        ...


class ReplicatedEngine:
    """Make it on the event loop that will use it, and run ``watch`` there as long as it lives."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._name = uuid4().hex
        self._board = Board()
        self._facts: EngineFacts | None = None
        self._is_closing = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._resets: set[asyncio.Task[None]] = set()

    @property
    def is_ready(self) -> bool:
        return self.absence is None

    @property
    def absence(self) -> EngineDead | None:
        if self._is_closing:
            return EngineDead("the engine is shutting down")
        if self._facts is not None and self._board.num_ready:
            return None
        whys = self._board.absences
        return EngineDead(f"no replica takes requests: {whys[0]}" if whys else "no replica has been started yet")

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine of the replica that reported last."""
        if self._facts is None:
            raise EngineDead("no replica has been loaded yet")
        return self._facts

    async def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request on one replica, or on another if the first is lost before it has said anything."""
        if self._is_closing:
            raise EngineDead("the engine is shutting down")
        if self._resets:  # they are to be heard before what follows, whoever waits no longer
            await asyncio.wait(self._resets)
        key = route_key(request, None if self._facts is None else self._facts.engine)
        avoid: set[str] = set()
        num_rows = request.sampling.n
        self._open()
        try:
            for num_tries in range(1, MAX_TRIES + 1):
                claim = self._board.claim(num_rows)
                route = Route(
                    self._board, self._name, key=key, num_rows=num_rows, avoid=frozenset(avoid), on_taken=claim.take
                )
                has_begun = False
                try:
                    async with aclosing(self._attempt(request, route)) as deltas:
                        async for delta in deltas:
                            has_begun = True
                            yield delta
                    return
                except (EngineDead, QueueFull) as error:
                    avoid.update(claim.names)
                    is_told = has_begun or num_tries == MAX_TRIES or not self._has_other(avoid, error)
                    if is_told:
                        raise
                    log.warning("request=%s is repeated on another replica: %s", request.request_id, error)
                finally:
                    claim.give_back()
        finally:
            self._close()

    def stats(self) -> EngineStats:
        return self._board.stats()

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """0: which replica a prompt goes to is decided later, and a draft in this front trims without a look."""
        return 0

    def reset_prefixes(self, namespace: str | None) -> None:
        """Forget the stored beginnings of a namespace's prompts, or of all, on every replica.

        EngineDead if there is none.
        """
        if self.absence is not None:
            raise self.absence
        for name in self._board.names:
            task = asyncio.create_task(self._reset(namespace, name))
            self._resets.add(task)
            task.add_done_callback(self._resets.discard)

    async def shutdown(self, drain_s: float) -> None:
        """Take no more requests, and let running ones finish for at most ``drain_s``. Replicas are Ray's to end."""
        self._is_closing = True
        try:
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except TimeoutError:
            log.warning("requests still run at the end of the drain")

    async def watch(self) -> None:
        """Ask every replica how it is, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(SOON_S if self._board.absences else POLL_S)

    async def look(self) -> None:
        """Ask every replica once. Where none is known, whichever Ray offers."""
        await asyncio.gather(*(self._ask(name) for name in self._board.names or ("",)))

    async def _ask(self, name: str) -> None:
        try:
            async with asyncio.timeout(REPORT_S):
                report = await self._replicas.report(Route(self._board, self._name, to=name))
        except TimeoutError:
            return
        except ReplicaLost as error:
            self._board.lose(name, str(error))
            return
        except Exception as error:  # a bug of ours, here or there: the watch must go on
            log.error("replica %s could not be asked how it is: %r", name or "?", error)
            return
        self._board.take(report)
        self._facts = report.facts

    async def _reset(self, namespace: str | None, name: str) -> None:
        try:
            async with asyncio.timeout(REPORT_S):
                await self._replicas.reset_prefixes(namespace, Route(self._board, to=name))
        except (ReplicaLost, TimeoutError) as error:  # a dead one has forgotten
            log.warning("replica %s was not told to forget prompts: %s", name, error)

    async def _attempt(self, request: Request, route: Route) -> AsyncGenerator[RequestDelta, None]:
        """The deltas of one replica, up to the last. EngineDead or QueueFull if there is no last one; ValueError."""
        name = ""
        try:
            async with aclosing(self._replicas.generate(request, route)) as parcels:
                try:
                    async with asyncio.timeout(ACCEPT_S):
                        parcel = await anext(parcels)
                except TimeoutError:
                    raise EngineDead(f"no replica took the request within {ACCEPT_S:g} s") from None
                while True:
                    name = parcel.replica
                    self._board.hear(name, parcel.load)
                    for delta in parcel.deltas.deltas:
                        yield delta
                        if delta.is_finished:
                            return
                    if parcel.fault is not None:
                        raise parcel.fault.error()
                    parcel = await anext(parcels)
        except StopAsyncIteration:
            raise EngineDead("a replica's answer ended early") from None
        except ReplicaLost as error:
            if name:
                self._board.lose(name, str(error))
            raise EngineDead(f"the replica was lost: {error}") from error

    def _has_other(self, avoid: set[str], error: Exception) -> bool:
        """Whether a repeat can do better. A replica that is gone will be replaced: Ray holds the request until then."""
        others = [name for name in self._board.names if name not in avoid]
        return bool(others) or (isinstance(error.__cause__, ReplicaLost))

    def _open(self) -> None:
        self._num_open += 1
        self._idle.clear()

    def _close(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()
