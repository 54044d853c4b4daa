"""Makes a result of the GPU suite part of the tree: the JSON under ``results/``, its tables in
docs/research/gpu-results.md.

    python -m benchmarks.gpu_tables gpu.json           keeps the JSON, writes the document
    python -m benchmarks.gpu_tables gpu.json --print   prints the document only

The document begins with the goals, the measured values and whether each goal was reached; then it has every section of
the JSON. It names a missing figure as missing and never leaves it out. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_wanted import WANTED, Result
from benchmarks.machine import RESULTS
from figures.markdown import table

DOCUMENT = Path(__file__).parents[1] / "docs" / "research" / "gpu-results.md"
HEAD = ("device", "memory_gib", "torch", "cuda", "cudnn", "commit", "date", "command", "seconds")


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


def section_parts(name: str, entry: dict[str, Any]) -> Iterator[str]:
    """Heading, what it is, a table per kind of line, what went wrong."""
    yield f"## {name}"
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


def document(result: Result, source: str) -> str:
    """The whole page."""
    parts = [
        "# Measured on a GPU",
        f"Written by `python -m benchmarks.gpu_tables` from `{source}`; nothing here was typed by hand. What the parts "
        "are and what is still open: [gpu.md](gpu.md).",
        table(["", ""], [[name, shown(result[name])] for name in HEAD if name in result]),
        "## Wanted and measured",
        wanted_table(result),
    ]
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
        print(document(result, args.result.name))
        return
    if "multiprocessors" not in result:
        raise SystemExit(f"error: {args.result} was not measured on a GPU; --print shows it")
    file = keep(result)
    DOCUMENT.write_text(document(result, str(file.relative_to(RESULTS.parents[1]))))
    print(f"wrote {file} and {DOCUMENT}\n\n{wanted_table(result)}")


if __name__ == "__main__":
    main()
