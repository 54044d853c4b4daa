"""Rank 0's view of the worker ranks: it starts or admits them, sends their tasks, and watches them.

      rank 0 ==channel==> worker rank 1       a thread for each worker receives; a channel closes when its process dies,
             ==channel==> worker rank 2 ...   and when rank 0 dies all channels close, which ends all workers

Invariant: when a worker is lost, ``lost`` says so and every wait here ends; after ``close``, or when this process
dies, no process that was started here is left, stopped ones included. Workers on this machine are started here; those
of others connect to rank 0's address. A worker's part: ``startup/ranks.py``. ``exec/parallel.py`` sends the plans.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from snapstream.distributed.control import (
    TO_RANK_0,
    BlocksDone,
    ControlChannel,
    Failed,
    Hello,
    Joined,
    Ready,
    Refused,
    Task,
    pair,
)
from snapstream.wire import ConnectionFailed, pack

log = logging.getLogger(__name__)

State = Literal["here", "joined", "ready"]

STOP_S = 5.0  # for a worker to end when its channel is closed
STALL_TICKS = 10  # checks of a running step within the stall timeout
LOST_S = 1.0  # between a collective that fails and the report of the lost rank
_ORDER: dict[type, State] = {Hello: "here", Joined: "joined", Ready: "ready"}


class RankLost(RuntimeError):
    """A rank is lost, and with it the engine."""


@dataclass(eq=False)
class WorkerRank:
    """Guarded by the lock of ``WorkerRanks``."""

    rank: int
    channel: ControlChannel
    process: subprocess.Popen[bytes] | None = None  # None: on another machine
    hello: Hello | None = None
    state: State | None = None
    failure: Failed | None = None


class WorkerRanks:
    """``on_lost`` is called once, on a thread, when a worker is lost that had joined, unless this is closed."""

    def __init__(
        self,
        count: int,
        on_lost: Callable[[str], None] = lambda why: None,
        stall_timeout_s: float = 0.0,
        refuses: Callable[[Hello], str] = lambda hello: "",
    ) -> None:
        """``count`` of them will be spawned or admitted; ``stall_timeout_s``: how long a step may take, 0: any time.

        ``refuses`` says why one of another machine cannot be a rank; nothing if it can.
        """
        self._refuses = refuses
        self._count, self._on_lost, self._stall_timeout_s = count, on_lost, stall_timeout_s
        self._step_since: float | None = None  # when the step began that runs
        self._closing = threading.Event()
        self._all: list[WorkerRank] = []
        self._change = threading.Condition()
        self._lost: Failed | None = None
        self._on_end: list[Callable[[], None]] = []
        self._on_done: Callable[[int, BlocksDone], None] = lambda rank, done: None
        self._is_closed = self._is_watched = False

    def __len__(self) -> int:
        return self._count

    @property
    def lost(self) -> str | None:
        """Why the engine cannot go on; None while all ranks are connected."""
        return None if self._lost is None else self._lost.reason

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers on this machine."""
        return tuple(own.process.pid for own in self._all if own.process is not None)

    def spawn(self, rank: int, entry: str, environment: Mapping[str, str]) -> None:
        """Start a worker on this machine, which calls ``entry`` (``module:function``) with the number of its channel's
        file. It does not import the caller's main module, so that a script needs no guard. ``environment``: changes.
        """
        channel, theirs = pair(TO_RANK_0)
        module, _, function = entry.partition(":")
        code = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}\n"
            f"from snapstream.distributed.launch import die_with_parent\ndie_with_parent({os.getpid()})\n"
            f"from {module} import {function}\nsys.exit({function}({theirs.fileno()}))"
        )
        own = WorkerRank(rank, channel)
        started: Future[None] = Future()

        def run() -> None:
            try:
                with theirs:
                    own.process = subprocess.Popen(
                        [sys.executable, "-c", code],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        env={**os.environ, **environment},
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,  # only rank 0 gets Ctrl-C from the terminal
                    )
                with self._change:
                    self._all.append(own)
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(None)
            self._receive(own)
            own.process.wait()

        # Not on the caller's thread: the system kills the process when the thread ends that started it.
        threading.Thread(target=run, name=f"rank-{rank}", daemon=True).start()
        started.result()

    def admit(self, channel: ControlChannel) -> None:
        """Admit a worker from another machine, as the rank that it names or the next free one. Rank 0 refuses one that
        cannot be a rank, with the reason, and keeps waiting.
        """
        threading.Thread(target=self._admit, args=(channel,), name="rank-admission", daemon=True).start()

    def _admit(self, channel: ControlChannel) -> None:
        """Thread that waits for a new worker's ``Hello``."""
        try:
            hello = channel.receive()
        except (ConnectionFailed, ValueError):
            hello = None
        if not isinstance(hello, Hello):
            channel.close()
            return
        why = self._refuses(hello)
        with self._change:
            free = sorted(set(range(1, self._count + 1)) - {own.rank for own in self._all})
            rank = hello.rank or next(iter(free), 0)
            if self._is_closed or not free:
                why = "all ranks are connected"
            elif rank not in free:
                why = why or f"rank {rank} is not missing; missing are {free}"
            own = WorkerRank(rank, channel, hello=hello, state="here")
            if not why:
                self._all.append(own)
                self._change.notify_all()
        if why:
            log.warning("a worker on %s was refused: %s", hello.host, why)
            with suppress(ConnectionFailed):
                channel.send(Refused(why))
            channel.close()
            return
        self._receive(own)

    def hand_out(self, tasks: Sequence[Task]) -> None:
        """Send every worker the task of its rank; ``wait`` reports a channel that is closed."""
        by_rank = {task.rank: task for task in tasks}
        for own in self._all:
            with suppress(ConnectionFailed):
                own.channel.send(by_rank[own.rank])

    def hellos(self) -> list[Hello]:
        """By rank, once ``wait("here")`` has returned."""
        return [own.hello for own in sorted(self._all, key=lambda own: own.rank) if own.hello is not None]

    def wait(self, state: State, timeout_s: float) -> None:
        """Until all workers are in ``state``. ValueError: one does not support the settings; RankLost: one is lost."""
        states = list(_ORDER.values())
        reached = states[states.index(state) :]
        deadline = monotonic() + timeout_s
        with self._change:
            while self._lost is None and self._late(reached):
                if not self._change.wait(max(deadline - monotonic(), 0.0)) and monotonic() >= deadline:
                    raise RankLost(f"ranks {self._late(reached)} were not {state} within {timeout_s:g} s")
        self.check()

    def _late(self, reached: Sequence[State]) -> list[int]:
        """Ranks that are not in these states."""
        done = {own.rank for own in self._all if own.state in reached}
        return [rank for rank in range(1, self._count + 1) if rank not in done]

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call ``act`` when a rank is lost, on a thread, or at once if one is. It must not wait."""
        with self._change:
            self._on_end.append(act)
            if self._lost is not None:
                act()

    def when_done(self, act: Callable[[int, BlocksDone], None]) -> None:
        """Call ``act`` with a rank and its answer about the prefix store's files, on a thread. It must not wait."""
        self._on_done = act

    def check(self) -> None:
        """RankLost, or the ValueError that a worker reported, if one is lost."""
        if self._lost is not None:
            raise ValueError(self._lost.reason) if self._lost.kind == "value" else RankLost(self._lost.reason)

    def send(self, message: object) -> None:
        """The same message to all. RankLost if one cannot receive it."""
        self.check()
        data = pack(message)
        for own in self._all:
            try:
                own.channel.send_packed(data)
            except ConnectionFailed:
                self.check_lost()
                raise RankLost(f"rank {own.rank} has closed its channel") from None

    @contextmanager
    def step(self) -> Iterator[None]:
        """While all ranks run a step; one that takes longer than the stall timeout ends the engine: a rank hangs."""
        if self._stall_timeout_s and not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._watch, name="ranks-stall", daemon=True).start()
        self._step_since = monotonic()
        try:
            yield
        finally:
            self._step_since = None

    def _watch(self) -> None:
        """Thread that looks for steps that take too long."""
        while not self._closing.wait(self._stall_timeout_s / STALL_TICKS):
            since = self._step_since
            if since is None or monotonic() - since < self._stall_timeout_s:
                continue
            with self._change:
                self._lost = self._lost or Failed(
                    "error", f"a step did not end within {self._stall_timeout_s:g} s (stall_timeout)"
                )
                self._change.notify_all()
            for own in self._all:  # which ends the collectives that wait for them
                own.channel.close()
                if own.process is not None:
                    own.process.kill()
            return

    def check_lost(self) -> None:
        """RankLost if a rank is lost, now or within ``LOST_S``: the cause of another failure."""
        with self._change:
            self._change.wait_for(lambda: self._lost is not None, LOST_S)
        self.check()

    def close(self) -> None:
        """End all workers; returns when those of this machine are reaped. May be called twice."""
        with self._change:
            self._is_closed = True
        self._closing.set()
        for own in self._all:
            own.channel.close()
        deadline = monotonic() + STOP_S
        for own in self._all:
            if own.process is not None:
                try:
                    own.process.wait(max(deadline - monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    own.process.kill()
                    own.process.wait()

    def _receive(self, own: WorkerRank) -> None:
        """Thread that listens to one worker."""
        why = ""
        try:
            while True:
                message = own.channel.receive()
                if isinstance(message, BlocksDone):
                    self._on_done(own.rank, message)
                    continue
                with self._change:
                    if isinstance(message, Failed):
                        own.failure = message
                    else:
                        own.state = _ORDER[type(message)]
                        own.hello = message if isinstance(message, Hello) else own.hello
                    self._change.notify_all()
        except ConnectionFailed:
            pass
        except ValueError as error:  # no message of ours
            why = f"rank {own.rank} sent {error}"
        self._note_end(own, why)

    def _note_end(self, own: WorkerRank, why: str) -> None:
        if own.failure is not None:
            end = Failed(own.failure.kind, f"rank {own.rank}: {own.failure.reason}")
        else:
            end = Failed("error", why or f"rank {own.rank} {_describe(own.process)}")
        with self._change:
            is_first = self._lost is None and not self._is_closed
            if is_first:
                self._lost = end
            for act in self._on_end:
                act()
            had_joined = own.state in ("joined", "ready")  # else rank 0 waits for it, and reports it
            self._change.notify_all()
        if is_first and had_joined and end.kind == "error":
            self._on_lost(end.reason)


def _describe(process: subprocess.Popen[bytes] | None) -> str:
    """How a process ended that closed its channel."""
    if process is None:
        return "is lost: its machine, its process or the network between"
    try:
        code = process.wait(LOST_S / 2)
    except subprocess.TimeoutExpired:
        return "closed its channel"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def die_with_parent(parent: int) -> None:
    """End this process when the thread of process ``parent`` that started it ends, on Linux: also where this process is
    stopped, and could not notice that its channel is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            os._exit(0)
