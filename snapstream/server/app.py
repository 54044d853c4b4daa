"""``make_app``: the HTTP front as one ASGI application, whatever engine is behind it.

Invariant: every answer that is an error has the one shape of ``errors.py``, also for unknown paths, wrong methods and
our own bugs. Routes are in ``openai_routes.py`` and ``other_routes.py``; ``run.py`` puts it on a socket.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from snapstream.server.auth import BearerAuth
from snapstream.server.cors import Cors
from snapstream.server.engine_api import AsyncEngine
from snapstream.server.errors import ApiError, bad_value, internal
from snapstream.server.front import Front
from snapstream.server.head import HeadAsGet
from snapstream.server.hosts import HostGuard
from snapstream.server.openai_routes import openai_routes
from snapstream.server.other_routes import other_routes
from snapstream.server.page_routes import page_routes
from snapstream.server.request_id import HEADER, RequestId
from snapstream.server.settings import ModelFacts, ServerSettings
from snapstream.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.spec_prefill.compressor import PromptCompressor

log = logging.getLogger(__name__)


def make_app(
    engine: AsyncEngine,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: ServerSettings,
    facts: Callable[[], ModelFacts],
    compressor: PromptCompressor | None = None,
) -> FastAPI:
    """``facts`` may raise EngineDead while the engine loads; callers get a 503 until then. ``compressor``: the draft.

    ``app.state.front`` is the shared state; set its ``is_draining`` to refuse new work.
    """
    front = Front(engine, tokenizer, settings, facts, compressor)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        front.close()

    # The pages /docs and /redoc would load their scripts from other hosts.
    app = FastAPI(title="snapstream", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.front = front
    app.include_router(openai_routes(front))
    app.include_router(other_routes(front))
    if settings.has_page:
        app.include_router(page_routes(front))
    add_error_handlers(app)
    app.add_middleware(BearerAuth, keys=settings.api_keys)
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
    app.add_middleware(RequestId)  # outside of the rest: refusals carry an id, too
    app.add_middleware(HeadAsGet)
    return app


def add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_http_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"There is nothing at {request.url.path}." if error.status_code == 404 else str(error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def on_invalid(_: HttpRequest, error: Exception) -> Response:
        return bad_value(str(error), None).response()

    async def on_bug(_: HttpRequest, error: Exception) -> Response:
        log.error("unhandled error", exc_info=error)
        return internal().response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_bug)
