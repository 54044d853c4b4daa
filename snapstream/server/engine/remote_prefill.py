"""Servers that read prompts (``serve --role prefill``), asked over HTTP; a ``PromptReaders``.

Invariant: the server with the fewest prompt tokens before it is asked: those that this process has asked it for, and
those that others had when it answered last. One that lost a row is asked last for a while.
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

from snapstream.config import EngineConfig
from snapstream.config.values import is_loopback
from snapstream.disaggregation.protocol import TransferSettings, check_fingerprints
from snapstream.disaggregation.requests import HEADER, prefill_request, proof_of, request_to_bytes
from snapstream.engine.transfers import TicketIssued
from snapstream.engine.worker import Reissue, ToEngine
from snapstream.server.engine.api import EngineDead, RequestDelta
from snapstream.step import KVTransferFailed
from snapstream.types import FinishReason, Request, RowTicket

# Has the prompts of requests read by other engines, and asks again elsewhere when a row does not come.
#
#     TicketIssued -> ask a reader ----> it says that the row has gone: nothing to do, the engine has it or says
#     KVTransferFailed
#          ^             '-> it fails, or KVTransferFailed ->-+
#          '------------- Reissue <--------------------'       the engine forgets the old ticket, unless the row came
#
# Invariant: each ticket is asked for once, and ends in a row, in ``Reissue`` or with its request; a request whose row
# is lost more than ``MAX_RETRIES`` times ends with ``EngineDead``. Only the engine knows whether a row came: it issues
# no ticket for one that did. Used on the event loop.

log = logging.getLogger(__name__)

MAX_RETRIES = 2
HEAR_OUT_S = 10.0  # a reader that sent a row, and has not said so when its request is over
SHUN_S = 30.0  # after a row was lost: others are asked first


class ReadFailed(Exception):
    """A reader did not send the row; why."""


class PromptReaders(Protocol):
    """Engines that read prompts, by name."""

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        """Who is to read it; one that was not ``tried``, if there is any."""
        ...

    async def read(self, name: str, request: Request, ticket: RowTicket) -> None:
        """Returns when the row has gone to ``ticket``. ReadFailed if it could not, ValueError if it never can."""
        ...

    async def check(self) -> None:
        """ReadFailed unless some reader can be asked; ValueError if none ever can, because settings differ."""
        ...

    def shun(self, name: str) -> None:
        """A row was lost on its way from there: ask others for a while."""
        ...

    async def close(self) -> None: ...


async def why_not_sent(deltas: AsyncIterator[RequestDelta]) -> str:
    """Waits for the end of a request with a ticket; "" if its row has gone out."""
    problem = "the engine ended the request"
    async for delta in deltas:
        for sample in delta.samples:
            if sample.finish_reason is not None:
                problem = "" if sample.finish_reason is FinishReason.STOP else str(sample.stop_reason)
    return problem


@dataclass(eq=False)
class _Errand:
    request: Request
    num_lost: int = 0
    reason: str = ""  # why the last row was lost
    key: str = ""  # of the ticket that somebody was asked for
    reader: str = ""
    tried: set[str] = field(default_factory=set)  # readers that failed
    task: asyncio.Task[None] | None = None


class Elsewhere:
    """Requests that are being read by others."""

    def __init__(self, readers: PromptReaders, fail: Callable[[str, Exception], None]) -> None:
        """``fail`` ends a request."""
        self._readers, self._fail = readers, fail
        self._errands: dict[str, _Errand] = {}
        self._ending: set[asyncio.Task[None]] = set()  # calls for requests that are over

    def begin(self, request: Request) -> None:
        """ValueError for an id that is in use."""
        if request.request_id in self._errands:
            raise ValueError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        self._errands[request.request_id] = _Errand(request)

    def end(self, request_id: str, *, has_row: bool = False) -> None:
        """The request is over: stop its remote prefill.

        ``has_row``: its row came. Then the reader is about to say that it has sent it, and is heard out: a call that
        is cut off looks to it like a client that left, and its row like one that was not sent.
        """
        errand = self._errands.pop(request_id, None)
        if errand is None or errand.task is None:
            return
        if has_row:
            self._ending.add(errand.task)
            errand.task.add_done_callback(self._ending.discard)
            asyncio.get_running_loop().call_later(HEAR_OUT_S, errand.task.cancel)
        else:
            errand.task.cancel()

    async def check(self) -> None:
        await self._readers.check()

    def deliver(self, message: TicketIssued | KVTransferFailed, send: Callable[[ToEngine], None]) -> None:
        """What the engine says; ``send`` is the way back to it."""
        errand = self._errands.get(message.request_id)
        if errand is None:
            return
        match message:
            case KVTransferFailed(_, key, reason):
                self._lose(errand, key, reason, send)
            case TicketIssued(request_id, ticket) if errand.num_lost > MAX_RETRIES:
                self._fail(request_id, EngineDead(f"the prompt could not be read elsewhere: {errand.reason}"))
            case TicketIssued(_, ticket):
                errand.key = ticket.key
                errand.reader = self._readers.choose(errand.request, frozenset(errand.tried))
                errand.task = asyncio.create_task(self._read(errand, ticket, send))

    async def close(self) -> None:
        for request_id in list(self._errands):
            self.end(request_id)
        for task in self._ending:
            task.cancel()
        await self._readers.close()

    async def _read(self, errand: _Errand, ticket: RowTicket, send: Callable[[ToEngine], None]) -> None:
        try:
            await self._readers.read(errand.reader, errand.request, ticket)
        except (ReadFailed, ValueError) as error:
            if self._errands.get(errand.request.request_id) is not errand:
                return  # it is over, and had its row
            errand.task = None
            if isinstance(error, ReadFailed):
                self._lose(errand, ticket.key, str(error), send)
            else:  # no server can be asked for this
                self._fail(errand.request.request_id, error)

    def _lose(self, errand: _Errand, key: str, reason: str, send: Callable[[ToEngine], None]) -> None:
        """The row of this ticket does not come, whichever side says so first."""
        if errand.key != key:
            return
        log.warning("a row was lost on its way from %s: %s", errand.reader, reason)
        errand.key, errand.reason = "", reason
        errand.num_lost += 1
        errand.tried.add(errand.reader)
        self._readers.shun(errand.reader)
        if errand.task is not None:  # it may wait for a reader that hangs
            errand.task.cancel()
            errand.task = None
        send(Reissue(errand.request.request_id, key))


READ_PATH = "/internal/read_prompt"
CHECK_PATH = "/internal/check"
CONNECT_S = 5.0
CHECK_S = 5.0  # for a server to answer a check
CHECK_AGAIN_S = 1.0  # a result is used that long: anybody may ask for /health
PERMANENT = (400, 413)  # statuses of a request that no prefill server would take
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


class RowFacts(Protocol):
    """What two engines must agree on before one sends rows to the other; ``EngineFacts`` and ``ModelFacts`` have it."""

    @property
    def engine(self) -> EngineConfig: ...
    @property
    def row_facts(self) -> dict[str, str]: ...


def told_of(facts: RowFacts) -> dict[str, Any]:
    """The answer to a check."""
    config = facts.engine
    return {"facts": facts.row_facts, "max_model_len": config.max_model_len, "slots": config.budget.capacity}


def check_reported(own: dict[str, Any], reported: Any) -> None:
    """ValueError for a prefill server whose rows this engine cannot take, or that takes smaller requests."""
    check_fingerprints(own["facts"], dict(reported["facts"]), "the prefill server")
    for name in ("max_model_len", "slots"):
        if reported[name] < own[name]:
            raise ValueError(
                f"{name} is {own[name]:,} here and {reported[name]:,} at the prefill server; it needs at least as much"
            )


class PrefillServers:
    """Make it on the event loop."""

    def __init__(self, urls: Sequence[str], settings: TransferSettings, facts: Callable[[], RowFacts]) -> None:
        """``facts``: of the engine that answers; its budget and selector are those of requests that name none."""
        self._servers = {url: _Server() for url in check_urls(urls)}
        self._secret, self._facts = settings.secret, facts
        self._checking = asyncio.Lock()
        self._checked_at = -inf
        self._problem: ReadFailed | ValueError | None = None
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
        server, config = self._servers[name], self._facts().engine
        body = request_to_bytes(prefill_request(request, ticket), config.budget, config.selector)
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
        if response.status_code in PERMANENT:
            raise ValueError(_reason(response))
        if response.status_code != 200:
            raise ReadFailed(f"{name} answered {response.status_code}: {_reason(response)}")
        server.other_tokens = max(0, _count(response, "queued_tokens") - server.own_tokens)

    async def check(self) -> None:
        async with self._checking:
            if monotonic() - self._checked_at >= CHECK_AGAIN_S:
                self._problem = await self._find_problem()
                self._checked_at = monotonic()
        if self._problem is not None:
            raise type(self._problem)(str(self._problem))

    async def _find_problem(self) -> ReadFailed | ValueError | None:
        """Why no server can be used; ValueError if none ever can be, as they are."""
        found = await asyncio.gather(*(self._problem_of(url) for url in self._servers))
        problems = [problem for problem in found if problem is not None]
        if len(problems) < len(found):
            for problem in problems:
                log.warning("a prefill server cannot be used: %s", problem)
            return None
        kind = ValueError if all(isinstance(problem, ValueError) for problem in problems) else ReadFailed
        return kind("; ".join(map(str, problems)))

    async def _problem_of(self, url: str) -> ReadFailed | ValueError | None:
        headers = {HEADER: proof_of(self._secret, CHECK_PATH, b"")}
        try:
            response = await self._client.get(url + CHECK_PATH, headers=headers, timeout=CHECK_S)
        except httpx.HTTPError as error:
            return ReadFailed(f"{url}: {str(error) or type(error).__name__}")
        if response.status_code == 401:
            return ValueError(f"{url} has another transfer secret")
        if response.status_code == 404:
            return ValueError(f"{url} is no server with --role prefill, or runs another version")
        if response.status_code != 200:
            return ReadFailed(f"{url} answered {response.status_code}: {_reason(response)}")
        try:
            check_reported(told_of(self._facts()), response.json())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return ValueError(f"{url}: {error}")
        return None

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
