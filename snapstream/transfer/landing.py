"""A row that arrives: which frame may come next, and where its bytes go. No sockets, no threads.

Invariant: memory is taken only for a frame that is due and whose size is the one that the ticket's row has, so a ticket
never takes more than its row, one hidden state, a header and a report. ``receiver.py`` reads into it.
"""

from __future__ import annotations

from snapstream.transfer.wire import MAX_HEADER_BYTES, Kind, RowHeader, WireError


class RowLanding:
    """What has come of the row of one ticket."""

    def __init__(self, expected: RowHeader, max_report_bytes: int) -> None:
        self._expected, self._max_report_bytes = expected, max_report_bytes
        self._has_header = False
        self._due: tuple[Kind, bytearray] | None = None  # a frame whose body is on its way
        self.parts: list[bytearray] = []  # by layer
        self.hidden: bytearray | None = None
        self.report: bytearray | None = None

    @property
    def is_whole(self) -> bool:
        return self.report is not None

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        held = [*self.parts, self.hidden, self.report, None if self._due is None else self._due[1]]
        return sum(len(piece) for piece in held if piece is not None)

    def room(self, kind: int, number: int, size: int) -> bytearray:
        """Memory for the body of a frame; WireError unless this frame comes next. ``take`` says that it is filled."""
        if self._due is not None:
            raise WireError("a frame began inside another")
        if kind == Kind.BEAT:
            self._check(kind, (number, size), (0, 0))
            self._due = Kind.BEAT, bytearray()
            return self._due[1]
        due, due_number, least, most = self._next()
        if kind != due:
            raise WireError(f"a frame of kind {kind} came where {due.name} {due_number} is due")
        if number != due_number:
            raise WireError(f"{due.name} {number} came where {due.name} {due_number} is due")
        if not least <= size <= most:
            wanted = f"{most}" if least == most else f"at most {most}"
            raise WireError(f"{due.name} {number} has {size} bytes; the row of this ticket has {wanted}")
        self._due = due, bytearray(size)
        return self._due[1]

    def take(self) -> None:
        """The memory of the last ``room`` is filled. WireError for a header that is not the expected one."""
        assert self._due is not None
        (kind, body), self._due = self._due, None
        match kind:
            case Kind.HEADER:
                self._expected.check(RowHeader.from_bytes(body))
                self._has_header = True
            case Kind.PART:
                self.parts.append(body)
            case Kind.LAST:
                self.hidden = body
            case Kind.REPORT:
                self.report = body

    def _next(self) -> tuple[Kind, int, int, int]:
        """Kind, number, least and greatest size of the frame that is due."""
        expected = self._expected
        if not self._has_header:
            return Kind.HEADER, 0, 2, MAX_HEADER_BYTES
        if len(self.parts) < expected.num_layers:
            size = expected.part_bytes[len(self.parts)]
            return Kind.PART, len(self.parts), size, size
        if self.hidden is None:
            return Kind.LAST, 0, expected.hidden_bytes, expected.hidden_bytes
        if self.report is None:
            return Kind.REPORT, 0, 2, self._max_report_bytes
        raise WireError("a frame came after the report")

    def _check(self, kind: int, sent: tuple[int, int], due: tuple[int, int]) -> None:
        if sent != due:
            raise WireError(f"a frame of kind {kind} has number and size {sent}; they must be {due}")
