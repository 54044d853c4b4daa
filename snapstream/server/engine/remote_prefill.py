"""Remote prefill (``serve --role decode``): other engines prefill this one's prompts and send the rows.

    TicketIssued -> ask a prefill server --> it reports that the row was sent: nothing to do, the engine has it or says
    KVTransferFailed                         why not
         ^             '-> it fails, or KVTransferFailed ->-+
         '------------- Reissue <---------------------------'   the engine drops the old ticket, unless the row came

Invariants: each ticket is asked for once, and ends in a row, in ``Reissue`` or with its request. A request whose row is
lost more than ``MAX_RETRIES`` times ends with ``EngineDead``. Only the engine knows whether a row came: it issues no
ticket for one that did. The server with the fewest waiting prompt tokens is asked (those that this process asked it
for, and those that others had when it last answered); one that lost a row comes last for a while.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from snapstream.config.values import is_loopback
from snapstream.disaggregation.protocol import (
    HEADER,
    TransferSettings,
    check_fingerprints,
    prefill_request,
    proof_of,
    request_to_bytes,
)
from snapstream.engine.core import TicketIssued
from snapstream.engine.worker import Reissue, ToEngine
from snapstream.server.engine.api import EngineDead, EngineMetadata, RequestDelta
from snapstream.server.options import is_base_url
from snapstream.step import KVTransferFailed
from snapstream.types import FinishReason, Request, RowTicket

log = logging.getLogger(__name__)

MAX_RETRIES = 2
LATE_ANSWER_S = 10.0  # for a server to report that it sent a row, if the request ends first
AVOID_S = 30.0  # after a row was lost: others are asked first


class PrefillFailed(Exception):
    """A prefill server did not send the row, with the reason."""


class PrefillBackend(Protocol):
    """Engines that prefill for others, by name."""

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        """The engine to ask; one that was not ``tried``, if there is any."""
        ...

    async def prefill(self, name: str, request: Request, ticket: RowTicket) -> None:
        """Returns when the row was sent to ``ticket``. PrefillFailed if it could not, ValueError if it never can."""
        ...

    async def check(self) -> None:
        """PrefillFailed unless some engine can be asked; ValueError if none ever can, because settings differ."""
        ...

    def avoid(self, name: str) -> None:
        """It lost a row: ask others first for a while."""
        ...

    async def close(self) -> None: ...


async def transfer_error(deltas: AsyncIterator[RequestDelta]) -> str:
    """Waits for the end of a request with a ticket; "" if its row was sent."""
    problem = "the engine ended the request"
    async for delta in deltas:
        for sample in delta.samples:
            if sample.finish_reason is not None:
                problem = "" if sample.finish_reason is FinishReason.STOP else str(sample.stop_reason)
    return problem


@dataclass(eq=False)
class _PrefillCall:
    request: Request
    num_lost: int = 0
    reason: str = ""  # why the last row was lost
    key: str = ""  # of the ticket that was asked for
    server: str = ""
    tried: set[str] = field(default_factory=set)  # servers that failed
    task: asyncio.Task[None] | None = None


class RemotePrefills:
    """Requests whose prompts other engines prefill. Used on one event loop."""

    def __init__(self, backend: PrefillBackend, fail: Callable[[str, Exception], None]) -> None:
        """``fail`` ends a request."""
        self._backend, self._fail = backend, fail
        self._calls: dict[str, _PrefillCall] = {}
        self._ending: set[asyncio.Task[None]] = set()  # calls for requests that are over

    def begin(self, request: Request) -> None:
        """ValueError for an id that is in use."""
        if request.request_id in self._calls:
            raise ValueError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        self._calls[request.request_id] = _PrefillCall(request)

    def end(self, request_id: str, *, has_row: bool = False) -> None:
        """The request is over: stop its remote prefill.

        ``has_row``: its row was received. The server is about to report that, so its call is not cancelled: the
        server would count a client that left and a row that was not sent.
        """
        call = self._calls.pop(request_id, None)
        if call is None or call.task is None:
            return
        if has_row:
            self._ending.add(call.task)
            call.task.add_done_callback(self._ending.discard)
            asyncio.get_running_loop().call_later(LATE_ANSWER_S, call.task.cancel)
        else:
            call.task.cancel()

    async def check(self) -> None:
        await self._backend.check()

    def deliver(self, message: TicketIssued | KVTransferFailed, send: Callable[[ToEngine], None]) -> None:
        """A message of the engine; ``send`` answers it."""
        call = self._calls.get(message.request_id)
        if call is None:
            return
        match message:
            case KVTransferFailed(_, key, reason):
                self._on_lost(call, key, reason, send)
            case TicketIssued(request_id, ticket) if call.num_lost > MAX_RETRIES:
                self._fail(request_id, EngineDead(f"remote prefill failed: {call.reason}"))
            case TicketIssued(_, ticket):
                call.key = ticket.key
                call.server = self._backend.choose(call.request, frozenset(call.tried))
                call.task = asyncio.create_task(self._prefill(call, ticket, send))

    async def close(self) -> None:
        for request_id in list(self._calls):
            self.end(request_id)
        for task in self._ending:
            task.cancel()
        await self._backend.close()

    async def _prefill(self, call: _PrefillCall, ticket: RowTicket, send: Callable[[ToEngine], None]) -> None:
        try:
            await self._backend.prefill(call.server, call.request, ticket)
        except (PrefillFailed, ValueError) as error:
            if self._calls.get(call.request.request_id) is not call:
                return  # it has ended, and had its row
            call.task = None
            if isinstance(error, PrefillFailed):
                self._on_lost(call, ticket.key, str(error), send)
            else:  # no server can serve this
                self._fail(call.request.request_id, error)

    def _on_lost(self, call: _PrefillCall, key: str, reason: str, send: Callable[[ToEngine], None]) -> None:
        """The row of this ticket does not come, whichever side reports it first."""
        if call.key != key:
            return
        log.warning("a row was lost on its way from %s: %s", call.server, reason)
        call.key, call.reason = "", reason
        call.num_lost += 1
        call.tried.add(call.server)
        self._backend.avoid(call.server)
        if call.task is not None:  # it may wait for a server that hangs
            call.task.cancel()
            call.task = None
        send(Reissue(call.request.request_id, key))


PREFILL_PATH = "/internal/prefill"
CHECK_PATH = "/internal/check"
CONNECT_S = 5.0
CHECK_S = 5.0  # for a server to answer a check
CHECK_AGAIN_S = 1.0  # a result is used that long: any client may ask for /health
PERMANENT = (400, 413)  # statuses of a request that no prefill server would take
MAX_REASON_CHARS = 500


@dataclass(eq=False)
class _Server:
    own_tokens: int = 0  # asked for by us, and not answered
    other_tokens: int = 0  # of others, when it answered last
    avoided_until: float = 0.0


def check_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Addresses of servers, without a slash at the end. ValueError for one that would get prompts unencrypted."""
    for url in urls:
        if not is_base_url(url) or (parts := urlsplit(url)).username:
            raise ValueError(f"--prefill is {url!r}; it must be an address like https://host:8000")
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError(f"--prefill is {url!r}, on another machine and without TLS; prompts need https there")
    if len(set(urls)) != len(urls):
        raise ValueError(f"--prefill names a server twice: {', '.join(urls)}")
    return tuple(url.rstrip("/") for url in urls)


