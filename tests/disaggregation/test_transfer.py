"""A row from a sender to a receiver over a socket, and all that can go wrong between them; with any bytes on the wire a
ticket ends once, memory stays within its row, and only the right row is complete.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapstream.config import KVBudget
from snapstream.disaggregation.connector import ReceiveBuffer
from snapstream.disaggregation.protocol import (
    MAX_HEADER_BYTES,
    PURPOSE,
    SECRET_VARIABLE,
    RowHeader,
    TransferSettings,
    read_secret,
)
from snapstream.types import RowTicket
from snapstream.wire import (
    HEAD,
    MAGIC,
    NONCE_BYTES,
    Connection,
    ConnectionFailed,
    Kind,
    WireError,
    checksum,
    frame_head,
    pack,
    unpack_one,
)
from tests.disaggregation.rows import (
    BUDGET,
    JSON_VALUES,
    MAX_REPORT,
    REPORT,
    SECRET,
    SIZES,
    bodies,
    by_hand,
    header_of,
    receiving,
    sending,
    sizes_of,
    values_of,
    with_values,
)
from tests.waiting import HANG_S, until


def test_a_row_arrives_as_it_was_sent() -> None:
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket)
        here.put_all()
        landing = there.result(ticket)
        assert isinstance(landing, ReceiveBuffer)
        assert [bytes(part) for part in landing.parts] == bodies()
        assert (landing.hidden, landing.report) == (b"h" * SIZES.hidden_bytes, REPORT)
        assert here.result() == ""
        assert there.receiver.num_tickets == 0


def test_both_ends_set_tcp_nodelay_and_write_small_frames_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    options, writes = [], []
    write, begin = Connection.write, Connection.__init__

    def watched(self: Connection, sock: socket.socket, *rest: Any, **more: Any) -> None:
        options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        begin(self, sock, *rest, **more)

    monkeypatch.setattr(Connection, "__init__", watched)
    monkeypatch.setattr(Connection, "write", lambda self, data: (writes.append(len(data)), write(self, data))[1])
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket)
        here.put_all()
        assert isinstance(there.result(ticket), ReceiveBuffer) and here.result() == ""
    assert len(options) == 3 and all(options)  # the receiver makes one for the handshake and one for the row
    # magic of both; ACCEPTED, HEADER, three layers, HIDDEN_STATE, REPORT, RECEIVED
    assert len(writes) == 2 + 3 + SIZES.num_layers + 2


def test_layers_travel_before_the_last_is_made() -> None:
    """The receiver has layer 0 while nobody has layer 1: the sender's next body waits for that."""
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket)
        first, *others = bodies()
        here.sender.put(lambda: first)
        asked = threading.Event()

        def second() -> bytes:  # called when the first has been written
            asked.set()
            return others[0]

        here.sender.put(second)
        assert asked.wait(HANG_S)
        assert not there.delivered
        here.sender.put(lambda: others[1])
        here.sender.put_last(lambda: b"h" * SIZES.hidden_bytes)
        here.sender.finish(REPORT)
        assert here.result() == "" and isinstance(there.result(ticket), ReceiveBuffer)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (header_of(fingerprint={"version": "2", "dtype": "float32"}), "version is 1 here and 2 at the sender"),
        (header_of(fingerprint={"version": "1"}), "dtype is float32 here and None at the sender"),
        (header_of(10), "prompt_len is 10; the row of this ticket has 9"),
        (header_of(budget=KVBudget(num_sink=0, num_topk=3, num_recent=3)), "budget is"),
        (header_of(sizes=sizes_of(num_layers=4)), "num_layers is 4"),
        (header_of(sizes=sizes_of(slot_bytes=2**40)), "layer_bytes is"),
    ],
)
def test_another_row_than_the_ticket_names_is_refused_on_both_sides(sent: object, reason: str) -> None:
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket, sent)  # type: ignore[arg-type]
        assert reason in there.reason(ticket)
        assert reason in here.result()


def test_a_ticket_of_another_engine_is_refused() -> None:
    with receiving() as there, receiving() as other:
        ticket = other.expect()
        here = sending(replace(ticket, port=there.receiver.port))
        assert "no row of this engine waits for this ticket" in here.result()
        assert other.receiver.num_tickets == 1


def test_a_ticket_is_good_once_and_for_one_sender() -> None:
    with receiving() as there:
        ticket = there.expect()
        first, is_taken = sending(ticket), threading.Event()

        def body_0() -> bytes:  # asked for when the ticket was accepted
            is_taken.set()
            return bodies()[0]

        first.sender.put(body_0)
        assert is_taken.wait(HANG_S)
        assert "in use" in sending(ticket).result()
        for body in bodies()[1:]:
            first.sender.put(lambda body=body: body)
        first.sender.put_last(lambda: b"h" * SIZES.hidden_bytes)
        first.sender.finish(REPORT)
        assert first.result() == ""
        assert "no row of this engine" in sending(ticket).result()


