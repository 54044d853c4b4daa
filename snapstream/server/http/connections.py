"""HTTP/1.1 connections: uvicorn's protocol with time limits and a bound on the number of connections.

            head of a request    complete within ``head_timeout_s`` of the connection, or of its first byte
            body                 ``requests.py``
            answer               the client must read some of it every ``write_timeout_s``
            between requests     uvicorn's keep-alive

Invariants: a connection that breaks a limit is aborted, its request is cancelled, and the reason is counted. Beyond a
limit a new connection replaces the one that has been silent the longest - of its own address, or of any if the process
is full - and is refused only if all are being answered; so idle connections cannot keep others out.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import h11
from pydantic_core import to_json
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from snapstream.server.http.errors import bad_value

SPARE_FILES = 64  # descriptors for everything but connections: files, pipes, the engine
MOST_FILES = 65536
LEAST = 8  # connections, however few descriptors there are


class Connections:
    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._counts: Counter[str] = Counter()  # by address
        self._open: set[GuardedProtocol] = set()
        self._silent: dict[GuardedProtocol, None] = {}  # in the order in which they fell silent

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: GuardedProtocol) -> bool:
        """Add a connection, silent at first. False if there is no room, and no silent connection to close."""
        address = connection.address
        is_full = len(self._open) >= self._most
        if is_full or self._counts[address] >= self._most_per_address:
            victim = next((one for one in self._silent if is_full or one.address == address), None)
            if victim is None:
                return False
            self.leave(victim)
            victim.evict()
        self._open.add(connection)
        self._counts[address] += 1
        self._silent[connection] = None
        return True

    def set_busy(self, connection: GuardedProtocol) -> None:
        """A request of it is being answered."""
        self._silent.pop(connection, None)

    def set_silent(self, connection: GuardedProtocol) -> None:
        if connection in self._open:
            self._silent.setdefault(connection, None)

    def leave(self, connection: GuardedProtocol) -> None:
        """It is closed; may be repeated."""
        if connection in self._open:
            self._open.remove(connection)
            self._silent.pop(connection, None)
            self._counts[connection.address] -= 1
            if not self._counts[connection.address]:
                del self._counts[connection.address]


def raise_file_limit() -> int:
    """Raise the limit of file descriptors as far as allowed, up to ``MOST_FILES``; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connections_for(num_files: int) -> Connections:
    """Limits for a process that may open ``num_files``; one address gets half of the connections."""
    most = max(LEAST, num_files - SPARE_FILES)
    return Connections(most, max(LEAST, most // 2))


UNSENT_BYTES = 65536  # of an answer that the system buffers for a slow reader, besides what is in flight
REASONS = ("silent", "slow_head", "not_reading", "too_many", "crowded_out")


@dataclass(kw_only=True)
class ConnectionGuard:
    """Limits (see the module docstring) and counters of one server's connections."""

    head_timeout_s: float = 20.0
    write_timeout_s: float = 30.0
    connections: Connections = field(default_factory=lambda: connections_for(raise_file_limit()))
    closed: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))  # by reason
    num_malformed: int = 0  # requests that were no HTTP

    def protocol(self) -> type[asyncio.Protocol]:
        """The protocol class for uvicorn's ``Config(http=...)``."""
        return type("Bound", (GuardedProtocol,), {"guard": self})


class JoinedHead(h11.Connection):
    """Returns the head of a response with its first body piece, so that both leave in one write.

    ``flush`` writes a head whose body is not there by the next turn of the event loop.
    """

    def __init__(self, flush: Callable[[], object]) -> None:
        super().__init__(h11.SERVER)
        self._flush, self._head = flush, b""

    def take_head(self) -> bytes:
        """A head that is not written yet, or nothing."""
        head, self._head = self._head, b""
        return head

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # overloads, by kind of event
        data = super().send(event)
        if isinstance(event, h11.Response):
            self._head = data or b""
            self._flush()
            return b""
        return data if data is None else self.take_head() + data


class GuardedProtocol(H11Protocol):
    guard: ConnectionGuard
    conn: JoinedHead
    address = ""
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _has_sent = False  # a byte of a request that is not whole yet
    _num_unsent = 0  # bytes, when it was last looked

    @property
    def is_busy(self) -> bool:
        """A request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        transport.set_write_buffer_limits(high=1, low=0)  # so that unsent bytes are noticed
        sock = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # else the system buffers megabytes for a client that reads nothing
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        # asyncio does so only for sockets with proto IPPROTO_TCP, and those of socket.create_server have 0. Nagle's
        # algorithm and the client's delayed ACK would add 40 ms to every response on a kept-alive connection.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.conn = JoinedHead(lambda: self.loop.call_soon(self._write_head))
        self.app_state = {**self.app_state, ABORT: self.abort}
        if self.guard.connections.enter(self):
            self._head_timer = self.loop.call_later(self.guard.head_timeout_s, self._end_head)
        else:
            self._close("too_many")

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.connections.leave(self)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close it at once; it is silent."""
        self._close("crowded_out")

    def abort(self) -> None:
        """Abort the connection during an answer, so that the client sees that it is incomplete."""
        self.transport.abort()

    # requests

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._has_sent = True
        self._look()
        if not self.is_busy and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.guard.head_timeout_s, self._end_head)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # may begin the next request, if it has come already
        self._look()

    def _look(self) -> None:
        if not self.is_busy:
            self.guard.connections.set_silent(self)
            return
        self.guard.connections.set_busy(self)
        self._has_sent = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_head(self) -> None:
        self._head_timer = None
        if not self.is_busy:
            self._close("slow_head" if self._has_sent else "silent")

    def send_400_response(self, msg: str) -> None:
        """uvicorn's refusal of malformed HTTP, as an ``ApiError`` body."""
        self.guard.num_malformed += 1
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is under way: nothing can be added
            self.transport.abort()
            return
        body = to_json(bad_value(msg, None, "malformed_http").body)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a client that offers HTTP/2, as Java's does, would fill the log. It is answered by HTTP/1.1."""

    # answers

    def _write_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.conn.take_head())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_writing(self) -> None:
        self._num_unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.guard.write_timeout_s, self._end_writing)

    def _end_writing(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size() < self._num_unsent:
            self._watch_writing()  # slow, but it reads
        else:
            self._close("not_reading")

    def _close(self, reason: str) -> None:
        if not self.transport.is_closing() or reason == "not_reading":
            self.guard.closed[reason] += 1
            self.transport.abort()


ABORT = "abort_connection"  # in a request's state: a function that aborts its connection


async def abort_connection(scope: Scope) -> None:
    """Abort a request's connection during its answer, and wait to be cancelled; returns at once without one."""
    abort = scope.get("state", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.Event().wait()
