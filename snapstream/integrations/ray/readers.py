"""``ReplicaReaders``: prefill replicas that read prompts for a replica that answers; a ``PromptReaders``. No ray.

Ray carries the request and the word that its row has gone; the row itself goes from engine to engine (``transfer/``).
Invariant: the replica with the fewest prompt tokens before it is asked: those that this one has asked it for, or all
that it says it has. A prompt whose beginning a prefix store may hold goes where it lies unless too much waits there
(``board.py``). One that lost a row is asked last for a while. While there is no replica, a prompt waits for the next as
long as its ticket is good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from time import monotonic

from snapstream.config import EngineConfig
from snapstream.engine.validate import QueueFull
from snapstream.integrations.ray.board import Board, Route, route_key
from snapstream.integrations.ray.replicas import ACCEPT_S, SOON_S, Replicas, Watched
from snapstream.request import Request, RowTicket
from snapstream.server.engine.api import EngineDead
from snapstream.server.engine.elsewhere import SHUN_S, ReadFailed, why_not_sent
from snapstream.transfer.asking import read_for, read_name


class ReplicaReaders:
    """Make it on the event loop that will use it."""

    def __init__(self, replicas: Replicas, config: Callable[[], EngineConfig]) -> None:
        """``config``: of the engine that answers; its budget and selector are those of requests that name none."""
        self._board = Board(reads_only=True)
        self._watched = Watched(replicas, self._board)
        self._config = config
        self._shunned: dict[str, float] = {}  # until when
        self._watching = asyncio.create_task(self._watched.watch(), name="prefill-watch")

    @property
    def absence(self) -> EngineDead | None:
        """Why nobody reads prompts; None if somebody does, or the first of them is awaited."""
        whys = self._board.absences
        return EngineDead(f"no replica reads prompts: {whys[0]}") if whys and not self._board.num_ready else None

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        """Who is to read it; "" for whoever will be there first."""
        return self._board.best(self._route(request, tried))

    async def read(self, name: str, request: Request, ticket: RowTicket) -> None:
        """Returns when the row has gone to ``ticket``. ReadFailed if it could not."""
        config = self._config()
        asked = replace(
            read_for(request, ticket),
            request_id=read_name(ticket),
            budget=request.budget or config.budget,  # its own might be others, on a machine of another size
            selector=request.selector or config.selector,
        )
        claim = self._board.claim(len(request.prompt_token_ids))
        try:
            await self._until_ready()
            to = name if name in self._board.names else ""
            route = replace(self._route(request, frozenset()), to=to, on_taken=claim.take)
            async with aclosing(self._watched.run(asked, route)) as deltas:
                problem = await why_not_sent(deltas)
        except (EngineDead, QueueFull, ValueError) as error:
            problem = str(error)
        finally:
            claim.give_back()
        if problem:
            for asked_one in claim.names:
                self.shun(asked_one)
            raise ReadFailed(problem)

    def shun(self, name: str) -> None:
        self._shunned[name] = monotonic() + SHUN_S

    async def reset_prefixes(self, namespace: str | None) -> None:
        """Every replica forgets the beginnings that it stores of a namespace's prompts."""
        await asyncio.gather(*(self._watched.reset_prefixes(namespace, name) for name in self._board.names))

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])

    def _route(self, request: Request, tried: frozenset[str]) -> Route:
        now = monotonic()
        self._shunned = {name: until for name, until in self._shunned.items() if until > now}
        facts = self._watched.facts
        return Route(
            self._board,
            self._watched.caller,
            key=route_key(request, None if facts is None else facts.engine),
            size=len(request.prompt_token_ids),
            avoid=tried | self._shunned.keys(),
        )

    async def _until_ready(self) -> None:
        """Replicas that are known, but take nothing now, are given time: their engines come back, or others come."""
        deadline = monotonic() + ACCEPT_S
        while self.absence is not None and monotonic() < deadline:
            await asyncio.sleep(SOON_S)
