"""Start and end of a server: log, listening socket, answers while the model loads, draining, health and metrics routes.

The log is lines for people (``text``) or for machines (``json``), on stderr. A record may carry ``fields``
(``extra={"fields": {...}}``): text shows them as ``name=value``, JSON as members. Invariant: every record is one line
without any prompt or answer.

The first signal drains, a second one ends at once. The socket is open from the start; until the application is loaded,
``StartupApp`` answers 503 to everything but ``/health/live``. A signal during loading is not lost.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, Protocol, TextIO

import uvicorn
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from snapstream.config.values import is_loopback
from snapstream.server.http.connections import ConnectionGuard
from snapstream.server.http.errors import Api, ApiError, SelectApi, api_of, note_no_fault, unavailable
from snapstream.server.http.middleware import RequestId
from snapstream.server.http.openapi import STRING, answers, errors
from snapstream.version import __version__

LogFormat = Literal["text", "json"]


class TextFormatter(logging.Formatter):
    """``time=... level=... message name=value ...``; a traceback follows on its own lines."""

    def __init__(self) -> None:
        super().__init__("time=%(asctime)s level=%(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is logging's
        given = fields_of(record)
        shown = " ".join(f"{name}={_plain(value)}" for name, value in given.items())
        return f"{super().formatMessage(record)} {shown}" if shown else super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC, RFC 3339), level, logger, message, the record's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        whole_s = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole_s}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def set_up_log(kind: LogFormat, stream: TextIO | None = None) -> None:
    """Send everything from INFO on, warnings of Python too, to ``stream`` (stderr) in this form."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)  # a client chooses the path


log = logging.getLogger(__name__)

LAST_FRAMES_S = 5  # for error frames to be sent after draining


def listen(host: str, port: int) -> socket.socket:
    """A listener; OSError with a remedy if the port is taken or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (while attempting")[0]  # the address is said here
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use; choose another with --port"
        raise OSError(f"cannot listen at {host} port {port}: {reason}") from None


class Drainable(Protocol):
    """State of an application that can drain."""

    is_draining: bool

    async def drain(self, timeout_s: float) -> None: ...


class DrainingServer(uvicorn.Server):
    """uvicorn, except that the first signal drains: it answers until ``state.drain`` returns."""

    def __init__(self, config: uvicorn.Config, state: Drainable, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._state = state
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in a signal handler: between any two instructions of the loop's thread."""
        if self._state.is_draining:
            # Not through uvicorn's own handler: it would raise the signal again before the engine is shut down.
            self.should_exit = self.force_exit = True
            return
        self._state.is_draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        log.info("draining for at most %g s; a second signal ends at once", self._drain_timeout_s)
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._state.drain(self._drain_timeout_s)
        finally:
            self.should_exit = True


class StartupApp:
    """Answers until another application is loaded, then forwards to it; also its ``Drainable``."""

    def __init__(self, retry_after_s: int, name: str = "server", *, apis: Sequence[Api] = ()) -> None:
        """``name`` is for messages; errors have the form of ``apis``."""
        self._retry_after_s, self._name = retry_after_s, name
        self._app: ASGIApp = SelectApi(RequestId(self._refuse), apis=apis)
        self._state: Drainable | None = None
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def start(self, app: ASGIApp, state: Drainable) -> None:
        """Forward to ``app`` from now on, and drain ``state``."""
        self._app, self._state = app, state
        state.is_draining = self.is_draining

    async def drain(self, timeout_s: float) -> None:
        """Nothing to wait for while loading."""
        if self._state is not None:
            await self._state.drain(timeout_s)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].rstrip("/") == LIVE_PATH:  # a loading process must not be restarted
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        what = "shutting down" if self.is_draining else "loading"
        fault = unavailable(f"the {self._name} is {what}", self._retry_after_s)
        await fault.response(api_of(scope))(scope, receive, send)


def uvicorn_config(app: ASGIApp, guard: ConnectionGuard, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=guard.protocol(),
        ws="none",  # so that every scope is HTTP
        lifespan="off",  # the application is set later, and closed by its maker
        log_config=None,
        access_log=False,  # every request logs one line with its id
        server_header=False,
        timeout_graceful_shutdown=LAST_FRAMES_S,
        **more,
    )


async def serve_until_signal(
    config: uvicorn.Config,
    startup: StartupApp,
    listener: socket.socket,
    loading: asyncio.Future[Any],
    drain_timeout_s: float,
) -> None:
    """Serve until a signal, or until ``loading`` fails; then its error is raised."""
    server = DrainingServer(config, startup, drain_timeout_s)

    def after_loading(done: asyncio.Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            server.should_exit = True

    loading.add_done_callback(after_loading)
    await server.serve(sockets=[listener])
    if loading.done() and not startup.is_draining:
        loading.result()


def url_of(host: str, listener: socket.socket, scheme: str = "http") -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def warn_if_open(host: str, api_keys: Sequence[str], name: str) -> None:
    if not api_keys and not is_loopback(host):
        log.warning("no API key is set: everyone who can reach %s may use this %s", host, name)


LIVE_PATH = "/health/live"  # also answered while the model loads


def status_routes(
    require_live: Callable[[], None], require_ready: Callable[[], Awaitable[None]], render_metrics: Callable[[], bytes]
) -> APIRouter:
    """``require_live`` raises if only a restart of the process helps, ``require_ready`` if no requests are admitted."""
    router = APIRouter()
    ok = answers({"status": {"const": "ok"}})

    @router.get(LIVE_PATH, responses=ok)
    @router.head(LIVE_PATH, include_in_schema=False)
    async def live() -> Response:
        require_live()
        return JSONResponse({"status": "ok"})

    @router.get("/health", responses=ok)
    @router.get("/health/ready", responses=ok)
    @router.head("/health", include_in_schema=False)
    @router.head("/health/ready", include_in_schema=False)
    async def ready(request: Request) -> Response:
        try:
            await require_ready()
        except ApiError as error:
            note_no_fault(request.scope)  # polling during a restart is no error
            return JSONResponse(error.body, status_code=error.status, headers=error.headers)
        return JSONResponse({"status": "ok"})

    @router.get("/metrics", response_class=PlainTextResponse, responses=errors())
    @router.head("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(render_metrics(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", responses=answers({"version": STRING}))
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return router
