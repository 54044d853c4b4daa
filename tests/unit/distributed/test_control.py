"""Control messages between ranks come out as they were packed, other bytes are refused, and so are peers without the
key."""

from __future__ import annotations

import errno
import os
import pickle
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from snapstream import wire
from snapstream.config import (
    EngineConfig,
    KVBudget,
    ParallelConfig,
    PrefixStoreConfig,
    WeightFormats,
)
from snapstream.config.values import split_address
from snapstream.distributed.control import (
    TO_RANK_0,
    TO_WORKER,
    BlocksDone,
    ControlChannel,
    Failed,
    ForgetBlocks,
    Hello,
    Joined,
    ReadBlocks,
    Ready,
    Task,
    WriteBlock,
    accept_workers,
    connect,
    inherited,
    listen,
    pair,
    shared_key,
)
from snapstream.kv.selectors.diverse import Diverse
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.step import JobSpec, PrefillEntry, PrefixMoves, StepPlan, StoredBlock, UnitRange
from snapstream.types import Grammar, SamplingParams
from snapstream.wire import ConnectionFailed, Kind, WireError, frame_head, pack, unpack
from tests.waiting import HANG_S

CONFIG = EngineConfig(
    budget=KVBudget.of(64),
    max_model_len=4096,
    selector=Hops(num_hops=2),
    parallel=ParallelConfig(size=4, experts="ep"),
    weights=WeightFormats.of("int4"),
    kv_dtype="auto",
)
STORING = EngineConfig(
    budget=KVBudget.of(64), max_model_len=64, prefix_store=PrefixStoreConfig(num_bytes=2**20), prefix_blocks=3,
)  # fmt: skip
SAMPLING = SamplingParams(
    n=2, temperature=1, logit_bias={3: -1.5, 7: 100}, stop=["a", "\ud800é"], stop_token_ids=[5], seed=-(2**63),
    logprobs=2, grammar=Grammar.json_object(), return_kept="bitmap",
)  # fmt: skip


def entry(count: int, **more: object) -> PrefillEntry:
    return PrefillEntry(
        request_id="r-1", token_ids=tuple(range(count)), rows=(0, 3), seeds=(2**63 - 1, 0), sampling=SAMPLING,
        budget=KVBudget.of(40), selector=Diverse(share=0.25), **more,
    )  # fmt: skip


def plan(count: int) -> StepPlan:
    long = entry(count, prefix=PrefixMoves(block_len=8, saved=(1, 2)))
    return StepPlan(
        step_id=7,
        dropped_jobs=(1,),
        opened_jobs=(JobSpec(job_id=2, staging_start=0, entries=(long, entry(1)), chunk_len=512),),
        units=(UnitRange(2, 0, 3),),
        decode_rows=tuple(range(count)),
    )


