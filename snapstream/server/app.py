"""``make_app``: the server as one ASGI application over any ``AsyncEngine``.

Invariants: every error has the form of the request's API, also for unknown paths, wrong methods and our own bugs. A
prefill server refuses a request without the transfer secret before its body is read, and aborts a request whose decode
server disconnects.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from snapstream.config.values import imported
from snapstream.disaggregation.protocol import HEADER, digest_of, has_digest, request_from_bytes
from snapstream.server.apis import APIS
from snapstream.server.engine.api import AsyncEngine, ModelMetadata
from snapstream.server.engine.remote_prefill import CHECK_PATH, PREFILL_PATH, compatibility_info, transfer_error
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.http.errors import ApiError, FaultCount, SelectApi, add_error_handlers, bad_value
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
    log_refusal,
)
from snapstream.server.http.requests import RequestContext, run_until_disconnect
from snapstream.server.openai.routes import tokenizer_routes
from snapstream.server.openai.state import ServerState
from snapstream.server.options import ServerSettings
from snapstream.server.page import page_routes
from snapstream.server.telemetry import TraceRequests, Tracing
from snapstream.types import Request
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
) -> FastAPI:
    """``metadata`` may raise EngineDead while the engine loads; callers get a 503 until then. ``compressor``: the
    draft. ``guard``: the connections that it is reached by, for its metrics.

    ``app.state.server`` is the shared state; set its ``is_draining`` to refuse new work.
    """
    state = ServerState(engine, tokenizer, settings, metadata, compressor, guard)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.close()

    # Without /docs and /redoc, which load scripts from other hosts.
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
        app.include_router(peer_routes(state))
    else:
        for api in APIS:
            app.include_router(imported(api.routes)(state))
        app.include_router(tokenizer_routes(state))
        if settings.has_page:
            app.include_router(page_routes(state.answer, state.prompts.with_tokenizer, lambda: _example_len(state)))
    add_error_handlers(app)
    app.add_middleware(BearerAuth, keys=settings.api_keys, admin_key=settings.admin_key, apis=APIS)
    if settings.cors_origins:  # outside of the keys: a preflight carries none
        app.add_middleware(
            Cors,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"],
            allow_private_network=True,  # of the named origins: pages on the web that call a server at home
            allow_headers=["*"],  # repeats what is requested; the SDKs send a changing set of X-Stainless-*
            expose_headers=[REQUEST_ID, "retry-after"],
        )
    if settings.allowed_hosts:
        app.add_middleware(HostGuard, allowed=settings.allowed_hosts)
    app.add_middleware(NormalizePath, root_path=settings.root_path)  # outside of everything that reads the path
    app.add_middleware(SingleBodyLength)
    if tracing is not None:
        state.metrics.on_request = tracing.note
        app.add_middleware(TraceRequests, tracing=tracing)
    app.add_middleware(FaultCount, count=state.metrics.count_fault)
    app.add_middleware(RequestId)  # around the rest: refusals carry an id, too
    app.add_middleware(SelectApi, apis=APIS)
    app.add_middleware(HeadAsGet)
    return app


def _example_len(state: ServerState) -> int:
    """Tokens of the longest example document for the model; 0: it was not trained on them."""
    return state.metadata.max_model_len if state.metadata.has_examples else 0


# The routes of a server with --role prefill.

log = logging.getLogger(__name__)


def peer_routes(state: ServerState) -> APIRouter:
    """Routes for other servers; they are not in /openapi.json."""
    router, secret = APIRouter(), state.settings.transfer_secret
    num_queued = 0  # tokens of prompts that this server prefills for others

    def proven_digest(http: HttpRequest, path: str) -> str:
        """The digest that the body must have; 401 without a proof. A check has no body."""
        digest = digest_of(secret, path, http.headers.get(HEADER, ""))
        if digest is None or (path == CHECK_PATH and not has_digest(b"", digest)):
            log_refusal("a request without the transfer secret was refused", http.scope)
            raise ApiError(401, "This route is for servers that know the transfer secret.", code="invalid_proof")
        return digest

    async def send_row(request: Request) -> Response:
        nonlocal num_queued
        num_tokens = len(request.prompt_token_ids)
        num_queued += num_tokens
        try:
            problem = await transfer_error(state.engine.generate(request))
        finally:
            num_queued -= num_tokens
        if problem:
            log.warning("a row was not sent: %s", problem)
            raise ApiError(502, f"the row was not sent: {problem}", kind="api_error", code="row_not_sent")
        return JSONResponse({"queued_tokens": num_queued})

    @router.post(PREFILL_PATH, include_in_schema=False)
    async def prefill(http: HttpRequest) -> Response:
        digest = proven_digest(http, PREFILL_PATH)
        context = RequestContext.of(state.open_requests, http)

        async def work() -> Response:
            body = await state.read_bytes(http, context)
            if not has_digest(body, digest):
                raise bad_value("the body is not the one that the proof is for", None, "invalid_proof")
            return await run_until_disconnect(http.receive, send_row(request_from_bytes(body)))

        return await state.handle(context, work)

    @router.get(CHECK_PATH, include_in_schema=False)
    async def check(http: HttpRequest) -> Response:
        proven_digest(http, CHECK_PATH)
        state.require_ready()
        return JSONResponse(compatibility_info(state.metadata))

    return router
