"""A runner over several ranks: the leader sends each plan to its followers, then runs it over its own share.

Every rank runs the same ``ModelRunner`` over its share of the weights and rows, meets the others in the collectives of
the layers, and draws the same tokens: what is drawn depends on logits that are the same bits on every rank, on seeds
and on counters. So a plan is all that is ever sent, and results are read on the leader alone. (What the prefix store's
files are asked for goes the same way: ``rank_files.py``.)

Invariant: followers run exactly the plans that the leader runs, in the same order. Ctrl-C therefore waits for the end
of a submit: a plan that one rank has run in part would leave the others waiting for it.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from snapstream.distributed.group import Group
from snapstream.distributed.launch import Followers
from snapstream.runner.model_runner import ModelRunner
from snapstream.runner.rank_files import RankFiles
from snapstream.runner.results import SubmittedStep
from snapstream.step import PrefixTier, RowExchange, StepPlan


class RanksDiffer(RuntimeError):
    """Ranks have drawn different tokens."""


class RankRunner:
    """One rank's runner: the leader's, or a follower's, which nobody reads."""

    def __init__(self, runner: ModelRunner, group: Group, *, checks: bool) -> None:
        """``checks``: compare what was drawn with the other ranks after every step, which makes the host wait."""
        self.runner, self._group, self._checks = runner, group, checks

    def submit(self, plan: StepPlan) -> SubmittedStep:
        step = self.runner.submit(plan)
        if self._checks:
            check_ranks(step.drawn_ids(), self._group, self.runner.decoder.device)
        return step


def check_ranks(drawn: list[int], group: Group, device: torch.device) -> None:
    """RanksDiffer unless all ranks have drawn the same token ids; a collective."""
    own = torch.tensor([[len(drawn), *drawn]], dtype=torch.int64, device=device)  # [1, 1 + n]
    told = group.all_gather(own, 0).tolist()
    if any(ids != told[0] for ids in told):
        raise RanksDiffer(f"ranks have drawn different tokens: {[ids[1:] for ids in told]}")


class ParallelRunner:
    """The leader's: a ``Runner`` of all ranks."""

    def __init__(self, leader: RankRunner, followers: Followers, leave: Callable[[], None]) -> None:
        """``leave`` is called when the ranks part: by ``close``, or when nobody holds this any more."""
        self.leader, self._followers = leader, followers
        files = leader.runner.prefix_tier
        self._files = None if files is None else RankFiles(files, len(followers), self._send)
        if self._files is not None:
            followers.when_done(self._files.note)
            followers.when_lost(self._files.give_up)
        self._part = weakref.finalize(self, _part, followers, leave)

    @property
    def prefix_tier(self) -> PrefixTier | None:
        """The files of all ranks; None where the engine has no folder."""
        return self._files

    @property
    def follower_pids(self) -> tuple[int, ...]:
        """Processes of this machine that hold the other ranks."""
        return self._followers.pids

    @property
    def lost(self) -> str | None:
        """Why the engine cannot go on; None while all ranks are there."""
        return self._followers.lost

    def is_ready(self, job_id: int) -> bool:
        """See ``Runner.is_ready``: the leader's answer; the others have as much to copy."""
        return self.leader.runner.is_ready(job_id)

    def connect(self, exchange: RowExchange) -> None:
        """See ``Runner.connect``: rows leave and arrive at the leader, whose ranks gather and spread them."""
        self.leader.runner.connect(exchange)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Run a plan on every rank. RankLost if one has gone; the engine cannot be used afterwards."""
        with _uninterrupted():
            self._followers.send(_for_followers(plan))
            try:
                return self.leader.submit(plan)
            except Exception:
                self._followers.blame()
                raise

    def _send(self, message: object) -> None:
        """RankLost if a follower has gone. Ctrl-C waits: all followers hear it, or none."""
        with _uninterrupted():
            self._followers.send(message)

    def close(self) -> None:
        """End the followers; returns when no process of them is left on this machine."""
        self._part()


def _for_followers(plan: StepPlan) -> StepPlan:
    """Rows that came stay with the leader, and go to the others layer by layer, in collectives."""
    return replace(plan, received=tuple(replace(row, row=None) for row in plan.received))


def _part(followers: Followers, leave: Callable[[], None]) -> None:
    followers.close()
    with suppress(RuntimeError):  # the group is broken
        leave()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block. A second one comes through: a rank may hang."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # only the main thread is interrupted
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> Any:
        held.append((number, frame))
        if len(held) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])
