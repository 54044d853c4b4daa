"""Where a figure was measured: device, versions, commit and command, for the head of every stored result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from snapstream.startup.measure import machine_name

ROOT = Path(__file__).parents[1]
# Of files under version control, but for records: one benchmark after the other stores its own.
_CHANGES = ("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results", ":!evals/results")


def describe() -> dict[str, Any]:
    """Device, versions, commit, command and date of this run, as plain data."""
    import transformers

    return {
        "device": f"cpu: {machine_name()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
        "command": "python -m " + " ".join([_module(), *sys.argv[1:]]),
        "date": date.today().isoformat(),
    }


def commit() -> str:
    """SNAPSTREAM_COMMIT, for a copy of the tree without git; otherwise what git says."""
    given = os.environ.get("SNAPSTREAM_COMMIT", "")
    return given or _git("rev-parse", "--short", "HEAD") + ("+changes" if _git(*_CHANGES) else "")


def _git(*args: str) -> str:
    try:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _module() -> str:
    """The module that runs, as ``python -m`` takes it."""
    path = Path(sys.argv[0]).resolve().with_suffix("")
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else path.parts[-2:]
    return ".".join(parts).removesuffix(".__main__")
