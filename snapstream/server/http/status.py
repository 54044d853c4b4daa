"""Routes for machines beside the API: health, metrics, version."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from snapstream.server.http.openapi import STRING, answers, errors
from snapstream.version import __version__


def status_routes(need_ready: Callable[[], None], render_metrics: Callable[[], bytes]) -> APIRouter:
    """``need_ready`` raises where /health must not say "ok"."""
    router = APIRouter()

    @router.get("/health", responses=answers({"status": {"const": "ok"}}))
    async def health() -> Response:
        need_ready()
        return JSONResponse({"status": "ok"})

    @router.get("/metrics", response_class=PlainTextResponse, responses=errors())
    async def metrics() -> Response:
        return Response(render_metrics(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", responses=answers({"version": STRING}))
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return router
