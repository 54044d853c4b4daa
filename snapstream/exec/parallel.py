"""A runner over several ranks: rank 0 sends each plan to its workers, then runs it over its own shard.

Every rank runs the same ``ModelRunner`` over its shard of weights and rows, and samples the same tokens: they depend on
logits with the same bits on every rank, on seeds and on counters. So only plans are sent, with the drafts that rank 0
proposes, and only rank 0 reads results. Invariant: workers run exactly the plans that rank 0 runs, in the same order.
Ctrl-C therefore waits for the end of a submit, or workers would wait for a plan that rank 0 has run in part.

Prefix store on disk: each rank has its shard of every block in its own files (``kv/prefix_store.py``).

    rank 0: ReadBlocks --> every worker, next to its steps: its files --> BlocksDone --> rank 0: all have n blocks

Rank 0's files say what is stored. Invariant: a block counts as read only if every rank has read its shard, before a
plan that uses it is sent. A shard that is missing or damaged on one rank is a miss for all, and is written again.
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

from snapstream.distributed.control import BlocksDone, ForgetBlocks, RankLost, ReadBlocks, WorkerRanks, WriteBlock
from snapstream.distributed.group import Group
from snapstream.exec.results import SubmittedStep
from snapstream.exec.runner import ModelRunner
from snapstream.kv.prefix_store import PrefixFiles
from snapstream.step import DiskCache, KVConnector, StepPlan, StoredBlock
from snapstream.wire import ConnectionFailed


class RanksDiffer(RuntimeError):
    """Ranks have sampled different tokens."""


class RankRunner:
    def __init__(self, runner: ModelRunner, group: Group, *, checks: bool) -> None:
        """``checks``: compare sampled tokens with the other ranks after every step, which makes the host wait."""
        self.runner, self._group, self._checks = runner, group, checks

    def submit(self, plan: StepPlan) -> SubmittedStep:
        step = self.runner.submit(plan)
        if self._checks:
            check_ranks(step.drawn_ids(), self._group, self.runner.decoder.device)
        return step


def check_ranks(drawn: list[int], group: Group, device: torch.device) -> None:
    """RanksDiffer unless all ranks have sampled the same token ids; a collective."""
    own = torch.tensor([[len(drawn), *drawn]], dtype=torch.int64, device=device)  # [1, 1 + n]
    gathered = group.all_gather(own, 0).tolist()
    if any(ids != gathered[0] for ids in gathered):
        raise RanksDiffer(f"ranks have sampled different tokens: {[ids[1:] for ids in gathered]}")


class ParallelRunner:
    """On rank 0: a ``Runner`` of all ranks."""

    def __init__(self, rank_0: RankRunner, workers: WorkerRanks, leave: Callable[[], None]) -> None:
        """``leave`` leaves the process group: at ``close``, or when this is garbage-collected."""
        self.rank_0, self.workers = rank_0, workers
        files = rank_0.runner.disk_cache
        self._files = None if files is None else RankFiles(files, len(workers), self._send)
        if self._files is not None:
            workers.when_done(self._files.note)
            workers.when_lost(self._files.give_up)
        self._finalizer = weakref.finalize(self, _finalize, workers, leave)

    @property
    def disk_cache(self) -> DiskCache | None:
        """The files of all ranks, if the prefix store has a folder."""
        return self._files

    def is_ready(self, job_id: int) -> bool:
        """See ``Runner.is_ready``; all ranks copy the same amount."""
        return self.rank_0.runner.is_ready(job_id)

    def connect(self, connector: KVConnector) -> None:
        """See ``Runner.connect``: rank 0 sends and receives whole rows."""
        self.rank_0.runner.connect(connector)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Run a plan on every rank. RankLost if one has ended; the engine is then unusable."""
        with _uninterrupted(), self.workers.step():
            plan = replace(plan, drafts=self.rank_0.runner.propose(plan))
            # Without received rows, which workers get layer by layer, in collectives.
            rowless = tuple(replace(row, row=None) for row in plan.received)
            self.workers.send(replace(plan, received=rowless))
            try:
                return self.rank_0.submit(plan)
            except Exception:
                self.workers.check_lost()
                raise

    def _send(self, message: object) -> None:
        """To all workers or, if Ctrl-C comes first, none. RankLost if one has ended."""
        with _uninterrupted():
            self.workers.send(message)

    def close(self) -> None:
        """End the workers, and wait for their processes on this machine."""
        self._finalizer()


