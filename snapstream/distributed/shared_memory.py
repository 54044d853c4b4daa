"""Memory that processes of one machine see together; without a name, so it goes with the last of them.

The first process creates a file that exists in memory only (``memfd_create``); the others reach it by the number that
it has there, as the system shows it to processes of the same user. Linux has both. Invariant: nothing is left behind,
however a process ends. ``group.py`` tells the numbers.
"""

from __future__ import annotations

import os
from mmap import mmap


def memory_problem() -> str | None:
    """Why ranks of this machine cannot share memory; None where they can."""
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return "ranks would share memory, and this system has no memfd_create or no /proc"
    return None


def create(num_bytes: int) -> int:
    """The file, zeros; OSError where memory is short."""
    made = os.memfd_create("snapstream-ranks")
    os.ftruncate(made, num_bytes)
    return made


def reach(pid: int, number: int, num_bytes: int) -> mmap:
    """The memory of the file ``number`` of process ``pid``; OSError for one that is not there or not ours."""
    own = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap(own, num_bytes)
    finally:
        os.close(own)
