"""Sends one row while it is computed: a queue and a thread.

    engine thread   put(layer 0)  put(layer 1) ...    put_last     finish  |
    own thread         LAYER 0      LAYER 1    ... HIDDEN_STATE    REPORT  +--> RECEIVED: done("")

The thread connects at once and sends heartbeats while it has nothing to send, so that the receiver can tell a prompt
that waits from an engine that is gone; it notices at once when the receiver refuses or leaves. Invariants: ``done`` is
called exactly once, with the reason if it failed, unless ``cancel`` came before. After ``cancel`` a row is never
complete for the receiver: the report is the last frame.
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

from snapstream.config.values import is_loopback
from snapstream.disaggregation.protocol import DEADLINE_S, HEARTBEAT_S, PURPOSE, RowHeader, TransferSettings
from snapstream.types import RowTicket
from snapstream.wire import HANDSHAKE_S, Body, Connection, ConnectionFailed, Kind, WireError, cut, pack

ReadBody = Callable[[], Body]  # waits for the device, where the bytes come from one


class KVSender:
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
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """``done`` is called on another thread. ``context``: of TLS, made from the settings unless given.

        ValueError for a ticket of another machine without TLS.
        """
        if not ticket.uses_tls and not is_loopback(ticket.host):
            raise ValueError(f"the ticket names another machine, {ticket.host}, and no TLS; rows hold prompts")
        self._ticket, self._header, self._settings, self._done = ticket, header, settings, done
        self._deadline_s, self._heartbeat_s, self._context = deadline_s, heartbeat_s, context
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
        """Until the report is out."""
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
        """Wait for a frame, or for the receiver to speak or leave; False after ``heartbeat_s``."""
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        poll.register(connection.sock, select.POLLIN)
        events = poll.poll(self._heartbeat_s * 1e3)
        if any(fd == self._wake_r.fileno() for fd, _ in events):
            self._wake_r.recv(4096)
        return bool(events)
