"""A connector without a network: the test says which rows come, are lost, or have gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from snapstream.config import KVBudget
from snapstream.step import KVReceived, KVSent, KVTransferFailed, PrefillReport
from snapstream.types import Compression, PrefixUse, Request, RowTicket

REPORT = PrefillReport(
    compression=Compression(
        prompt_tokens=1, kept_tokens=1, evicted_tokens=0, row_bytes=1, full_bytes=1, compress_ms=0.0, ring_tokens=1
    ),
    prefix=PrefixUse(cached_tokens=1),
)


@dataclass(eq=False)
class FakeConnector:
    """Strict: at most one ticket per request, and nothing is left when all requests are over."""

    receives: bool = True
    tickets: dict[str, RowTicket] = field(default_factory=dict)  # good ones by request
    open_senders: dict[str, list[str]] = field(default_factory=dict)  # what was put, by request
    news: list[KVReceived | KVTransferFailed | KVSent] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    @property
    def has_events(self) -> bool:
        return bool(self.news)

    def poll(self) -> list[KVReceived | KVTransferFailed | KVSent]:
        news, self.news = self.news, []
        return news

    def expect(self, request: Request, budget: KVBudget) -> RowTicket:
        assert request.is_prefilled_remotely
        self.void(request.request_id)
        ticket = RowTicket(host="127.0.0.1", port=1, key=f"{next(self.numbers):032x}")
        self.tickets[request.request_id] = ticket
        return ticket

    def void(self, request_id: str) -> None:
        self.tickets.pop(request_id, None)
        self.news = [one for one in self.news if one.request_id != request_id]

    def open(self, request: Request, budget: KVBudget) -> None:
        assert request.request_id not in self.open_senders
        self.open_senders[request.request_id] = []

    def put(self, request_id: str, read: Callable[[], memoryview]) -> None:
        self.open_senders[request_id].append("part")

    def put_last(self, request_id: str, read: Callable[[], memoryview]) -> None:
        self.open_senders[request_id].append("last")

    def finish(self, request_id: str, report: PrefillReport) -> None:
        if request_id in self.open_senders:
            self.open_senders[request_id].append("report")

    def cancel(self, request_id: str) -> None:
        self.open_senders.pop(request_id, None)
        self.news = [one for one in self.news if one.request_id != request_id]

    def close(self) -> None:
        pass

    # what the test does

    def arrive(self, request_id: str) -> None:
        del self.tickets[request_id]
        self.news.append(KVReceived(request_id=request_id, parts=(bytearray(2),), hidden=bytearray(4), report=REPORT))

    def lose(self, request_id: str) -> None:
        self.news.append(KVTransferFailed(request_id, self.tickets.pop(request_id).key, "cut"))

    def sent(self, request_id: str, problem: str = "") -> None:
        del self.open_senders[request_id]
        self.news.append(KVSent(request_id, problem))
