"""What travels when a row goes to another engine: frames of plain bytes, and the header that they begin with.

    sender    HEADER  PART 0  PART 1 ... PART L-1  LAST  REPORT          BEAT anywhere between two frames
    receiver                                               TAKEN         or REFUSED with a reason, at any moment

A part is one layer of the row, kv head after kv head: scales and votes if it has any, then keys and values of the slots
up to ``min(N, C)``, C of each head its own where a profile says so.
LAST is the last hidden state of the prompt, from which the receiver draws the first token of every sample; REPORT says
what compression did. Invariant: the receiver knows the size of every frame but the report before it comes, because the
header must equal the one that it expects. No torch; nothing is unpickled. Next: ``landing.py``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any

from snapstream.config import KVBudget
from snapstream.config.heads import HeadSlots

WIRE_VERSION = 3
MAX_HEADER_BYTES = 16 * 2**10
MAX_REASON_BYTES = 2**10
HEAD = struct.Struct(">BIQ")  # kind, number, bytes of the body


class Kind(IntEnum):
    """Of a frame."""

    HEADER = 1
    PART = 2  # its number is the layer
    LAST = 3
    REPORT = 4
    BEAT = 5  # nothing new, but the sender lives
    REFUSED = 6
    TAKEN = 7
    ACCEPTED = 8  # the receiver's half of the handshake


class WireError(ValueError):
    """What a peer sent is not what comes next; the message goes to both sides."""


class TransferFailed(Exception):
    """A row did not arrive; why."""


def frame_head(kind: Kind, number: int, size: int) -> bytes:
    return HEAD.pack(kind, number, size)


def read_json(data: bytes | bytearray, what: str) -> dict[str, Any]:
    """A JSON object; WireError for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the {what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise WireError(f"the {what} is not a JSON object")
    return found


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Bytes of a row's pieces, on both sides; integers that ``KVSpec`` and the config tell."""

    num_layers: int
    slot_bytes: int  # keys and values of one slot in one layer, with scales of its own in int8
    scale_bytes: int = 0  # per layer: rows in FP8
    vote_bytes: int = 0  # per layer and selected slot: rows that choose again
    hidden_bytes: int  # the last hidden state
    num_kv_heads: int = 1
    heads: HeadSlots | None = None  # slots of every kv head; None: all have the budget's

    def part_bytes(self, prompt_len: int, budget: KVBudget) -> tuple[int, ...]:
        """Of the row of a prompt, layer by layer."""
        budgets = ((budget,) * self.num_kv_heads,) * self.num_layers if self.heads is None else self.heads.budgets
        return tuple(self.scale_bytes + sum(self._head_bytes(prompt_len, own) for own in layer) for layer in budgets)

    def row_bytes(self, prompt_len: int, budget: KVBudget) -> int:
        """All layers and the hidden state: host memory of the row while it is on its way, on either side."""
        return sum(self.part_bytes(prompt_len, budget)) + self.hidden_bytes

    def _head_bytes(self, prompt_len: int, budget: KVBudget) -> int:
        num_slots = min(prompt_len, budget.capacity)
        return (self.vote_bytes * budget.num_topk + self.slot_bytes * num_slots) // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHeader:
    """Says which row comes. Both sides make one, and they must be equal."""

    fingerprint: Mapping[str, str]  # facts about the engine that rows depend on, by name
    prompt_len: int
    next_position: int  # where the answer begins
    budget: KVBudget
    num_layers: int
    part_bytes: tuple[int, ...]  # by layer
    hidden_bytes: int

    @classmethod
    def of(
        cls, fingerprint: Mapping[str, str], sizes: RowSizes, prompt_len: int, next_position: int, budget: KVBudget
    ) -> RowHeader:
        return cls(
            fingerprint=fingerprint,
            prompt_len=prompt_len,
            next_position=next_position,
            budget=budget,
            num_layers=sizes.num_layers,
            part_bytes=sizes.part_bytes(prompt_len, budget),
            hidden_bytes=sizes.hidden_bytes,
        )

    def to_bytes(self) -> bytes:
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        told |= {"wire": WIRE_VERSION, "fingerprint": dict(self.fingerprint), "budget": asdict(self.budget)}
        return json.dumps(told).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> RowHeader:
        """WireError for anything that no sender of ours writes."""
        told = read_json(data, "header")
        if told.get("wire") != WIRE_VERSION:
            raise WireError(f"the header has wire version {told.get('wire')!r}; this engine speaks {WIRE_VERSION}")
        counts: dict[str, Any] = {name: told.get(name) for name in _COUNTS}
        wrong = next((name for name, value in counts.items() if not is_count(value)), None)
        if wrong is not None:
            raise WireError(f"{wrong} of the header is {counts[wrong]!r}; it must be a count")
        parts = told.get("part_bytes")
        if not isinstance(parts, list) or not all(map(is_count, parts)):
            raise WireError(f"part_bytes of the header is {str(parts)[:200]}; it must be counts by layer")
        facts, regions = told.get("fingerprint"), told.get("budget")
        if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
            raise WireError("the fingerprint of the header must be texts by name")
        if not isinstance(regions, dict):
            raise WireError("the budget of the header must be counts by name")
        try:
            return cls(fingerprint=facts, budget=KVBudget(**regions), part_bytes=tuple(parts), **counts)
        except (TypeError, ValueError) as error:
            raise WireError(f"the budget of the header: {str(error)[:200]}") from None

    def check(self, sent: RowHeader) -> None:
        """WireError, with both values, unless what was sent is the row that is expected."""
        for name in sorted(self.fingerprint.keys() | sent.fingerprint.keys()):
            own, theirs = self.fingerprint.get(name), sent.fingerprint.get(name)
            if own != theirs:
                raise WireError(f"the engines differ: {name} is {own} here and {str(theirs)[:200]} at the sender")
        for name in (*_COUNTS, "budget", "part_bytes"):
            own, theirs = getattr(self, name), getattr(sent, name)
            if own != theirs:
                raise WireError(f"{name} is {str(theirs)[:200]}; the row of this ticket has {str(own)[:200]}")


_COUNTS = ("prompt_len", "next_position", "num_layers", "hidden_bytes")
