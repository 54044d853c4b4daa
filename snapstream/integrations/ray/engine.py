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

from snapstream.engine.validate import QueueFull
from snapstream.integrations.ray.board import Board, Route, route_key
from snapstream.integrations.ray.replicas import ReplicaLost, Replicas, Watched
from snapstream.request import Request
from snapstream.server.engine.api import EngineDead, EngineStats, RequestDelta
from snapstream.server.engine.messages import EngineFacts

log = logging.getLogger(__name__)

MAX_TRIES = 3


class ReplicatedEngine:
    """Make it on the event loop that will use it, and run ``watch`` there as long as it lives."""

    def __init__(self, replicas: Replicas) -> None:
        self._board = Board()
        self._replicas = Watched(replicas, self._board)
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
        if self._replicas.facts is not None and self._board.num_ready:
            return None
        whys = self._board.absences
        return EngineDead(f"no replica takes requests: {whys[0]}" if whys else "no replica has been started yet")

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine of the replica that reported last."""
        if self._replicas.facts is None:
            raise EngineDead("no replica has been loaded yet")
        return self._replicas.facts

    async def generate(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        """Run a request on one replica, or on another if the first is lost before it has said anything."""
        if self._is_closing:
            raise EngineDead("the engine is shutting down")
        if self._resets:  # they are to be heard before what follows, whoever waits no longer
            await asyncio.wait(self._resets)
        facts = self._replicas.facts
        key = route_key(request, None if facts is None else facts.engine)
        avoid: set[str] = set()
        num_rows = request.sampling.n
        self._open()
        try:
            for num_tries in range(1, MAX_TRIES + 1):
                claim = self._board.claim(num_rows)
                route = Route(
                    self._board,
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
            task = asyncio.create_task(self._replicas.reset_prefixes(namespace, name))
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
        await self._replicas.watch()

    async def look(self) -> None:
        """Ask every replica once."""
        await self._replicas.look()

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
