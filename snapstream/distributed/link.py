"""Links between a leader and its followers: a pair of sockets on one machine, TCP and a shared key between machines.

Frames are those of ``multiprocessing.connection``, what is in them is ``wire.py``'s: nothing is unpickled. Over TCP
both ends prove first that they know the key (a challenge each way, HMAC); until then nothing else of the peer is read.
What follows is neither encrypted nor signed, as the collectives of ``torch.distributed`` beside it are not: ranks
belong on a network that strangers cannot reach.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from time import sleep

from snapstream.distributed.wire import MAX_BYTES, pack, unpack

KEY_VARIABLE = "SNAPSTREAM_RANKS_KEY"  # or that with _FILE: a file that holds it
MIN_KEY = 16  # characters
PROVE_S = 10.0  # for a peer to show that it knows the key
MAX_PROVING = 32  # peers that are asked at the same time
ACCEPT_PAUSE_S = 0.05  # where nobody could be taken in
# A machine that vanishes is noticed after idle + count x interval seconds.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class LinkClosed(Exception):
    """The other end has gone."""


class Link:
    """One end. Threads may send while another receives."""

    def __init__(self, connection: Connection, kinds: Mapping[str, type]) -> None:
        """``kinds``: the messages that may come, by name."""
        self._connection, self._kinds = connection, kinds
        self._sends = threading.Lock()

    def send(self, message: object) -> None:
        """LinkClosed if nobody can receive it."""
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """The same for a message that is packed once for several followers."""
        try:
            with self._sends:
                self._connection.send_bytes(data)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> object:
        """Wait for the next message. LinkClosed at the end; ValueError for bytes that are none."""
        try:
            data = self._connection.recv_bytes(MAX_BYTES)
        except (EOFError, OSError) as error:
            raise LinkClosed(str(error)) from error
        return unpack(data, self._kinds)

    def close(self) -> None:
        """No more messages, either way: the other end is told, and a thread that receives here wakes up.

        The file is closed with the object: a number that another file has got could still be read by that thread.
        """
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)


def pair(kinds: Mapping[str, type]) -> tuple[Link, socket.socket]:
    """A link on this machine, and the socket of its other end, which the other process inherits."""
    ours, theirs = socket.socketpair()
    return Link(Connection(ours.detach()), kinds), theirs


def inherited(fileno: int, kinds: Mapping[str, type]) -> Link:
    """The other end, in the process that inherited it."""
    return Link(Connection(fileno), kinds)


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


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` apart; ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"address is {address!r}; it must be HOST:PORT, such as 10.0.0.1:7690")
    return host.strip("[]"), int(port)


class Door:
    """Takes in followers from other machines, those that know the key."""

    def __init__(self, address: str, key: bytes, kinds: Mapping[str, type], enter: Callable[[Link], None]) -> None:
        """``enter`` is called with each link, on a thread of its own. ValueError for a port that is taken."""
        self._key, self._kinds, self._enter = key, kinds, enter
        host, port = split_address(address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ValueError(f"leader_address is {address!r}; nobody can be waited for there: {error}") from None
        self._proving = threading.BoundedSemaphore(MAX_PROVING)
        self._is_closed = False
        threading.Thread(target=self._wait, name="ranks-door", daemon=True).start()

    def close(self) -> None:
        """Take nobody in any more."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
        self._socket.close()

    def _wait(self) -> None:
        while not self._is_closed:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # closed; or the peer left already, or there are too many descriptors
                sleep(ACCEPT_PAUSE_S)
                continue
            if self._proving.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(peer,), name="ranks-proof", daemon=True).start()
            else:
                peer.close()

    def _admit(self, peer: socket.socket) -> None:
        try:
            connection = _proven(peer, self._key, asks_first=True)
        except (AuthenticationError, EOFError, OSError):
            return
        finally:
            self._proving.release()
        self._enter(Link(connection, self._kinds))


def knock(address: str, key: bytes, kinds: Mapping[str, type]) -> Link:
    """A link to the leader at ``address``. OSError where nobody listens; ValueError where the keys differ."""
    peer = socket.create_connection(split_address(address), PROVE_S)
    peer.settimeout(None)
    try:
        return Link(_proven(peer, key, asks_first=False), kinds)
    except (AuthenticationError, EOFError, ConnectionError):
        raise ValueError(
            f"the leader at {address} was not proven to have the same {KEY_VARIABLE}, or took nobody in"
        ) from None


def _proven(peer: socket.socket, key: bytes, *, asks_first: bool) -> Connection:
    """Both ends prove that they know the key, within ``PROVE_S``, or the connection is closed with an error."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEPALIVE:
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    connection = Connection(os.dup(peer.fileno()))
    patience = threading.Timer(PROVE_S, _hang_up, (peer,))
    patience.daemon = True
    patience.start()
    try:
        for step in (deliver_challenge, answer_challenge) if asks_first else (answer_challenge, deliver_challenge):
            step(connection, key)
    except BaseException:
        connection.close()
        raise
    finally:
        patience.cancel()
        patience.join()
        peer.close()
    return connection


def _hang_up(peer: socket.socket) -> None:
    with suppress(OSError):  # it has gone
        peer.shutdown(socket.SHUT_RDWR)
