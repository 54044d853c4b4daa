"""Errors that clients see, in the form of the API of their request, and what an API is to the middleware (``Api``).

Invariants: outside of all APIs the body is ``{"error": {"message", "type", "param", "code"}}``, always with all four.
5xx only where a retry may help, or for a bug, because clients retry 408, 409, 429 and 5xx. A request is counted as an
error at most once, by status and a reason that is never a client's text. The reason is kept in the request's scope
(``note_fault``), because an error within a stream has status 200. This package names no API: ``server/apis.py`` has the
list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.types import NOT_FINITE

log = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # nginx's number; only logs and metrics see it
MAX_MESSAGE_CHARS = 500
API, FAULT = "api", "fault"  # in a request's state


@dataclass(frozen=True, kw_only=True)
class Api:
    """One wire API: where its paths are, the form of its errors, the headers of its clients."""

    prefix: str  # of its paths; the longest that matches wins
    routes: str  # "module:function", imported by the server alone; the function makes a router of the ``ServerState``
    error_body: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError], dict[str, Any]] | None = None  # ends a broken stream; None: ``data:`` frames
    key_header: str = ""  # carries an API key, besides ``Authorization: Bearer``
    id_header: str = ""  # repeats the request id on answers, besides ``X-Request-Id``

    def covers(self, path: str) -> bool:
        """Whether a path is one of this API's, also below the prefix of a reverse proxy."""
        return f"{self.prefix}/" in f"{path}/"


class Middleware:
    """Around an application; all but HTTP passes ``on_http`` by."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.on_http if scope["type"] == "http" else self._app)(scope, receive, send)

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class SelectApi(Middleware):
    """Middleware around everything that refuses requests: finds a request's API by its path, for ``api_of``."""

    def __init__(self, app: ASGIApp, *, apis: Sequence[Api]) -> None:
        super().__init__(app)
        self._apis = sorted(apis, key=lambda api: len(api.prefix), reverse=True)

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = next((api for api in self._apis if api.covers(scope["path"])), None)
        scope.setdefault("state", {})[API] = found
        await self._app(scope, receive, send)


def api_of(scope: Scope) -> Api | None:
    """The API of a request; None for paths outside of all."""
    found: Api | None = scope.get("state", {}).get(API)
    return found


def note_fault(scope: Scope, status: int, reason: str) -> None:
    """The answer to this request is an error."""
    scope.setdefault("state", {})[FAULT] = (status, reason)


def note_no_fault(scope: Scope) -> None:
    """Do not count the answer to this request as an error, whatever its status."""
    scope.setdefault("state", {})[FAULT] = None


class FaultCount(Middleware):
    """Middleware around everything that refuses requests: counts errors at the end of each answer."""

    def __init__(self, app: ASGIApp, *, count: Callable[[int, str], None]) -> None:
        """``count`` takes status and reason."""
        super().__init__(app)
        self._count = count

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            note_fault(scope, 500, "internal_error")
            raise
        finally:
            state = scope.get("state", {})
            if FAULT in state:
                if state[FAULT] is not None:
                    self._count(*state[FAULT])
            elif status >= 400:
                self._count(status, "client_left" if status == CLIENT_CLOSED else "other")


class ApiError(Exception):
    """An answer that is an error; ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details  # for APIs whose errors have details

    @property
    def message(self) -> str:
        """Truncated: it may quote what the client sent."""
        message = str(self)
        return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def reason(self) -> str:
        """Label for metrics: the code, or else the type."""
        return self.code or self.kind

    def body_for(self, api: Api | None) -> dict[str, Any]:
        """The body in the form of the request's API (``api_of``)."""
        return self.body if api is None else api.error_body(self)

    def response(self, api: Api | None) -> JSONResponse:
        return ErrorResponse(self, self.body_for(api))


class ContextLengthError(ApiError):
    """400: prompt and output do not fit ``limit``, the model's context in tokens. APIs word it from the numbers."""

    def __init__(self, message: str, param: str, *, prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit


class ErrorResponse(JSONResponse):
    """The answer to an ``ApiError``; it is counted as an error."""

    def __init__(self, error: ApiError, body: dict[str, Any]) -> None:
        super().__init__(body, status_code=error.status, headers=error.headers)
        self._reason = error.reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_fault(scope, self.status_code, self._reason)
        await super().__call__(scope, receive, send)


def bad_value(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the request is at fault; a retry does not help."""
    return ApiError(400, message, param=param, code=code)


def unavailable(reason: str, retry_after_s: int | None) -> ApiError:
    """503: loading, draining, or the engine is gone; no Retry-After if it will not come back."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, reason, kind="service_unavailable", code="engine_unavailable", headers=headers)


def queue_full(reason: str, retry_after_s: int) -> ApiError:
    """429: a valid request at a time of high load."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, reason, kind="rate_limit_error", code="queue_full", headers=headers)


def internal() -> ApiError:
    """500: a bug. The cause goes to the log, not to the client."""
    return ApiError(500, "internal error; the server's log has the cause", kind="server_error", code="internal_error")


def not_finite() -> ApiError:
    """500: the model computed NaN or infinity for this request, so no part of the answer is valid."""
    return ApiError(500, f"the model failed: its {NOT_FINITE}", kind="server_error", code="logits_not_finite")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of ``app`` the form of its API, also for unknown paths, wrong methods and bugs."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(request, error).response(api_of(request.scope))

    def as_api_error(request: Request, error: Exception) -> ApiError:
        match error:
            case ApiError():
                return error
            case HTTPException(status_code=status):
                message = f"There is nothing at {request.url.path}." if status == 404 else str(error.detail)
                headers = {"Allow": _methods(request)} if status == 405 else error.headers
                return ApiError(status, message, headers=headers)
            case RequestValidationError():
                first = error.errors()[0]  # of a query parameter; ``str(error)`` would name our source file
                name = str(first["loc"][-1])
                return bad_value(f"{name}: {first['msg']}", name)
        log.error("unhandled error", exc_info=error)
        return internal()

    def _methods(request: Request) -> str:
        """Methods of all routes at this path; Starlette lists those of the first route only."""
        methods = {
            name
            for name in ("DELETE", "GET", "POST")
            for route in app.routes
            if route.matches({**request.scope, "method": name})[0] is Match.FULL
        }
        return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))  # ``HeadAsGet``

    for kind in (ApiError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
