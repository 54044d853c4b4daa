"""``snapstream follow``: ranks on this machine for an engine whose leader is on another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from snapstream.cli.flags import number_option, whole_option

HELP = """Be ranks of an engine on another machine, whose leader was started with --local-ranks and --leader-address.

MODEL is this machine's copy of the leader's checkpoint folder. The key of SNAPSTREAM_RANKS_KEY (or of the file that
SNAPSTREAM_RANKS_KEY_FILE names) must be the leader's. The command ends with the engine.

\b
Examples:
  snapstream serve DeepSeek-R1/ --device cuda --tensor-parallel 16 --local-ranks 8 --leader-address 10.0.0.1:7690
  snapstream follow 10.0.0.1:7690 DeepSeek-R1/ --ranks 8
"""

POLL_S = 0.1


def follow(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the leader waits.", show_default=False)],
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    ranks: Annotated[int, whole_option("Ranks here, a process each; on GPUs the first so many, one each.")] = 1,
    patience: Annotated[float, number_option("Seconds to wait for a leader that is not there yet.")] = 300.0,
) -> None:
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it must be a whole number >= 1")
    if ranks == 1:
        from snapstream.start.follow import follow_address

        raise typer.Exit(follow_address(address, model, patience))
    own = [sys.executable, "-m", "snapstream.cli", "follow", address, str(model), "--patience", str(patience)]
    raise typer.Exit(run_all([(own, environment(rank, ranks)) for rank in range(ranks)]))


def environment(rank: int, ranks: int) -> dict[str, str]:
    """Of one of several ranks: it sees one GPU, and has its part of the cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = [name.strip() for name in visible.split(",")] if visible else [str(gpu) for gpu in range(ranks)]
    if len(gpus) < ranks:
        raise ValueError(f"--ranks is {ranks}; CUDA_VISIBLE_DEVICES names {len(gpus)} GPUs")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[rank], "OMP_NUM_THREADS": threads}


def run_all(commands: list[tuple[list[str], dict[str, str]]]) -> int:
    """Run commands beside each other until one ends, and end the others with it; its exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # past the end of this function
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, environ in commands:
            running.append(subprocess.Popen(command, env=environ))
        while True:
            for process in running:
                if process.poll() is not None:
                    return process.returncode
            time.sleep(POLL_S)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