def _finalize(workers: WorkerRanks, leave: Callable[[], None]) -> None:
    workers.close()
    with suppress(RuntimeError):  # the group is broken
        leave()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, but not a second one: a rank may hang."""
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
class _Pending:
    """A request to the files of all ranks."""

    counts: dict[int, int] = field(default_factory=dict)  # answers, by rank
    least: Future[int] = field(default_factory=Future)


class RankFiles:
    """The ``DiskCache`` of rank 0: the files of all ranks."""

    def __init__(self, own: PrefixFiles, num_workers: int, send: Callable[[object], None]) -> None:
        """``send`` sends a message to every worker; ``note`` receives their answers."""
        self._own, self._num_ranks, self._send = own, 1 + num_workers, send
        self._lock = Lock()
        self._pending: dict[int, _Pending] = {}  # by number
        self._next = 0

    def names(self, namespace: str, chain: Sequence[bytes], *, of_snapshots: bool = False) -> tuple[str, ...]:
        """See ``DiskCache.names``; the same on all ranks."""
        return self._own.names(namespace, chain, of_snapshots=of_snapshots)

    def has(self, name: str) -> bool:
        """Whether rank 0 has its shard."""
        return self._own.has(name)

    def load(self, wanted: Sequence[StoredBlock]) -> Future[int]:
        """See ``DiskCache.load``; the least of all ranks."""
        return self._ask(lambda number: ReadBlocks(number, tuple(wanted)), lambda: self._own.load(wanted))

    def save(self, block: StoredBlock) -> Future[int]:
        return self._ask(lambda number: WriteBlock(number, block), lambda: self._own.save(block))

    def forget(self, namespace: str | None) -> None:
        place = "" if namespace is None else self._own.place(namespace)
        self._ask(lambda number: ForgetBlocks(number, place), lambda: self._own.forget_place(place))

    def note(self, rank: int, done: BlocksDone) -> None:
        """A rank's answer; any thread may call it."""
        with self._lock:
            pending = self._pending.get(done.number)
            if pending is None:
                return
            pending.counts[rank] = done.count
            if len(pending.counts) < self._num_ranks:
                return
            del self._pending[done.number]
        pending.least.set_result(min(pending.counts.values()))

    def give_up(self) -> None:
        """A rank has ended: fail all pending requests. Any thread may call it."""
        with self._lock:
            left, self._pending = list(self._pending.values()), {}
        for pending in left:
            pending.least.set_exception(RankLost("a rank ended while it handled files of the prefix store"))

    def close(self) -> None:
        """Finish writing, on every rank."""
        self._own.close()
        with self._lock:
            left = [pending.least for pending in self._pending.values()]
        wait(left)

    def _ask(self, message: Callable[[int], object], own: Callable[[], Future[int]]) -> Future[int]:
        pending = _Pending()
        with self._lock:
            number, self._next = self._next, self._next + 1
        try:
            self._pending[number] = pending
            own().add_done_callback(lambda done: self.note(0, BlocksDone(number, _count(done))))
            self._send(message(number))
        except BaseException:  # a rank ended, or Ctrl-C: neither the caller nor ``close`` may wait
            with self._lock:
                self._pending.pop(number, None)
            raise
        return pending.least


def answer(files: PrefixFiles, message: object, reply: Callable[[object], None]) -> None:
    """On a worker: start what rank 0 requests, and reply from another thread when it is done."""
    if isinstance(message, ReadBlocks):
        done = files.load(message.blocks)
    elif isinstance(message, WriteBlock):
        done = files.save(message.block)
    else:
        assert isinstance(message, ForgetBlocks), f"rank 0 sent a {type(message).__name__}"
        done = files.forget_place(message.place)
    number = message.number

    def send_count(done: Future[int]) -> None:
        with suppress(ConnectionFailed):  # then this process ends
            reply(BlocksDone(number, _count(done)))

    done.add_done_callback(send_count)


def _count(done: Future[int]) -> int:
    """0 if it failed."""
    return 0 if done.exception() is not None else done.result()
