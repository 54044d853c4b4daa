"""Worker ranks for tests of rank 0: they send what the test needs, without torch, and then wait or end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from snapstream.distributed.control import TO_WORKER, Failed, Hello, Joined, Ready, inherited
from snapstream.step import StepPlan
from snapstream.wire import ConnectionFailed

HELLO = Hello(version="1", torch="2", host="here", pid=0)


def good(fileno: int) -> int:
    """A worker that takes every plan."""
    return take_plans(fileno, weak=False)


def weak(fileno: int) -> int:
    """One that the plan of step 13 kills, and for which that of step 14 is too much."""
    return take_plans(fileno, weak=True)


def take_plans(fileno: int, *, weak: bool) -> int:
    channel = inherited(fileno, TO_WORKER)
    for said in (HELLO, Joined(), Ready()):
        channel.send(said)
    try:
        while True:
            plan = channel.receive()
            assert isinstance(plan, StepPlan)
            if weak and plan.step_id == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            if weak and plan.step_id == 14:
                channel.send(Failed("error", "RuntimeError: too much"))
                return 3
    except ConnectionFailed:
        return 0


def refusing(fileno: int) -> int:
    """One that cannot serve."""
    channel = inherited(fileno, TO_WORKER)
    channel.send(HELLO)
    channel.send(Failed("value", "this is not rank 0's checkpoint"))
    return 1


def mute(fileno: int) -> int:
    """One that ends before it says a word."""
    return 7


def deaf(fileno: int) -> int:
    """One that does not notice that rank 0 has closed the channel."""
    inherited(fileno, TO_WORKER).send(HELLO)
    while True:
        time.sleep(1)


def babbling(fileno: int) -> int:
    """One that says what is no message."""
    channel = inherited(fileno, TO_WORKER)
    channel.send_packed(b"what?")
    with suppress(ConnectionFailed):
        channel.receive()
    return 0
