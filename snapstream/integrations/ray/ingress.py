"""The ingress: the HTTP server (``server/app.py``) over the replicas of a deployment, behind Ray's proxy.

Invariant: all ingresses give a caller the same namespace, so its cached prompts are found through any of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.integrations.ray.config import DeployConfig
from snapstream.integrations.ray.engine import ReplicaLost, ReplicatedEngine
from snapstream.integrations.ray.registry import DeltaBatch, Report, Route
from snapstream.models.tokenizer import find_tokenizer, read_template
from snapstream.server.app import make_app
from snapstream.server.engine.api import ModelMetadata
from snapstream.server.http.lifecycle import set_up_log
from snapstream.server.http.middleware import REQUEST_ID
from snapstream.server.options import ServerSettings
from snapstream.types import Request


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
        self._watching = asyncio.create_task(self._engine.watch(), name="replica-watch")
        tokenizer = await asyncio.to_thread(find_tokenizer, Path(config.model))
        if config.front.chat_template is not None:
            if tokenizer is None:
                raise ValueError(f"{config.model} has no tokenizer; chat_template needs one")
            tokenizer.chat_template = read_template(config.front.chat_template)
        settings = replace(settings, namespace_secret=_secret(settings.api_keys))
        created = int(time.time())
        self._app = make_app(
            self._engine, tokenizer, settings, lambda: ModelMetadata.of(self._engine.metadata, config.names, created)
        )
        self._app.add_middleware(DropRequestId)

    def __serve_build_asgi_app__(self) -> FastAPI:  # the name is Ray's
        return self._app


class DropRequestId:
    """Middleware: removes our request id from answers, because Ray's proxy adds its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID]
            await send(message)

        await self._app(scope, receive, without)


def _secret(api_keys: tuple[str, ...]) -> bytes:
    """Of namespaces: the same at every ingress; a caller with only one of the keys cannot compute it."""
    return sha256(b"\0".join([b"snapstream namespaces", *(key.encode() for key in sorted(api_keys))])).digest()
