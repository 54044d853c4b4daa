"""Middleware and access rules, all pure ASGI, so that streams pass through unchanged.

Invariants: keys, routes and logs see the same path, without root path and trailing slash, and nothing is redirected.
Every answer has ``X-Request-Id``, errors of other middleware included. A client's id is repeated only if it matches
``VALID_ID``; its key is in no log. Comparing keys takes constant time: all digests are compared each time.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.config.engine import NAMESPACE_SEPARATOR
from snapstream.config.values import is_loopback
from snapstream.server.http.errors import Api, ApiError, Middleware, api_of, bad_value

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def log_refusal(what: str, scope: Scope) -> None:
    """Log a refused request: id, path and address, nothing of its contents."""
    client = scope.get("client")
    log.warning(
        what,
        extra={
            "fields": {
                "request": scope.get("state", {}).get("request_id"),
                "path": scope["path"][:200],
                "client": None if client is None else client[0],
            }
        },
    )


class RequestId(Middleware):
    """Sets ``own_id``, a new id, and ``request_id``, the client's if it matches ``VALID_ID``, in ``request.state``."""

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        own_id = uuid4().hex
        request_id = given if VALID_ID.fullmatch(given) else own_id
        scope.setdefault("state", {}).update(request_id=request_id, own_id=own_id)
        api = api_of(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                if api is not None and api.id_header:
                    MutableHeaders(scope=message)[api.id_header] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeadAsGet(Middleware):
    """Answers HEAD with the status and headers of GET and no body, as health checks of proxies need."""

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_bare(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_bare)


class NormalizePath(Middleware):
    """Removes the root path, if a request has it, and trailing slashes."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        super().__init__(app)
        self._root_path = root_path

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self._root_path and f"{path}/".startswith(f"{self._root_path}/"):
            path = path[len(self._root_path) :]
        await self._app({**scope, "path": path.rstrip("/") or "/", "root_path": ""}, receive, send)


class SingleBodyLength(Middleware):
    """Refuses a request whose body has two lengths: servers in between may disagree about it (RFC 9112, 6.1)."""

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            message = "the request has both Content-Length and Transfer-Encoding"
            error = bad_value(message, None, "ambiguous_length")
            error.headers["Connection"] = "close"
            await error.response(api_of(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)


RESET = "/reset_prefix_cache"
GUARDED = ("/v1/", RESET)


class BearerAuth(Middleware):
    """Requires an API key for ``GUARDED`` paths if there are any; ``caller`` in the request's state is its digest. The
    admin key opens only ``RESET``, where it sets ``is_admin``.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_key: str = "", apis: Sequence[Api] = ()) -> None:
        """The key headers of ``apis`` are read for every request, whatever its API."""
        super().__init__(app)
        self._headers = tuple(api.key_header for api in apis if api.key_header)
        self._admin = (_digest(admin_key),) if admin_key else ()
        self._digests = tuple(_digest(key) for key in keys)

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [_digest(key) for key in keys_of(Headers(scope=scope), self._headers)]
        if scope["path"] == RESET and any([_is_known(digest, self._admin) for digest in given]):
            scope.setdefault("state", {})["is_admin"] = True
        elif self._digests and scope["path"].startswith(GUARDED):
            callers = [digest for digest in given if _is_known(digest, self._digests)]
            if not callers:
                log_refusal("a key was refused" if given else "a request without a key was refused", scope)
                await self._refusal(has_key=bool(given)).response(api_of(scope))(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = callers[0]
        await self._app(scope, receive, send)

    def _refusal(self, *, has_key: bool) -> ApiError:
        ways = ", or ".join(["Authorization: Bearer KEY", *(f"{name}: KEY" for name in self._headers)])
        message = "Incorrect API key provided." if has_key else f"No API key provided: send {ways}."
        return ApiError(
            401, message, kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


def keys_of(headers: Headers, others: Sequence[str]) -> list[str]:
    """The keys of a request: a bearer key, and those in ``others``; some clients send both."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    own = [headers.get(name, "").strip() for name in others]
    return [*([key.strip()] if scheme.lower() == "bearer" else []), *filter(None, own)]


def _is_known(digest: bytes, known: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(digest, own) for own in known]
    return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Cors(CORSMiddleware):
    """Starlette's middleware; a refused preflight has the body of an ``ApiError``."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        kept = {k: v for k, v in response.headers.items() if k not in ("content-length", "content-type")}
        reason = bytes(response.body).decode()  # names what is refused: origin, method
        remedy = "--cors-origin would permit it" if "origin" in reason else f"methods: {', '.join(self.allow_methods)}"
        message = f"{reason}; {remedy}."
        return ApiError(
            response.status_code, message, kind="permission_error", code="cors_refused", headers=kept
        ).response(None)  # no path is known here


class HostGuard(Middleware):
    """Refuses a request whose Host header is none of the allowed names, before anything is read (DNS rebinding: a web
    page can make a browser call a server on its user's machine). Loopback addresses always pass: DNS cannot forge them.
    So does a request of HTTP/1.0 without the header, like a load balancer's health check: browsers always send it.
    """

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        super().__init__(app)
        self._allowed = frozenset(name.lower() for name in allowed)

    async def on_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("host")
        if given is not None and (host := _name(given)) not in self._allowed and not is_loopback(host):
            log_refusal("a host name was refused", scope)
            message = f"This server does not answer to the host {host!r}; --allowed-host would permit it."
            fault = ApiError(403, message, kind="permission_error", code="host_not_allowed")
            await fault.response(api_of(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


SALT = "cache_salt"  # the field of a request; vLLM's name
MAX_SALT_CHARS = 4096


class Namespaces:
    """Namespaces of the prefix cache: one per API key, divided further by a request's salt.

    Response times reveal whether a prompt's prefix was cached, so callers with different keys never share a block,
    whatever salts they send: a namespace is a keyed hash of the key, with a secret of this process. It reveals nothing
    about the key, and is not logged.
    """

    def __init__(self, secret: bytes = b"") -> None:
        """``secret``: for namespaces that outlive this process."""
        self._secret = secret or os.urandom(32)

    def of(self, caller: bytes, salt: Any = None) -> str:
        """The namespace of a caller's request; ``caller`` is empty if no keys are required. ApiError for a bad salt."""
        own = self._hash(b"key", caller)
        if salt is None:
            return own
        if not isinstance(salt, str):
            raise bad_value(f"{SALT} is {salt!r}; it must be a string", SALT)
        if not 1 <= len(salt) <= MAX_SALT_CHARS:
            raise bad_value(f"{SALT} has {len(salt)} characters; it must have 1 to {MAX_SALT_CHARS}", SALT)
        return own + NAMESPACE_SEPARATOR + self._hash(own.encode(), salt.encode("utf-8", "surrogatepass"))

    def _hash(self, kind: bytes, value: bytes) -> str:
        return hmac.new(self._secret, kind + b"\0" + value, hashlib.sha256).hexdigest()
