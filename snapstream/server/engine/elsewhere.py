"""Has the prompts of requests read by other engines, and asks again elsewhere when a row does not come.

    TicketIssued -> ask a reader ----> it says that the row has gone: nothing to do, the engine has it or says RowMissed
         ^             '-> it fails, or RowMissed ->-+
         '------------- Reissue <--------------------'       the engine forgets the old ticket, unless the row came

Invariant: each ticket is asked for once, and ends in a row, in ``Reissue`` or with its request; a request whose row is
lost more than ``MAX_RETRIES`` times ends with ``EngineDead``. Only the engine knows whether a row came: it issues no
ticket for one that did. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from snapstream.engine.messages import Reissue, ToEngine
from snapstream.engine.transfers import RowMissed, TicketIssued
from snapstream.request import FinishReason, Request, RowTicket
from snapstream.server.engine.api import EngineDead, RequestDelta

log = logging.getLogger(__name__)

MAX_RETRIES = 2
SHUN_S = 30.0  # after a row was lost: others are asked first


class ReadFailed(Exception):
    """A reader did not send the row; why."""


class PromptReaders(Protocol):
    """Engines that read prompts, by name."""

    def choose(self, request: Request, tried: frozenset[str]) -> str:
        """Who is to read it; one that was not ``tried``, if there is any."""
        ...

    async def read(self, name: str, request: Request, ticket: RowTicket) -> None:
        """Returns when the row has gone to ``ticket``. ReadFailed if it could not."""
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

    def begin(self, request: Request) -> None:
        """ValueError for an id that is in use."""
        if request.request_id in self._errands:
            raise ValueError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        self._errands[request.request_id] = _Errand(request)

    def end(self, request_id: str) -> None:
        """The request is over: nobody reads for it any more."""
        errand = self._errands.pop(request_id, None)
        if errand is not None and errand.task is not None:
            errand.task.cancel()

    def deliver(self, message: TicketIssued | RowMissed, send: Callable[[ToEngine], None]) -> None:
        """What the engine says; ``send`` is the way back to it."""
        errand = self._errands.get(message.request_id)
        if errand is None:
            return
        match message:
            case RowMissed(_, key, reason):
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
        await self._readers.close()

    async def _read(self, errand: _Errand, ticket: RowTicket, send: Callable[[ToEngine], None]) -> None:
        try:
            await self._readers.read(errand.reader, errand.request, ticket)
        except ReadFailed as error:
            errand.task = None
            self._lose(errand, ticket.key, str(error), send)
        except ValueError as error:  # nobody can be asked for this
            self._fail(errand.request.request_id, error)

    def _lose(self, errand: _Errand, key: str, reason: str, send: Callable[[ToEngine], None]) -> None:
        """The row of this ticket does not come, whoever says so first."""
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
