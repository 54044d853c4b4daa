"""``EngineReplica``: one replica, which owns one ``EngineProcess``.

It does prefill, decode or both (``role``). Invariant: the rows of a request whose caller has left are freed, whether
the caller closed the call, was cancelled by Ray, or was killed. Ray does not report a killed caller, so callers hold
their requests by leases. Deltas that gather while Ray carries the last batch go out together in the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from time import monotonic

from ray import serve
from ray.serve.handle import DeploymentHandle

from snapstream.engine.validate import QueueFull
from snapstream.engine.worker import Deltas
from snapstream.integrations.ray.certificates import receiver_settings, sender_settings
from snapstream.integrations.ray.engine import ReplicaReaders
from snapstream.integrations.ray.ingress import HandleReplicas
from snapstream.integrations.ray.registry import TICK_S, DeltaBatch, Fault, Leases, Load, Report, Route
from snapstream.server import logs
from snapstream.server.engine.api import EngineDead, EngineSpec, RequestDelta
from snapstream.server.engine.process import EngineProcess
from snapstream.server.options import Role
from snapstream.types import Request

LEAST_ABSENCE_S = 60.0  # an engine that restarts may take so long at least; in all
LOADS_OF_ABSENCE = 3.0  # as many times what its first load took


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that is not answered to its end."""

    caller: str
    num_rows: int
    queued_tokens: int  # of its prompt, until it has a token
    reading: asyncio.Task[None]  # takes its deltas from the engine; cancelling it aborts the request


class EngineReplica:
    """Ray makes it, calls it on one event loop, and ends it when it has drained."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, spec: EngineSpec, stall_timeout_s: float, role: Role = "both", prefill: DeploymentHandle | None = None
    ) -> None:
        """Returns when the engine serves. ValueError, EngineDead: it cannot be loaded; Ray shows the message.

        ``prefill``: the replicas that read prompts for one with the role "decode".
        """
        logs.set_up("text")
        self._name = serve.get_replica_context().replica_id.unique_id
        if role != "both":
            settings = await asyncio.to_thread(receiver_settings if role == "decode" else sender_settings)
            spec = replace(spec, transfer=settings)
        self._readers: ReplicaReaders | None = None
        if prefill is not None:
            self._readers = ReplicaReaders(HandleReplicas(prefill), lambda: self._engine.facts.engine)
        readers = self._readers
        make_readers = None if readers is None else lambda engine: readers
        self._engine = EngineProcess(spec, stall_timeout_s=stall_timeout_s, make_readers=make_readers)
        began = monotonic()
        await self._engine.start()
        self._patience_s = max(LEAST_ABSENCE_S, LOADS_OF_ABSENCE * (monotonic() - began))
        self._absent_since: float | None = None
        self._open: dict[int, OpenRequest] = {}
        self._leases = Leases()
        self._sweeping = asyncio.create_task(self._sweep(), name="lease-sweep")

    async def generate(self, request: Request, route: Route) -> AsyncGenerator[DeltaBatch, None]:
        """The batches of a request (``messages.py``); ``route`` was for the router."""
        waiting: list[RequestDelta | Fault] = []
        news = asyncio.Event()
        reading = asyncio.create_task(self._read(request, waiting, news))
        own = OpenRequest(route.caller, request.sampling.n, len(request.prompt_token_ids), reading)
        self._open[id(own)] = own
        self._leases.open(route.caller)
        try:
            yield DeltaBatch(self._name, self._load())
            is_over = False
            while not is_over:
                await news.wait()
                news.clear()
                if any(not isinstance(item, Fault) for item in waiting):
                    own.queued_tokens = 0
                is_over = isinstance(waiting[-1], Fault) or waiting[-1].is_finished
                if is_over:  # so that the last batch says what is left to do without this request
                    self._open.pop(id(own), None)
                batch = self._batch(waiting)
                waiting.clear()
                yield batch
        finally:
            self._open.pop(id(own), None)
            reading.cancel()
            await asyncio.wait([reading])

    async def report(self, route: Route) -> Report:
        """This replica on itself; asking renews the caller's lease."""
        self._leases.renew(route.caller)
        return Report(
            replica=self._name,
            load=self._load(),
            stats=self._engine.stats(),
            facts=self._engine.facts,
            pid=os.getpid(),
        )

    async def reset_prefixes(self, namespace: str | None, route: Route) -> None:
        """Forget the stored beginnings of a namespace's prompts. An engine that is gone has forgotten them."""
        if self._readers is not None:
            await self._readers.reset_prefixes(namespace)
        elif self._engine.is_ready:
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
        if hasattr(self, "_sweeping"):
            self._sweeping.cancel()
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
        except Exception as error:  # a bug of ours: the caller would wait for ever
            log.exception("request=%s failed", request.request_id)
            waiting.append(Fault("dead", f"the replica failed: {type(error).__name__}: {error}"))
            news.set()
        except asyncio.CancelledError:
            waiting.append(Fault("dead", "the client has left"))
            news.set()
            raise

    async def _sweep(self) -> None:
        """End the requests of callers that are gone."""
        while True:
            await asyncio.sleep(TICK_S)
            for caller in self._leases.tick():
                lost = {number: own for number, own in self._open.items() if own.caller == caller}
                if lost:
                    log.warning("ingress %s is gone; requests that it had open: %d", caller, len(lost))
                for number, own in lost.items():
                    del self._open[number]  # whatever becomes of a call that Ray cannot end
                    own.reading.cancel()

    def _load(self) -> Load:
        absence = self._engine.absence or (None if self._readers is None else self._readers.absence)
        return Load(
            rows=self._engine.facts.max_rows,
            open_rows=sum(own.num_rows for own in self._open.values()),
            queued_tokens=sum(own.queued_tokens for own in self._open.values()),
            absence="" if absence is None else str(absence),
        )

    def _batch(self, waiting: list[RequestDelta | Fault]) -> DeltaBatch:
        deltas = tuple(item for item in waiting if not isinstance(item, Fault))
        fault = waiting[-1] if isinstance(waiting[-1], Fault) else None
        return DeltaBatch(self._name, self._load(), Deltas(deltas), fault)
