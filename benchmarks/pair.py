"""Another checkout against this one: the same benchmark in both, in turn, so that a drifting machine favours neither.

    python -m benchmarks.pair ../before decode --prompt-len 4096 --parts 4
    python -m benchmarks.pair ../before serving

Every figure of the benchmark's JSON that is a number is compared: the median of each side's runs, and here over there.
Times below 1 and rates above 1 are gains. Both sides use this environment; the other checkout must know the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import RESULTS, ceilings, report

HERE = RESULTS.parents[1]


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a result by their place in it."""
    if isinstance(value, dict):
        for key, own in value.items():
            yield from numbers(own, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, own in enumerate(value):
            yield from numbers(own, f"{name}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)


def run(checkout: Path, command: list[str]) -> dict[str, Any]:
    """What the benchmark printed last, a line of JSON; its output is shown where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{command[0]}", *command[1:]],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"benchmarks.{command[0]} failed in {checkout}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(other: Path, command: list[str], repeats: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"before": [], "here": []}
    for _ in range(repeats):
        for side, checkout in (("before", other), ("here", HERE)):
            runs[side].append(run(checkout, command))
    sides = {side: [dict(numbers(one["figures"])) for one in own] for side, own in runs.items()}
    rows = []
    for name in sides["here"][0]:
        if not all(name in one for own in sides.values() for one in own):
            continue
        before, here = (median(one[name] for one in sides[side]) for side in ("before", "here"))
        if before and before != here:
            rows.append({"figure": name, "before": before, "here": here, "ratio": here / before})
    commits = {side: own[0]["commit"] for side, own in runs.items()}
    return {"benchmark": " ".join(command), "repeats": repeats, "commits": commits, "figures": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="benchmark and its options")
    args = parser.parse_args()
    if not args.command or not args.other.is_dir():
        parser.error("give the folder of another checkout, then a benchmark and its options")
    ceiling = ceilings()
    found = compare(args.other.resolve(), args.command, args.repeats)
    for row in found["figures"]:
        print(f"{row['figure']:48s} {row['before']:12.4g} {row['here']:12.4g} {row['ratio']:7.3f}")
    report(f"pair_{args.command[0]}", ceiling, found, save=args.save)


if __name__ == "__main__":
    main()
