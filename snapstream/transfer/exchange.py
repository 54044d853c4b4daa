"""All rows that one engine sends and receives: the ``RowExchange`` (``step.py``) over TCP.

    other engines' senders --> receiver --> news --> engine          engine --> put, finish --> a sender per row

Invariant: what happens on the threads of senders and receiver reaches the engine as news only, which it reads between
two steps; ``wake`` is called with each, so that an engine at rest hears of it. A request that the engine has voided or
cancelled makes no news.
"""

from __future__ import annotations

import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from snapstream.config import KVBudget
from snapstream.request import Request, RowTicket
from snapstream.step import PrefillReport, RowArrived, RowLost, RowSent
from snapstream.transfer.landing import RowLanding
from snapstream.transfer.receiver import RowReceiver
from snapstream.transfer.report import max_report_bytes, report_from_bytes, report_to_bytes
from snapstream.transfer.sender import RowSender
from snapstream.transfer.session import DEADLINE_S
from snapstream.transfer.settings import TransferSettings
from snapstream.transfer.wire import RowHeader, RowSizes, WireError


class TcpExchange:
    """Used by the engine's thread; ``wake`` is called on others."""

    def __init__(
        self,
        settings: TransferSettings,
        sizes: RowSizes,
        fingerprint: Mapping[str, str],
        wake: Callable[[], None] = lambda: None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """ValueError where rows cannot arrive. ``deadline_s``: without a byte or a beat, on either side."""
        self._settings, self._sizes, self._fingerprint, self._wake = settings, sizes, fingerprint, wake
        self._deadline_s = deadline_s
        self._context: ssl.SSLContext | None = None  # of senders; reading the authorities takes a while
        self._lock = threading.Lock()  # of the four below
        self._news: deque[RowArrived | RowLost | RowSent] = deque()
        self._keys: dict[str, str] = {}  # of the good tickets, by request
        self._owners: dict[str, str] = {}  # of tickets: requests by key
        self._senders: dict[str, RowSender] = {}
        self._receiver: RowReceiver | None = None
        if settings.host is not None:
            self._receiver = RowReceiver(settings, self._take, deadline_s=deadline_s)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where rows arrive."""
        return None if self._receiver is None else (self._receiver.host, self._receiver.port)

    @property
    def receives(self) -> bool:
        return self._receiver is not None

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def poll(self) -> list[RowArrived | RowLost | RowSent]:
        with self._lock:
            news = list(self._news)
            self._news.clear()
            for one in news:
                if isinstance(one, RowSent):
                    self._senders.pop(one.request_id, None)
        return news

    def expect(self, request: Request, budget: KVBudget) -> RowTicket:
        assert self._receiver is not None, "this engine receives no rows"
        self.void(request.request_id)
        most = max_report_bytes(request, budget, self._sizes.num_layers, self._sizes.num_kv_heads)
        with self._lock:  # a sender that is faster than this function waits for the names
            ticket = self._receiver.expect(self._header(request, budget), most)
            self._keys[request.request_id], self._owners[ticket.key] = ticket.key, request.request_id
        return ticket

    def void(self, request_id: str) -> None:
        with self._lock:
            key = self._keys.pop(request_id, None)
            self._owners.pop(key or "", None)
            self._forget(request_id)
        if key is not None and self._receiver is not None:
            self._receiver.void(key)

    def open(self, request: Request, budget: KVBudget) -> None:
        assert request.ticket is not None
        done = partial(self._sent, request.request_id)
        header = self._header(request, budget)
        try:
            if self._context is None and request.ticket.uses_tls:
                self._context = self._settings.client_context()
            with self._lock:  # a sender that fails at once waits until it is known
                self._senders[request.request_id] = RowSender(
                    request.ticket,
                    header,
                    self._settings,
                    done,
                    context=self._context,
                    deadline_s=self._deadline_s,
                )
        except (OSError, RuntimeError) as error:  # descriptors, threads
            raise ValueError(f"this engine cannot send another row now: {error}") from None

    def put(self, request_id: str, read: Callable[[], memoryview]) -> None:
        sender = self._senders.get(request_id)
        if sender is not None:  # else it has failed or was cancelled, and the job is about to hear of it
            sender.put(read)

    def put_last(self, request_id: str, read: Callable[[], memoryview]) -> None:
        sender = self._senders.get(request_id)
        if sender is not None:
            sender.put_last(read)

    def finish(self, request_id: str, report: PrefillReport) -> None:
        sender = self._senders.get(request_id)
        if sender is not None:
            sender.finish(report_to_bytes(report))

    def cancel(self, request_id: str) -> None:
        sender = self._senders.pop(request_id, None)
        if sender is not None:
            sender.cancel()
        with self._lock:
            self._forget(request_id)

    def close(self) -> None:
        for request_id in list(self._senders):
            self.cancel(request_id)
        if self._receiver is not None:
            self._receiver.close()

    def _header(self, request: Request, budget: KVBudget) -> RowHeader:
        prompt_len = len(request.prompt_token_ids)
        return RowHeader.of(self._fingerprint, self._sizes, prompt_len, request.next_position, budget)

    def _take(self, key: str, what: RowLanding | str) -> None:
        """On the receiver's threads."""
        report: PrefillReport | None = None
        if isinstance(what, RowLanding):
            assert what.report is not None
            try:
                report = report_from_bytes(what.report)
            except WireError as error:
                what = str(error)
        with self._lock:
            request_id = self._owners.pop(key, None)
            if request_id is None:
                return  # voided meanwhile
            del self._keys[request_id]
            if isinstance(what, str):
                self._news.append(RowLost(request_id, key, what))
            else:
                assert report is not None and what.hidden is not None
                parts = tuple(what.parts)
                self._news.append(RowArrived(request_id=request_id, parts=parts, hidden=what.hidden, report=report))
        self._wake()

    def _sent(self, request_id: str, problem: str) -> None:
        """On a sender's thread."""
        with self._lock:
            if request_id in self._senders:  # else cancelled in this moment
                self._news.append(RowSent(request_id, problem))
        self._wake()

    def _forget(self, request_id: str) -> None:
        """Of a request that is over, or begins again; its id may come back."""
        kept = [one for one in self._news if one.request_id != request_id]
        self._news.clear()
        self._news.extend(kept)
