"""Makes a result of the GPU suite part of the tree: the JSON under ``results/``, its tables in
docs/research/gpu-results.md.

    python -m benchmarks.gpu_tables gpu.json           keeps the JSON, writes the document of all that are kept
    python -m benchmarks.gpu_tables gpu.json --print   prints the document of this one only

The document begins with the goals, the measured values and whether each goal was reached; then it has every section of
every JSON. It names a missing figure as missing and never leaves it out. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS
from figures.markdown import table

DOCUMENT = Path(__file__).parents[1] / "docs" / "research" / "gpu-results.md"
HEAD = ("device", "memory_gib", "torch", "cuda", "cudnn", "commit", "date", "command", "seconds")


# What one H200 should reach, and where in a result each figure stands.

Result = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """One line; ``measured`` is None where the result has no such figure."""

    what: str
    limit: float
    measured: Callable[[Result], float | None]
    unit: str = ""  # "%" shows a share as one
    is_most: bool = False  # the limit is a ceiling
    is_strict: bool = False

    def is_reached(self, value: float) -> bool:
        if self.is_strict:
            return value > self.limit
        return value <= self.limit if self.is_most else value >= self.limit

    def bound(self) -> str:
        sign = ">" if self.is_strict else "<=" if self.is_most else ">="
        return f"{sign} {self.shown(self.limit)}"

    def shown(self, value: float) -> str:
        return f"{value * 100:.3g} %" if self.unit == "%" else f"{value:.3g}{self.unit}"


def figures(result: Result, section: str, **fixed: Any) -> Iterator[dict[str, Any]]:
    """Figures of a section that have these values."""
    for figure in result["sections"].get(section, {}).get("figures", []):
        if all(figure.get(name) == value for name, value in fixed.items()):
            yield figure


def one(section: str, name: str, **fixed: Any) -> Callable[[Result], float | None]:
    """The figure ``name`` of the line that has these values."""
    return lambda result: next((f[name] for f in figures(result, section, **fixed) if name in f), None)


def prefill(name: str, prompt_len: int) -> Callable[[Result], float | None]:
    """Of the prompt of about that length."""

    def find(result: Result) -> float | None:
        near = (f for f in figures(result, "prefill_8b") if abs(f["prompt_len"] - prompt_len) <= 64 and name in f)
        return next((figure[name] for figure in near), None)

    return find


def most_rows(result: Result) -> float | None:
    found = {figure["batch"]: figure["share_of_read"] for figure in figures(result, "decode_8b", executor="graph")}
    return found[max(found)] if found and max(found) > 32 else None


def speedup_of_draft(result: Result) -> float | None:
    found = [figure["speedup"] for figure in figures(result, "spec_prefill") if "speedup" in figure]
    return max(found, default=None)


def plan_error(result: Result) -> float | None:
    """The largest deviation of the peak from what was planned."""
    found = [abs(f["peak_gib"] / f["planned_gib"] - 1) for f in figures(result, "largest_batch")]
    return max(found, default=None)


def ahead_of_peer(result: Result) -> float | None:
    """Least ratio to transformers' static cache over the batches of both; None unless all of ours have one."""
    ours = {f["batch"]: f["tokens_per_s"] for f in figures(result, "peers") if f["engine"].startswith("snapstream")}
    theirs = {f["batch"]: f["tokens_per_s"] for f in figures(result, "peers") if f["engine"].startswith("transformers")}
    return min((ours[batch] / theirs[batch] for batch in ours), default=None) if ours.keys() == theirs.keys() else None


def ahead_of_continuous(result: Result) -> float | None:
    ours, theirs = (one(name, "tokens_per_s")(result) for name in ("requests", "peers_continuous"))
    return None if ours is None or theirs is None else ours / theirs


WANTED = (
    Wanted("decode of 8B, 64 rows of 8,192 slots, or what fits: share of the read bandwidth", 0.80, most_rows, "%"),
    Wanted("decode of 8B, one row", 0.70, one("decode_8b", "share_of_read", executor="graph", batch=1), "%"),
    Wanted("decode attention alone, 64 rows of 8,192 slots of 8B", 0.85,
           one("decode_kernel", "share_of_read", model="Llama-3.1-8B", batch=64), "%"),
    Wanted("128k prompts: decode at the largest batch, a quarter of the cache over all of it", 4.3,
           one("largest_batch", "speedup_over_full", slots=32_768), "x"),
    Wanted("scoring, selection and write of a 128k prefill", 0.01, prefill("compress_share", 131_072), "%",
           is_most=True),
    Wanted("extra memory of a 128k prefill at 8B", 2.0, prefill("extra_gib", 131_072), " GiB", is_most=True),
    Wanted("MFU of a 32k prefill", 0.55, prefill("mfu", 32_768), "%"),
    Wanted("p99 between tokens during a 128k prefill over idle, by default", 2.0,
           one("streams", "p99_ratio", is_default=True), "x", is_most=True),
    Wanted("tokens/s over transformers, static cache and compile, the least of all batches", 1.0, ahead_of_peer, "x",
           is_strict=True),
    Wanted("tokens/s over transformers' continuous batching, prefill included", 1.0, ahead_of_continuous, "x",
           is_strict=True),
    Wanted("first token of 128k tokens cut to 16k by a draft, over the whole prompt", 8.0, speedup_of_draft, "x"),
    Wanted("peak memory against the plan, largest deviation", 0.03, plan_error, "%", is_most=True),
    Wanted("first token of a 33k prompt out of the prefix store, over cold", 12.0, one("prefixes", "speedup"), "x"),
    Wanted("a cold prefill with the prefix store on, over one without", 1.02, one("prefixes", "slowdown"), "x",
           is_most=True),
    Wanted("p99 between tokens of streams while a stored prompt is restored, over idle", 1.5,
           one("prefixes", "p99_ratio"), "x", is_most=True),
)  # fmt: skip


