"""One connection between two engines: the handshake that proves both know the secret, and whole frames either way.

    receiver  magic, nonce                        sender  magic, ticket, nonce, MAC of all of it
    receiver  ACCEPTED with a MAC of its own, or REFUSED with the reason

Both MACs cover both nonces, the ticket and, with TLS, the receiver's certificate: a proof cannot be used in another
session. The secret itself never travels. Progress counts: a peer that takes or gives nothing for ``deadline_s`` is
given up, one that is slow is not.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from snapstream.transfer.wire import HEAD, MAX_REASON_BYTES, Kind, TransferFailed, WireError, frame_head

MAGIC = b"SNAPROW1"
NONCE_BYTES = 32
MAC_BYTES = 32
DEADLINE_S = 30.0  # without a byte or a beat
BEAT_S = 5.0  # between two signs of life of a sender that has nothing to send
HANDSHAKE_S = 10.0

Room = Callable[[int, int, int], bytearray]  # kind, number, size: memory for a frame's body


class Session:
    """A connected socket; used by one thread, but for ``cut``."""

    def __init__(self, sock: socket.socket, deadline_s: float = DEADLINE_S, binding: bytes = b"") -> None:
        """``binding``: digest of the receiver's certificate, where there is TLS."""
        self.sock, self._binding = sock, binding
        self._deadline_s = deadline_s
        sock.settimeout(deadline_s)

    def prove(self, secret: bytes, ticket: bytes) -> None:
        """The sender's half. TransferFailed with the receiver's reason; WireError for one that knows no secret."""
        hello = self.read(len(MAGIC) + NONCE_BYTES)
        if hello[: len(MAGIC)] != MAGIC:
            raise WireError("the other side is no receiver of rows, or speaks another version")
        own = os.urandom(NONCE_BYTES)
        proof = bytes(hello[len(MAGIC) :]) + own + ticket + self._binding
        self.write(MAGIC + ticket + own + _mac(secret, b"sender", proof))
        if not hmac.compare_digest(self.answer(Kind.ACCEPTED), _mac(secret, b"receiver", proof)):
            raise WireError("the receiver does not know the transfer secret")

    def greet(self, secret: bytes, ticket_bytes: int) -> tuple[bytes, bytes]:
        """The receiver's half: the ticket that the sender names, and the proof to accept it with. WireError."""
        nonce = os.urandom(NONCE_BYTES)
        self.write(MAGIC + nonce)
        hello = bytes(self.read(len(MAGIC) + ticket_bytes + NONCE_BYTES + MAC_BYTES))
        if hello[: len(MAGIC)] != MAGIC:
            raise WireError("the other side is no sender of rows, or speaks another version")
        ticket, own = hello[len(MAGIC) :][:ticket_bytes], hello[len(MAGIC) + ticket_bytes :][:NONCE_BYTES]
        proof = nonce + own + ticket + self._binding
        if not hmac.compare_digest(hello[-MAC_BYTES:], _mac(secret, b"sender", proof)):
            raise WireError("the sender does not know the transfer secret")
        return ticket, _mac(secret, b"receiver", proof)

    def send(self, kind: Kind, body: bytes | bytearray | memoryview = b"", number: int = 0) -> None:
        self.write(frame_head(kind, number, len(body)))
        self.write(body)

    def receive(self, room: Room) -> None:
        """Read one frame into the memory that ``room`` gives for it."""
        kind, number, size = HEAD.unpack(self.read(HEAD.size))
        self._fill(memoryview(room(kind, number, size)))

    def answer(self, wanted: Kind) -> bytes:
        """The body of the receiver's next frame. TransferFailed with its reason if it refuses."""
        kind, _, size = HEAD.unpack(self.read(HEAD.size))
        if size > MAX_REASON_BYTES or kind not in (wanted, Kind.REFUSED):
            raise WireError(f"the receiver answered with a frame of kind {kind} and {size} bytes")
        body = bytes(self.read(size))
        if kind == Kind.REFUSED:
            raise TransferFailed(f"the receiver refused the row: {body.decode(errors='replace')}")
        return body

    def refuse(self, reason: str) -> None:
        """Say why, and read no further; the sender sees it before its next frame."""
        body = reason.encode()[:MAX_REASON_BYTES]
        self.send(Kind.REFUSED, body.decode(errors="ignore").encode())

    def is_readable(self) -> bool:
        """Whether the other side has said something, or has left."""
        pending = isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(self.sock, select.POLLIN)
        return pending or bool(poll.poll(0))

    def read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """All of it; ``sendall`` would count its timeout over the whole."""
        view = memoryview(data)
        while view:
            view = view[self._within(partial(self.sock.send, view)) :]

    def cut(self) -> None:
        """End it from any thread: whoever reads or writes here wakes up."""
        cut(self.sock)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._within(partial(self.sock.recv_into, view))
            if not count:
                raise TransferFailed("the connection was closed before the row was whole")
            view = view[count:]

    def _within(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except TimeoutError:
            raise TransferFailed(f"nothing moved for {self._deadline_s:g} s") from None
        except OSError as error:
            raise TransferFailed(f"the connection broke: {error}") from None


def cut(sock: socket.socket) -> None:
    """Shut a socket down, whoever waits on it; closing alone would wake nobody."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _mac(secret: bytes, side: bytes, proof: bytes) -> bytes:
    return hmac.digest(secret, b"snapstream row " + side + b"\0" + proof, "sha256")
