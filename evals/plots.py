"""SVG of stored cells: accuracy against budget, accuracy against bytes. ``tables.py`` reads the cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from benchmarks.svg import Line, Panel, chart
from evals.tables import ARM_NAMES, by_group, compared, group_of, mean, part_of
from evals.tasks import TASKS
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL

COLOURS = {
    "full": "#000000", "hops": "#56b4e9", "snapstream": "#0072b2", "snapkv": "#009e73", "streaming": "#d55e00",
    "random": "#cc79a7", "truncation": "#999999",
}  # fmt: skip


def accuracy_plot(model: Path = TINY_MODEL) -> str:
    """SVG: accuracy against budget, a panel per group that was measured, all arms."""
    found = compared(model)
    prompt_len = found[0]["settings"]["prompt_len"]
    slots = sorted({c["settings"]["slots"] for c in found if c["settings"]["arm"] != "full"}, reverse=True)
    ticks = [part_of(n, prompt_len) for n in slots]
    rows = by_group(found)
    panels = []
    for group in dict.fromkeys(task.group for task in TASKS.values()):
        lines = []
        for arm, name in ARM_NAMES.items():
            if arm == "full":
                points = [(0.0, *mean(rows["full", 0][group]))] if group in rows.get(("full", 0), {}) else []
            else:
                points = [(float(i), *mean(rows[arm, n][group])) for i, n in enumerate(slots)
                          if group in rows.get((arm, n), {})]  # fmt: skip
            if points:
                lines.append(Line(name=name, colour=COLOURS[arm], points=points, is_level=arm == "full"))
        if lines:
            panels.append(Panel(title=group, ticks=ticks, lines=lines, x_label="slots per prompt token"))
    return chart(panels, columns=3)


def bytes_plot() -> str:
    """SVG: mean accuracy over the groups that every arm has, against the bytes of a row."""
    found = compared()
    rows = by_group(found)
    shared = set.intersection(*(set(line) for line in rows.values()))
    smallest = {row: min(c["result"]["row_bytes"] for own in line.values() for c in own) for row, line in rows.items()}
    full = smallest["full", 0]
    sizes = sorted({size for (arm, _), size in smallest.items() if arm != "full"} | {full})
    lines = []
    for arm, name in ARM_NAMES.items():
        points = []
        for row in sorted((row for row in rows if row[0] == arm), key=lambda row: row[1]):
            values = [mean(rows[row][group]) for group in shared]
            error = math.sqrt(sum(e**2 for _, e in values)) / len(values)
            points.append((math.log2(smallest[row]), sum(v for v, _ in values) / len(values), error))
        if points:
            lines.append(Line(name=name, colour=COLOURS[arm], points=points, is_level=arm == "full"))
    ticks = [f"{size / 2**20:.2f}" for size in sizes]
    groups = dict.fromkeys(map(group_of, found))
    missing = ", ".join(group for group in groups if group not in shared)
    title = f"mean over all groups of tasks but {missing}" if missing else "mean over all groups of tasks"
    panel = Panel(
        title=title, ticks=ticks, places=[math.log2(size) for size in sizes], lines=lines, x_label="MiB per row"
    )
    return chart([panel], columns=1, panel_width=750)


PLOTS: dict[str, Callable[[], str]] = {
    "accuracy_plot": accuracy_plot,
    "draft_accuracy_plot": lambda: accuracy_plot(TINY_DRAFT_MODEL),
    "bytes_plot": bytes_plot,
}
PLOT_TEXTS = {
    "accuracy_plot": "Accuracy against budget, a panel per group of tasks, one line per arm",
    "draft_accuracy_plot": "The same on the second model (Qwen3): accuracy against budget",
    "bytes_plot": "Mean accuracy against the bytes of a row, one line per arm",
}
