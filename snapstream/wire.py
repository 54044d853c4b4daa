"""Messages and connections between engine processes: one codec, one framing, one handshake.

Used by the control channel between ranks (``distributed/control.py``) and by KV transfer (``disaggregation/``).

    message    u32 bytes of the head | head: JSON [name, values, [bytes of each array]] | arrays of int64
    frame      u8 kind | u32 number | u64 bytes of the body | blake2b of the body | body
    handshake  listening side   MAGIC, nonce
               connecting side  MAGIC, ticket, nonce, MAC
               listening side   ACCEPTED with a MAC of its own, or REFUSED with the reason

Invariants: nothing is ever unpickled or executed. Before the handshake is over, only byte strings of fixed length are
read. A body is read into memory only after the caller has agreed to its kind and size. The secret is never sent; both
MACs (HMAC-SHA256) cover the purpose, both nonces, the ticket and, with TLS, the listening side's certificate, so that
no proof can be used in another session. Without TLS, what follows the handshake is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import ssl
import struct
import threading
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import cache, partial
from hashlib import blake2b
from time import monotonic, sleep
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from snapstream.config import SELECTORS, Selector

MAGIC = b"SNAPWIR1"
NONCE_BYTES = 32
MAC_BYTES = 32
HANDSHAKE_S = 10.0
DRAIN_S = 10.0  # for a peer to read why it was refused; it leaves then
MAX_PENDING = 64  # connections that are not authenticated yet; more are closed
ACCEPT_PAUSE_S = 0.05  # after a failed accept, such as for want of descriptors
CHECKSUM_BYTES = 16
HEAD = struct.Struct(f">BIQ{CHECKSUM_BYTES}s")  # of a frame: kind, number, bytes of the body, checksum of the body
MAX_REASON_BYTES = 2**10
MAX_JOINED_BYTES = 4096  # of a body that is copied behind its head, so that both leave in one write
_MESSAGE_HEAD = struct.Struct("<I")
_LONG = 16  # integers from which a tuple is sent as an array
_INT64 = "q"

Body = bytes | bytearray | memoryview
Allocate = Callable[[int, int, int], bytearray]  # kind, number, size: memory for a frame's body
Serve = Callable[[socket.socket, bytes, bytes], None]  # owns the socket; the peer's ticket, the proof for ACCEPTED
Read = Callable[[Any, Sequence[tuple[int, ...]]], Any]  # a value of a message's head, and the message's arrays
T = TypeVar("T")


class WireError(ValueError):
    """The peer sent something unexpected; the message is for both sides."""


class ConnectionFailed(Exception):
    """The connection broke or stalled, or the peer refused; with the reason."""


# codec


def pack(message: object) -> bytes:
    """A frozen dataclass as bytes. TypeError for a value that cannot be sent.

    Fields may be numbers, text, bytes, None, tuples, lists, mappings, registered selectors and such dataclasses. Values
    are rebuilt by the usual constructors, with their checks.
    """
    arrays: list[bytes] = []
    values = _plain(message, arrays)
    head = json.dumps([type(message).__name__, values, [len(own) for own in arrays]], separators=(",", ":")).encode()
    return b"".join((_MESSAGE_HEAD.pack(len(head)), head, *arrays))


def unpack(data: bytes | bytearray, kinds: Mapping[str, type], *, is_signed: bool = True) -> object:
    """The message in ``data``, one of ``kinds`` by name. WireError, and no other error, for other bytes, and for
    integers below 0 unless ``is_signed``."""
    parse_int = int if is_signed else _as_count
    try:
        (length,) = _MESSAGE_HEAD.unpack_from(data)
        start = _MESSAGE_HEAD.size + length
        name, values, sizes = json.loads(data[_MESSAGE_HEAD.size : start], parse_int=parse_int)
        arrays = []
        for size in sizes:
            own = array(_INT64)
            own.frombytes(data[start : start + size])
            if not is_signed and own and min(own) < 0:
                raise ValueError(f"{min(own)} is not a count")
            arrays.append(tuple(own))
            start += size
        if start != len(data):
            raise ValueError(f"{len(data)} bytes were received, and the message has {start}")
        return reader(kinds[name])(values, arrays)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
        reason = f"{type(error).__name__}: {str(error)[:250]}"
        raise WireError(f"{len(data)} bytes that are not a valid message: {reason}") from None


def unpack_one(data: bytes | bytearray, kind: type[T], *, is_signed: bool = True) -> T:
    """As ``unpack``, for one kind of message."""
    return cast(T, unpack(data, {kind.__name__: kind}, is_signed=is_signed))


def _as_count(digits: str) -> int:
    if digits.startswith("-"):
        raise ValueError(f"{digits:.40} is not a count")
    return int(digits)


def _plain(value: Any, arrays: list[bytes]) -> Any:
    """``value`` in JSON types; long tuples of integers are moved to ``arrays``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Selector) and value.name in SELECTORS and SELECTORS.get(value.name) is type(value):
        return [value.name, _values(value, arrays)]
    if is_dataclass(value) and not isinstance(value, Selector):
        return _values(value, arrays)
    if isinstance(value, Mapping):
        return [[_plain(key, arrays), _plain(own, arrays)] for key, own in value.items()]
    if isinstance(value, (tuple, list)):
        if len(value) >= _LONG and all(type(own) is int and own.bit_length() < 64 for own in value):
            arrays.append(array(_INT64, value).tobytes())
            return {"array": len(arrays) - 1}
        return [_plain(own, arrays) for own in value]
    raise TypeError(f"{type(value).__name__} cannot be sent to another process: {value!r}")