def test_who_does_not_know_the_secret_is_refused_by_both() -> None:
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket, secret=b"another secret of thirty-two bytes")
        assert "the connecting side does not know the shared secret" in here.result()
        assert there.receiver.num_tickets == 1 and not there.delivered  # the right one may still come


def test_a_receiver_that_does_not_know_the_secret_gets_no_row() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ticket = RowTicket(host="127.0.0.1", port=listener.getsockname()[1], key="00" * 16)
        here = sending(ticket)
        sock, _ = listener.accept()
        with sock:
            connection = Connection(sock, HANG_S)
            connection.write(MAGIC + bytes(NONCE_BYTES))
            connection.read(len(MAGIC) + 16 + NONCE_BYTES + 32)
            connection.send(Kind.ACCEPTED, bytes(32))
            assert here.result() == "the listening side does not know the shared secret"


def test_proofs_cannot_be_used_again() -> None:
    """What a sender said once opens no second connection: the receiver's nonce is another."""
    with receiving() as there:
        ticket, said = there.expect(), bytearray()
        with socket.create_connection((ticket.host, ticket.port)) as sock:
            connection = Connection(sock, HANG_S)
            write = connection.write
            connection.write = lambda data: (said.extend(data), write(data))[1]  # type: ignore[method-assign]
            connection.prove(SECRET, PURPOSE, bytes.fromhex(ticket.key))
        again = there.expect()
        with socket.create_connection((again.host, again.port)) as sock:
            connection = Connection(sock, HANG_S)
            connection.read(len(MAGIC) + NONCE_BYTES)
            connection.write(said)
            with pytest.raises(ConnectionFailed, match="does not know the shared secret"):
                connection.answer(Kind.ACCEPTED)


def test_a_stall_ends_the_ticket() -> None:
    with receiving(deadline_s=0.2) as there:

        def stalled() -> str:
            ticket = there.expect()
            with suppress(ConnectionFailed, OSError), by_hand(ticket) as connection:  # or this came too late
                connection.send(Kind.HEADER, pack(header_of()))
                there.result(ticket)
            return there.reason(ticket)

        until(lambda: stalled() == "nothing was sent or received for 0.2 s")
        unused = there.expect()
        assert there.reason(unused) == "no sender came within 0.2 s"


def test_beats_keep_a_ticket_alive_and_cuts_end_it() -> None:
    with receiving() as there:
        ticket = there.expect()
        with by_hand(ticket) as connection:
            connection.send(Kind.HEARTBEAT)
            connection.send(Kind.HEADER, pack(header_of()))
            connection.send(Kind.HEARTBEAT)
            connection.write(frame_head(Kind.LAYER, 0, bodies()[0]) + b"half")
        assert "the peer closed the connection" in there.reason(ticket)


@pytest.mark.parametrize("place", range(SIZES.num_layers + 3))
def test_a_frame_that_is_damaged_on_its_way_loses_the_row(place: int) -> None:
    header = pack(header_of())
    frames = [
        (Kind.HEADER, 0, header),
        *((Kind.LAYER, layer, body) for layer, body in enumerate(bodies())),
        (Kind.HIDDEN_STATE, 0, b"h" * SIZES.hidden_bytes),
        (Kind.REPORT, 0, REPORT),
    ]
    with receiving() as there, by_hand(ticket := there.expect()) as connection:
        for kind, number, body in frames[:place]:
            connection.send(kind, body, number)
        kind, number, body = frames[place]
        connection.write(frame_head(kind, number, body) + body[:-1] + bytes([body[-1] ^ 1]))
        assert f"bytes of {kind.name} {number} are damaged" in there.reason(ticket)
        with pytest.raises(ConnectionFailed, match="refused: .* damaged"):
            connection.answer(Kind.RECEIVED)


def test_a_voided_ticket_delivers_nothing_and_cuts_its_sender() -> None:
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket)
        here.sender.put(lambda: bodies()[0])
        with by_hand(there.expect()):
            pass
        there.receiver.void(ticket.key)
        assert here.result()
        assert ticket.key not in there.delivered
        assert there.receiver.num_tickets <= 1


