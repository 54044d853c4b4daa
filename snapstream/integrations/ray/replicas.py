"""Replicas of one deployment as a caller sees them: calls that it makes, and what it hears of them. No ray.

``handles.py`` makes the calls. ``engine.py`` (of an ingress) and ``readers.py`` (of a replica that answers) are the
callers; each has a name, and keeps what it asked for by asking for reports (``leases.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol
from uuid import uuid4

from snapstream.integrations.ray.board import Board, Route
from snapstream.integrations.ray.messages import Parcel, Report
from snapstream.request import Request
from snapstream.server.engine.api import EngineDead, RequestDelta
from snapstream.server.engine.messages import EngineFacts

log = logging.getLogger(__name__)

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


class Watched:
    """The replicas, and a board that is kept up to date as long as ``watch`` runs."""

    def __init__(self, replicas: Replicas, board: Board) -> None:
        self._replicas, self.board = replicas, board
        self.caller = uuid4().hex
        self.facts: EngineFacts | None = None  # about the engine of the replica that reported last

    async def watch(self) -> None:
        """Ask every replica how it is, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(SOON_S if self.board.absences else POLL_S)

    async def look(self) -> None:
        """Ask every replica once. Where none is known, whichever Ray offers."""
        await asyncio.gather(*(self._ask(name) for name in self.board.names or ("",)))

    async def run(self, request: Request, route: Route) -> AsyncGenerator[RequestDelta, None]:
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
                    self.board.hear(name, parcel.load)
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
                self.board.lose(name, str(error))
            raise EngineDead(f"the replica was lost: {error}") from error

    async def reset_prefixes(self, namespace: str | None, name: str) -> None:
        """One replica is to forget the beginnings that it stores; one that is lost has forgotten."""
        try:
            async with asyncio.timeout(REPORT_S):
                await self._replicas.reset_prefixes(namespace, Route(self.board, to=name))
        except (ReplicaLost, TimeoutError) as error:
            log.warning("replica %s was not told to forget prompts: %s", name, error)

    async def _ask(self, name: str) -> None:
        try:
            async with asyncio.timeout(REPORT_S):
                report = await self._replicas.report(Route(self.board, self.caller, to=name))
        except TimeoutError:
            return
        except ReplicaLost as error:
            self.board.lose(name, str(error))
            return
        except Exception as error:  # a bug of ours, here or there: the watch must go on
            log.error("replica %s could not be asked how it is: %r", name or "?", error)
            return
        self.board.take(report)
        self.facts = report.facts
