"""The ceilings of the machine, and how a benchmark stores its result.

The ceilings are measured in the same run as the figures, because shared machines drift: a share of the measured
bandwidth means something, a time in milliseconds on somebody's two cores does not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from figures.machine import describe
from snapstream.startup.measure import read_bandwidth

RESULTS = Path(__file__).parent / "results"


def timed_seconds(work: Any, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` calls after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return times


def best_seconds(work: Any, repeats: int = 5) -> float:
    """Shortest of ``repeats`` timed calls after one warm-up."""
    return min(timed_seconds(work, repeats))


def matmul_rate() -> float:
    """fp32 operations per second of a 2048-cubed matrix product."""
    a, b = torch.randn(2, 2048, 2048)
    return 2 * 2048**3 / best_seconds(lambda: a @ b)


def ceilings() -> dict[str, float]:
    """Both ceilings, printed first as every benchmark here does."""
    found = {"read_gb_per_s": read_bandwidth() / 1e9, "fp32_gflop_per_s": matmul_rate() / 1e9}
    print(f"ceiling: read {found['read_gb_per_s']:.1f} GB/s, fp32 {found['fp32_gflop_per_s']:.0f} GFLOP/s", flush=True)
    return found


def report(name: str, ceiling: dict[str, float], figures: dict[str, Any], *, save: bool, device: str = "cpu") -> None:
    """Print one JSON line; with ``save`` also write ``results/<device>/<date>_<name>.json``.

    Under ``SNAPSTREAM_INSTRUCTIONS`` the name ends with it: a record of its own.
    """
    instructions = os.environ.get("SNAPSTREAM_INSTRUCTIONS")
    name = f"{name}_{instructions}" if instructions else name
    result = {"name": name, **describe(), "ceiling": ceiling, "figures": figures}
    if save:
        folder = RESULTS / device
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result['date']}_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
