"""Which names this server answers to. A page on the web can make a browser call a server on its user's machine.

Invariant: with names given, a request whose Host header is none of them is refused before anything is read; addresses
of the loopback network always pass, because no name server can point a foreign page's name at itself through them.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from snapstream.config.addresses import is_loopback
from snapstream.server.http.errors import ApiError
from snapstream.server.http.request_id import log_refusal


def check_hosts(hosts: Sequence[str]) -> None:
    """ValueError for what can never equal the name in a Host header."""
    for host in hosts:
        if not host or "/" in host or "*" in host or ":" in host:
            raise ValueError(f"allowed host {host!r} is not a name without port and wildcards")


def answered_hosts(host: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Names in Host headers to answer to at the address ``host``; none means any."""
    return ("localhost", *allowed) if allowed or is_loopback(host) else ()


class HostGuard:
    """Middleware; used only where names are given."""

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _name(Headers(scope=scope).get("host", ""))
            if host not in self._allowed and not is_loopback(host):
                log_refusal("a host name was refused", scope)
                message = f"This server does not answer to the host {host!r}; --allowed-host would permit it."
                fault = ApiError(403, message, kind="permission_error", code="host_not_allowed")
                await fault.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
