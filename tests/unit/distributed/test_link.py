"""Links between ranks: who is let in, who is not, and that nothing of a stranger is read."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from snapstream.distributed import link as links
from snapstream.distributed.link import Door, Link, LinkClosed, knock, pair, shared_key, split_address
from snapstream.distributed.messages import TO_FOLLOWER, TO_LEADER, Failed, Joined, Ready
from snapstream.step import StepPlan
from tests.waiting import HANG_S

KEY = b"a key of sixteen letters"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as own:
        return f"127.0.0.1:{own.getsockname()[1]}"


class Waiting:
    """A door, and who came in."""

    def __init__(self) -> None:
        self.address = free_address()
        self.entered: SimpleQueue[Link] = SimpleQueue()
        self.door = Door(self.address, KEY, TO_LEADER, self.entered.put)


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    own = Waiting()
    yield own
    own.door.close()


def test_messages_go_both_ways_and_closing_tells_the_other_end() -> None:
    ours, socket_ = pair(TO_LEADER)
    with socket_:
        theirs = links.inherited(os.dup(socket_.fileno()), TO_FOLLOWER)
    theirs.send(Ready())
    assert ours.receive() == Ready()
    ours.send(StepPlan(step_id=4))
    assert theirs.receive() == StepPlan(step_id=4)
    ended = threading.Thread(target=lambda: pytest.raises(LinkClosed, theirs.receive))
    ended.start()
    ours.close()
    ended.join(HANG_S)
    assert not ended.is_alive()
    with pytest.raises(LinkClosed):
        for _ in range(2):  # the first may still find room in the socket
            theirs.send(Ready())


def test_who_knows_the_key_comes_in(waiting: Waiting) -> None:
    theirs = knock(waiting.address, KEY, TO_FOLLOWER)
    ours = waiting.entered.get(timeout=HANG_S)
    theirs.send(Joined())
    assert ours.receive() == Joined()
    ours.close()
    theirs.close()


def test_who_has_another_key_does_not(waiting: Waiting) -> None:
    with pytest.raises(ValueError, match="not proven to have the same SNAPSTREAM_RANKS_KEY"):
        knock(waiting.address, b"another key of some letters", TO_FOLLOWER)
    knock(waiting.address, KEY, TO_FOLLOWER)  # the door is still open
    waiting.entered.get(timeout=HANG_S)
    assert waiting.entered.empty()


def test_strangers_are_not_read_and_keep_nobody_out(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, ones that send garbage, huge frames or a pickle: they are hung up on, and others come in."""
    monkeypatch.setattr(links, "PROVE_S", 0.2)
    host, port = split_address(waiting.address)

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, ("/nonexistent/never",)

    bomb = pickle.dumps(Bomb())
    strangers = []
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!i", 2**31 - 1), struct.pack("!i", len(bomb)) + bomb):
        stranger = socket.create_connection((host, port))
        stranger.sendall(said)
        strangers.append(stranger)
    for stranger in strangers:
        stranger.settimeout(HANG_S)
        with stranger, suppress(ConnectionResetError):
            while stranger.recv(1024):
                pass  # our challenge, then the end
    monkeypatch.undo()
    knock(waiting.address, KEY, TO_FOLLOWER).close()
    waiting.entered.get(timeout=HANG_S)


def test_who_is_gone_before_being_taken_in_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [ConnectionAbortedError(), OSError(errno.EMFILE, "too many open files")]

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    own = Waiting()
    knock(own.address, KEY, TO_FOLLOWER).close()
    own.entered.get(timeout=HANG_S)
    own.door.close()
    assert not failures


def test_what_is_no_message_is_an_error_at_the_reader(waiting: Waiting) -> None:
    theirs = knock(waiting.address, KEY, TO_FOLLOWER)
    ours = waiting.entered.get(timeout=HANG_S)
    theirs.send_packed(pickle.dumps(Failed("error", "x")))
    with pytest.raises(ValueError, match="no message"):
        ours.receive()


def test_a_port_that_is_taken_is_refused(waiting: Waiting) -> None:
    with pytest.raises(
        ValueError, match=f"leader_address is '{waiting.address}'; nobody can be waited for there: .*in use"
    ):
        Door(waiting.address, KEY, TO_LEADER, lambda link: None)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:x", "host:0", "host:65536"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match="it must be HOST:PORT"):
        split_address(address)


def test_the_key_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SNAPSTREAM_RANKS_KEY", "short")
    with pytest.raises(ValueError, match="has 5 characters; ranks on other machines need a key of at least 16"):
        shared_key()
    file = tmp_path / "key"
    file.write_text(f"{KEY.decode()}\n")
    monkeypatch.delenv("SNAPSTREAM_RANKS_KEY")
    monkeypatch.setenv("SNAPSTREAM_RANKS_KEY_FILE", str(file))
    assert shared_key() == KEY
