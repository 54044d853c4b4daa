"""Asks generated questions under equal numbers of slots, and stores a record per cell.

    python -m evals.run                                   # the shipped model, 2,048 tokens, 1/2 to 1/16
    python -m evals.run --model DIR --families kv variable --budgets 1/4 1/8 --arms full snapstream --prompts 40
    python -m evals.run --kv-dtype int8 --arms full snapstream --budgets 1/4 1/8     # the same with rows in int8
    python -m evals.run --width int4 --arms full snapstream --budgets 1/4           # the same with weights in int4
    python -m evals.run --arms full snapstream --selector diverse mine:Mine         # beside other selectors
    python -m evals.run --csv run.csv --plot run.svg --answers answers.jsonl        # this run in files of its own

A stored cell is not run again, so an interrupted run goes on where it stopped; delete its line to repeat it. Every arm
sees the same prompts, and the arms of a task share one prefill of each (``shared.py``). Answers are greedy.
``--jobs 2`` starts two processes of one thread each.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from fractions import Fraction
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evals.arms import ARMS, EVERY_ARM, make_arm, selector_arm
from evals.cells import Cell, run_cells
from evals.rounded import WIDTHS
from evals.selectors import load_selector
from evals.tasks import TASKS
from figures.chart import Line, Panel, chart
from snapstream.assets import TINY_MODEL
from snapstream.config import KV_DTYPES

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """All cells of a run, task by task because arms share prompts.

    An arm that does not fit a budget (a long answer) has no cell there; stderr names it.
    """
    cells = []
    sizes = [("full", args.prompt_len)] if "full" in args.arms else []
    names = [*(name for name in args.arms if name != "full"), *args.selector]
    sizes += [(name, int(args.prompt_len * budget)) for budget in args.budgets for name in names]
    for task in args.families:
        for name, slots in sizes:
            max_tokens = TASKS[task].max_tokens
            try:
                if name in args.selector:
                    arm = selector_arm(name, slots)
                else:
                    arm = make_arm(name, slots, args.prompt_len + max_tokens, max_tokens)
            except ValueError as reason:
                Console(stderr=True).print(f"left out: {task}, {name}: {reason}")
                continue
            cells.append(
                Cell(
                    model=args.model, task=task, arm=arm, prompt_len=args.prompt_len, num_prompts=args.prompts,
                    seed=args.seed, kv_dtype=args.kv_dtype, width=args.width,
                )
            )  # fmt: skip
    return cells


def table_of(results: Sequence[dict[str, Any]], families: Sequence[str]) -> Table:
    """One line per arm and size: accuracy +- standard error per task, in points."""
    table = Table(title="accuracy in points, +- one standard error")
    for heading in ("arm", "slots", *families):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for cell in results:
        settings, result = cell["settings"], cell["result"]
        slots = "all" if settings["arm"] == "full" else f"{settings['slots']:,}"
        name = " ".join((settings["arm"], settings.get("kv_dtype", ""))).rstrip()
        line = lines.setdefault((name, slots), {})
        line[settings["task"]] = f"{result['accuracy']:.1f} +-{result['standard_error']:.1f}"
    for (arm, slots), line in lines.items():
        table.add_row(arm, slots, *(line.get(family, "") for family in families))
    return table


COLUMNS = ("accuracy", "standard_error", "accuracy_after_first_token", "mean_answer_tokens", "mean_prompt_tokens",
           "mean_evicted_tokens", "row_bytes")  # fmt: skip
SETTINGS = ("model", "weights", "task", "arm", "slots", "kv_dtype", "weight_width", "prompt_len", "num_prompts", "seed")


def write_csv(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A line per cell: its settings and its result; what a cell does not have stays empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*SETTINGS, *COLUMNS), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(cell["settings"] | cell["result"] for cell in results)


def plot_of(results: Sequence[dict[str, Any]]) -> str:
    """SVG: a panel per task with accuracy against slots, a line per arm."""
    arms = list(dict.fromkeys(cell["settings"]["arm"] for cell in results))
    colours = dict(zip(arms, cycle(COLOURS), strict=False))
    slots = sorted({c["settings"]["slots"] for c in results if c["settings"]["arm"] != "full"}, reverse=True)
    panels = []
    for task in dict.fromkeys(cell["settings"]["task"] for cell in results):
        lines = []
        for arm in arms:
            own = [c for c in results if (c["settings"]["task"], c["settings"]["arm"]) == (task, arm)]
            places = [0 if arm == "full" else slots.index(c["settings"]["slots"]) for c in own]
            points = sorted((float(place), c["result"]["accuracy"], c["result"]["standard_error"])
                            for place, c in zip(places, own, strict=True))  # fmt: skip
            if points:
                lines.append(Line(name=arm, colour=colours[arm], points=points, is_level=arm == "full"))
        panels.append(Panel(title=task, ticks=[f"{n:,}" for n in slots] or ["all"], lines=lines, x_label="slots"))
    return chart(panels, columns=min(3, len(panels)))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY_MODEL, help="checkpoint folder with a chat template")
    parser.add_argument("--families", nargs="+", choices=list(TASKS), metavar="TASK", default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=EVERY_ARM, default=list(ARMS))
    parser.add_argument("--budgets", type=Fraction, nargs="+", default=[Fraction(1, n) for n in (2, 4, 8, 16)],
                        metavar="PART", help="slots as parts of --prompt-len, for example 1/4")  # fmt: skip
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=200, help="per cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="storage of rows")
    parser.add_argument("--width", choices=list(WIDTHS), default="auto", help="of weights; -a8: inputs of decode int8")
    parser.add_argument("--selector", nargs="+", default=[], metavar="NAME|MODULE:CLASS",
                        help="more arms: the default budget with these selectors")  # fmt: skip
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the cells of this run as CSV")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the cells of this run")
    parser.add_argument("--answers", type=Path, metavar="FILE.jsonl",
                        help="write every answer, a line per cell; stored cells run again")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    for text in args.selector:
        try:
            load_selector(text)
        except ValueError as error:
            parser.error(str(error))
    return args


def main() -> None:
    args = parse_args()
    cells = cells_of(args)
    run_cells(cells, args.jobs, args.answers)
    results = [result for cell in cells if (result := cell.read())]
    if args.csv is not None:
        write_csv(results, args.csv)
    if args.plot is not None:
        args.plot.write_text(plot_of(results))
    Console(width=200).print(table_of(results, args.families))


if __name__ == "__main__":
    main()