def test_a_cancelled_sender_says_nothing_and_the_row_is_lost() -> None:
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket)
        here.sender.put(lambda: bodies()[0])
        with by_hand(there.expect()):
            pass
        here.sender.cancel()
        here.put_all()
        until(lambda: there.receiver.num_tickets <= 1)  # ended, or never claimed
        assert not isinstance(there.delivered.get(ticket.key), ReceiveBuffer)
        assert not here.ended


def test_a_receiver_that_leaves_is_noticed_while_nothing_is_sent() -> None:
    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket)
        with by_hand(there.expect()):
            pass
    assert here.result()


def test_a_body_that_cannot_be_read_fails_the_row() -> None:
    def broken() -> bytes:
        raise RuntimeError("the device is gone")

    with receiving() as there:
        ticket = there.expect()
        here = sending(ticket)
        here.sender.put(broken)
        assert "the device is gone" in here.result()
        assert "closed" in there.reason(ticket)


def test_a_slow_receiver_gets_the_row_and_a_dead_one_ends_it() -> None:
    """More than sockets buffer: the sender waits in the middle of a part for whoever reads."""
    sizes = sizes_of(slot_bytes=2**20)
    header = header_of(sizes=sizes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ticket = RowTicket(host="127.0.0.1", port=listener.getsockname()[1], key="00" * 16)
        here = sending(ticket, header)
        body = bytes(header.layer_bytes[0])
        here.sender.put(lambda: body)
        sock, _ = listener.accept()
        with sock:
            connection = Connection(sock, HANG_S)
            key, proof = connection.greet(SECRET, PURPOSE, 16)
            assert key == bytes(16)
            connection.send(Kind.ACCEPTED, proof)
            connection.receive(lambda kind, number, size: bytearray(size))
            kind, _, size, _ = HEAD.unpack(connection.read(HEAD.size))
            assert (kind, size) == (Kind.LAYER, header.layer_bytes[0])
            connection.read(size // 2)
            assert not here.ended
        assert "broke" in here.result()


def test_an_address_that_is_taken_is_named() -> None:
    with receiving() as there:
        port = there.receiver.port
        with (
            pytest.raises(ValueError, match=f"cannot receive rows at 127.0.0.1 port {port}: .*in use"),
            receiving(port=port),
        ):
            pass


def test_settings_refuse_what_would_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs TLS"):
        TransferSettings(secret=SECRET, host="192.0.2.1")
    with pytest.raises(ValueError, match="which no sender can reach"):
        TransferSettings(secret=SECRET, host="0.0.0.0")
    with pytest.raises(ValueError, match="no TLS; rows hold prompts"):
        sending(RowTicket(host="192.0.2.1", port=1, key="00" * 16))
    assert SECRET.decode() not in repr(TransferSettings(secret=SECRET))
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="holds no transfer secret"):
        read_secret(None)
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ValueError, match="at least 32"):
        read_secret(None)
    file = tmp_path / "secret"
    file.write_text(SECRET.decode() + "\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match="mode 0640"):
        read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == SECRET
    file.write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=f"{file} is not text"):
        read_secret(file)


@pytest.mark.parametrize("wrong", [{"port": 0}, {"host": ""}, {"key": "zz" * 16}, {"key": "00"}, {"uses_tls": 1}])
def test_a_ticket_that_names_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="of a ticket"):
        RowTicket(**{"host": "127.0.0.1", "port": 1, "key": "00" * 16, **wrong})  # type: ignore[arg-type]


def test_a_landing_takes_nothing_inside_a_frame() -> None:
    landing = ReceiveBuffer(header_of(), 64)
    landing.allocate(Kind.HEADER, 0, 100)
    with pytest.raises(WireError, match="inside another"):
        landing.allocate(Kind.LAYER, 0, 1)
    assert BUDGET.capacity == 6


Frame = tuple[int, int, bytes]
HEADER = header_of()
GOOD: list[Frame] = [
    (Kind.HEADER, 0, pack(HEADER)),
    *((Kind.LAYER, layer, body) for layer, body in enumerate(bodies())),
    (Kind.HIDDEN_STATE, 0, bytes(SIZES.hidden_bytes)),
    (Kind.REPORT, 0, REPORT),
]
MOST = MAX_HEADER_BYTES + sum(len(body) for body in bodies()) + SIZES.hidden_bytes + MAX_REPORT