def shown(value: Any) -> str:
    """A figure as people read it: three or four digits, and thousands apart."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def wanted_table(result: Result) -> str:
    """Wanted, measured, reached."""
    rows = []
    for wanted in WANTED:
        value = wanted.measured(result)
        reached = "not measured" if value is None else "yes" if wanted.is_reached(value) else "**no**"
        rows.append([wanted.what, wanted.bound(), "" if value is None else wanted.shown(value), reached])
    return table(["what", "wanted", "measured", "reached"], rows)


def all_wanted(results: list[Result]) -> str:
    """Wanted, and what each device measured."""
    rows = []
    for wanted in WANTED:
        values = [wanted.measured(result) for result in results]
        cells = ["" if value is None else wanted.shown(value) if wanted.is_reached(value)
                 else f"**{wanted.shown(value)}**" for value in values]  # fmt: skip
        rows.append([wanted.what, wanted.bound(), *cells])
    return table(["what", "wanted", *(result["device"] for result in results)], rows)


def section_parts(name: str, entry: dict[str, Any]) -> Iterator[str]:
    """Heading, what it is, a table per kind of line, what went wrong."""
    yield f"### {name}"
    if entry.get("about"):
        yield entry["about"][:1].upper() + entry["about"][1:] + "."
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for figure in entry["figures"]:
        kinds.setdefault(tuple(figure), []).append(figure)
    for names, figures in kinds.items():
        yield table(list(names), [[shown(figure[column]) for column in names] for figure in figures])
    if entry["error"]:
        yield f"Failed: `{entry['error'].strip().splitlines()[-1]}`"
    if entry["is_cut"]:
        yield f"Cut by time after {entry['seconds']:.0f} s." if entry["seconds"] else "Not started: no time was left."


def document(results: dict[str, Result]) -> str:
    """The whole page, of results by their files."""
    parts = [
        "# Measured on GPUs",
        "Written by `python -m benchmarks.gpu_tables` from the files named below; nothing here was typed by hand. What "
        "the parts are and what is still open: [gpu.md](gpu.md).",
        "## Wanted and measured",
        "Bold: not reached. Empty: not measured.",
        all_wanted([*results.values()]),
    ]
    for source, result in results.items():
        head = [[name, shown(result[name])] for name in HEAD if name in result]
        parts += [f"## {result['device']}, {result['date']}", table(["", ""], [["file", f"`{source}`"], *head])]
        for name, entry in result["sections"].items():
            parts += section_parts(name, entry)
    return "\n\n".join(parts) + "\n"


def keep(result: Result) -> Path:
    """Stores the JSON as ``results/<device>/<date>_gpu_suite.json``."""
    device = result["device"].lower().replace("nvidia", "").strip().replace(" ", "_")
    file = RESULTS / device / f"{result['date']}_gpu_suite.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file


def kept() -> dict[str, Result]:
    """All results that are kept, the latest first."""
    files = sorted(RESULTS.glob("*/*_gpu_suite.json"), key=lambda file: file.name, reverse=True)
    return {str(file.relative_to(RESULTS.parents[1])): json.loads(file.read_text()) for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tables", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("result", type=Path, help="JSON of the GPU suite")
    parser.add_argument("--print", action="store_true", dest="is_print", help="write nothing")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    if result.get("name") != "gpu_suite":
        raise SystemExit(f"error: {args.result} is no result of the GPU suite")
    if args.is_print:
        print(document({args.result.name: result}))
        return
    if "multiprocessors" not in result:
        raise SystemExit(f"error: {args.result} was not measured on a GPU; --print shows it")
    file = keep(result)
    DOCUMENT.write_text(document(kept()))
    print(f"wrote {file} and {DOCUMENT}\n\n{wanted_table(result)}")


if __name__ == "__main__":
    main()
