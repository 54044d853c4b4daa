"""What a replica says of itself and of a request: plain data, no ray.

A call's first parcel comes as soon as the replica has the request, without deltas: so the caller knows who has it.
Errors are data too, because Ray would hand over a remote traceback in place of a message. ``replica.py`` makes these,
``engine.py`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snapstream.engine.messages import Deltas
from snapstream.engine.validate import QueueFull
from snapstream.server.engine.api import EngineDead, EngineStats
from snapstream.server.engine.messages import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replica has to do at this moment."""

    rows: int = 0  # that its engine has
    open_rows: int = 0  # asked for by requests that it has not answered to the end; may be more than ``rows``
    queued_tokens: int = 0  # prompt tokens of requests that have no token of an answer yet
    absence: str = ""  # why its engine takes no requests; "" where it does

    @property
    def free_rows(self) -> int:
        return max(0, self.rows - self.open_rows)


@dataclass(frozen=True, slots=True)
class Fault:
    """How a request ended that was not answered; an exception of ``engine/api.py`` as data."""

    kind: Literal["value", "queue_full", "dead"]
    message: str

    @classmethod
    def of(cls, error: ValueError | QueueFull | EngineDead) -> Fault:
        kinds: dict[type[Exception], Literal["queue_full", "dead"]] = {QueueFull: "queue_full", EngineDead: "dead"}
        return cls(next((name for kind, name in kinds.items() if isinstance(error, kind)), "value"), str(error))

    def error(self) -> Exception:
        """The exception again. A lost engine is never final here: there are other replicas, or will be."""
        if self.kind == "value":
            return ValueError(self.message)
        return QueueFull(self.message) if self.kind == "queue_full" else EngineDead(self.message)


@dataclass(frozen=True, slots=True)
class Parcel:
    """What gathered for one request since the last parcel."""

    replica: str
    load: Load
    deltas: Deltas = Deltas(())
    fault: Fault | None = None  # then this parcel is the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A replica on itself."""

    replica: str
    load: Load
    stats: EngineStats
    facts: EngineFacts
    pid: int  # of the replica's process; that of its engine is in ``facts``
