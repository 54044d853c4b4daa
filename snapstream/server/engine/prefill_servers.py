"""Servers that read prompts (``serve --role prefill``), asked over HTTP; a ``PromptReaders``.

Invariant: the server with the fewest prompt tokens before it is asked: those that this process has asked it for, and
those that others had when it answered last. One that lost a row is asked last for a while.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from urllib.parse import urlsplit

import httpx

from snapstream.config import EngineConfig
from snapstream.config.addresses import is_loopback
from snapstream.request import Request, RowTicket
from snapstream.server.engine.elsewhere import SHUN_S, ReadFailed
from snapstream.transfer.asking import read_for, request_to_bytes
from snapstream.transfer.proof import HEADER, proof_of
from snapstream.transfer.settings import TransferSettings

READ_PATH = "/internal/read_prompt"
CONNECT_S = 5.0
MAX_REASON_CHARS = 500


@dataclass(eq=False)
class _Server:
    own_tokens: int = 0  # asked for by us, and not answered
    other_tokens: int = 0  # of others, when it answered last
    shunned_until: float = 0.0


def check_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Addresses of servers, without a slash at the end. ValueError for one that would take prompts in the open."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ValueError(f"--prefill is {url!r}; it must be an address like https://host:8000")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError(f"--prefill is {url!r}, on another machine and without TLS; prompts need https there")
    if len(set(urls)) != len(urls):
        raise ValueError(f"--prefill names a server twice: {', '.join(urls)}")
    return tuple(url.rstrip("/") for url in urls)


class PrefillServers:
    """Make it on the event loop."""

    def __init__(self, urls: Sequence[str], settings: TransferSettings, config: Callable[[], EngineConfig]) -> None:
        """``config``: of the engine that answers; its budget and selector are those of requests that name none."""
        self._servers = {url: _Server() for url in check_urls(urls)}
        self._secret, self._config = settings.secret, config
        verify: ssl.SSLContext | bool = settings.client_context()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        timeout = httpx.Timeout(None, connect=CONNECT_S)  # the engine notices a row that does not get on
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, verify=verify, trust_env=False)

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        now = monotonic()

        def order(url: str) -> tuple[bool, bool, int]:
            server = self._servers[url]
            return url in tried, server.shunned_until > now, server.own_tokens + server.other_tokens

        return min(self._servers, key=order)

    async def read(self, name: str, request: Request, ticket: RowTicket) -> None:
        server, config = self._servers[name], self._config()
        body = request_to_bytes(read_for(request, ticket), config.budget, config.selector)
        num_tokens = len(request.prompt_token_ids)
        server.own_tokens += num_tokens
        try:
            response = await self._client.post(
                name + READ_PATH, content=body, headers={HEADER: proof_of(self._secret, READ_PATH, body)}
            )
        except httpx.HTTPError as error:
            raise ReadFailed(f"{name}: {str(error) or type(error).__name__}") from None
        finally:
            server.own_tokens -= num_tokens
        if response.status_code != 200:
            raise ReadFailed(f"{name} answered {response.status_code}: {_reason(response)}")
        server.other_tokens = max(0, _count(response, "queued_tokens") - server.own_tokens)

    def shun(self, name: str) -> None:
        self._servers[name].shunned_until = monotonic() + SHUN_S

    async def close(self) -> None:
        await self._client.aclose()


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:MAX_REASON_CHARS]
    except (ValueError, KeyError, TypeError):
        return "no reason"


def _count(response: httpx.Response, name: str) -> int:
    try:
        found = response.json()[name]
    except (ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) else 0