def compatibility_info(metadata: EngineMetadata) -> dict[str, Any]:
    """The answer to a check."""
    config = metadata.engine
    return {
        "fingerprint": metadata.transfer_fingerprint,
        "max_model_len": config.max_model_len,
        "slots": config.budget.capacity,
    }


def check_reported(own: dict[str, Any], reported: Any) -> None:
    """ValueError for a prefill server whose rows this engine cannot take, or that takes smaller requests."""
    check_fingerprints(own["fingerprint"], dict(reported["fingerprint"]), "the prefill server")
    for name in ("max_model_len", "slots"):
        if reported[name] < own[name]:
            raise ValueError(
                f"{name} is {own[name]:,} here and {reported[name]:,} at the prefill server; it needs at least as much"
            )


class PrefillServers:
    """Servers with ``--role prefill``, over HTTP. Make it on the event loop."""

    def __init__(self, urls: Sequence[str], settings: TransferSettings, metadata: Callable[[], EngineMetadata]) -> None:
        """``metadata``: of the engine that answers; its budget and selector are those of requests that name none."""
        self._servers = {url: _Server() for url in check_urls(urls)}
        self._secret, self._metadata = settings.secret, metadata
        self._checking = asyncio.Lock()
        self._checked_at = -inf
        self._problem: PrefillFailed | ValueError | None = None
        verify: ssl.SSLContext | bool = settings.client_context()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        timeout = httpx.Timeout(None, connect=CONNECT_S)  # the engine notices a row that makes no progress
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, verify=verify, trust_env=False)

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        now = monotonic()

        def order(url: str) -> tuple[bool, bool, int]:
            server = self._servers[url]
            return url in tried, server.avoided_until > now, server.own_tokens + server.other_tokens

        return min(self._servers, key=order)

    async def prefill(self, name: str, request: Request, ticket: RowTicket) -> None:
        server, config = self._servers[name], self._metadata().engine
        body = request_to_bytes(prefill_request(request, ticket, config.budget, config.selector))
        num_tokens = len(request.prompt_token_ids)
        server.own_tokens += num_tokens
        try:
            response = await self._client.post(
                name + PREFILL_PATH, content=body, headers={HEADER: proof_of(self._secret, PREFILL_PATH, body)}
            )
        except httpx.HTTPError as error:
            raise PrefillFailed(f"{name}: {str(error) or type(error).__name__}") from None
        finally:
            server.own_tokens -= num_tokens
        if response.status_code in PERMANENT:
            raise ValueError(_reason(response))
        if response.status_code != 200:
            raise PrefillFailed(f"{name} answered {response.status_code}: {_reason(response)}")
        server.other_tokens = max(0, _count(response, "queued_tokens") - server.own_tokens)

    async def check(self) -> None:
        async with self._checking:
            if monotonic() - self._checked_at >= CHECK_AGAIN_S:
                self._problem = await self._find_problem()
                self._checked_at = monotonic()
        if self._problem is not None:
            raise type(self._problem)(str(self._problem))

    async def _find_problem(self) -> PrefillFailed | ValueError | None:
        """Why no server can be used; ValueError if none ever can be, as they are."""
        found = await asyncio.gather(*(self._problem_of(url) for url in self._servers))
        problems = [problem for problem in found if problem is not None]
        if len(problems) < len(found):
            for problem in problems:
                log.warning("a prefill server cannot be used: %s", problem)
            return None
        kind = ValueError if all(isinstance(problem, ValueError) for problem in problems) else PrefillFailed
        return kind("; ".join(map(str, problems)))

    async def _problem_of(self, url: str) -> PrefillFailed | ValueError | None:
        headers = {HEADER: proof_of(self._secret, CHECK_PATH, b"")}
        try:
            response = await self._client.get(url + CHECK_PATH, headers=headers, timeout=CHECK_S)
        except httpx.HTTPError as error:
            return PrefillFailed(f"{url}: {str(error) or type(error).__name__}")
        if response.status_code == 401:
            return ValueError(f"{url} has another transfer secret")
        if response.status_code == 404:
            return ValueError(f"{url} is not a server with --role prefill, or runs another version")
        if response.status_code != 200:
            return PrefillFailed(f"{url} answered {response.status_code}: {_reason(response)}")
        try:
            check_reported(compatibility_info(self._metadata()), response.json())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return ValueError(f"{url}: {error}")
        return None

    def avoid(self, name: str) -> None:
        self._servers[name].avoided_until = monotonic() + AVOID_S

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
