"""``make_app``: the HTTP front as one ASGI application, whatever engine is behind it.

Invariant: every answer that is an error has the one shape of ``http/errors.py``, also for unknown paths, wrong methods
and our own bugs. ``run.py`` puts it on a socket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from snapstream.server.anthropic.routes import anthropic_routes
from snapstream.server.engine.api import AsyncEngine
from snapstream.server.http.auth import BearerAuth
from snapstream.server.http.cors import Cors
from snapstream.server.http.errors import add_error_handlers
from snapstream.server.http.faults import FaultCount
from snapstream.server.http.head import HeadAsGet
from snapstream.server.http.hosts import HostGuard
from snapstream.server.http.paths import OneLength, PlainPath
from snapstream.server.http.request_id import HEADER, RequestId
from snapstream.server.http.status import status_routes
from snapstream.server.http.wire import Wire
from snapstream.server.openai.front import Front
from snapstream.server.openai.routes import openai_routes
from snapstream.server.openai.tokenizer_routes import tokenizer_routes
from snapstream.server.page.routes import page_routes
from snapstream.server.peers.routes import peer_routes
from snapstream.server.responses.routes import responses_routes
from snapstream.server.settings import ModelFacts, ServerSettings
from snapstream.server.tracing import TraceRequests, Tracing
from snapstream.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.text_trimmer import TextTrimmer


def make_app(
    engine: AsyncEngine,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: ServerSettings,
    facts: Callable[[], ModelFacts],
    trimmer: TextTrimmer | None = None,
    wire: Wire | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """``facts`` may raise EngineDead while the engine loads; callers get a 503 until then. ``trimmer``: the draft.
    ``wire``: the connections that it is reached by, for its metrics.

    ``app.state.front`` is the shared state; set its ``is_draining`` to refuse new work.
    """
    front = Front(engine, tokenizer, settings, facts, trimmer, wire)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        front.close()

    # The pages /docs and /redoc would load their scripts from other hosts.
    app = FastAPI(
        title="snapstream",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,  # PlainPath makes one path of both spellings
        servers=[{"url": settings.root_path}] if settings.root_path else None,
    )
    app.state.front = front
    app.include_router(status_routes(front.need_ready, front.metrics.render))
    if settings.duty == "prefill":  # clients talk to the servers that answer
        app.include_router(peer_routes(front, engine, settings.transfer_secret))
    else:
        _add_apis(app, front)
    add_error_handlers(app)
    app.add_middleware(BearerAuth, keys=settings.api_keys, admin_key=settings.admin_key)
    if settings.cors_origins:  # outside of the keys: a preflight carries none
        app.add_middleware(
            Cors,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],  # answers what is asked for; the SDKs send a changing set of X-Stainless-*
            expose_headers=[HEADER, "retry-after"],
        )
    if settings.allowed_hosts:
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts)
    app.add_middleware(PlainPath, root_path=settings.root_path)  # outside of all that goes by paths
    app.add_middleware(OneLength)
    if tracing is not None:
        front.metrics.on_request = tracing.note
        app.add_middleware(TraceRequests, tracing=tracing)
    app.add_middleware(FaultCount, count=front.metrics.count_fault)
    app.add_middleware(RequestId)  # outside of the rest: refusals carry an id, too
    app.add_middleware(HeadAsGet)
    return app


def _add_apis(app: FastAPI, front: Front) -> None:
    """What clients use."""
    app.include_router(openai_routes(front))
    app.include_router(responses_routes(front))
    app.include_router(anthropic_routes(front))
    app.include_router(tokenizer_routes(front))
    if front.settings.has_page:
        app.include_router(page_routes(front))
