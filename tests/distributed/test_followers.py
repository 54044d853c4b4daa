"""Followers as their leader sees them: waited for, watched, told, ended. They run no model here, and start at once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from benchmarks.server_process import is_running
from snapstream.distributed import launch
from snapstream.distributed.launch import Followers, RankLost
from snapstream.step import StepPlan
from tests.waiting import HANG_S, until


@contextmanager
def started(*entries: str) -> Iterator[tuple[Followers, SimpleQueue[str]]]:
    lost: SimpleQueue[str] = SimpleQueue()
    followers = Followers(len(entries), lost.put)
    try:
        for rank, entry in enumerate(entries, start=1):
            followers.spawn(rank, f"tests.distributed.entries:{entry}", {})
        yield followers, lost
    finally:
        followers.close()
        assert not any(is_running(pid) for pid in followers.pids)


def test_all_are_waited_for_told_and_ended() -> None:
    with started("good", "good") as (followers, lost):
        followers.wait("here", HANG_S)
        assert [hello.host for hello in followers.hellos()] == ["here", "here"]
        followers.wait("ready", HANG_S)
        for step in range(3):
            followers.send(StepPlan(step_id=step, decode_rows=tuple(range(2000))))
        assert followers.lost is None and all(is_running(pid) for pid in followers.pids)
        followers.close()
        followers.close()  # may be repeated
        assert followers.lost is None and lost.empty(), "who is ended is not lost"


@pytest.mark.parametrize(
    ("step", "why"), [(13, "rank 2 was killed by SIGKILL"), (14, "rank 2: RuntimeError: too much")]
)
def test_one_that_dies_is_noticed_and_named(step: int, why: str) -> None:
    with started("good", "weak") as (followers, lost):
        followers.wait("ready", HANG_S)
        woken: list[int] = []
        followers.when_lost(lambda: woken.append(1))
        followers.send(StepPlan(step_id=step))
        assert lost.get(timeout=HANG_S) == why == followers.lost
        assert woken, "whoever waits for it is told"
        followers.when_lost(lambda: woken.append(2))
        assert woken[-1] == 2, "at once, where it has gone"
        with pytest.raises(RankLost, match=why):
            followers.send(StepPlan(step_id=15))
        with pytest.raises(RankLost, match=why):
            followers.blame()
        assert lost.empty(), "it is told once"


@pytest.mark.parametrize(
    ("entry", "error", "why"),
    [
        ("refusing", ValueError, "rank 1: this is not the leader's checkpoint"),
        ("mute", RankLost, "rank 1 ended with code 7"),
        ("babbling", RankLost, "rank 1 sent 5 bytes that are no message"),
    ],
)
def test_one_that_cannot_start_says_why(entry: str, error: type[Exception], why: str) -> None:
    with started(entry, "good") as (followers, lost):
        with pytest.raises(error, match=why):
            followers.wait("ready", HANG_S)
        assert lost.empty(), "the waiting caller knows"


def test_one_that_is_late_is_named() -> None:
    with started("deaf") as (followers, _):
        followers.wait("here", HANG_S)
        with pytest.raises(RankLost, match=r"ranks \[1\] were not ready within 0\.01 s"):
            followers.wait("ready", 0.01)


def test_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with started("deaf") as (followers, _):
        followers.wait("here", HANG_S)
        monkeypatch.setattr(launch, "STOP_S", 0.0)
        followers.close()
        assert not any(is_running(pid) for pid in followers.pids)


LEADER = """
import sys, time
from snapstream.distributed.launch import Followers
followers = Followers(1)
followers.spawn(1, "tests.distributed.entries:good", {})
followers.wait("ready", 300)
print(*followers.pids, flush=True)
time.sleep(600)
"""


def test_a_leader_that_is_killed_leaves_none_behind() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, env=env) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        assert is_running(pid)
        leader.kill()
    until(lambda: not is_running(pid))


def test_garbage_is_no_reason_to_stay() -> None:
    """Threads of the leader do not hold what nobody else holds: see ``ParallelRunner``."""
    with started("good") as (followers, _):
        followers.wait("ready", HANG_S)
        holder = type("Holder", (), {})()
        weakref.finalize(holder, followers.close)
        del holder
        gc.collect()
        assert not any(is_running(pid) for pid in followers.pids)
