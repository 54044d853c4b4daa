"""The engine's half of rows that travel: tickets for requests whose rows arrive, and rows that are sent.

    decode side    rows reserved -> ticket -> notice to the caller, who has a prompt read elsewhere -> the row -> decode
                                     ^---- reissue ----- notice that the row was lost <-'
    prefill side   queued -> connected to the ticket -> layer by layer -> report -> gone

Invariant: a request that ends, however it does, leaves neither a ticket nor a connection behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.engine.request_state import LiveRequest
from snapstream.engine.scheduler import Scheduler
from snapstream.step import KVConnector, KVReceived, KVTransferFailed, PrefillReport, PrefillResult
from snapstream.types import Request, RowTicket


@dataclass(frozen=True, slots=True)
class TicketIssued:
    """A request whose row arrives has rows: its prompt may be read elsewhere, with this ticket."""

    request_id: str
    ticket: RowTicket


@dataclass(frozen=True, slots=True)
class RowMissed:
    """The ticket of a request is void and its row lost; its rows stay reserved until ``Reissue`` or ``Abort``."""

    request_id: str
    key: str
    reason: str


@dataclass(slots=True)
class TransferStats:
    """Counts of rows since the start of an engine."""

    num_sent: int = 0
    num_received: int = 0
    num_failed: int = 0  # either way
    num_bytes: int = 0  # of those received


class Transfers:
    """Used by the engine alone."""

    def __init__(self, connector: KVConnector, scheduler: Scheduler) -> None:
        self._connector, self._scheduler = connector, scheduler
        self._lives: dict[str, LiveRequest] = {}  # those that send a row, or wait for one
        self._keys: dict[str, str] = {}  # of the last ticket, by request
        self._notices: list[TicketIssued | RowMissed] = []
        self.stats = TransferStats()

    @property
    def has_news(self) -> bool:
        return self._connector.has_news

    def add(self, live: LiveRequest) -> None:
        """A request joins the queue. ValueError for a ticket, or a row, that this engine cannot serve."""
        if live.request.arrives and not self._connector.receives:
            raise ValueError("no rows arrive at this engine: it has no transfer address")
        if live.request.ticket is not None:
            self._connector.open(live.request, live.budget)
        self._lives[live.request_id] = live

    def issue(self, live: LiveRequest) -> None:
        """Its rows are reserved."""
        ticket = self._connector.expect(live.request, live.budget)
        self._keys[live.request_id] = ticket.key
        self._notices.append(TicketIssued(live.request_id, ticket))

    def reissue(self, request_id: str, key: str) -> None:
        """Another ticket in place of the one named, unless that has been used or the request is over."""
        live = self._lives.get(request_id)
        if live is not None and self._keys.get(request_id) == key and self._scheduler.awaits_row(live):
            self.issue(live)

    def take_notices(self) -> list[TicketIssued | RowMissed]:
        notices, self._notices = self._notices, []
        return notices

    def poll(self) -> list[tuple[LiveRequest, str]]:
        """Hand over rows that came; requests whose row has gone out, with why it could not."""
        ended: list[tuple[LiveRequest, str]] = []
        for news in self._connector.poll():
            live = self._lives.get(news.request_id)
            if live is None:
                continue
            match news:
                case KVReceived():
                    self.stats.num_received += 1
                    self.stats.num_bytes += sum(map(len, news.parts))
                    live.output.prefix = news.report.prefix
                    self._scheduler.arrive(live, news)
                case KVTransferFailed(request_id, key, reason):
                    self.stats.num_failed += 1
                    self._notices.append(RowMissed(request_id, key, reason))
                case _:
                    self.stats.num_failed += bool(news.problem)
                    self.stats.num_sent += not news.problem
                    ended.append((live, news.problem))
        return ended

    def finish(self, live: LiveRequest, result: PrefillResult) -> None:
        """Its prompt is read, and all of its row handed to the sender."""
        report = PrefillReport(
            compression=result.compression, prompt_logprobs=result.prompt_logprobs, prefix=live.output.prefix
        )
        self._connector.finish(live.request_id, report)

    def end(self, live: LiveRequest) -> None:
        """The request is over."""
        if self._lives.pop(live.request_id, None) is None:
            return
        if live.request.ticket is not None:
            self._connector.cancel(live.request_id)
        else:
            self._keys.pop(live.request_id, None)
            self._connector.void(live.request_id)

    def close(self) -> None:
        self._connector.close()


def travels(request: Request) -> bool:
    """Whether its row is sent, or arrives."""
    return request.arrives or request.ticket is not None