MESSAGES = [
    Hello(version="1", torch="2", host="h", pid=3),
    Task(rank=1, model="/m", fingerprint="f", config=CONFIG, rendezvous="file:///x", num_threads=2),
    Task(rank=3, model="", fingerprint="", config=STORING, rendezvous="", num_threads=0, checks_ranks=True),
    Joined(),
    Ready(),
    Failed("value", "why\nnot"),
    ReadBlocks(3, (StoredBlock(5, "a/b", bytes(range(256))), StoredBlock(6, "c", b""))),
    WriteBlock(4, StoredBlock(1, "a", b"\xff\x00")),
    ForgetBlocks(5, ""),
    BlocksDone(3, 2),
    StepPlan(step_id=0),
    plan(3),
    plan(5000),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_out_as_they_went_in(message: object) -> None:
    found = unpack(pack(message), {**TO_WORKER, **TO_RANK_0})
    assert found == message and type(found) is type(message)


def test_token_ids_take_eight_bytes_each() -> None:
    assert len(pack(plan(5000))) < 3 * 8 * 5000 + 3000


def test_only_messages_of_that_direction_are_read() -> None:
    with pytest.raises(ValueError, match="KeyError: 'Joined'"):
        unpack(pack(Joined()), TO_WORKER)


def test_what_is_not_plain_is_not_sent() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(SnapKV):
        """A selector that other processes do not know."""

    for value in (Own(), object(), bytearray(b"x")):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            pack(Failed("error", value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", "1"), ("rank", None), ("rank", 1.0), ("rank", True), ("config", None), ("config", [1]), ("model", 3)],
)
def test_values_of_a_wrong_type_are_refused(field: str, value: object) -> None:
    task = Task(rank=1, model="", fingerprint="", config=CONFIG, rendezvous="", num_threads=0)
    object.__setattr__(task, field, value)
    with pytest.raises(ValueError, match="not a valid message"):
        unpack(pack(task), TO_WORKER)


def test_a_number_that_no_float_holds_is_refused() -> None:
    selector = Diverse(share=0.25)
    object.__setattr__(selector, "share", 10**400)
    task = Task(
        rank=1, model="", fingerprint="", config=replace(CONFIG, selector=selector), rendezvous="", num_threads=0
    )
    with pytest.raises(ValueError, match="not a valid message: OverflowError"):
        unpack(pack(task), TO_WORKER)


def test_values_that_no_engine_could_have_are_refused() -> None:
    task = Task(rank=1, model="", fingerprint="", config=CONFIG, rendezvous="", num_threads=0)
    object.__setattr__(task.config, "dtype", "int3")
    try:
        with pytest.raises(ValueError, match="int3"):
            unpack(pack(task), TO_WORKER)
    finally:
        object.__setattr__(task.config, "dtype", "float32")


def test_bytes_that_are_cut_doubled_or_changed_are_refused_or_read_and_never_more() -> None:
    """No other error, whatever comes; nothing is executed, because nothing but JSON and numbers is ever read."""
    rng, whole = random.Random(5), pack(plan(40))
    kinds = {**TO_WORKER, **TO_RANK_0}
    for bad in (b"", b"\0", whole[:-1], whole + b"\0", whole + whole, whole[:40]):
        with pytest.raises(ValueError, match="not a valid message"):
            unpack(bad, kinds)
    for _ in range(3000):
        bytes_ = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            bytes_[rng.randrange(len(bytes_))] = rng.randrange(256)
        try:
            found = unpack(bytes(bytes_), kinds)
        except ValueError:
            continue
        assert isinstance(found, StepPlan)


# Channels between ranks: who is admitted, who is not, and that nothing of a stranger is read.

KEY = b"a key of sixteen letters"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as own:
        return f"127.0.0.1:{own.getsockname()[1]}"


class Waiting:
    """A listener, and the workers that it admitted."""

    def __init__(self) -> None:
        self.entered: SimpleQueue[ControlChannel] = SimpleQueue()
        self.listener = accept_workers("127.0.0.1", KEY, TO_RANK_0, self.entered.put)
        self.address = f"127.0.0.1:{self.listener.port}"


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    own = Waiting()
    yield own
    own.listener.close()


def test_messages_go_both_ways_and_closing_tells_the_other_end() -> None:
    ours, socket_ = pair(TO_RANK_0)
    with socket_:
        theirs = inherited(os.dup(socket_.fileno()), TO_WORKER)
    theirs.send(Ready())
    assert ours.receive() == Ready()
    ours.send(StepPlan(step_id=4))
    assert theirs.receive() == StepPlan(step_id=4)
    ended = threading.Thread(target=lambda: pytest.raises(ConnectionFailed, theirs.receive))
    ended.start()
    ours.close()
    ended.join(HANG_S)
    assert not ended.is_alive()
    with pytest.raises(ConnectionFailed):
        for _ in range(2):  # the first may still find room in the socket
            theirs.send(Ready())


def test_who_knows_the_key_comes_in(waiting: Waiting) -> None:
    theirs = connect(waiting.address, KEY, TO_WORKER)
    ours = waiting.entered.get(timeout=HANG_S)
    theirs.send(Joined())
    assert ours.receive() == Joined()
    ours.close()
    theirs.close()


def test_who_has_another_key_does_not(waiting: Waiting) -> None:
    with pytest.raises(ValueError, match="did not prove that it has the same SNAPSTREAM_RANKS_KEY"):
        connect(waiting.address, b"another key of some letters", TO_WORKER)
    connect(waiting.address, KEY, TO_WORKER)  # the listener still admits others
    waiting.entered.get(timeout=HANG_S)
    assert waiting.entered.empty()


def test_strangers_are_not_read_and_keep_nobody_out(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, ones that send garbage, huge frames or a pickle: they are hung up on, and others come in."""
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.2)
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
    connect(waiting.address, KEY, TO_WORKER).close()
    waiting.entered.get(timeout=HANG_S)


def test_who_is_gone_before_being_taken_in_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [ConnectionAbortedError(), OSError(errno.EMFILE, "too many open files")]

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    own = Waiting()
    connect(own.address, KEY, TO_WORKER).close()
    own.entered.get(timeout=HANG_S)
    own.listener.close()
    assert not failures


def test_what_is_no_message_is_an_error_at_the_reader(waiting: Waiting) -> None:
    theirs = connect(waiting.address, KEY, TO_WORKER)
    ours = waiting.entered.get(timeout=HANG_S)
    theirs.send_packed(pickle.dumps(Failed("error", "x")))
    with pytest.raises(ValueError, match="not a valid message"):
        ours.receive()


def test_a_damaged_or_oversized_frame_is_an_error_at_the_reader() -> None:
    for data in (
        frame_head(Kind.MESSAGE, 0, pack(Ready())) + pack(Joined()),
        wire.HEAD.pack(Kind.MESSAGE, 0, 2**40, bytes(wire.CHECKSUM_BYTES)),
        frame_head(Kind.LAYER, 0, pack(Ready())) + pack(Ready()),
    ):
        ours, theirs = pair(TO_RANK_0)
        with theirs:
            theirs.sendall(data)
            with pytest.raises(WireError, match="are damaged|a frame of kind"):
                ours.receive()


def test_integers_below_0_are_refused_where_counts_are_expected() -> None:
    kinds = {"BlocksDone": BlocksDone, "StepPlan": StepPlan}
    assert unpack(pack(BlocksDone(3, 2)), kinds, is_signed=False) == BlocksDone(3, 2)
    for message in (BlocksDone(3, -2), StepPlan(step_id=0, decode_rows=(*range(99), -1))):
        with pytest.raises(WireError, match="is not a count"):
            unpack(pack(message), kinds, is_signed=False)


@dataclass(frozen=True)
class Texts:
    items: tuple[str, ...]


def test_an_array_is_read_by_the_type_of_its_items() -> None:
    with pytest.raises(WireError, match="0 is not a str"):
        unpack(pack(Texts(tuple(range(40)))), {"Texts": Texts})  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_refused(waiting: Waiting) -> None:
    with pytest.raises(ValueError, match=f"master_addr is '{waiting.address}'; cannot listen there: .*in use"):
        listen("127.0.0.1", waiting.listener.port)


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
    file.write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=f"{file} is not text"):
        shared_key()
