"""The engine's side of KV transfer: tickets for requests with a remote prefill, and rows that are sent.

    decode side    rows reserved -> ticket -> notice to the caller, who requests a prefill -> KV received -> decode
                                     ^---- reissue ----- notice that the transfer failed <-'
    prefill side   queued -> connected to the ticket -> layer by layer -> report -> sent

Invariant: a request that has ended leaves neither a ticket nor a connection behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.engine.request_state import LiveRequest
from snapstream.engine.scheduler import Scheduler
from snapstream.step import KVConnector, KVReceived, KVTransferFailed, PrefillReport, PrefillResult
from snapstream.types import Request, RowTicket


@dataclass(frozen=True, slots=True)
class TicketIssued:
    """A request with a remote prefill has rows: another engine may prefill its prompt, with this ticket."""

    request_id: str
    ticket: RowTicket


@dataclass(slots=True)
class TransferStats:
    """Counts of rows since the start of an engine."""

    num_sent: int = 0
    num_received: int = 0
    num_failed: int = 0  # in either direction
    num_bytes: int = 0  # received


class Transfers:
    """Requests of one engine that send or receive KV."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._connector: KVConnector | None = None  # then there are no such requests
        self._lives: dict[str, LiveRequest] = {}
        self._keys: dict[str, str] = {}  # of the last ticket, by request
        self._notices: list[TicketIssued | KVTransferFailed] = []
        self.stats = TransferStats()

    def connect(self, connector: KVConnector) -> None:
        self._connector = connector

    @property
    def _connected(self) -> KVConnector:
        assert self._connector is not None
        return self._connector

    @property
    def has_events(self) -> bool:
        return self._connector is not None and self._connector.has_events

    def validate(self, request: Request) -> None:
        """ValueError for KV transfer without a connector."""
        if self._connector is None and uses_kv_transfer(request):
            raise ValueError("KV transfer requested, but no connector is configured")

    def add(self, live: LiveRequest) -> None:
        """A request joins the queue. ValueError for a transfer that this engine does not support."""
        if not uses_kv_transfer(live.request):
            return
        if live.request.is_prefilled_remotely and not self._connected.receives:
            raise ValueError("a remote prefill was requested, and this engine has no transfer address to receive KV")
        if live.request.ticket is not None:
            self._connected.open(live.request, live.budget)
        self._lives[live.request_id] = live

    def issue(self, live: LiveRequest) -> None:
        """Its rows are reserved."""
        ticket = self._connected.expect(live.request, live.budget)
        self._keys[live.request_id] = ticket.key
        self._notices.append(TicketIssued(live.request_id, ticket))

    def reissue(self, request_id: str, key: str) -> None:
        """Replace a ticket, unless it has been used or the request is over."""
        live = self._lives.get(request_id)
        if live is not None and self._keys.get(request_id) == key and self._scheduler.awaits_kv(live):
            self.issue(live)

    def take_notices(self) -> list[TicketIssued | KVTransferFailed]:
        notices, self._notices = self._notices, []
        return notices

    def poll(self) -> list[tuple[LiveRequest, str]]:
        """Pass received rows to the scheduler; requests whose row was sent, or with the reason why it was not."""
        ended: list[tuple[LiveRequest, str]] = []
        for news in [] if self._connector is None else self._connector.poll():
            live = self._lives.get(news.request_id)
            if live is None:
                continue
            match news:
                case KVReceived():
                    self.stats.num_received += 1
                    self.stats.num_bytes += sum(map(len, news.parts))
                    live.output.prefix = news.report.prefix
                    self._scheduler.receive_kv(live, news)
                case KVTransferFailed():
                    self.stats.num_failed += 1
                    self._notices.append(news)
                case _:
                    self.stats.num_failed += bool(news.problem)
                    self.stats.num_sent += not news.problem
                    ended.append((live, news.problem))
        return ended

    def finish(self, live: LiveRequest, result: PrefillResult) -> None:
        """Its prompt is prefilled, and all layers have been passed to the connector."""
        report = PrefillReport(
            compression=result.compression, prompt_logprobs=result.prompt_logprobs, prefix=live.output.prefix
        )
        self._connected.finish(live.request_id, report)

    def end(self, live: LiveRequest) -> None:
        if self._lives.pop(live.request_id, None) is None:
            return
        if live.request.ticket is not None:
            self._connected.cancel(live.request_id)
        else:
            self._keys.pop(live.request_id, None)
            self._connected.void(live.request_id)

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()


def uses_kv_transfer(request: Request) -> bool:
    return request.is_prefilled_remotely or request.ticket is not None
