"""The disk tier of a prefix store over several ranks: each rank has its share of every block in files of its own.

    rank 0: ReadBlocks --> every worker, beside its steps: its files --> BlocksDone --> rank 0: all have n blocks

The engine asks rank 0's files what is stored, and every rank reads its share of that. Invariant: a block counts as
read only if every rank has read its share, before a plan that restores it is sent. A share that is missing or damaged
on one rank is a miss for all, and its block is written again where it is lacking. A rank that goes ends what waits for
it. ``kv/prefix_store.py`` has the files, ``distributed/control.py`` the messages.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from types import FrameType
from typing import Any

import torch

from snapstream.distributed.control import BlocksDone, ForgetBlocks, ReadBlocks, WriteBlock
from snapstream.distributed.group import Group
from snapstream.distributed.launch import RankLost, WorkerRanks
from snapstream.exec.results import SubmittedStep
from snapstream.exec.runner import ModelRunner
from snapstream.kv.prefix_store import PrefixFiles
from snapstream.step import KVConnector, PrefixTier, StepPlan, StoredBlock
from snapstream.wire import ConnectionFailed

# A runner over several ranks: rank 0 sends each plan to its workers, then runs it over its own share.
#
# Every rank runs the same ``ModelRunner`` over its share of the weights and rows, meets the others in the collectives
# of the layers, and draws the same tokens: what is drawn depends on logits that are the same bits on every rank, on
# seeds and on counters. So a plan is all that is ever sent, and results are read on rank 0 alone. (What the prefix
# store's files are asked for goes the same way: ``rank_files.py``.)
#
# Invariant: workers run exactly the plans that rank 0 runs, in the same order. Ctrl-C therefore waits for the
# end of a submit: a plan that one rank has run in part would leave the others waiting for it.


class RanksDiffer(RuntimeError):
    """Ranks have drawn different tokens."""


class RankRunner:
    """One rank's runner: rank 0's, or a worker's, whose results are not read."""

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
    gathered = group.all_gather(own, 0).tolist()
    if any(ids != gathered[0] for ids in gathered):
        raise RanksDiffer(f"ranks have drawn different tokens: {[ids[1:] for ids in gathered]}")


