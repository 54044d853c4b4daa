"""What followers do in tests of the leader: they say what they are told to, without torch, and then wait or end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from snapstream.distributed.link import LinkClosed, inherited
from snapstream.distributed.messages import TO_FOLLOWER, Failed, Hello, Joined, Ready
from snapstream.step import StepPlan

HELLO = Hello(version="1", torch="2", host="here", pid=0)


def good(fileno: int) -> int:
    """A follower that takes every plan."""
    return take_plans(fileno, weak=False)


def weak(fileno: int) -> int:
    """One that the plan of step 13 kills, and for which that of step 14 is too much."""
    return take_plans(fileno, weak=True)


def take_plans(fileno: int, *, weak: bool) -> int:
    link = inherited(fileno, TO_FOLLOWER)
    for said in (HELLO, Joined(), Ready()):
        link.send(said)
    try:
        while True:
            plan = link.receive()
            assert isinstance(plan, StepPlan)
            if weak and plan.step_id == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            if weak and plan.step_id == 14:
                link.send(Failed("error", "RuntimeError: too much"))
                return 3
    except LinkClosed:
        return 0


def refusing(fileno: int) -> int:
    """One that cannot serve."""
    link = inherited(fileno, TO_FOLLOWER)
    link.send(HELLO)
    link.send(Failed("value", "this is not the leader's checkpoint"))
    return 1


def mute(fileno: int) -> int:
    """One that ends before it says a word."""
    return 7


def deaf(fileno: int) -> int:
    """One that does not notice that its leader has closed the link."""
    inherited(fileno, TO_FOLLOWER).send(HELLO)
    while True:
        time.sleep(1)


def babbling(fileno: int) -> int:
    """One that says what is no message."""
    link = inherited(fileno, TO_FOLLOWER)
    link.send_packed(b"what?")
    with suppress(LinkClosed):
        link.receive()
    return 0
