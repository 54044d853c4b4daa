"""Whatever comes over the wire: a ticket ends once, memory stays within its row, and only the right row is whole."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapstream.disaggregation.connector import ReceiveBuffer
from snapstream.disaggregation.protocol import MAX_HEADER_BYTES, RowHeader
from snapstream.wire import HEAD, Kind, WireError, checksum, pack, unpack_one
from tests.disaggregation.rows import (
    MAX_REPORT,
    REPORT,
    SIZES,
    bodies,
    by_hand,
    header_of,
    receiving,
    values_of,
    with_values,
)

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
            room = landing.room(kind, number, len(body))
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
            landing.room(frame[0], frame[1], len(frame[2]))[:] = frame[2]
            landing.take()
        with suppress(WireError):
            landing.room(kind, number, size)
        assert landing.num_bytes <= MOST


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


NAMES = [field.name for field in fields(RowHeader)]
VALUES, _ = values_of(pack(HEADER))


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*NAMES, "more"]), _json, max_size=3))
@example(changes={"budget": [0, 2, 0]})
@example(changes={"hidden_bytes": -1})
def test_a_header_is_right_or_refused(changes: dict[str, Any]) -> None:
    told = list({**dict(zip(NAMES, VALUES, strict=True)), **changes}.values())
    try:
        HEADER.check(unpack_one(with_values(pack(HEADER), told), RowHeader, is_signed=False))
    except WireError as error:
        assert str(error)
    else:
        assert told == VALUES


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
