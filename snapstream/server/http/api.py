"""A wire API as the middleware sees it: where its paths are, how its errors look, which headers its clients use.

``SelectApi`` finds the API of a request by its path; everything that refuses a request asks ``api_of`` for it. This
package names no API: ``server/apis.py`` has the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from snapstream.server.http.errors import ApiError

_API = "api"  # in a request's state


@dataclass(frozen=True, kw_only=True)
class Api:
    """One wire API."""

    prefix: str  # of its paths; the longest that matches wins
    routes: Callable[[Any], APIRouter]  # takes the server's shared state
    error_body: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError], dict[str, Any]] | None = None  # ends a broken stream; None: ``data:`` frames
    key_header: str = ""  # carries an API key, besides ``Authorization: Bearer``
    id_header: str = ""  # repeats the request id on answers, besides ``X-Request-Id``

    def covers(self, path: str) -> bool:
        """Whether a path is one of this API's, also below the prefix of a reverse proxy."""
        return f"{self.prefix}/" in f"{path}/"


class SelectApi:
    """Middleware around all that refuses requests; ``api_of`` reads what it found."""

    def __init__(self, app: ASGIApp, *, apis: Sequence[Api]) -> None:
        self._app = app
        self._apis = sorted(apis, key=lambda api: len(api.prefix), reverse=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = next((api for api in self._apis if api.covers(scope["path"])), None)
            scope.setdefault("state", {})[_API] = found
        await self._app(scope, receive, send)


def api_of(scope: Scope) -> Api | None:
    """The API that a request is for; None for paths outside of all."""
    found: Api | None = scope.get("state", {}).get(_API)
    return found
