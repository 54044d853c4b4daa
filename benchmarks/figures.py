"""Writes the figures of README.md from stored results, so that no number there was typed by hand.

A section of the README between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced by the table of the newest
``results/cpu/*_NAME.json``. ``--check`` changes nothing and fails if a section is out of date (a test runs it).

    python -m benchmarks.figures
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS

README = Path(__file__).parent.parent / "README.md"
EVALS = README.parent / "evals" / "results"
# How the arms of evals/arms.py are called, in the order of the table.
ARM_NAMES = {
    "full": "full attention", "snapstream": "SnapStream", "snapkv": "SnapKV, ring never wraps",
    "streaming": "StreamingLLM", "truncation": "truncation (middle cut)",
}  # fmt: skip
SECTION = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def newest(name: str) -> tuple[Path, dict[str, Any]]:
    """The latest stored result of that name; file names begin with their date."""
    found = sorted((RESULTS / "cpu").glob(f"*_{name}.json"))
    if not found:
        raise ValueError(f"no result named {name} under {RESULTS / 'cpu'}")
    return found[-1], json.loads(found[-1].read_text())


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def decode(figures: dict[str, Any]) -> str:
    rows = []
    for arm in figures["arms"]:
        against = (
            f"{arm['speedup']:.2f}x | {arm['predicted']:.2f}x | {arm['measured_over_predicted']:.2f}"
            if "speedup" in arm
            else "1 | 1 | "
        )
        rows.append([arm["budget"], f"{arm['slots']:,}", f"{arm['tokens_per_s']:.1f}", *against.split(" | ")])
    heads = ["cache", "slots", "tokens/s", "faster", "as the bytes predict", "ratio"]
    return f"Decode of {figures['rows']} rows after a {figures['prompt_len']:,}-token prompt:\n\n" + _table(heads, rows)


def prefill(figures: dict[str, Any]) -> str:
    rows = [
        [f"{arm['prompt_len']:,}", f"{arm['slots']:,}", f"{arm['tokens_per_s']:,.0f}", f"{arm['compress_share']:.2%}"]
        for arm in figures["arms"]
    ]
    heads = ["prompt", "slots", "tokens/s", "scoring + selection + write"]
    return "What compression adds to a prefill:\n\n" + _table(heads, rows)


def memory(figures: dict[str, Any]) -> str:
    rows = [
        [str(arm["layers"]), f"{arm['measured_mib']:.0f} MiB", f"{arm['planned_mib']:.0f} MiB",
         f"{arm['measured_over_planned']:.2f}", f"{arm['chunk_major_staging_mib']:,.0f} MiB"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["layers", "measured peak", "`plan` says", "ratio", "K and V of all layers"]
    return f"Memory that a {figures['prompt_len']:,}-token prefill needs beside weights and row:\n\n" + _table(
        heads, rows
    )


def peers(figures: dict[str, Any]) -> str:
    rows = []
    for arm in figures["arms"]:
        same = f"{arm['same_tokens']:.1%}" if "same_tokens" in arm else ""
        rows.append([arm["engine"], f"{arm['output_tokens_per_s']:,.0f}", f"{arm['speedup']:.2f}x", same])
    size = f"{figures['rows']} prompts of {figures['prompt_len']:,} tokens, {figures['new_tokens']} new tokens each"
    heads = ["engine", "output tokens/s, prefill included", "speed-up", "same greedy tokens"]
    return f"{size}:\n\n" + _table(heads, rows)


def accuracy_cells() -> list[dict[str, Any]]:
    """Stored cells of ``evals.run`` on the shipped model, the largest prompt length that has all of them."""
    cells = [json.loads(path.read_text()) for path in sorted((EVALS / "tiny").glob("*.json"))]
    if not cells:
        raise ValueError(f"no results under {EVALS / 'tiny'}")
    longest = max(cell["settings"]["prompt_len"] for cell in cells)
    return [cell for cell in cells if cell["settings"]["prompt_len"] == longest]


def accuracy() -> str:
    cells = accuracy_cells()
    families = list(dict.fromkeys(cell["settings"]["family"] for cell in cells))
    order = {name: i for i, name in enumerate(ARM_NAMES)}
    lines: dict[tuple[int, int, str], dict[str, Any]] = {}
    for cell in cells:
        settings = cell["settings"]
        key = (-settings["slots"], order[settings["arm"]], settings["arm"])
        lines.setdefault(key, {})[settings["family"]] = cell["result"]
    rows = []
    for (slots, _, arm), line in sorted(lines.items()):
        row_bytes = next(iter(line.values()))["row_bytes"]
        size = f"{row_bytes / 2**20:.2f} MiB"
        rows.append([ARM_NAMES[arm], f"{-slots:,}", size, *(f"{line[f]['accuracy']:.1f}" for f in families)])
    settings = cells[0]["settings"]
    widest = max(cell["result"]["standard_error"] for cell in cells)
    note = (
        f"Accuracy in points, {settings['num_prompts']} prompts of {settings['prompt_len']:,} tokens per cell, "
        f"held-out keys and values, greedy; standard errors are at most {widest:.1f}."
    )
    return note + "\n\n" + _table(["cache", "slots", "bytes per row", *families], rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "accuracy": lambda _: accuracy(), "decode": decode, "prefill": prefill, "memory": memory, "peers_100m": peers,
    "peers_tiny": peers,
}  # fmt: skip


def section(name: str) -> str:
    """Markdown of one result, with its source underneath."""
    if name == "accuracy":
        cell = accuracy_cells()[0]
        source = "evals/results/tiny"
        return f"{accuracy()}\n\n<sub>{cell['device']}; `{cell['command']}`; [{source}]({source})</sub>\n"
    path, result = newest(name)
    source = path.relative_to(README.parent).as_posix()
    table = TABLES[name](result["figures"])
    model = result["figures"].get(
        "model", "the tiny model that ships" if name.endswith("tiny") else "random Llama 100M fp32"
    )
    return f"{table}\n\n<sub>{model}; {result['device']}; `{result['command']}`; [{source}]({source})</sub>\n"


def render(text: str) -> str:
    """The README with every section filled in anew."""
    return SECTION.sub(lambda match: match[1] + section(match[2]) + match[4], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the README is out of date")
    args = parser.parse_args()
    old = README.read_text()
    new = render(old)
    if args.check and new != old:
        raise SystemExit("README.md is out of date; run python -m benchmarks.figures")
    if new != old:
        README.write_text(new)


if __name__ == "__main__":
    main()
