"""Small rows, and both ends of a transfer, for tests of the wire."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from snapstream.config import KVBudget
from snapstream.disaggregation.connector import KVReceiver, KVSender, ReceiveBuffer
from snapstream.disaggregation.protocol import PURPOSE, RowHeader, RowSizes, TransferSettings
from snapstream.types import RowTicket
from snapstream.wire import Connection
from tests.waiting import HANG_S, until

SECRET = b"0123456789abcdef0123456789abcdef"


def sizes_of(num_layers: int = 3, slot_bytes: int = 8) -> RowSizes:
    def layer_bytes(prompt_len: int, budget: KVBudget) -> tuple[int, ...]:
        return (slot_bytes * min(prompt_len, budget.capacity),) * num_layers

    return RowSizes(num_layers=num_layers, hidden_bytes=16, layer_bytes=layer_bytes)


SIZES = sizes_of()
BUDGET = KVBudget(num_sink=1, num_topk=2, num_recent=3)
REPORT = b'{"a": 1}'
MAX_REPORT = 64
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def header_of(prompt_len: int = 9, **changes: Any) -> RowHeader:
    fields = {"fingerprint": {"version": "1", "dtype": "float32"}, "sizes": SIZES, "prompt_len": prompt_len}
    return RowHeader.of(**{**fields, "budget": BUDGET, **changes})


def bodies() -> list[bytes]:
    return [bytes([layer]) * size for layer, size in enumerate(SIZES.layer_bytes(9, BUDGET), 1)]


def values_of(data: bytes) -> tuple[list[Any], bytes]:
    """The values of a packed message's fields, in order, and its arrays."""
    stop = 4 + int.from_bytes(data[:4], "little")
    return json.loads(data[4:stop])[1], data[stop:]


def with_values(data: bytes, values: list[Any]) -> bytes:
    """The same message with other values."""
    stop = 4 + int.from_bytes(data[:4], "little")
    name, _, sizes = json.loads(data[4:stop])
    head = json.dumps([name, values, sizes]).encode()
    return len(head).to_bytes(4, "little") + head + data[stop:]


@dataclass
class Receiving:
    """A receiver, and what it delivered by ticket."""

    receiver: KVReceiver
    delivered: dict[str, ReceiveBuffer | str] = field(default_factory=dict)

    def expect(self, header: RowHeader | None = None) -> RowTicket:
        return self.receiver.expect(header or header_of(), MAX_REPORT)

    def result(self, ticket: RowTicket) -> ReceiveBuffer | str:
        until(lambda: ticket.key in self.delivered)
        return self.delivered[ticket.key]

    def reason(self, ticket: RowTicket) -> str:
        result = self.result(ticket)
        assert isinstance(result, str)
        return result


@contextmanager
def receiving(deadline_s: float = HANG_S, **fields: Any) -> Iterator[Receiving]:
    settings = TransferSettings(**{"secret": SECRET, "host": "127.0.0.1", **fields})
    delivered: dict[str, ReceiveBuffer | str] = {}

    def deliver(key: str, what: ReceiveBuffer | str) -> None:
        assert key not in delivered, "a ticket ends once"
        delivered[key] = what

    own = Receiving(KVReceiver(settings, deliver, deadline_s=deadline_s), delivered)
    try:
        yield own
    finally:
        own.receiver.close()


@dataclass
class Sending:
    sender: KVSender
    ended: list[str]

    def result(self) -> str:
        until(lambda: self.ended)
        return self.ended[0]

    def put_all(self) -> None:
        for body in bodies():
            self.sender.put(lambda body=body: body)
        self.sender.put_last(lambda: b"h" * SIZES.hidden_bytes)
        self.sender.finish(REPORT)


def sending(ticket: RowTicket, header: RowHeader | None = None, **fields: Any) -> Sending:
    ended: list[str] = []
    settings = TransferSettings(**{"secret": SECRET, **fields})
    sender = KVSender(ticket, header or header_of(), settings, ended.append, deadline_s=HANG_S)
    return Sending(sender, ended)


@contextmanager
def by_hand(ticket: RowTicket) -> Iterator[Connection]:
    """A sender that has proved itself and says what the test wants."""
    with socket.create_connection((ticket.host, ticket.port), timeout=HANG_S) as sock:
        connection = Connection(sock, HANG_S)
        connection.prove(SECRET, PURPOSE, bytes.fromhex(ticket.key))
        yield connection
