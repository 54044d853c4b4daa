"""The ingress: the server's HTTP front, whole, over the replicas of a deployment.

Ray's proxy takes connections and hands each request on; everything from keys to frames is the front's own work
(``server/app.py``). Invariant: all ingresses give a caller the same namespace, so its prompts are found whichever it
came through.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.assets import TINY_MODEL
from snapstream.integrations.ray.config import DeployConfig
from snapstream.integrations.ray.engine import ReplicatedEngine
from snapstream.integrations.ray.handles import HandleReplicas
from snapstream.models.tokenizer import find_tokenizer, read_template
from snapstream.server import logs
from snapstream.server.app import make_app
from snapstream.server.http.request_id import HEADER
from snapstream.server.settings import ModelFacts, ServerSettings


class Ingress:
    """Ray makes it; ``serve.ingress`` asks it for its application."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, config: DeployConfig, settings: ServerSettings, decode: DeploymentHandle
    ) -> None:
        logs.set_up("text")
        self._engine = ReplicatedEngine(HandleReplicas(decode))
        self._watching = asyncio.create_task(self._engine.watch(), name="replica-watch")
        tokenizer = await asyncio.to_thread(find_tokenizer, Path(config.model))
        if config.front.chat_template:
            if tokenizer is None:
                raise ValueError(f"{config.model} has no tokenizer; chat_template needs one")
            tokenizer.chat_template = read_template(Path(config.front.chat_template))
        settings = replace(settings, namespace_secret=_secret(settings.api_keys))
        self._app = make_app(self._engine, tokenizer, settings, _facts(config, self._engine, int(time.time())))
        self._app.add_middleware(IdByProxy)

    def __serve_build_asgi_app__(self) -> FastAPI:  # the name is Ray's
        return self._app


class IdByProxy:
    """Middleware: Ray's proxy gives requests their ids and puts them on answers; the front's would be there twice."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[HEADER]
            await send(message)

        await self._app(scope, receive, without)


def _secret(api_keys: tuple[str, ...]) -> bytes:
    """Of namespaces: the same wherever the keys are; who has one key and not the others cannot compute it."""
    return sha256(b"\0".join([b"snapstream namespaces", *(key.encode() for key in sorted(api_keys))])).digest()


def _facts(config: DeployConfig, engine: ReplicatedEngine, created: int) -> Callable[[], ModelFacts]:
    has_examples = Path(config.model).resolve() == TINY_MODEL.resolve()

    def facts() -> ModelFacts:
        known = engine.facts
        return ModelFacts(
            names=config.names,
            vocab_size=known.vocab_size,
            engine=known.engine,
            created=created,
            num_layers=known.architecture.num_layers,
            num_kv_heads=known.architecture.num_kv_heads,
            has_examples=has_examples,
        )

    return facts
