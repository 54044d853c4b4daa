"""Sends one row while it is made: a queue and a thread.

    engine thread   put(layer 0)  put(layer 1) ...  put_last  finish  |
    own thread          PART 0       PART 1    ...     LAST   REPORT  +--> TAKEN: done("")

The thread connects at once and gives a sign of life while it has nothing to send, so that the receiver knows a prompt
that waits from an engine that is gone; and it sees at once when the receiver refuses or leaves. Invariant: ``done`` is
called exactly once, with why it failed, unless ``cancel`` came before. A row is never whole for the receiver after
``cancel``: the report is the last frame.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import count

from snapstream.config.addresses import is_loopback
from snapstream.request.ticket import RowTicket
from snapstream.transfer.session import BEAT_S, DEADLINE_S, HANDSHAKE_S, Session, cut
from snapstream.transfer.settings import TransferSettings
from snapstream.transfer.wire import Kind, RowHeader, TransferFailed, WireError

Body = bytes | bytearray | memoryview
ReadBody = Callable[[], Body]  # waits for the device, where the bytes come from one


class RowSender:
    """One row to one ticket."""

    def __init__(
        self,
        ticket: RowTicket,
        header: RowHeader,
        settings: TransferSettings,
        done: Callable[[str], None],
        *,
        context: ssl.SSLContext | None = None,
        deadline_s: float = DEADLINE_S,
        beat_s: float = BEAT_S,
    ) -> None:
        """``done`` is called on another thread. ``context``: of TLS, made of the settings unless given.

        ValueError for a ticket that would send the row in the open.
        """
        if not ticket.uses_tls and not is_loopback(ticket.host):
            raise ValueError(f"the ticket names another machine, {ticket.host}, and no TLS; rows hold prompts")
        self._ticket, self._header, self._settings, self._done = ticket, header, settings, done
        self._deadline_s, self._beat_s, self._context = deadline_s, beat_s, context
        self._numbers = count()  # of parts
        self._frames: deque[tuple[Kind, int, ReadBody]] = deque()
        self._is_cancelled = False
        self._bell, self._ear = socket.socketpair()  # a byte: there is a frame, or the end
        self._bell.setblocking(False)
        self._sock: socket.socket | None = None
        threading.Thread(target=self._run, name="row-sender", daemon=True).start()

    def put(self, read: ReadBody) -> None:
        """The next layer of the row."""
        self._add(Kind.PART, read, next(self._numbers))

    def put_last(self, read: ReadBody) -> None:
        """The last hidden state of the prompt."""
        self._add(Kind.LAST, read)

    def finish(self, report: bytes) -> None:
        """What the receiver's caller is told; with it the row is whole."""
        self._add(Kind.REPORT, lambda: report)

    def cancel(self) -> None:
        """Give up; ``done`` is not called any more, unless it is being called now."""
        self._is_cancelled = True
        self._ring()
        if self._sock is not None:
            cut(self._sock)

    def _add(self, kind: Kind, read: ReadBody, number: int = 0) -> None:
        self._frames.append((kind, number, read))
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already, or the thread has ended
            self._bell.send(b"\0")

    def _run(self) -> None:
        problem = ""
        try:
            with ExitStack() as stack:
                stack.callback(self._frames.clear)
                stack.enter_context(self._ear)
                stack.enter_context(self._bell)
                session = Session(*self._connect(stack))
                session.prove(self._settings.secret, bytes.fromhex(self._ticket.key))
                session.send(Kind.HEADER, self._header.to_bytes())
                self._send_all(session)
                if session.answer(Kind.TAKEN):
                    raise WireError("the receiver said more than that it has the row")
        except (TransferFailed, WireError, OSError) as error:
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
            raise TransferFailed("cancelled")
        if not ticket.uses_tls:
            return sock, self._deadline_s, b""
        context = self._context or self._settings.client_context()
        wrapped = context.wrap_socket(sock, server_hostname=ticket.host)
        self._sock = stack.enter_context(wrapped)
        return wrapped, self._deadline_s, sha256(wrapped.getpeercert(binary_form=True) or b"").digest()

    def _send_all(self, session: Session) -> None:
        """Until the report is out."""
        while True:
            if self._is_cancelled:
                raise TransferFailed("cancelled")
            if session.is_readable():
                session.answer(Kind.REFUSED)  # raises, whatever it is
            if not self._frames:
                if not self._wait(session):
                    session.send(Kind.BEAT)
                continue
            kind, number, read = self._frames.popleft()
            session.send(kind, read(), number)
            if kind == Kind.REPORT:
                return

    def _wait(self, session: Session) -> bool:
        """Wait for a frame, or for the receiver to speak or leave; False after ``beat_s``."""
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        poll.register(session.sock, select.POLLIN)
        told = poll.poll(self._beat_s * 1e3)
        if any(fd == self._ear.fileno() for fd, _ in told):
            self._ear.recv(4096)
        return bool(told)