def _values(message: Any, arrays: list[bytes]) -> list[Any]:
    return [_plain(getattr(message, name), arrays) for name in _field_names(cast(Any, type(message)))]


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(own.name for own in fields(kind))


@cache
def reader(kind: Any) -> Read:
    """A function that reads values of a type; TypeError for unsupported types."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Selector:
        return _read_selector
    if is_dataclass(kind):
        made, hints = cast(type, kind), get_type_hints(kind)
        names = _field_names(made)
        return partial(_read_fields, made, names, tuple(hints[name] for name in names))
    if kind in (NoneType, bool, int, float, str):
        return partial(_read_scalar, kind)
    if kind is bytes:
        return _read_bytes
    if origin is Literal:
        return partial(_read_literal, args)
    if origin in (Union, UnionType):
        return partial(_read_union, tuple(reader(own) for own in args))
    if origin is tuple and len(args) == 2 and args[1] is ... or origin is Sequence:
        return partial(_read_items, tuple, reader(args[0]))
    if origin is list:
        return partial(_read_items, list, reader(args[0]))
    if origin is tuple:
        return partial(_read_fixed, tuple(reader(own) for own in args))
    if origin is Mapping:
        return partial(_read_mapping, reader(args[0]), reader(args[1]))
    raise TypeError(f"a message cannot have a {kind}")


def _read_bytes(value: Any, arrays: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is not base64")
    return b64decode(value, validate=True)


def _read_fields(kind: type, names: Sequence[str], kinds: Sequence[Any], value: Any, arrays: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"{kind.__name__} is {value!r:.80}; it must be a list of its fields")
    return kind(**{name: reader(own)(item, arrays) for name, own, item in zip(names, kinds, value, strict=True)})


def _read_scalar(kind: type, value: Any, arrays: Any) -> Any:
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise ValueError(f"{value!r:.80} is not a {kind.__name__}")


def _read_literal(names: Sequence[Any], value: Any, arrays: Any) -> Any:
    if value not in names:
        raise ValueError(f"{value!r:.80} is none of {names}")
    return value


def _read_union(readers: Sequence[Read], value: Any, arrays: Any) -> Any:
    reasons = []
    for read in readers:
        try:
            return read(value, arrays)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError("; ".join(reasons))


def _read_items(make: Callable[[Any], Any], read: Read, value: Any, arrays: Sequence[tuple[int, ...]]) -> Any:
    if isinstance(value, dict):
        value = arrays[value["array"]]
        if read is reader(int):
            return make(value)
    elif not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return make(read(own, arrays) for own in value)


def _read_fixed(readers: Sequence[Read], value: Any, arrays: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return tuple(read(own, arrays) for read, own in zip(readers, value, strict=True))


def _read_mapping(read_key: Read, read_own: Read, value: Any, arrays: Any) -> dict[Any, Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list of pairs")
    return {read_key(key, arrays): read_own(own, arrays) for key, own in value}


def _read_selector(value: Any, arrays: Any) -> Selector:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r:.80} is not a selector: a name and settings")
    name, values = value
    kind = SELECTORS.get(name)
    made: Selector = reader(kind)(values, arrays) if is_dataclass(kind) else kind()
    return made


# frames and connections


class Kind(IntEnum):
    """Of a frame."""

    MESSAGE = 0  # of the control channel between ranks
    HEADER = 1  # this and the following but the last: of a KV transfer
    LAYER = 2  # numbered by layer
    HIDDEN_STATE = 3
    REPORT = 4
    HEARTBEAT = 5
    REFUSED = 6
    RECEIVED = 7
    ACCEPTED = 8  # the listening side's half of the handshake


def checksum(body: Body) -> bytes:
    """hashlib releases the GIL meanwhile."""
    return blake2b(body, digest_size=CHECKSUM_BYTES).digest()


def frame_head(kind: Kind, number: int, body: Body) -> bytes:
    return HEAD.pack(kind, number, len(body), checksum(body))


def _check_body(kind: int, number: int, body: Body, expected: bytes) -> None:
    """WireError for a damaged body."""
    found = checksum(body)
    if found != expected:
        raise WireError(
            f"the {len(body):,} bytes of {Kind(kind).name} {number} are damaged: their checksum is {found.hex()}, and "
            f"the sender's {expected.hex()}"
        )


def mac(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    """HMAC-SHA256; ``purpose`` keeps a MAC made for one use from serving another."""
    return hmac.digest(secret, b"snapstream " + purpose + b"\0" + data, "sha256")


class Connection:
    """A connected socket. One thread may send while another receives; ``cut`` may be called from any."""

    def __init__(
        self, sock: socket.socket, deadline_s: float | None = None, binding: bytes = b"", *, within_s: float = 0.0
    ) -> None:
        """``deadline_s``: without a byte sent or received, None: no limit. ``within_s``: for everything together.
        ``binding``: digest of the listening side's certificate, with TLS.
        """
        self.sock, self._binding = sock, binding
        self._deadline_s = within_s or deadline_s
        self._until = monotonic() + within_s if within_s else None
        sock.settimeout(self._deadline_s)

    def prove(self, secret: bytes, purpose: bytes, ticket: bytes = b"") -> None:
        """The connecting side's half of the handshake. ConnectionFailed with the reason of a refusal; WireError for a
        peer that does not know the secret."""
        hello = self.read(len(MAGIC) + NONCE_BYTES)
        if hello[: len(MAGIC)] != MAGIC:
            raise WireError("the listening side is no snapstream engine, or runs another version")
        own = os.urandom(NONCE_BYTES)
        proof = bytes(hello[len(MAGIC) :]) + own + ticket + self._binding
        self.write(MAGIC + ticket + own + mac(secret, purpose + b" connecting", proof))
        if not hmac.compare_digest(self.answer(Kind.ACCEPTED), mac(secret, purpose + b" listening", proof)):
            raise WireError("the listening side does not know the shared secret")

    def greet(self, secret: bytes, purpose: bytes, ticket_bytes: int) -> tuple[bytes, bytes]:
        """The listening side's half: the peer's ticket, and the proof to send as ACCEPTED. WireError for a peer that
        does not know the secret."""
        nonce = os.urandom(NONCE_BYTES)
        self.write(MAGIC + nonce)
        hello = bytes(self.read(len(MAGIC) + ticket_bytes + NONCE_BYTES + MAC_BYTES))
        if hello[: len(MAGIC)] != MAGIC:
            raise WireError("the connecting side is no snapstream engine, or runs another version")
        ticket, own = hello[len(MAGIC) :][:ticket_bytes], hello[len(MAGIC) + ticket_bytes :][:NONCE_BYTES]
        proof = nonce + own + ticket + self._binding
        if not hmac.compare_digest(hello[-MAC_BYTES:], mac(secret, purpose + b" connecting", proof)):
            raise WireError("the connecting side does not know the shared secret")
        return ticket, mac(secret, purpose + b" listening", proof)

    def send(self, kind: Kind, body: Body = b"", number: int = 0) -> None:
        head = frame_head(kind, number, body)
        if len(body) <= MAX_JOINED_BYTES:
            self.write(head + body)
        else:
            self.write(head)
            self.write(body)

    def receive(self, allocate: Allocate) -> bytearray:
        """Read one frame into the memory that ``allocate`` returns for it. WireError for a damaged one."""
        kind, number, size, expected = HEAD.unpack(self.read(HEAD.size))
        body = allocate(kind, number, size)
        self._fill(memoryview(body))
        _check_body(kind, number, body, expected)
        return body

    def answer(self, wanted: Kind) -> bytes:
        """The body of the listening side's next frame. ConnectionFailed with its reason if it refuses."""
        kind, number, size, expected = HEAD.unpack(self.read(HEAD.size))
        if size > MAX_REASON_BYTES or kind not in (wanted, Kind.REFUSED):
            raise WireError(f"the peer answered with a frame of kind {kind} and {size} bytes")
        body = bytes(self.read(size))
        _check_body(kind, number, body, expected)
        if kind == Kind.REFUSED:
            raise ConnectionFailed(f"the peer refused: {body.decode(errors='replace')}")
        return body

    def refuse(self, reason: str) -> None:
        """Send the reason, and wait a while for the peer to leave: closing on unread bytes would discard the reason."""
        until = self._until or monotonic() + DRAIN_S
        with suppress(OSError, ConnectionFailed):
            self.send(Kind.REFUSED, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode())
            while (left := until - monotonic()) > 0:
                self.sock.settimeout(left)
                if not self.sock.recv(2**16):
                    return

    def is_readable(self) -> bool:
        """Whether the peer has sent something, or closed the connection."""
        pending = isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(self.sock, select.POLLIN)
        return pending or bool(poll.poll(0))

    def read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def write(self, data: Body) -> None:
        """Send all of it; the timeout of ``sendall`` would be for the whole."""
        view = memoryview(data)
        while view:
            view = view[self._within(partial(self.sock.send, view)) :]

    def cut(self) -> None:
        """Shut the connection down: threads that read or write here wake up."""
        cut(self.sock)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._within(partial(self.sock.recv_into, view))
            if not count:
                raise ConnectionFailed("the peer closed the connection")
            view = view[count:]

    def _within(self, call: Callable[[], int]) -> int:
        try:
            if self._until is not None:
                left = self._until - monotonic()
                if left <= 0:
                    raise TimeoutError
                self.sock.settimeout(left)
            return call()
        except TimeoutError:
            raise ConnectionFailed(f"nothing was sent or received for {self._deadline_s:g} s") from None
        except OSError as error:
            raise ConnectionFailed(f"the connection broke: {error}") from None


