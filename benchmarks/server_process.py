"""``snapstream serve`` as a process of its own, for benchmarks and tests that need a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 600.0  # to load the tiny model, on a machine that is busy with other things


@dataclass(frozen=True)
class ServerProcess:
    process: subprocess.Popen[bytes]
    url: str  # scheme://host:port
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """Of the engine process that was started last."""
        return int(re.findall(r"engine process (\d+) serves", self.log.read_text())[-1])


@contextmanager
def served(options: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    """A server on a free port, once it answers; ended at the end, whatever state it is in. ``log`` gets its stderr."""
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "snapstream.cli", "serve", "--port", "0", *options],
            stderr=err,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"serving .+? at (https?://\S+?)/v1", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield ServerProcess(process, found[1], log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # the engine process notices and ends, too
        process.wait()


def resident_bytes(pid: int) -> int:
    """Memory of a process that is its own or file-backed and present; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """That a process has used so far, all threads, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """False also for a zombie: it has ended, whoever fails to collect it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
