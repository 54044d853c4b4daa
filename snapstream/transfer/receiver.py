"""The port where rows arrive: one per engine. A ticket names a row that the engine has reserved.

               expect                    header is right           report is there
    (nothing) -------> waiting --------> landing ----------------> gone: deliver(key, landing)
                          |  deadline       |  cut, stalled, wrong
                          +-----------------+--------------------> gone: deliver(key, reason)

Invariant: for each ticket ``deliver`` is called once, unless ``void`` came before; a ticket is good for one connection,
and memory is taken for tickets only, each at most its row (``landing.py``). One thread accepts and minds deadlines, one
per connection reads.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector
from time import monotonic, sleep

from snapstream.request.ticket import KEY_BYTES, RowTicket
from snapstream.transfer.landing import RowLanding
from snapstream.transfer.session import DEADLINE_S, HANDSHAKE_S, Session, cut
from snapstream.transfer.settings import TransferSettings
from snapstream.transfer.wire import Kind, RowHeader, TransferFailed, WireError

MAX_STRANGERS = 64  # connections that have not named a ticket yet; more are closed
ACCEPT_PAUSE_S = 0.05  # where the system has no descriptor left
DRAIN_S = 10.0  # for a sender to read why its row was refused; it leaves then

Deliver = Callable[[str, RowLanding | str], None]  # the ticket's key, and the row or why it did not come


@dataclass(slots=True, eq=False)
class _Waiting:
    """A ticket that is good."""

    header: RowHeader
    max_report_bytes: int
    deadline: float
    sock: socket.socket | None = None  # of the sender that fills it


class RowReceiver:
    """Listens from its making on; ``deliver`` is called on threads of its own."""

    def __init__(self, settings: TransferSettings, deliver: Deliver, *, deadline_s: float = DEADLINE_S) -> None:
        """ValueError without an address, or where nobody can listen there."""
        if settings.host is None:
            raise ValueError("a receiver of rows needs an address")
        self._settings, self._deliver, self._deadline_s = settings, deliver, deadline_s
        self._context, self._binding = settings.server_context(), settings.certificate_digest()
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            self._listener = socket.create_server((settings.host, settings.port), family=family, backlog=256)
        except OSError as error:
            raise ValueError(f"rows cannot arrive at {settings.host} port {settings.port}: {error}") from None
        self._listener.setblocking(False)
        self.host, self.port = settings.host, int(self._listener.getsockname()[1])
        self._lock = threading.Lock()  # of the three below
        self._tickets: dict[str, _Waiting] = {}
        self._strangers: dict[socket.socket, float] = {}  # and until when they may stay so
        self._is_closed = False
        self._bell, self._ear = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="row-receiver", daemon=True)
        self._thread.start()

    @property
    def num_tickets(self) -> int:
        """Tickets that are good."""
        return len(self._tickets)

    def expect(self, header: RowHeader, max_report_bytes: int) -> RowTicket:
        """Make a ticket for the row that ``header`` describes."""
        key = os.urandom(KEY_BYTES).hex()
        with self._lock:
            self._tickets[key] = _Waiting(header, max_report_bytes, monotonic() + self._deadline_s)
        self._bell.send(b"\0")  # the deadline may be the next
        return RowTicket(host=self.host, port=self.port, key=key, uses_tls=self._context is not None)

    def void(self, key: str) -> None:
        """The ticket is good no more; what comes for it is refused, and nothing delivered."""
        with self._lock:
            gone = self._tickets.pop(key, None)
        if gone is not None and gone.sock is not None:
            cut(gone.sock)

    def close(self) -> None:
        """Void all tickets and stop listening."""
        with self._lock:
            self._is_closed = True
            socks = [*self._strangers, *(own.sock for own in self._tickets.values() if own.sock is not None)]
            self._tickets.clear()
        for sock in socks:
            cut(sock)
        self._bell.send(b"\0")
        self._thread.join()

    def _listen(self) -> None:
        with self._listener, self._bell, self._ear, DefaultSelector() as selector:
            selector.register(self._listener, EVENT_READ)
            selector.register(self._ear, EVENT_READ)
            while not self._is_closed:
                told = [key.fileobj for key, _ in selector.select(self._next_deadline())]
                if self._ear in told:
                    self._ear.recv(4096)
                if self._listener in told:
                    self._accept()
                self._expire()

    def _next_deadline(self) -> float | None:
        """Seconds until a ticket that nobody has come for expires, or a stranger's time is over."""
        with self._lock:
            ends = [own.deadline for own in self._tickets.values() if own.sock is None]
            ends += self._strangers.values()
        return max(min(ends) - monotonic(), 0.0) if ends else None

    def _expire(self) -> None:
        now = monotonic()
        with self._lock:
            late = [key for key, own in self._tickets.items() if own.sock is None and own.deadline <= now]
            slow = [sock for sock, deadline in self._strangers.items() if deadline <= now]
            for sock in slow:  # its thread notices
                del self._strangers[sock]
        for sock in slow:
            cut(sock)
        for key in late:
            self._end(key, f"no sender came within {self._deadline_s:g} s")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it left already, or there are too many descriptors
            sleep(ACCEPT_PAUSE_S)
            return
        with self._lock:
            is_full = self._is_closed or len(self._strangers) >= MAX_STRANGERS
            if not is_full:
                self._strangers[sock] = monotonic() + HANDSHAKE_S
        try:
            if not is_full:
                threading.Thread(target=self._serve, args=(sock,), name="row-connection", daemon=True).start()
                return
        except RuntimeError:  # no more threads
            self._know(sock)
        sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """One connection, from greeting to end."""
        try:
            sock.settimeout(HANDSHAKE_S)
            if self._context is not None:
                sock = self._wrap(sock, self._context)
            self._talk(sock)
        except (OSError, TransferFailed):
            pass  # a stranger, who gets no answer, or a sender that left when it had sent all
        finally:
            self._know(sock)
            sock.close()

    def _wrap(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """The same connection with TLS, still a stranger's; the plain socket is nothing any more."""
        with self._lock:
            until = self._strangers.pop(plain, monotonic())
            sock = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            self._strangers[sock] = until
        try:
            sock.do_handshake()
        except OSError:
            self._know(sock)
            sock.close()
            raise
        return sock

    def _know(self, sock: socket.socket) -> None:
        """It is no stranger."""
        with self._lock:
            self._strangers.pop(sock, None)

    def _talk(self, sock: socket.socket) -> None:
        session = Session(sock, min(HANDSHAKE_S, self._deadline_s), self._binding)
        try:
            ticket, proof = session.greet(self._settings.secret, KEY_BYTES)
            own = self._claim(ticket.hex(), sock)
        except WireError as error:
            self._refuse(session, str(error))
            return
        self._know(sock)
        session = Session(sock, self._deadline_s, self._binding)
        landing = RowLanding(own.header, own.max_report_bytes)
        problem = self._fill(session, landing, proof)
        if not self._end(ticket.hex(), problem or landing):
            return  # it was voided
        if problem:
            self._refuse(session, problem)
        else:
            session.send(Kind.TAKEN)

    @staticmethod
    def _fill(session: Session, landing: RowLanding, proof: bytes) -> str:
        """Read the row; why it did not come, or nothing."""
        try:
            session.send(Kind.ACCEPTED, proof)
            while not landing.is_whole:
                session.receive(landing.room)
                landing.take()
        except (TransferFailed, WireError) as error:
            return str(error)
        except Exception as error:  # no memory: the ticket must not stay taken
            return f"the row could not be taken: {type(error).__name__}: {error}"
        return ""

    def _claim(self, key: str, sock: socket.socket) -> _Waiting:
        with self._lock:
            own = self._tickets.get(key)
            if own is None:
                raise WireError("no row of this engine waits for this ticket")
            if own.sock is not None:
                raise WireError("this ticket is in use")
            own.sock = sock
            return own

    def _end(self, key: str, what: RowLanding | str) -> bool:
        """The ticket is gone; False if it was gone before."""
        with self._lock:
            if self._tickets.pop(key, None) is None:
                return False
        self._deliver(key, what)
        return True

    def _refuse(self, session: Session, reason: str) -> None:
        """Tell the sender, and give it a moment to read it: closing on unread bytes would throw the answer away."""
        with suppress(OSError, TransferFailed):
            session.refuse(reason)
            session.sock.settimeout(DRAIN_S)
            until = monotonic() + DRAIN_S
            while monotonic() < until and session.sock.recv(2**16):
                pass
