"""The control channel between rank 0 and a worker rank: its messages, and how a worker of another machine connects.

    worker: Hello ---> rank 0: Task ---> worker: Joined, later Ready ---> rank 0: StepPlan, StepPlan, ...

Between plans rank 0 may send requests for the prefix cache's files (``ReadBlocks``, ``WriteBlock``, ``ForgetBlocks``);
the worker serves them between steps and answers with ``BlocksDone``. A worker of another machine that cannot be a
rank gets ``Refused`` in place of ``Task``. A worker that cannot go on sends ``Failed`` as its last message. There is no
message for the end: a process that finds its channel closed ends.

On one machine the channel is a pair of sockets; between machines it is TCP, and both sides prove first that they know a
shared key. Codec, framing and handshake: ``snapstream/wire.py``. After the handshake nothing is encrypted or signed, as
in the collectives of ``torch.distributed``: ranks belong on a network that others cannot reach.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from snapstream.config import EngineConfig
from snapstream.config.values import split_address
from snapstream.step import StepPlan, StoredBlock
from snapstream.wire import HANDSHAKE_S, Connection, ConnectionFailed, Kind, Listener, WireError, pack, unpack

MAX_BYTES = 2**28  # of a message: a plan holds the token ids of its prompts, 8 bytes each
KEY_VARIABLE = "SNAPSTREAM_RANKS_KEY"  # or that with _FILE: a file that holds it
MIN_KEY = 16  # characters
PURPOSE = b"ranks"  # of the handshake
# A machine that vanishes is noticed after idle + count x interval seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker rank on itself. Ranks of other versions might compute other bits."""

    version: str  # of snapstream
    torch: str  # its version
    host: str
    pid: int
    fingerprint: str = ""  # of the checkpoint on another machine
    rank: int = 0  # from RANK; 0: the next free one


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a worker needs to be a rank of the engine."""

    rank: int
    model: str  # the checkpoint's folder at rank 0; a worker on another machine has its own
    fingerprint: str  # of the checkpoint: it must be the same one
    config: EngineConfig
    rendezvous: str  # of the process group: file://PATH, or tcp://HOST:PORT/PREFIX of a TCPStore
    num_threads: int  # of torch; 0: its default
    checks_ranks: bool = False  # compare sampled tokens after every step


@dataclass(frozen=True, slots=True)
class Refused:
    """Rank 0 does not admit this worker, and waits for another one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker has the same checkpoint and can do its task; next it joins the process group."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's runner is built and warm."""


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Fill blocks of the prefix cache from the files of this rank."""

    number: int  # of this request, for the answer
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write a block, which must not change until the answer has come."""

    number: int
    block: StoredBlock


@dataclass(frozen=True, slots=True)
class ForgetBlocks:
    """Delete the files of a namespace; of all, if ``place`` is empty."""

    number: int
    place: str


@dataclass(frozen=True, slots=True)
class BlocksDone:
    """The answer to one of the three."""

    number: int
    count: int  # of the first blocks that could be read


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker process ends. "value": it does not support the settings."""

    kind: Literal["value", "error"]
    reason: str


TO_WORKER: dict[str, type] = {
    kind.__name__: kind for kind in (Task, Refused, StepPlan, ReadBlocks, WriteBlock, ForgetBlocks)
}
TO_RANK_0: dict[str, type] = {kind.__name__: kind for kind in (Hello, Joined, Ready, BlocksDone, Failed)}


class ControlChannel:
    """One end. Threads may send while another receives."""

    def __init__(self, sock: socket.socket, kinds: Mapping[str, type]) -> None:
        """``kinds``: the messages that may be received, by name."""
        self._connection, self._kinds = Connection(sock), kinds
        self._sends = threading.Lock()

    def send(self, message: object) -> None:
        """ConnectionFailed if it cannot be sent."""
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """The same for a message that is packed once for several ranks."""
        with self._sends:
            self._connection.send(Kind.MESSAGE, data)

    def receive(self) -> object:
        """Wait for the next message. ConnectionFailed at the end; ValueError for bytes that are not a message."""
        return unpack(self._connection.receive(_room), self._kinds)

    def close(self) -> None:
        """End the channel both ways; a thread that receives here wakes up.

        The descriptor is closed with the object: a reused number could still be read by that thread.
        """
        self._connection.cut()


def _room(kind: int, number: int, size: int) -> bytearray:
    if kind != Kind.MESSAGE or size > MAX_BYTES:
        raise WireError(f"a frame of kind {kind} and {size} bytes; a message is of kind 0 and at most {MAX_BYTES}")
    return bytearray(size)


def pair(kinds: Mapping[str, type]) -> tuple[ControlChannel, socket.socket]:
    """A channel on this machine, and the socket of its other end, which the other process inherits."""
    ours, theirs = socket.socketpair()
    return ControlChannel(ours, kinds), theirs


def inherited(fileno: int, kinds: Mapping[str, type]) -> ControlChannel:
    """The other end, in the process that inherited it."""
    return ControlChannel(socket.socket(fileno=fileno), kinds)


def shared_key() -> bytes:
    """The key of this engine's ranks, from the environment; ValueError where there is none, or a short one."""
    key, file = os.environ.get(KEY_VARIABLE, ""), os.environ.get(f"{KEY_VARIABLE}_FILE", "")
    if file and not key:
        with open(file, encoding="utf-8") as lines:
            key = lines.read().strip()
    if len(key) < MIN_KEY:
        raise ValueError(
            f"{KEY_VARIABLE} has {len(key)} characters; ranks on other machines need a key of at least {MIN_KEY}, the "
            f"same everywhere, in that variable or in a file that {KEY_VARIABLE}_FILE names"
        )
    return key.encode()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine; ValueError for a port that is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"master_addr is {f'{host}:{port}'!r}; cannot listen there: {error}") from None


def accept_workers(
    host: str, key: bytes, kinds: Mapping[str, type], admit: Callable[[ControlChannel], None]
) -> Listener:
    """Listen at a free port of ``host``; ``admit`` is called, on other threads, with each peer that knows the key."""

    def serve(sock: socket.socket, ticket: bytes, proof: bytes) -> None:
        try:
            Connection(sock).send(Kind.ACCEPTED, proof)
        except ConnectionFailed:
            sock.close()
            return
        _keep_alive(sock)
        admit(ControlChannel(sock, kinds))

    return Listener(listen(host, 0), key, PURPOSE, serve)


def connect(address: str, key: bytes, kinds: Mapping[str, type]) -> ControlChannel:
    """A channel to rank 0 at ``address``. OSError if nothing listens there; ValueError if the keys differ."""
    sock = socket.create_connection(split_address(address), HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(sock)
    try:
        Connection(sock, within_s=HANDSHAKE_S).prove(key, PURPOSE)
    except (ConnectionFailed, WireError) as error:
        sock.close()
        raise ValueError(
            f"rank 0 at {address} did not prove that it has the same {KEY_VARIABLE}, or admits no worker: {error}"
        ) from None
    return ControlChannel(sock, kinds)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