def cut(sock: socket.socket) -> None:
    """Shut a socket down, which wakes threads that wait for it; closing it would not."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Listener:
    """Accepts connections and authenticates their peers, each on its own thread."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        purpose: bytes,
        serve: Serve,
        *,
        ticket_bytes: int = 0,
        context: ssl.SSLContext | None = None,
        binding: bytes = b"",
        handshake_s: float | None = None,
    ) -> None:
        """``serve`` is called, on the connection's thread, for each peer that knows the secret."""
        self._socket, self._secret, self._purpose, self._serve = sock, secret, purpose, serve
        self._ticket_bytes, self._context, self._binding = ticket_bytes, context, binding
        self._handshake_s = handshake_s
        self.port: int = sock.getsockname()[1]
        self._lock = threading.Lock()  # of the two below
        self._pending: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and cut those that are not authenticated."""
        with self._lock:
            self._is_closed = True
            pending = list(self._pending)
        for sock in (self._socket, *pending):
            cut(sock)  # wakes the thread that waits for it
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed; or the peer has left, or there are too many descriptors
                sleep(ACCEPT_PAUSE_S)
                continue
            with self._lock:
                has_room = not self._is_closed and len(self._pending) < MAX_PENDING
                if has_room:
                    self._pending.add(sock)
            try:
                if has_room:
                    threading.Thread(target=self._admit, args=(sock,), name="connection", daemon=True).start()
                    continue
            except RuntimeError:  # no more threads
                self._settle(sock)
            sock.close()

    def _admit(self, sock: socket.socket) -> None:
        within_s = HANDSHAKE_S if self._handshake_s is None else self._handshake_s
        try:
            sock.settimeout(within_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._wrap(sock, self._context)
            connection = Connection(sock, binding=self._binding, within_s=within_s)
            try:
                ticket, proof = connection.greet(self._secret, self._purpose, self._ticket_bytes)
            except WireError as error:
                connection.refuse(str(error))
                raise
        except (OSError, ConnectionFailed, WireError):
            self._settle(sock)
            sock.close()
            return
        self._settle(sock)
        self._serve(sock, ticket, proof)

    def _wrap(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """The same connection with TLS, not authenticated yet. The timeout of ``do_handshake`` is for the whole."""
        with self._lock:
            sock = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            self._pending.discard(plain)
            self._pending.add(sock)
        try:
            sock.do_handshake()
        except OSError:
            self._settle(sock)
            sock.close()
            raise
        return sock

    def _settle(self, sock: socket.socket) -> None:
        """It is authenticated, or closed."""
        with self._lock:
            self._pending.discard(sock)
