"""Requests whose prompts other engines read: they own rows, and wait for what these hold.

            rows reserved            the row is whole             a plan takes it
    (queue) -------------> waiting -----------------> whole ---------------------> decode

Invariant: a request is in one of the two, and its rows are nobody else's. ``scheduler.py`` decides when.
"""

from __future__ import annotations

from snapstream.engine.live import LiveRequest
from snapstream.step import PrefillEntry, ReceivedRow, RowArrived


class ArrivingRows:
    """In the order in which rows were reserved, and came."""

    def __init__(self) -> None:
        self._waiting: dict[LiveRequest, PrefillEntry] = {}
        self._whole: dict[LiveRequest, ReceivedRow] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose rows are not whole."""
        return len(self._waiting)

    @property
    def has_whole(self) -> bool:
        """Whether ``take`` would return anything."""
        return bool(self._whole)

    def reserve(self, live: LiveRequest, entry: PrefillEntry) -> None:
        self._waiting[live] = entry

    def is_waiting(self, live: LiveRequest) -> bool:
        return live in self._waiting

    def arrive(self, live: LiveRequest, row: RowArrived) -> None:
        """What a waiting request's rows will hold is here."""
        self._whole[live] = ReceivedRow(entry=self._waiting.pop(live), row=row)

    def take(self) -> dict[LiveRequest, ReceivedRow]:
        """All that are whole; they are gone from here."""
        whole, self._whole = self._whole, {}
        return whole

    def remove(self, live: LiveRequest) -> bool:
        """Forget a request, whose rows are free then; False if it is not here."""
        was_here = live in self._waiting or live in self._whole
        self._waiting.pop(live, None)
        self._whole.pop(live, None)
        return was_here
