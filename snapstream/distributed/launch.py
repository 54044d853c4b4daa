"""The other ranks as the leader sees them: it starts or takes in followers, hands out their tasks, and watches them.

      leader ==link==> follower 1            a thread for each follower receives; its link closes when its process dies
             ==link==> follower 2 ...        and a leader that dies closes all links, which ends all followers

Invariant: when a follower has gone, ``lost`` says so and every wait here ends; after ``close`` no process that was
started here is left. Followers on this machine are started here; those of others come to the leader's address. What a
follower does with its task: ``start/follow.py``. ``runner/parallel.py`` sends the plans.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from snapstream.distributed.link import Link, LinkClosed, pair
from snapstream.distributed.messages import TO_LEADER, BlocksDone, Failed, Hello, Joined, Ready, Task
from snapstream.distributed.wire import pack

State = Literal["here", "joined", "ready"]

STOP_S = 5.0  # for a follower to end when its link is closed
BLAME_S = 1.0  # between a collective that fails and the news of whose death that was
_ORDER: dict[type, State] = {Hello: "here", Joined: "joined", Ready: "ready"}


class RankLost(RuntimeError):
    """A rank has gone, and with it the engine."""


@dataclass(eq=False)
class Follower:
    """One other rank. Its fields belong to the lock of ``Followers``."""

    rank: int
    link: Link
    process: subprocess.Popen[bytes] | None = None  # None: on another machine
    hello: Hello | None = None
    state: State | None = None
    failure: Failed | None = None


class Followers:
    """All of them. ``on_lost`` is called once, on a thread, when one goes that had joined, unless this is closed."""

    def __init__(self, count: int, on_lost: Callable[[str], None] = lambda why: None) -> None:
        """``count`` of them will be spawned or admitted."""
        self._count, self._on_lost = count, on_lost
        self._all: list[Follower] = []
        self._change = threading.Condition()
        self._lost: Failed | None = None
        self._on_end: list[Callable[[], None]] = []
        self._on_done: Callable[[int, BlocksDone], None] = lambda rank, done: None
        self._is_closed = False

    def __len__(self) -> int:
        return self._count

    @property
    def lost(self) -> str | None:
        """Why the engine cannot go on; None while all are there."""
        return None if self._lost is None else self._lost.reason

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the followers on this machine."""
        return tuple(own.process.pid for own in self._all if own.process is not None)

    def spawn(self, rank: int, entry: str, environment: Mapping[str, str]) -> None:
        """Start a follower on this machine, which calls ``entry`` (``module:function``) with the number of its link's
        file. It does not import the caller's main module, so that a script needs no guard. ``environment``: changes.
        """
        link, theirs = pair(TO_LEADER)
        module, _, function = entry.partition(":")
        code = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}\n"
            f"from {module} import {function}\nsys.exit({function}({theirs.fileno()}))"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C at the terminal is the leader's alone
            )
        own = Follower(rank, link, process)
        with self._change:
            self._all.append(own)
        self._listen(own)

    def admit(self, link: Link) -> None:
        """Take in a follower from another machine as the next rank; who comes when all are there is turned away."""
        with self._change:
            if self._is_closed or len(self._all) == self._count:
                link.close()
                return
            own = Follower(len(self._all) + 1, link)
            self._all.append(own)
        self._listen(own)

    def hand_out(self, tasks: Sequence[Task]) -> None:
        """Give every follower the task of its rank; a link that is closed shows in ``wait``."""
        by_rank = {task.rank: task for task in tasks}
        for own in self._all:
            with suppress(LinkClosed):
                own.link.send(by_rank[own.rank])

    def hellos(self) -> list[Hello]:
        """What the followers said of themselves, by rank, once ``wait("here")`` has returned."""
        return [own.hello for own in sorted(self._all, key=lambda own: own.rank) if own.hello is not None]

    def wait(self, state: State, timeout_s: float) -> None:
        """Until all followers have come so far. ValueError: one cannot serve these settings; RankLost: one has gone."""
        states = list(_ORDER.values())
        reached = states[states.index(state) :]
        deadline = monotonic() + timeout_s
        with self._change:
            while self._lost is None and self._late(reached):
                if not self._change.wait(max(deadline - monotonic(), 0.0)) and monotonic() >= deadline:
                    raise RankLost(f"ranks {self._late(reached)} were not {state} within {timeout_s:g} s")
        self.check()

    def _late(self, reached: Sequence[State]) -> list[int]:
        """Ranks that have not come so far, or not come at all."""
        there = {own.rank for own in self._all if own.state in reached}
        return [rank for rank in range(1, self._count + 1) if rank not in there]

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call ``act`` when a rank goes, for whatever reason, on a thread, or at once if one has. It must not wait."""
        with self._change:
            self._on_end.append(act)
            if self._lost is not None:
                act()

    def when_done(self, act: Callable[[int, BlocksDone], None]) -> None:
        """Call ``act`` with a rank and its answer about the prefix store's files, on a thread. It must not wait."""
        self._on_done = act

    def check(self) -> None:
        """RankLost, or the ValueError that a follower reported, if one has gone."""
        if self._lost is not None:
            raise ValueError(self._lost.reason) if self._lost.kind == "value" else RankLost(self._lost.reason)

    def send(self, message: object) -> None:
        """The same message to all. RankLost if one cannot receive it."""
        self.check()
        data = pack(message)
        for own in self._all:
            try:
                own.link.send_packed(data)
            except LinkClosed:
                self.blame()
                raise RankLost(f"rank {own.rank} has closed its link") from None

    def blame(self) -> None:
        """RankLost if a rank has gone or goes in this moment: then that is why something else has failed."""
        with self._change:
            self._change.wait_for(lambda: self._lost is not None, BLAME_S)
        self.check()

    def close(self) -> None:
        """End all followers; returns when those of this machine are reaped. May be called twice."""
        with self._change:
            self._is_closed = True
        for own in self._all:
            own.link.close()
        deadline = monotonic() + STOP_S
        for own in self._all:
            if own.process is not None:
                try:
                    own.process.wait(max(deadline - monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    own.process.kill()
                    own.process.wait()

    def _listen(self, follower: Follower) -> None:
        name = f"rank-{follower.rank}"
        threading.Thread(target=self._receive, args=(follower,), name=name, daemon=True).start()

    def _receive(self, own: Follower) -> None:
        """Life of the thread that listens to one follower."""
        why = ""
        try:
            while True:
                message = own.link.receive()
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
        except LinkClosed:
            pass
        except ValueError as error:  # no message of ours
            why = f"rank {own.rank} sent {error}"
        self._note_end(own, why)

    def _note_end(self, own: Follower, why: str) -> None:
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
            had_joined = own.state in ("joined", "ready")  # else the leader waits for it, and will be told
            self._change.notify_all()
        if is_first and had_joined and end.kind == "error":
            self._on_lost(end.reason)


def _describe(process: subprocess.Popen[bytes] | None) -> str:
    """How a process has ended that has closed its link."""
    if process is None:
        return "has gone: its machine, its process or the network between"
    try:
        code = process.wait(BLAME_S / 2)
    except subprocess.TimeoutExpired:
        return "closed its link"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
