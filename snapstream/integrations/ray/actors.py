"""The actors of a deployment: ``Ingress``, the HTTP server behind Ray's proxy, and ``EngineReplica``, which owns one
``EngineProcess`` and does prefill, decode or both (``role``).

Invariants: all ingresses give a caller the same namespace, so its cached prompts are found through any of them. The
rows of a request whose caller is gone are freed, whether the caller closed the call, was cancelled by Ray, or was
killed. Ray does not report a killed caller, so callers hold their requests by leases. Deltas that accumulate while Ray
sends a batch go into the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from time import monotonic

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from snapstream.engine.worker import Deltas
from snapstream.integrations.ray.certificates import receiver_settings, sender_settings
from snapstream.integrations.ray.config import DeployConfig
from snapstream.integrations.ray.replicas import (
    TICK_S,
    DeltaBatch,
    Fault,
    Leases,
    Load,
    ReplicaLost,
    ReplicaPrefill,
    ReplicatedEngine,
    Report,
    Route,
)
from snapstream.server.app import make_app
from snapstream.server.engine.api import EngineDead, EngineSpec, ModelMetadata, RequestDelta
from snapstream.server.engine.process import EngineProcess
from snapstream.server.http.errors import Middleware
from snapstream.server.http.lifecycle import set_up_log
from snapstream.server.http.middleware import REQUEST_ID
from snapstream.server.options import Role, ServerSettings
from snapstream.server.run import load_tokenizer
from snapstream.types import QueueFull, Request


class HandleReplicas:
    """Calls to the replicas of a deployment through a Serve handle; Ray's errors become ReplicaLost."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(self, request: Request, route: Route) -> AsyncGenerator[DeltaBatch, None]:
        """Batches of a request. ReplicaLost. Closing it early aborts the request."""
        response = self._streaming.generate.remote(request, route)
        is_over = False
        try:
            while not is_over:
                with _ray_errors():
                    batch: DeltaBatch = await anext(response)
                deltas = batch.deltas.deltas
                is_over = batch.fault is not None or any(delta.is_finished for delta in deltas)
                yield batch
        except StopAsyncIteration:
            raise ReplicaLost("its answer ended early") from None
        finally:
            if not is_over:
                with suppress(RayError):
                    response.cancel()

    async def report(self, route: Route) -> Report:
        with _ray_errors():
            report: Report = await self._handle.report.remote(route)
        return report

    async def reset_prefixes(self, namespace: str | None, route: Route) -> None:
        with _ray_errors():
            await self._handle.reset_prefixes.remote(namespace, route)


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise ReplicaLost for what Ray raises if a replica is gone, or ended during a call."""
    try:
        yield
    except RayTaskError:  # a bug of ours in the replica
        raise
    except (RayError, RayServeException) as error:
        raise ReplicaLost(type(error).__name__) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ReplicaLost("it cancelled the call") from None


class Ingress:
    """Ray makes it; ``serve.ingress`` asks it for its application."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, config: DeployConfig, settings: ServerSettings, decode: DeploymentHandle
    ) -> None:
        set_up_log("text")
        self._engine = ReplicatedEngine(HandleReplicas(decode))
        self._watching = asyncio.create_task(self._engine.replicas.watch(), name="replica-watch")
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.front)
        settings = replace(settings, namespace_secret=_secret(settings.api_keys))
        created = int(time.time())
        self._app = make_app(
            self._engine, tokenizer, settings, lambda: ModelMetadata.of(self._engine.metadata, config.names, created)
        )
        self._app.add_middleware(DropRequestId)

    def __serve_build_asgi_app__(self) -> FastAPI:  # the name is Ray's
        return self._app


class DropRequestId(Middleware):
    """Removes our request id from answers, because Ray's proxy adds its own."""

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID]
            await send(message)

        await self._app(scope, receive, without)


def _secret(api_keys: tuple[str, ...]) -> bytes:
    """Secret of the namespaces: the same at every ingress; one API key alone does not reveal it."""
    return sha256(b"\0".join([b"snapstream namespaces", *(key.encode() for key in sorted(api_keys))])).digest()


MIN_UNAVAILABLE_S = 60.0  # a restarting engine gets at least this long
LOADS_UNAVAILABLE = 3.0  # or this many times its first load


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenRequest:
    caller: str
    num_rows: int
    queued_tokens: int  # of its prompt, until it has a token
    reader: asyncio.Task[None]  # takes its deltas from the engine; cancelling it aborts the request


