"""``DecodeServer``: one replica, which owns one ``EngineProcess`` - child, restarts, stall watch and all.

Invariant: rows of a request that nobody reads any more are given back, however its reader left: closed, cancelled by
Ray, or killed. What gathers for a request while Ray carries its last parcel goes out together in the next.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from time import monotonic

from ray import serve

from snapstream.engine.messages import Deltas
from snapstream.engine.validate import QueueFull
from snapstream.integrations.ray.board import Route
from snapstream.integrations.ray.messages import Fault, Load, Parcel, Report
from snapstream.request import Request
from snapstream.server import logs
from snapstream.server.engine.api import EngineDead, RequestDelta
from snapstream.server.engine.messages import EngineSpec
from snapstream.server.engine.process import EngineProcess

LEAST_ABSENCE_S = 60.0  # an engine that restarts may take so long at least; in all
LOADS_OF_ABSENCE = 3.0  # as many times what its first load took


class DecodeServer:
    """Prefills and decodes. Ray makes it, calls it on one event loop, and ends it when it has drained."""

    async def __init__(self, spec: EngineSpec, stall_timeout_s: float) -> None:  # type: ignore[misc] # Ray awaits it
        """Returns when the engine serves. ValueError, EngineDead: it cannot be loaded; Ray shows the message."""
        logs.set_up("text")
        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine = EngineProcess(spec, stall_timeout_s=stall_timeout_s)
        began = monotonic()
        await self._engine.start()
        self._patience_s = max(LEAST_ABSENCE_S, LOADS_OF_ABSENCE * (monotonic() - began))
        self._absent_since: float | None = None
        self._rows: dict[object, int] = {}  # of open requests
        self._queued: dict[object, int] = {}  # prompt tokens of those without a token yet

    async def generate(self, request: Request, route: Route) -> AsyncGenerator[Parcel, None]:
        """The parcels of a request (``messages.py``); ``route`` was for the router."""
        own = object()
        self._rows[own] = request.sampling.n
        self._queued[own] = len(request.prompt_token_ids)
        waiting: list[RequestDelta | Fault] = []
        news = asyncio.Event()
        reading = asyncio.create_task(self._read(request, waiting, news))
        try:
            yield Parcel(self._name, self._load())
            is_over = False
            while not is_over:
                await news.wait()
                news.clear()
                if any(not isinstance(item, Fault) for item in waiting):
                    self._queued.pop(own, None)
                is_over = isinstance(waiting[-1], Fault) or waiting[-1].is_finished
                if is_over:  # so that the last parcel says what is left to do without this request
                    self._forget(own)
                parcel = self._parcel(waiting)
                waiting.clear()
                yield parcel
        finally:
            self._forget(own)
            reading.cancel()
            await asyncio.wait([reading])

    async def report(self, route: Route) -> Report:
        return Report(
            replica=self._name,
            load=self._load(),
            stats=self._engine.stats(),
            facts=self._engine.facts,
            pid=os.getpid(),
        )

    async def reset_prefixes(self, namespace: str, route: Route) -> None:
        """Forget the stored beginnings of a namespace's prompts. An engine that is gone has forgotten them."""
        if self._engine.is_ready:
            self._engine.reset_prefixes(namespace)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What ``scaling.py`` goes by."""
        load = self._load()
        return {"rows": load.rows, "open_rows": load.open_rows, "queued_tokens": load.queued_tokens}

    async def check_health(self) -> None:
        """EngineDead where Ray had better start another replica: the engine will not come back, or takes too long."""
        absence = self._engine.absence
        if absence is None:
            self._absent_since = None
            return
        now = monotonic()
        self._absent_since = now if self._absent_since is None else self._absent_since
        if absence.is_final or now - self._absent_since > self._patience_s:
            raise absence

    async def __del__(self) -> None:
        """Ray calls it when the requests have ended, or their time is over."""
        if hasattr(self, "_engine"):
            await self._engine.shutdown(0)

    async def _read(self, request: Request, waiting: list[RequestDelta | Fault], news: asyncio.Event) -> None:
        try:
            async for delta in self._engine.generate(request):
                waiting.append(delta)
                news.set()
        except (ValueError, QueueFull, EngineDead) as error:
            waiting.append(Fault.of(error))
            news.set()

    def _load(self) -> Load:
        absence = self._engine.absence
        return Load(
            rows=self._engine.facts.max_rows,
            open_rows=sum(self._rows.values()),
            queued_tokens=sum(self._queued.values()),
            absence="" if absence is None else str(absence),
        )

    def _parcel(self, waiting: list[RequestDelta | Fault]) -> Parcel:
        deltas = tuple(item for item in waiting if not isinstance(item, Fault))
        fault = waiting[-1] if isinstance(waiting[-1], Fault) else None
        return Parcel(self._name, self._load(), Deltas(deltas), fault)

    def _forget(self, own: object) -> None:
        self._rows.pop(own, None)
        self._queued.pop(own, None)
