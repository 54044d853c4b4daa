"""``make_app``: the server as one ASGI application over any ``AsyncEngine``.

Invariant: every error has the form of the request's API, also for unknown paths, wrong methods and our own bugs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from snapstream.server.apis import APIS
from snapstream.server.engine.api import AsyncEngine, ModelMetadata
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.http.errors import FaultCount, SelectApi, add_error_handlers
from snapstream.server.http.lifecycle import status_routes
from snapstream.server.http.middleware import (
    REQUEST_ID,
    BearerAuth,
    Cors,
    HeadAsGet,
    HostGuard,
    NormalizePath,
    RequestId,
    SingleBodyLength,
)
from snapstream.server.openai.routes import tokenizer_routes
from snapstream.server.openai.state import CheckPrefill, ServerState, no_prefill_check
from snapstream.server.options import ServerSettings
from snapstream.server.page import page_routes
from snapstream.server.roles import peer_routes
from snapstream.server.telemetry import TraceRequests, Tracing
from snapstream.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor


def make_app(
    engine: AsyncEngine,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: ServerSettings,
    metadata: Callable[[], ModelMetadata],
    compressor: PromptCompressor | None = None,
    guard: ConnectionGuard | None = None,
    tracing: Tracing | None = None,
    check_prefill: CheckPrefill = no_prefill_check,
) -> FastAPI:
    """``metadata`` may raise EngineDead while the engine loads; callers get a 503 until then. ``compressor``: the
    draft. ``guard``: the connections that it is reached by, for its metrics. ``check_prefill``: see ``ServerState``.

    ``app.state.server`` is the shared state; set its ``is_draining`` to refuse new work.
    """
    state = ServerState(engine, tokenizer, settings, metadata, compressor, guard, check_prefill)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    # The pages /docs and /redoc would load their scripts from other hosts.
    app = FastAPI(
        title="snapstream",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,  # NormalizePath makes one path of both spellings
        servers=[{"url": settings.root_path}] if settings.root_path else None,
    )
    app.state.server = state
    app.include_router(status_routes(state.require_live, state.check_ready, state.metrics.render))
    if settings.role == "prefill":  # clients talk to the servers that answer
        secret = settings.transfer_secret
        app.include_router(peer_routes(state, engine, secret, state.require_ready, lambda: state.metadata))
    else:
        for api in APIS:
            app.include_router(api.routes(state))
        app.include_router(tokenizer_routes(state))
        if settings.has_page:
            app.include_router(page_routes(state))
    add_error_handlers(app)
    app.add_middleware(BearerAuth, keys=settings.api_keys, admin_key=settings.admin_key, apis=APIS)
    if settings.cors_origins:  # outside of the keys: a preflight carries none
        app.add_middleware(
            Cors,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"],
            allow_private_network=True,  # of the named origins: pages on the web that call a server at home
            allow_headers=["*"],  # answers what is asked for; the SDKs send a changing set of X-Stainless-*
            expose_headers=[REQUEST_ID, "retry-after"],
        )
    if settings.allowed_hosts:
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts)
    app.add_middleware(NormalizePath, root_path=settings.root_path)  # outside of all that goes by paths
    app.add_middleware(SingleBodyLength)
    if tracing is not None:
        state.metrics.on_request = tracing.note
        app.add_middleware(TraceRequests, tracing=tracing)
    app.add_middleware(FaultCount, count=state.metrics.count_fault)
    app.add_middleware(RequestId)  # around the rest: refusals carry an id, too
    app.add_middleware(SelectApi, apis=APIS)
    app.add_middleware(HeadAsGet)
    return app