class EngineReplica:
    """Ray makes it, calls it on one event loop, and ends it when it has drained."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, spec: EngineSpec, stall_timeout_s: float, role: Role = "both", prefill: DeploymentHandle | None = None
    ) -> None:
        """Returns when the engine serves. ValueError, EngineDead: it cannot be loaded; Ray shows the message.

        ``prefill``: the prefill replicas of one with the role "decode".
        """
        set_up_log("text")
        self._name = serve.get_replica_context().replica_id.unique_id
        if role != "both":
            settings = await asyncio.to_thread(receiver_settings if role == "decode" else sender_settings)
            spec = replace(spec, transfer=settings)
        self._prefill: ReplicaPrefill | None = None
        if prefill is not None:
            self._prefill = ReplicaPrefill(HandleReplicas(prefill), lambda: self._engine.metadata.engine)
        self._engine = EngineProcess(spec, stall_timeout_s=stall_timeout_s, prefill=self._prefill)
        began = monotonic()
        await self._engine.start()
        self._patience_s = max(MIN_UNAVAILABLE_S, LOADS_UNAVAILABLE * (monotonic() - began))
        self._unavailable_since: float | None = None
        self._open: dict[int, OpenRequest] = {}
        self._leases = Leases()
        self._sweeping = asyncio.create_task(self._sweep(), name="lease-sweep")

    async def generate(self, request: Request, route: Route) -> AsyncGenerator[DeltaBatch, None]:
        """The batches of a request; ``route`` was for the router."""
        pending: list[RequestDelta | Fault] = []
        arrived = asyncio.Event()
        reader = asyncio.create_task(self._read(request, pending, arrived))
        own = OpenRequest(route.caller, request.sampling.n, len(request.prompt_token_ids), reader)
        self._open[id(own)] = own
        self._leases.open(route.caller)
        try:
            yield DeltaBatch(self._name, self._load())
            is_over = False
            while not is_over:
                await arrived.wait()
                arrived.clear()
                if any(not isinstance(item, Fault) for item in pending):
                    own.queued_tokens = 0
                is_over = isinstance(pending[-1], Fault) or pending[-1].is_finished
                if is_over:  # so that the load in the last batch does not count this request
                    self._open.pop(id(own), None)
                batch = self._batch(pending)
                pending.clear()
                yield batch
        finally:
            self._open.pop(id(own), None)
            reader.cancel()
            await asyncio.wait([reader])

    async def report(self, route: Route) -> Report:
        """This replica on itself; asking renews the caller's lease."""
        self._leases.renew(route.caller)
        return Report(
            replica=self._name,
            load=self._load(),
            stats=self._engine.stats(),
            metadata=self._engine.metadata,
            pid=os.getpid(),
        )

    async def reset_prefixes(self, namespace: str | None, route: Route) -> None:
        """Drop the stored prefixes of a namespace. An engine that is gone has none."""
        if self._prefill is not None:
            await self._prefill.reset_prefixes(namespace)
        elif self._engine.is_ready:
            self._engine.reset_prefixes(namespace)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Metrics for ``ScaleByLoad``."""
        load = self._load()
        return {"rows": load.rows, "open_rows": load.open_rows, "queued_tokens": load.queued_tokens}

    async def check_health(self) -> None:
        """EngineDead if Ray should start another replica: the engine will not come back, or takes too long."""
        unavailable = self._engine.unavailable
        if unavailable is None:
            self._unavailable_since = None
            return
        now = monotonic()
        self._unavailable_since = now if self._unavailable_since is None else self._unavailable_since
        if unavailable.is_final or now - self._unavailable_since > self._patience_s:
            raise unavailable

    async def __del__(self) -> None:
        """Ray calls it after the drain."""
        if hasattr(self, "_sweeping"):
            self._sweeping.cancel()
        if hasattr(self, "_engine"):
            await self._engine.shutdown(0)

    async def _read(self, request: Request, pending: list[RequestDelta | Fault], arrived: asyncio.Event) -> None:
        try:
            async for delta in self._engine.generate(request):
                pending.append(delta)
                arrived.set()
        except (ValueError, QueueFull, EngineDead) as error:
            pending.append(Fault.of(error))
        except Exception as error:  # a bug: the caller would wait forever
            log.exception("request=%s failed", request.request_id)
            pending.append(Fault("dead", f"the replica failed: {type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            pending.append(Fault("dead", "the client has left"))
            raise
        finally:
            arrived.set()

    async def _sweep(self) -> None:
        """Abort the requests of callers that are gone."""
        while True:
            await asyncio.sleep(TICK_S)
            for caller in self._leases.tick():
                lost = {number: own for number, own in self._open.items() if own.caller == caller}
                if lost:
                    log.warning("ingress %s is gone; requests that it had open: %d", caller, len(lost))
                for number, own in lost.items():
                    del self._open[number]  # also if Ray cannot end the call
                    own.reader.cancel()

    def _load(self) -> Load:
        unavailable = self._engine.unavailable or (None if self._prefill is None else self._prefill.unavailable)
        return Load(
            rows=self._engine.metadata.engine.max_rows,
            open_rows=sum(own.num_rows for own in self._open.values()),
            queued_tokens=sum(own.queued_tokens for own in self._open.values()),
            unavailable="" if unavailable is None else str(unavailable),
        )

    def _batch(self, pending: list[RequestDelta | Fault]) -> DeltaBatch:
        deltas = tuple(item for item in pending if not isinstance(item, Fault))
        fault = pending[-1] if isinstance(pending[-1], Fault) else None
        return DeltaBatch(self._name, self._load(), Deltas(deltas), fault)
