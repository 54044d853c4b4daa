"""Waiting in tests: until something holds, however slow the machine is.

A limit here is for what hangs, so it is far beyond what a busy machine needs. No test asks how long something takes:
times belong in benchmarks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

HANG_S = 300.0
# For requests of any thread, a connection each. ``httpx.get`` makes a client every time, which
# reads all certificates: 40 ms of a processor, often more than the answer takes.
HTTP = httpx.Client(timeout=HANG_S, limits=httpx.Limits(max_keepalive_connections=0))


def until(holds: Callable[[], object], limit_s: float = HANG_S) -> None:
    """Poll until it holds; AssertionError after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come within {limit_s:g} s"
        time.sleep(0.02)


async def until_async(holds: Callable[[], object], limit_s: float = HANG_S) -> None:
    """The same beside what runs on the event loop."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come within {limit_s:g} s"
        await asyncio.sleep(0.01)