@st.composite
def frames(draw: st.DrawFn) -> list[Frame]:
    """The right frames, with some dropped, doubled, swapped or changed, and others put between."""
    found = list(GOOD)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(len(found) - 1, 0)))
        match draw(st.sampled_from(["drop", "double", "swap", "size", "number", "kind", "heartbeat", "noise"])):
            case "drop" if found:
                del found[place]
            case "double" if found:
                found.insert(place, found[place])
            case "swap" if found:
                other = draw(st.integers(0, len(found) - 1))
                found[place], found[other] = found[other], found[place]
            case "size" if found:
                kind, number, body = found[place]
                found[place] = kind, number, draw(st.sampled_from([body[:-1], body + b"x", b""]))
            case "number" if found:
                found[place] = found[place][0], draw(st.integers(0, 2**32 - 1)), found[place][2]
            case "kind" if found:
                found[place] = draw(st.integers(0, 255)), *found[place][1:]
            case "heartbeat":
                found.insert(place, (Kind.HEARTBEAT, 0, b""))
            case "noise":
                found.insert(place, (draw(st.integers(0, 255)), draw(st.integers(0, 9)), draw(st.binary(max_size=40))))
    return found


def land(sent: list[Frame]) -> ReceiveBuffer | str:
    landing = ReceiveBuffer(HEADER, MAX_REPORT)
    for kind, number, body in sent:
        if landing.is_whole:
            break  # nobody reads further
        try:
            room = landing.allocate(kind, number, len(body))
            assert len(room) == len(body)
            room[:] = body
            landing.take()
        except WireError as error:
            return str(error)
        finally:
            assert landing.num_bytes <= MOST
    return landing


@settings(max_examples=300, deadline=None)
@given(sent=frames())
@example(sent=GOOD)
def test_only_the_right_frames_in_order_make_a_row(sent: list[Frame]) -> None:
    landing = land(sent)
    is_right = [frame for frame in sent if frame[0] != Kind.HEARTBEAT][: len(GOOD)] == GOOD
    is_whole = isinstance(landing, ReceiveBuffer) and landing.is_whole
    if is_whole:
        assert isinstance(landing, ReceiveBuffer)
        assert [len(part) for part in landing.parts] == [len(body) for body in bodies()]
    if is_right and all(frame in GOOD or frame == (Kind.HEARTBEAT, 0, b"") for frame in sent):
        assert is_whole
    if isinstance(landing, str):
        assert landing and len(landing) < 1000


@settings(max_examples=300, deadline=None)
@given(kind=st.integers(0, 255), number=st.integers(0, 2**32 - 1), size=st.integers(0, 2**64 - 1))
def test_no_head_takes_more_memory_than_the_row_has(kind: int, number: int, size: int) -> None:
    for count in range(len(GOOD)):
        landing = ReceiveBuffer(HEADER, MAX_REPORT)
        for frame in GOOD[:count]:
            landing.allocate(frame[0], frame[1], len(frame[2]))[:] = frame[2]
            landing.take()
        with suppress(WireError):
            landing.allocate(kind, number, size)
        assert landing.num_bytes <= MOST


NAMES = [field.name for field in fields(RowHeader)]
VALUES, _ = values_of(pack(HEADER))


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*NAMES, "more"]), JSON_VALUES, max_size=3))
@example(changes={"budget": [0, 2, 0]})
@example(changes={"hidden_bytes": -1})
def test_a_header_is_right_or_refused(changes: dict[str, Any]) -> None:
    values = list({**dict(zip(NAMES, VALUES, strict=True)), **changes}.values())
    try:
        HEADER.check(unpack_one(with_values(pack(HEADER), values), RowHeader, is_signed=False))
    except WireError as error:
        assert str(error)
    else:
        assert values == VALUES


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200) | st.just((15_000).to_bytes(4, "little") + b"[" * 15_000))
def test_noise_is_no_header(data: bytes) -> None:
    try:
        unpack_one(data, RowHeader, is_signed=False)
    except WireError:
        return
    raise AssertionError("noise made a header")


@settings(max_examples=40, deadline=None)
@given(sent=st.lists(frames(), min_size=1, max_size=4), cut=st.integers(0, 400))
def test_no_ticket_leaks_over_sockets(sent: list[list[Frame]], cut: int) -> None:
    """Several tickets of one receiver, each with frames of its own, the last cut after some bytes."""
    with receiving() as there:
        tickets = [there.expect() for _ in sent]
        for ticket, own in zip(tickets, sent, strict=True):
            data = b"".join(HEAD.pack(kind, number, len(body), checksum(body)) + body for kind, number, body in own)
            with by_hand(ticket) as connection:
                connection.sock.sendall(data[:cut] if ticket is tickets[-1] else data)
        for ticket, own in zip(tickets, sent, strict=True):
            result = there.result(ticket)
            if isinstance(result, ReceiveBuffer):
                assert result.is_whole and isinstance(land(own), ReceiveBuffer)
        assert there.receiver.num_tickets == 0
