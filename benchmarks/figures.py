"""Writes the figures of README.md and docs/accuracy.md from stored results, so that no number was typed by hand.

A section between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is replaced by the table of the newest
``results/cpu/*_NAME.json``, by a table of ``evals/tables.py`` or by a plot of ``evals/plots.py``; plots lie under
docs/figures. ``--check`` changes nothing and fails if a section or a plot is out of date (a test runs it).

    python -m benchmarks.figures
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS
from evals import plots, sections, tables
from evals.compression_table import compression_table, settings_table
from evals.long_answers import rescoring_table

README = Path(__file__).parent.parent / "README.md"
DOCUMENTS = (README, *(README.parent / "docs" / name for name in ("accuracy.md", "speculative-prefill.md")))
PLOTS = README.parent / "docs" / "figures"
SECTION = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def newest(name: str) -> tuple[Path, dict[str, Any]]:
    """The latest stored result of that name; file names begin with their date."""
    found = sorted((RESULTS / "cpu").glob(f"????-??-??_{name}.json"))
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


def serving(figures: dict[str, Any]) -> str:
    rows = [
        ["output tokens/s", f"{figures['engine_tokens_per_s']:,.0f}", f"{figures['server_tokens_per_s']:,.0f}",
         f"{figures['throughput_ratio']:.1%}"],
        ["ms to the first token when idle", f"{figures['engine_first_token_ms']:.1f}",
         f"{figures['server_first_token_ms']:.1f}", f"+{figures['first_token_cost_ms']:.1f} ms"],
    ]  # fmt: skip
    size = f"{figures['rows']} streams of {figures['max_tokens']} tokens after {figures['prompt_len']}-token prompts"
    return f"What HTTP costs, {size}:\n\n" + _table(["", "engine in-process", "over HTTP", "against it"], rows)


def soak(figures: dict[str, Any]) -> str:
    outcomes = figures["outcomes"]
    rows = [
        ["right, compared with the engine alone", f"{outcomes['right']:,}"],
        ["cancelled by the client", f"{outcomes['cancelled']:,}"],
        ["malformed and refused", f"{outcomes['refused']:,}"],
        ["wrong, lost or 5xx", f"{len(figures['failures']):,}"],
        ["429, tried again", f"{outcomes.get('tried again', 0):,}"],
        *([f"growth of the {name}'s memory, second half", f"{growth:+.1%}"]
          for name, growth in figures["memory_growth"].items()),
    ]  # fmt: skip
    size = f"{figures['requests']:,} requests from {figures['clients']} clients on {figures['max_rows']} rows"
    return f"Soak, {size}:\n\n" + _table(["", ""], rows)


def spec_prefill(figures: dict[str, Any]) -> str:
    rows = [
        [f"{arm['prompt_len']:,}", f"{arm['keep']:.0%}", str(arm["look_ahead"]), f"{arm['full_s']:.2f} s",
         f"{arm['first_token_s']:.2f} s", f"{arm['draft_s']:.2f} s", f"{arm['speedup']:.1f}x",
         f"{arm['predicted']:.1f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["prompt", "kept", "look-ahead", "first token, whole prompt", "first token, draft included", "of it draft",
             "sooner", "as the operations predict"]  # fmt: skip
    return "Time to the first token with a draft in front:\n\n" + _table(heads, rows)


def executors(figures: dict[str, Any]) -> str:
    rows = [
        [f"{arm['context']:,}", arm["sampling"], f"{arm['eager_ms']:.2f} ms", f"{arm['graph_ms']:.2f} ms",
         f"{arm['speedup']:.2f}x"]
        for arm in figures["arms"]
    ]  # fmt: skip
    heads = ["tokens in the rows", "sampling", "eager", "graph", "faster"]
    return f"A decode step of {figures['rows']} rows, plain calls against the compiled step (medians):\n\n" + _table(
        heads, rows
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "decode": decode, "prefill": prefill, "memory": memory, "peers_100m": peers,
    "peers_tiny": peers, "spec_prefill": spec_prefill, "serving": serving, "soak": soak,
    "executors": executors,
}  # fmt: skip

# Sections that name their sources themselves.
WITH_SOURCE: dict[str, Callable[[], str]] = {
    "prompt_compression": compression_table, "prompt_compression_settings": settings_table,
    "rescoring": rescoring_table,
}  # fmt: skip


def link(path: Path, document: Path) -> str:
    """The path as seen from a document."""
    return Path(os.path.relpath(path, document.parent)).as_posix()


def evals_section(name: str, document: Path) -> str:
    """Markdown of a table or a plot of ``evals``; ValueError if its cells were not measured."""
    if name in plots.PLOTS:
        plots.PLOTS[name]()
        return f"![{plots.PLOT_TEXTS[name]}]({link(PLOTS / f'{name}.svg', document)})\n"
    model = sections.model_of(name)
    text, folder = sections.SECTIONS[name](), tables.folder(model)
    where = f"[{folder.relative_to(README.parent).as_posix()}]({link(folder, document)})"
    source = tables.source(model, "fp8" if name == "accuracy_fp8" else "auto")
    return f"{text}\n\n<sub>{source}; {where}</sub>\n"


def section(name: str, document: Path = README) -> str:
    """Markdown of one result, with its source underneath."""
    if name in plots.PLOTS or name in sections.SECTIONS:
        try:
            return evals_section(name, document)
        except ValueError as missing:
            return f"({missing})\n"
    if name in WITH_SOURCE:
        try:
            return WITH_SOURCE[name]() + "\n"
        except ValueError as missing:
            return f"({missing})\n"
    path, result = newest(name)
    source = path.relative_to(README.parent).as_posix()
    table = TABLES[name](result["figures"])
    model = result["figures"].get(
        "model",
        "the tiny model that ships"
        if name in ("peers_tiny", "soak", "serving", "executors")
        else "random Llama 100M fp32",
    )
    where = f"[{source}]({link(path, document)})"
    return f"{table}\n\n<sub>{model}; {result['device']}; `{result['command']}`; {where}</sub>\n"


def render(text: str, document: Path = README) -> str:
    """A document with every section filled in anew."""
    return SECTION.sub(lambda match: match[1] + section(match[2], document) + match[4], text)


def rendered() -> dict[Path, str]:
    """Every file that this module writes, as it should be."""
    out = {path: render(path.read_text(), path) for path in DOCUMENTS if path.exists()}
    shown = {name for name in plots.PLOTS if any(f"/{name}.svg)" in text for text in out.values())}
    return out | {PLOTS / f"{name}.svg": plots.PLOTS[name]() for name in sorted(shown)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    args = parser.parse_args()
    for path, new in rendered().items():
        if path.exists() and path.read_text() == new:
            continue
        if args.check:
            raise SystemExit(f"{path.relative_to(README.parent)} is out of date; run python -m benchmarks.figures")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new)


if __name__ == "__main__":
    main()
