"""What a leader and a follower say to each other: plain data, in this order.

    follower: Hello ---> leader: Task ---> follower: Joined, later Ready ---> leader: StepPlan, StepPlan, ...

Between plans the leader may ask what the prefix store's files are for (``ReadBlocks``, ``WriteBlock``,
``ForgetBlocks``); the follower does that beside its steps and says ``BlocksDone``.

A follower that cannot go on says ``Failed`` as its last word. There is no message for the end: whoever finds the link
closed ends. ``wire.py`` makes bytes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snapstream.config import EngineConfig
from snapstream.step import StepPlan, StoredBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who a follower is. Ranks of other versions might compute other bits."""

    version: str  # of snapstream
    torch: str  # its version
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a follower needs to be a rank of the leader's engine."""

    rank: int
    model: str  # the checkpoint's folder at the leader's; a follower on another machine has its own
    fingerprint: str  # of the checkpoint: it must be the same one
    config: EngineConfig
    meeting: str  # where the ranks' group is made, as ``Ranks.join`` takes it
    num_threads: int  # of torch; 0: its default
    checks_ranks: bool = False  # compare drawn tokens after every step


@dataclass(frozen=True, slots=True)
class Joined:
    """The follower has the same checkpoint and can do its task; next it meets the others."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The follower's runner is built and warm."""


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Fill blocks of the prefix store from the files of this rank."""

    number: int  # of this request, for the answer
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write a block, which stays as it is until the answer has come."""

    number: int
    block: StoredBlock


@dataclass(frozen=True, slots=True)
class ForgetBlocks:
    """Delete the files of a namespace; an empty place: all."""

    number: int
    place: str


@dataclass(frozen=True, slots=True)
class BlocksDone:
    """The answer to one of the three."""

    number: int
    count: int  # of the first blocks that could be read


@dataclass(frozen=True, slots=True)
class Failed:
    """The follower's process ends. "value": the settings cannot be served there."""

    kind: Literal["value", "error"]
    reason: str


TO_FOLLOWER: dict[str, type] = {kind.__name__: kind for kind in (Task, StepPlan, ReadBlocks, WriteBlock, ForgetBlocks)}
TO_LEADER: dict[str, type] = {kind.__name__: kind for kind in (Hello, Joined, Ready, BlocksDone, Failed)}
