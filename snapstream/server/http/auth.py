"""Bearer keys on /v1/*. Pure ASGI, so that a stream passes through untouched.

Invariant: the time of a comparison tells nothing about the keys: digests are compared, all of them, each time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from snapstream.server.http.errors import ApiError

GUARDED = "/v1/"
KEY_VARIABLE = "SNAPSTREAM_API_KEY"


def check_keys(keys: Sequence[str]) -> None:
    """ValueError for a key that no client could send, or that every client sends."""
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ValueError("an API key is empty, not printable ASCII, or has spaces around it")


def refuse_blank(variable: str) -> None:
    """ValueError for a key in the environment that is blank: typer takes it for none, and would let everyone in."""
    if not os.environ.get(variable, "unset").strip():
        raise ValueError(f"{variable} is set but blank; give it a key, or unset it to serve without")


class BearerAuth:
    """Middleware; without keys everything passes."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(_digest(key) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"].startswith(GUARDED):
            given = Headers(scope=scope).get("authorization", "")
            if not self._is_known(given):
                await _refusal(bool(given)).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refusal(has_key: bool) -> ApiError:
    message = "Incorrect API key provided." if has_key else "No API key provided: send Authorization: Bearer KEY."
    return ApiError(
        401, message, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )
