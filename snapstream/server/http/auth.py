"""Keys on /v1/* and on what acts for their owner, as a bearer's or in ``x-api-key``. Pure ASGI, so that a stream passes
through untouched. The digest of the key that opened the door is ``caller`` in the state of the request.

Invariant: the time of a comparison tells nothing about the keys: digests are compared, all of them, each time. What was
given as a key is in no log.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from snapstream.server.http.errors import ApiError
from snapstream.server.http.request_id import log_refusal

RESET = "/reset_prefix_cache"
GUARDED = ("/v1/", RESET)
KEY_VARIABLE = "SNAPSTREAM_API_KEY"


def check_keys(keys: Sequence[str]) -> None:
    """ValueError for a key that no client could send, or that every client sends."""
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ValueError("an API key is empty, not printable ASCII, or has spaces around it")


def refuse_blank(variable: str) -> None:
    """ValueError for a key in the environment that is blank: it looks like one and would let everyone in."""
    if not os.environ.get(variable, "unset").strip():
        raise ValueError(f"{variable} is set but blank; give it a key, or unset it to serve without")


def all_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Keys of the command line, of the file (one a line) and of the environment, together.

    ValueError for a file or a variable that holds none: whoever names one does not want to serve without.
    """
    refuse_blank(KEY_VARIABLE)
    lines = [] if file is None else [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    kept = [line for line in lines if line]
    if file is not None and not kept:
        raise ValueError(f"{file} holds no API key")
    return tuple(dict.fromkeys((*given, *kept, *os.environ.get(KEY_VARIABLE, "").split())))


class BearerAuth:
    """Middleware; without keys everything passes. The admin key opens nothing but ``RESET``, and there ``is_admin`` is
    set in the state of the request.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_key: str = "") -> None:
        self._app = app
        self._admin = _digest(admin_key) if admin_key else None
        self._digests = tuple(_digest(key) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == RESET and self._is_admin(scope):
            scope.setdefault("state", {})["is_admin"] = True
        elif scope["type"] == "http" and self._digests and scope["path"].startswith(GUARDED):
            given = keys_of(Headers(scope=scope))
            callers = [digest for digest in map(_digest, given) if self._is_known(digest)]
            if not callers:
                log_refusal("a key was refused" if given else "a request without a key was refused", scope)
                await _refusal(bool(given)).response(scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = callers[0]
        await self._app(scope, receive, send)

    def _is_admin(self, scope: Scope) -> bool:
        if self._admin is None:
            return False
        matches = [hmac.compare_digest(_digest(key), self._admin) for key in keys_of(Headers(scope=scope))]
        return any(matches)

    def _is_known(self, digest: bytes) -> bool:
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def keys_of(headers: Headers) -> list[str]:
    """The keys that a request carries: OpenAI's clients send a bearer's, Anthropic's their own header, some both."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    own = headers.get("x-api-key", "").strip()
    return [*([key.strip()] if scheme.lower() == "bearer" else []), *([own] if own else [])]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _refusal(has_key: bool) -> ApiError:
    missing = "No API key provided: send Authorization: Bearer KEY, or x-api-key: KEY."
    message = "Incorrect API key provided." if has_key else missing
    return ApiError(
        401, message, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )
