"""Receives rows: one listener per engine. A ticket names a row that the engine has reserved.

               expect                    header is right             REPORT is there
    (nothing) -------> waiting --------> receiving ----------------> gone: deliver(key, buffer)
                          |  deadline       |  closed, stalled, wrong
                          +-----------------+----------------------> gone: deliver(key, reason)

Invariants: ``deliver`` is called once for each ticket, unless ``void`` came before. A ticket is good for one
connection. Memory is taken only for tickets, and only for a frame that comes next and has the size of the ticket's row,
so a ticket never takes more than its row, one hidden state, a header and a report.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from snapstream.disaggregation.protocol import DEADLINE_S, MAX_HEADER_BYTES, PURPOSE, RowHeader, TransferSettings
from snapstream.types import KEY_BYTES, RowTicket
from snapstream.wire import HANDSHAKE_S, Connection, ConnectionFailed, Kind, Listener, WireError, cut, unpack_one


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

    def room(self, kind: int, number: int, size: int) -> bytearray:
        """Memory for the body of a frame; WireError unless this frame comes next. Call ``take`` when it is filled."""
        if self._due is not None:
            raise WireError("a frame began inside another")
        if kind == Kind.HEARTBEAT:
            self._check(kind, (number, size), (0, 0))
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
        """The memory of the last ``room`` is filled. WireError for a header that is not the expected one."""
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

    def _check(self, kind: int, sent: tuple[int, int], due: tuple[int, int]) -> None:
        if sent != due:
            raise WireError(f"a frame of kind {kind} has number and size {sent}; they must be {due}")


Deliver = Callable[[str, ReceiveBuffer | str], None]  # the ticket's key, and the row or why it was not received


@dataclass(slots=True, eq=False)
class _Ticket:
    header: RowHeader
    max_report_bytes: int
    deadline: float  # for a sender to connect
    sock: socket.socket | None = None  # of the sender that uses it


class KVReceiver:
    """Listens as soon as it is made; ``deliver`` is called on other threads."""

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
        """Tickets that are good."""
        return len(self._tickets)

    def expect(self, header: RowHeader, max_report_bytes: int) -> RowTicket:
        """Make a ticket for the row that ``header`` describes."""
        key = os.urandom(KEY_BYTES).hex()
        with self._change:
            self._tickets[key] = _Ticket(header, max_report_bytes, monotonic() + self._deadline_s)
            self._change.notify_all()
        return RowTicket(host=self.host, port=self.port, key=key, uses_tls=self._uses_tls)

    def void(self, key: str) -> None:
        """The ticket is good no more: its sender is refused, and nothing is delivered."""
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
        """Life of the thread that ends tickets to which no sender came."""
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
        """Life of an authenticated connection."""
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
                connection.receive(buffer.room)
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
        """The ticket is gone; False if it was gone before."""
        with self._change:
            if self._tickets.pop(key, None) is None:
                return False
        self._deliver(key, what)
        return True
