"""KV transfer over TCP: all rows that one engine sends and receives; the ``KVConnector`` of ``step.py``.

    other engines' senders --> KVReceiver --> events --> engine      engine --> put, finish --> one KVSender per row

Invariant: what happens on the threads of senders and receiver reaches the engine only as events, which it polls between
two steps; ``wake`` is called with each, so that an idle engine polls. A request that the engine has voided or cancelled
makes no events.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from time import monotonic

from snapstream.config import KVBudget
from snapstream.config.values import is_loopback
from snapstream.disaggregation.protocol import (
    DEADLINE_S,
    HEARTBEAT_S,
    MAX_HEADER_BYTES,
    PURPOSE,
    RowHeader,
    RowSizes,
    TransferSettings,
)
from snapstream.step import KVReceived, KVSent, KVTransferFailed, PrefillReport
from snapstream.types import KEY_BYTES, Request, RowTicket
from snapstream.wire import (
    HANDSHAKE_S,
    Body,
    Connection,
    ConnectionFailed,
    Kind,
    Listener,
    WireError,
    cut,
    pack,
    unpack_one,
)

ReadBody = Callable[[], Body]  # waits for the device, where the bytes come from one


class KVSender:
    """Sends one row to one ticket while it is computed: a queue and a thread.

        engine thread   put(layer 0)  put(layer 1) ...    put_last     finish  |
        own thread         LAYER 0      LAYER 1    ... HIDDEN_STATE    REPORT  +--> RECEIVED: done("")

    The thread connects at once and sends heartbeats while it has nothing to send, so that the receiver can tell a
    queued prompt from a dead engine; it notices at once when the receiver refuses or leaves. Invariants:
    ``done`` is called exactly once, with the reason if it failed, unless ``cancel`` came before. After ``cancel`` a row
    is never complete for the receiver: the report is the last frame.
    """

    def __init__(
        self,
        ticket: RowTicket,
        header: RowHeader,
        settings: TransferSettings,
        done: Callable[[str], None],
        *,
        context: ssl.SSLContext | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """``done`` is called on another thread. ``context``: of TLS, made from the settings unless given.

        ValueError for a ticket of another machine without TLS.
        """
        if not ticket.uses_tls and not is_loopback(ticket.host):
            raise ValueError(f"the ticket names another machine, {ticket.host}, and no TLS; rows hold prompts")
        self._ticket, self._header, self._settings, self._done = ticket, header, settings, done
        self._deadline_s, self._context = deadline_s, context
        self._numbers = count()  # of parts
        self._frames: deque[tuple[Kind, int, ReadBody]] = deque()
        self._is_cancelled = False
        self._wake_w, self._wake_r = socket.socketpair()  # a byte: there is a frame, or the end
        self._wake_w.setblocking(False)
        self._sock: socket.socket | None = None
        threading.Thread(target=self._run, name="row-sender", daemon=True).start()

    def put(self, read: ReadBody) -> None:
        """The next layer of the row."""
        self._add(Kind.LAYER, read, next(self._numbers))

    def put_last(self, read: ReadBody) -> None:
        """The last hidden state of the prompt."""
        self._add(Kind.HIDDEN_STATE, read)

    def finish(self, report: bytes) -> None:
        """The last frame; with it the row is complete."""
        self._add(Kind.REPORT, lambda: report)

    def cancel(self) -> None:
        """Give up; ``done`` is not called any more, unless it is being called now."""
        self._is_cancelled = True
        self._wake()
        if self._sock is not None:
            cut(self._sock)

    def _add(self, kind: Kind, read: ReadBody, number: int = 0) -> None:
        self._frames.append((kind, number, read))
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # a byte is pending, or the thread has ended
            self._wake_w.send(b"\0")

    def _run(self) -> None:
        problem = ""
        try:
            with ExitStack() as stack:
                stack.callback(self._frames.clear)
                stack.enter_context(self._wake_r)
                stack.enter_context(self._wake_w)
                connection = Connection(*self._connect(stack))
                connection.prove(self._settings.secret, PURPOSE, bytes.fromhex(self._ticket.key))
                connection.send(Kind.HEADER, pack(self._header))
                self._send_all(connection)
                if connection.answer(Kind.RECEIVED):
                    raise WireError("the receiver sent more than that it has the row")
        except (ConnectionFailed, WireError, OSError) as error:
            problem = str(error) or type(error).__name__
        except Exception as error:  # of the device that the bytes come from
            problem = f"the row could not be read: {type(error).__name__}: {error}"
        if not self._is_cancelled:
            self._done(problem)

    def _connect(self, stack: ExitStack) -> tuple[socket.socket, float, bytes]:
        ticket = self._ticket
        sock = socket.create_connection((ticket.host, ticket.port), timeout=HANDSHAKE_S)
        self._sock = stack.enter_context(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_cancelled:
            raise ConnectionFailed("cancelled")
        if not ticket.uses_tls:
            return sock, self._deadline_s, b""
        context = self._context or self._settings.client_context()
        wrapped = context.wrap_socket(sock, server_hostname=ticket.host)
        self._sock = stack.enter_context(wrapped)
        return wrapped, self._deadline_s, sha256(wrapped.getpeercert(binary_form=True) or b"").digest()

    def _send_all(self, connection: Connection) -> None:
        """Send frames until the report is sent."""
        while True:
            if self._is_cancelled:
                raise ConnectionFailed("cancelled")
            if connection.is_readable():
                connection.answer(Kind.REFUSED)  # raises, whatever it is
            if not self._frames:
                if not self._wait(connection):
                    connection.send(Kind.HEARTBEAT)
                continue
            kind, number, read = self._frames.popleft()
            connection.send(kind, read(), number)
            if kind == Kind.REPORT:
                return

    def _wait(self, connection: Connection) -> bool:
        """Wait for a frame, or for the receiver to speak or leave; False after ``HEARTBEAT_S``."""
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        poll.register(connection.sock, select.POLLIN)
        events = poll.poll(HEARTBEAT_S * 1e3)
        if any(fd == self._wake_r.fileno() for fd, _ in events):
            self._wake_r.recv(4096)
        return bool(events)


class ReceiveBuffer:
    """The row of one ticket as far as it was received: which frame may come next, and where its bytes go."""

    def __init__(self, expected: RowHeader, max_report_bytes: int) -> None:
        self._expected, self._max_report_bytes = expected, max_report_bytes
        self._has_header = False
        self._due: tuple[Kind, bytearray] | None = None  # a frame whose body is being read
        self.parts: list[bytearray] = []  # by layer
        self.hidden: bytearray | None = None
        self.report: bytearray | None = None

    @property
    def is_whole(self) -> bool:
        return self.report is not None

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        held = [*self.parts, self.hidden, self.report, None if self._due is None else self._due[1]]
        return sum(len(piece) for piece in held if piece is not None)

    def allocate(self, kind: int, number: int, size: int) -> bytearray:
        """Memory for the body of a frame; WireError unless this frame comes next. Call ``take`` when it is filled."""
        if self._due is not None:
            raise WireError("a frame began inside another")
        if kind == Kind.HEARTBEAT:
            if number or size:
                raise WireError(f"a frame of kind {kind} has number and size {(number, size)}; they must be (0, 0)")
            self._due = Kind.HEARTBEAT, bytearray()
            return self._due[1]
        due, due_number, least, most = self._next()
        if kind != due:
            raise WireError(f"a frame of kind {kind} came where {due.name} {due_number} is due")
        if number != due_number:
            raise WireError(f"{due.name} {number} came where {due.name} {due_number} is due")
        if not least <= size <= most:
            wanted = f"{most}" if least == most else f"at most {most}"
            raise WireError(f"{due.name} {number} has {size} bytes; the row of this ticket has {wanted}")
        self._due = due, bytearray(size)
        return self._due[1]

    def take(self) -> None:
        """The memory of the last ``allocate`` is filled. WireError for a header that is not the expected one."""
        assert self._due is not None
        (kind, body), self._due = self._due, None
        match kind:
            case Kind.HEADER:
                self._expected.check(unpack_one(body, RowHeader, is_signed=False))
                self._has_header = True
            case Kind.LAYER:
                self.parts.append(body)
            case Kind.HIDDEN_STATE:
                self.hidden = body
            case Kind.REPORT:
                self.report = body

    def _next(self) -> tuple[Kind, int, int, int]:
        """Kind, number, least and greatest size of the frame that is due."""
        expected = self._expected
        if not self._has_header:
            return Kind.HEADER, 0, 2, MAX_HEADER_BYTES
        if len(self.parts) < expected.num_layers:
            size = expected.layer_bytes[len(self.parts)]
            return Kind.LAYER, len(self.parts), size, size
        if self.hidden is None:
            return Kind.HIDDEN_STATE, 0, expected.hidden_bytes, expected.hidden_bytes
        if self.report is None:
            return Kind.REPORT, 0, 2, self._max_report_bytes
        raise WireError("a frame came after the report")


Deliver = Callable[[str, ReceiveBuffer | str], None]  # the ticket's key, and the row or why it was not received


@dataclass(slots=True, eq=False)
class _Ticket:
    header: RowHeader
    max_report_bytes: int
    deadline: float  # for a sender to connect
    sock: socket.socket | None = None  # of the sender that uses it


class KVReceiver:
    """Receives rows: one listener per engine. A ticket names a row that the engine has reserved.

                   expect                    header is right             REPORT is there
        (nothing) -------> waiting --------> receiving ----------------> gone: deliver(key, buffer)
                              |  deadline       |  closed, stalled, wrong
                              +-----------------+----------------------> gone: deliver(key, reason)

    Invariants: ``deliver`` is called once for each ticket, unless ``void`` came before. A ticket is valid for one
    connection. Memory is allocated only for tickets, and only for a frame that comes next and has the size of the
    ticket's row, so a ticket never takes more than its row, one hidden state, a header and a report.
    """

    def __init__(self, settings: TransferSettings, deliver: Deliver, *, deadline_s: float = DEADLINE_S) -> None:
        """ValueError without an address, or if it cannot be listened at."""
        if settings.host is None:
            raise ValueError("a receiver of rows needs an address")
        self._deliver, self._deadline_s = deliver, deadline_s
        context, self._binding = settings.server_context(), settings.certificate_digest()
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            sock = socket.create_server((settings.host, settings.port), family=family, backlog=256)
        except OSError as error:
            raise ValueError(f"cannot receive rows at {settings.host} port {settings.port}: {error}") from None
        self._change = threading.Condition()  # guards the two below
        self._tickets: dict[str, _Ticket] = {}
        self._is_closed = False
        self._listener = Listener(
            sock, settings.secret, PURPOSE, self._serve, ticket_bytes=KEY_BYTES, context=context,
            binding=self._binding, handshake_s=min(HANDSHAKE_S, deadline_s),
        )  # fmt: skip
        self.host, self.port, self._uses_tls = settings.host, self._listener.port, context is not None
        self._thread = threading.Thread(target=self._expire, name="row-tickets", daemon=True)
        self._thread.start()

    @property
    def num_tickets(self) -> int:
        """Valid tickets."""
        return len(self._tickets)

    def expect(self, header: RowHeader, max_report_bytes: int) -> RowTicket:
        """Make a ticket for the row that ``header`` describes."""
        key = os.urandom(KEY_BYTES).hex()
        with self._change:
            self._tickets[key] = _Ticket(header, max_report_bytes, monotonic() + self._deadline_s)
            self._change.notify_all()
        return RowTicket(host=self.host, port=self.port, key=key, uses_tls=self._uses_tls)

    def void(self, key: str) -> None:
        """Invalidate the ticket: its sender is refused, and nothing is delivered."""
        with self._change:
            gone = self._tickets.pop(key, None)
        if gone is not None and gone.sock is not None:
            cut(gone.sock)

    def close(self) -> None:
        """Void all tickets and stop listening."""
        self._listener.close()
        with self._change:
            self._is_closed = True
            socks = [own.sock for own in self._tickets.values() if own.sock is not None]
            self._tickets.clear()
            self._change.notify_all()
        for sock in socks:
            cut(sock)
        self._thread.join()

    def _expire(self) -> None:
        """Main function of the thread that ends tickets without a sender."""
        while True:
            with self._change:
                now = monotonic()
                unused = {key: own.deadline for key, own in self._tickets.items() if own.sock is None}
                late = [key for key, deadline in unused.items() if deadline <= now]
                if self._is_closed:
                    return
                if not late:
                    self._change.wait(min(unused.values()) - now if unused else None)
            for key in late:
                self._end(key, f"no sender came within {self._deadline_s:g} s")

    def _serve(self, sock: socket.socket, ticket: bytes, proof: bytes) -> None:
        with sock:
            connection, key = Connection(sock, self._deadline_s, self._binding), ticket.hex()
            try:
                own = self._claim(key, sock)
            except WireError as error:
                connection.refuse(str(error))
                return
            buffer = ReceiveBuffer(own.header, own.max_report_bytes)
            problem = self._fill(connection, buffer, proof)
            if not self._end(key, problem or buffer):
                return  # it was voided
            if problem:
                connection.refuse(problem)
            else:
                with suppress(ConnectionFailed):
                    connection.send(Kind.RECEIVED)

    @staticmethod
    def _fill(connection: Connection, buffer: ReceiveBuffer, proof: bytes) -> str:
        """Read the row; why it failed, or nothing."""
        try:
            connection.send(Kind.ACCEPTED, proof)
            while not buffer.is_whole:
                connection.receive(buffer.allocate)
                buffer.take()
        except (ConnectionFailed, WireError) as error:
            return str(error)
        except Exception as error:  # no memory: the ticket must not stay taken
            return f"the row could not be stored: {type(error).__name__}: {error}"
        return ""

    def _claim(self, key: str, sock: socket.socket) -> _Ticket:
        with self._change:
            own = self._tickets.get(key)
            if own is None:
                raise WireError("no row of this engine waits for this ticket")
            if own.sock is not None:
                raise WireError("this ticket is in use")
            own.sock = sock
            return own

    def _end(self, key: str, what: ReceiveBuffer | str) -> bool:
        """Remove the ticket and deliver; False if it was removed before."""
        with self._change:
            if self._tickets.pop(key, None) is None:
                return False
        self._deliver(key, what)
        return True


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
    ) -> None:
        """ValueError if it cannot listen at the address."""
        self._settings, self._sizes, self._wake = settings, sizes, wake
        self.fingerprint = fingerprint  # properties of the engine that both sides must share
        self._context: ssl.SSLContext | None = None  # of senders; made once, because reading the authorities is slow
        self._lock = threading.Lock()  # of the four below
        self._events: deque[KVReceived | KVTransferFailed | KVSent] = deque()
        self._keys: dict[str, str] = {}  # of the valid tickets, by request
        self._owners: dict[str, str] = {}  # of tickets: requests by key
        self._senders: dict[str, KVSender] = {}
        self._receiver: KVReceiver | None = None
        if settings.host is not None:
            self._receiver = KVReceiver(settings, self._take)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where this engine receives rows."""
        return None if self._receiver is None else (self._receiver.host, self._receiver.port)

    @property
    def receives(self) -> bool:
        return self._receiver is not None

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def poll(self) -> list[KVReceived | KVTransferFailed | KVSent]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
            for event in events:
                if isinstance(event, KVSent):
                    self._senders.pop(event.request_id, None)
        return events

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
                    request.ticket, header, self._settings, done, context=self._context
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
        return RowHeader.of(self.fingerprint, self._sizes, len(request.prompt_token_ids), budget)

    def _take(self, key: str, what: ReceiveBuffer | str) -> None:
        """Deliver a row or a failure; called on the receiver's threads."""
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
                self._events.append(KVTransferFailed(request_id, key, what))
            else:
                assert report is not None and what.hidden is not None
                parts = tuple(what.parts)
                self._events.append(KVReceived(request_id=request_id, parts=parts, hidden=what.hidden, report=report))
        self._wake()

    def _sent(self, request_id: str, problem: str) -> None:
        """Note the end of a send; called on the sender's thread."""
        with self._lock:
            if request_id in self._senders:  # else cancelled in this moment
                self._events.append(KVSent(request_id, problem))
        self._wake()

    def _forget(self, request_id: str) -> None:
        """Drop the events of a request that is over or starts again; its id may be used again."""
        kept = [event for event in self._events if event.request_id != request_id]
        self._events.clear()
        self._events.extend(kept)
