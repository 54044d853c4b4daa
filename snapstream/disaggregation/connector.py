"""KV transfer over TCP: all rows that one engine sends and receives; the ``KVConnector`` of ``step.py``.

    other engines' senders --> receiver --> news --> engine        engine --> put, finish --> one sender per row

Invariant: what happens on the threads of senders and receiver reaches the engine only as news, which it polls between
two steps; ``wake`` is called with each, so that an idle engine polls. A request that the engine has voided or cancelled
makes no news.
"""

from __future__ import annotations

import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from snapstream.config import KVBudget
from snapstream.disaggregation.protocol import DEADLINE_S, RowHeader, RowSizes, TransferSettings
from snapstream.disaggregation.receiver import KVReceiver, ReceiveBuffer
from snapstream.disaggregation.sender import KVSender
from snapstream.step import KVReceived, KVSent, KVTransferFailed, PrefillReport
from snapstream.types import Request, RowTicket
from snapstream.wire import WireError, pack, unpack_one

_FIXED_BYTES = 4096
_NUMBER_BYTES = 32  # of a number, or of a pair of them, in a message


def max_report_bytes(request: Request, budget: KVBudget, num_layers: int, num_kv_heads: int) -> int:
    """Bytes of the longest report on a request."""
    sampling, prompt_len = request.sampling, len(request.prompt_token_ids)
    heads, most = num_layers * num_kv_heads, _FIXED_BYTES
    if sampling.return_kept == "bitmap":
        most += 2 * heads * -(-prompt_len // 8)
    elif sampling.return_kept:
        most += _NUMBER_BYTES * heads * (budget.num_topk + 1)
    if sampling.prompt_logprobs is not None:
        most += 2 * _NUMBER_BYTES * prompt_len * (2 + sampling.prompt_logprobs)
    return most


def report_from_bytes(data: bytes | bytearray) -> PrefillReport:
    """WireError for anything but a packed report whose integers are all >= 0."""
    return unpack_one(data, PrefillReport, is_signed=False)


class TcpConnector:
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
        """ValueError if it cannot listen at the address. ``deadline_s``: without a byte, on either side."""
        self._settings, self._sizes, self._fingerprint, self._wake = settings, sizes, fingerprint, wake
        self._deadline_s = deadline_s
        self._context: ssl.SSLContext | None = None  # of senders; made once, because reading the authorities is slow
        self._lock = threading.Lock()  # of the four below
        self._news: deque[KVReceived | KVTransferFailed | KVSent] = deque()
        self._keys: dict[str, str] = {}  # of the good tickets, by request
        self._owners: dict[str, str] = {}  # of tickets: requests by key
        self._senders: dict[str, KVSender] = {}
        self._receiver: KVReceiver | None = None
        if settings.host is not None:
            self._receiver = KVReceiver(settings, self._take, deadline_s=deadline_s)

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Facts about the engine that the other side must agree with."""
        return self._fingerprint

    @property
    def address(self) -> tuple[str, int] | None:
        """Where this engine receives rows."""
        return None if self._receiver is None else (self._receiver.host, self._receiver.port)

    @property
    def receives(self) -> bool:
        return self._receiver is not None

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def poll(self) -> list[KVReceived | KVTransferFailed | KVSent]:
        with self._lock:
            news = list(self._news)
            self._news.clear()
            for one in news:
                if isinstance(one, KVSent):
                    self._senders.pop(one.request_id, None)
        return news

    def expect(self, request: Request, budget: KVBudget) -> RowTicket:
        assert self._receiver is not None, "this engine does not receive rows"
        self.void(request.request_id)
        most = max_report_bytes(request, budget, self._sizes.num_layers, self._sizes.num_kv_heads)
        with self._lock:  # a sender that is faster than this function waits
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
            with self._lock:  # a sender that fails at once waits until it is registered
                self._senders[request.request_id] = KVSender(
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
        if sender is not None:  # else it has failed or was cancelled, and the engine is about to poll that
            sender.put(read)

    def put_last(self, request_id: str, read: Callable[[], memoryview]) -> None:
        sender = self._senders.get(request_id)
        if sender is not None:
            sender.put_last(read)

    def finish(self, request_id: str, report: PrefillReport) -> None:
        sender = self._senders.get(request_id)
        if sender is not None:
            sender.finish(pack(report))

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

    def _take(self, key: str, what: ReceiveBuffer | str) -> None:
        """On the receiver's threads."""
        report: PrefillReport | None = None
        if isinstance(what, ReceiveBuffer):
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
                self._news.append(KVTransferFailed(request_id, key, what))
            else:
                assert report is not None and what.hidden is not None
                parts = tuple(what.parts)
                self._news.append(KVReceived(request_id=request_id, parts=parts, hidden=what.hidden, report=report))
        self._wake()

    def _sent(self, request_id: str, problem: str) -> None:
        """On a sender's thread."""
        with self._lock:
            if request_id in self._senders:  # else cancelled in this moment
                self._news.append(KVSent(request_id, problem))
        self._wake()

    def _forget(self, request_id: str) -> None:
        """Drop the news of a request that is over or starts again; its id may be used again."""
        kept = [one for one in self._news if one.request_id != request_id]
        self._news.clear()
        self._news.extend(kept)
