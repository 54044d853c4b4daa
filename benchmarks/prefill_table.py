"""Fills the table by which prefill attention is chosen from a result of the GPU suite; needs no GPU itself.

    python -m benchmarks.gpu_suite --out gpu.json --only attention      # on the GPU; part of the whole suite too
    python -m benchmarks.prefill_table gpu.json                         # writes snapstream/kernels/backends/table.json

Per dtype and head dimension of the result one entry. Chunks: kernels that ran at every point, by the sum of their times
there, each divided by the point's best. The extra time of a first call with new lengths counts too, spread over
``CALLS_PER_SHAPE``: every chunk of a prompt has other lengths, and each is used once per layer. Packed: kernels whose
one call beats the best loop.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapstream.kernels.backends import autotune
from snapstream.kernels.backends.autotune import Entry
from snapstream.kernels.backends.prefill import VERSIONS

PACKAGES = ("flash_attn", "flash_attn_3")
CALLS_PER_SHAPE = 32  # layers of an 8B model


def entries_of(result: dict[str, Any], source: str) -> list[Entry]:
    """Measured entries of a suite's result. ValueError if it has none."""
    figures = result["sections"].get("attention", {}).get("figures", [])
    places = {(f["capability"], f["dtype"], f["head_dim"]) for f in figures if f["capability"] and "ms" in f}
    if not places:
        raise ValueError(f"{source} has no figures of the section attention on a GPU")
    measured = f"{result['device']}, {result['date']}, PyTorch {result['torch']} ({source})"
    found = []
    for capability, dtype, head_dim in sorted(places):
        own = [f for f in figures if (f["capability"], f["dtype"], f["head_dim"]) == (capability, dtype, head_dim)]
        chunk, packed = chunk_order(own), packed_order(own)
        found.append(Entry(capability=capability, dtype=dtype, head_dim=head_dim, chunk=chunk, packed=packed,
                           measured=measured, reason=""))  # fmt: skip
    return found


def cost(figure: dict[str, Any]) -> float:
    """Milliseconds of a call, with its share of what new lengths cost."""
    extra = max(0.0, figure["first_ms"] - figure["ms"])
    return float(figure["ms"] + extra / CALLS_PER_SHAPE)


def chunk_order(figures: list[dict[str, Any]]) -> tuple[str, ...]:
    """Kernels by their time over the points that all of them share; ``reference`` last."""
    points: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for figure in figures:
        if figure.get("kind") == "chunk" and "ms" in figure and figure["way"] != "reference":
            points[figure["chunk"], figure["keys"]][figure["way"]] = cost(figure)
    everywhere = set.intersection(*(set(point) for point in points.values())) if points else set()
    total = {way: sum(point[way] / min(point.values()) for point in points.values()) for way in everywhere}
    return (*sorted(total, key=lambda way: total[way]), "reference")


def packed_order(figures: list[dict[str, Any]]) -> tuple[str, ...]:
    """Kernels whose one call for several prompts is faster than any call per prompt, the fastest first."""
    loops = [figure["ms"] for figure in figures if figure.get("kind") == "loop" and "ms" in figure]
    one = {f["way"]: f["ms"] for f in figures if f.get("kind") == "packed" and "ms" in f}
    return tuple(sorted((way for way in one if not loops or one[way] < min(loops)), key=lambda way: one[way]))


def with_absent(old: tuple[Entry, ...], entry: Entry) -> Entry:
    """``entry`` with the kernels of packages that were not installed where it was measured, in their old places: first,
    as the start compares all that are there.
    """
    before = autotune.find(old, str(entry.capability), entry.dtype, entry.head_dim or 0)
    chunk, packed = (
        (*(way for way in known if way not in own and way in PACKAGES), *own)
        for known, own in ((before.chunk, entry.chunk), (before.packed, entry.packed))
    )
    return replace(entry, chunk=chunk, packed=packed)


def merged(old: tuple[Entry, ...], new: list[Entry]) -> tuple[Entry, ...]:
    """The old table with new entries in the place of those for the same GPU, dtype and head dimension."""
    places = {(entry.capability, entry.dtype, entry.head_dim) for entry in new}
    kept = [entry for entry in old if (entry.capability, entry.dtype, entry.head_dim) not in places]
    return (*kept, *new)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill_table", description=__doc__)
    parser.add_argument("result", type=Path, help="JSON of the GPU suite")
    parser.add_argument("--table", type=Path, default=autotune.FILE, help="the table to fill")
    args = parser.parse_args()
    old = autotune.read(args.table)
    new = [with_absent(old, entry) for entry in entries_of(json.loads(args.result.read_text()), args.result.name)]
    assert all(set(entry.chunk) <= set(VERSIONS) for entry in new)
    autotune.write(merged(old, new), args.table)
    for entry in new:
        print(f"{entry.capability} {entry.dtype} heads of {entry.head_dim}: {', '.join(entry.chunk)}; "
              f"packed: {', '.join(entry.packed) or 'one by one'}")  # fmt: skip


if __name__ == "__main__":
    main()
