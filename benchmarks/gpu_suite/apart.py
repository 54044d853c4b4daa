"""Runs every section in a process of its own: one that hangs, dies or loses the device costs only itself.

The parent imports no torch and holds no device memory. Each child writes a JSON of its own, also after every figure;
the parent merges them into one. Run as a module, this is the stand-in for a section of a rehearsal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

START_S = 30.0  # imports, a CUDA context, and the grace of the child's own watchdog
HANGS, DIES = "hangs", "dies"


class Apart(NamedTuple):
    """A section to run: at most ``limit_s`` seconds, the start of its process included."""

    name: str
    limit_s: float
    about: str


def entry_of(about: str, error: str | None = None, *, is_cut: bool = False) -> dict[str, Any]:
    return {"about": about, "figures": [], "error": error, "is_cut": is_cut, "is_running": False, "seconds": 0.0}


def is_waiting(entry: dict[str, Any] | None) -> bool:
    """Whether a section has not started yet, in this run or an earlier one into the same file."""
    return entry is None or bool(entry["is_cut"] and not entry["figures"] and not entry["error"])


def run_apart(
    sections: Iterable[Apart], command: Callable[[str, float, Path], list[str]], out: Path, budget_s: float
) -> dict[str, Any]:
    """Run the sections that ``out`` lacks, one after another, and write ``out`` after each.

    ``command(name, seconds, part)`` is the child's command, which writes ``part``. A section that has less than half of
    its time left does not start; the next run into the same file begins with it.
    """
    began = time.monotonic()
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"sections": {}}
    before = float(result.get("seconds", 0.0))
    with tempfile.TemporaryDirectory() as folder:
        for name, limit_s, about in sections:
            if not is_waiting(result["sections"].get(name)):
                continue
            left, part = budget_s - (time.monotonic() - began), Path(folder) / f"{name}.json"
            if left <= limit_s / 2:
                result["sections"][name] = entry_of(about, is_cut=True)
            else:
                started, seconds = time.monotonic(), min(limit_s, left)
                print(f"== {name} (at most {seconds:.0f} s)", flush=True)
                problem = _run(command(name, seconds, part), seconds)
                _merge(result, name, part, about, problem)
                result["sections"][name]["seconds"] = time.monotonic() - started
            result["seconds"] = before + time.monotonic() - began
            _write(out, result)
    return result


def _run(command: list[str], seconds: float) -> str | None:
    """Why the process did not end by itself with success; None where it did."""
    child = subprocess.Popen(command, start_new_session=True)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s, its limit"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # also what it started
        with suppress(subprocess.TimeoutExpired):  # a process inside a driver may not die at once
            child.wait(5)
    return None if code == 0 else f"the process ended with code {code}"


def _merge(result: dict[str, Any], name: str, part: Path, about: str, problem: str | None) -> None:
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # it ended before its first write
        found = json.loads(part.read_text())
    head = {key: value for key, value in found.items() if key not in ("sections", "seconds", "command")}
    for key, value in head.items():
        if value or key not in result:
            result.setdefault(key, value)
            if not result[key]:  # ceilings, which the first section measures
                result[key] = value
    entry = found.get("sections", {}).get(name) or entry_of(about)
    entry["is_cut"] |= entry["is_running"]
    entry["is_running"] = False
    if problem is not None:
        entry["error"] = entry["error"] or problem
        print(f"{name}: {problem}", flush=True)
    result["sections"][name] = entry


def _write(out: Path, result: dict[str, Any]) -> None:
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(out)


def rehearse(names: list[str], out: Path, hang_s: float) -> list[str]:
    """Run stand-ins of all sections, a third of the way in one that hangs and one that dies; what went wrong.

    ``hang_s``: the limit of the one that hangs.
    """
    third = len(names) // 3
    wanted = [*names[:third], HANGS, DIES, *names[third:]]
    sections = [Apart(name, hang_s if name == HANGS else 120.0, "a stand-in") for name in wanted]
    module = "benchmarks.gpu_suite.apart"
    made = run_apart(
        sections, lambda name, seconds, part: [sys.executable, "-m", module, name, str(part)], out, 600.0
    )["sections"]  # fmt: skip
    expected = {HANGS: "its limit", DIES: f"code {-signal.SIGKILL}"}
    problems = [f"{name}: no figure" for name in wanted if not made[name]["figures"]]
    for name in wanted:
        error, words = made[name]["error"], expected.get(name)
        if (error is not None) if words is None else words not in (error or ""):
            problems.append(f"{name}: {error}")
    return problems


def stand_in(name: str, part: Path) -> None:
    """A child of a rehearsal: one figure, then what its name says."""
    entry = entry_of("a stand-in")
    entry |= {"figures": [{"value": len(name)}], "is_running": name in (HANGS, DIES)}
    _write(part, {"name": "rehearsal", "seconds": 0.0, "sections": {name: entry}})
    if name == HANGS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a process that waits for a device
        time.sleep(3600)
    if name == DIES:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    stand_in(sys.argv[1], Path(sys.argv[2]))