class ParallelRunner:
    """On rank 0: a ``Runner`` of all ranks."""

    def __init__(self, rank_0: RankRunner, workers: WorkerRanks, leave: Callable[[], None]) -> None:
        """``leave`` is called when the ranks part: by ``close``, or when this is garbage-collected."""
        self.rank_0, self._workers = rank_0, workers
        files = rank_0.runner.prefix_tier
        self._files = None if files is None else RankFiles(files, len(workers), self._send)
        if self._files is not None:
            workers.when_done(self._files.note)
            workers.when_lost(self._files.give_up)
        self._part = weakref.finalize(self, _part, workers, leave)

    @property
    def prefix_tier(self) -> PrefixTier | None:
        """The files of all ranks; None where the engine has no folder."""
        return self._files

    @property
    def follower_pids(self) -> tuple[int, ...]:
        """Processes of this machine that hold the other ranks."""
        return self._workers.pids

    @property
    def lost(self) -> str | None:
        """Why the engine cannot go on; None while all ranks are there."""
        return self._workers.lost

    def is_ready(self, job_id: int) -> bool:
        """See ``Runner.is_ready``: rank 0's answer; the others have as much to copy."""
        return self.rank_0.runner.is_ready(job_id)

    def connect(self, connector: KVConnector) -> None:
        """See ``Runner.connect``: rows leave and arrive at rank 0, whose ranks gather and spread them."""
        self.rank_0.runner.connect(connector)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Run a plan on every rank. RankLost if one has gone; the engine cannot be used afterwards."""
        with _uninterrupted(), self._workers.step():
            self._workers.send(_for_workers(plan))
            try:
                return self.rank_0.submit(plan)
            except Exception:
                self._workers.blame()
                raise

    def _send(self, message: object) -> None:
        """RankLost if a worker has gone. Ctrl-C waits: all workers hear it, or none."""
        with _uninterrupted():
            self._workers.send(message)

    def close(self) -> None:
        """End the workers; returns when no process of them is left on this machine."""
        self._part()


def _for_workers(plan: StepPlan) -> StepPlan:
    """Rows that came stay with rank 0, and go to the others layer by layer, in collectives."""
    return replace(plan, received=tuple(replace(row, row=None) for row in plan.received))


def _part(workers: WorkerRanks, leave: Callable[[], None]) -> None:
    workers.close()
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


@dataclass(eq=False)
class _Asked:
    """What all ranks have been asked for."""

    counts: dict[int, int] = field(default_factory=dict)  # by rank that has answered
    agreed: Future[int] = field(default_factory=Future)  # the smallest of them


class RankFiles:
    """The ``PrefixTier`` of rank 0: the files of all ranks."""

    def __init__(self, own: PrefixFiles, num_workers: int, send: Callable[[object], None]) -> None:
        """``send`` brings a message to every worker; their answers come to ``note``."""
        self._own, self._num_ranks, self._send = own, 1 + num_workers, send
        self._lock = Lock()
        self._asked: dict[int, _Asked] = {}  # by number, until all have answered
        self._next = 0

    def names(self, namespace: str, chain: Sequence[bytes]) -> tuple[str, ...]:
        """See ``PrefixTier.names``: rank 0's, which the files of all ranks have."""
        return self._own.names(namespace, chain)

    def has(self, name: str) -> bool:
        """Whether rank 0 has its share; the others show it when they read."""
        return self._own.has(name)

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        """Fill the blocks of every rank; how many of the first ones all of them have."""
        return self._ask(lambda number: ReadBlocks(number, tuple(wanted)), lambda: self._own.load(wanted))

    def save(self, block: StoredBlock) -> Future[int]:
        """Write every rank's share of a block."""
        return self._ask(lambda number: WriteBlock(number, block), lambda: self._own.save(block))

    def forget(self, namespace: str | None) -> None:
        """Delete the files of a namespace and those below it, by default all, on every rank."""
        place = "" if namespace is None else self._own.place(namespace)
        self._ask(lambda number: ForgetBlocks(number, place), lambda: self._own.forget_place(place))

    def note(self, rank: int, done: BlocksDone) -> None:
        """A rank's answer; any thread may call it."""
        with self._lock:
            asked = self._asked.get(done.number)
            if asked is None:
                return
            asked.counts[rank] = done.count
            if len(asked.counts) < self._num_ranks:
                return
            del self._asked[done.number]
        asked.agreed.set_result(min(asked.counts.values()))

    def give_up(self) -> None:
        """A rank has gone: fail what waits for its answers. Any thread may call it."""
        with self._lock:
            left, self._asked = list(self._asked.values()), {}
        for asked in left:
            asked.agreed.set_exception(RankLost("a rank ended while it handled files of the prefix store"))

    def close(self) -> None:
        """Finish what is being written, on every rank."""
        self._own.close()
        with self._lock:
            left = [asked.agreed for asked in self._asked.values()]
        wait(left)

    def _ask(self, message: Callable[[int], object], own: Callable[[], Future[int]]) -> Future[int]:
        asked = _Asked()
        with self._lock:
            number, self._next = self._next, self._next + 1
        try:
            self._asked[number] = asked
            own().add_done_callback(lambda done: self.note(0, BlocksDone(number, _count(done))))
            self._send(message(number))
        except BaseException:  # a rank ended, or Ctrl-C: neither the caller nor ``close`` may wait
            with self._lock:
                self._asked.pop(number, None)
            raise
        return asked.agreed


def answer(files: PrefixFiles, message: object, reply: Callable[[object], None]) -> None:
    """A worker's part: begin what rank 0 asks for, and reply from another thread when it is done."""
    if isinstance(message, ReadBlocks):
        done = files.load(message.blocks)
    elif isinstance(message, WriteBlock):
        done = files.save(message.block)
    else:
        assert isinstance(message, ForgetBlocks), "rank 0 sends plans, and what its workers' files are asked for"
        done = files.forget_place(message.place)
    number = message.number

    def tell(done: Future[int]) -> None:
        with suppress(ConnectionFailed):  # then this process ends
            reply(BlocksDone(number, _count(done)))

    done.add_done_callback(tell)


def _count(done: Future[int]) -> int:
    """What a thread has found; nothing where it failed."""
    return 0 if done.exception() is not None else done.result()
