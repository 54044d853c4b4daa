"""SVG of stored cells: accuracy against budget, accuracy against bytes. ``tables.py`` reads the cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evals.tables import ARM_NAMES, by_group, compared, group_of, mean, part_of
from evals.tasks import TASKS
from figures.chart import Line, Panel, chart
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL

COLOURS = {
    "full": "#000000", "hops": "#56b4e9", "snapstream": "#0072b2", "snapkv": "#009e73", "streaming": "#d55e00",
    "random": "#cc79a7", "truncation": "#999999", "heads": "#e69f00",
}  # fmt: skip

# What the panel on budgets shows: (group, arm) and how the line is called.
BUDGET_LINES = {
    ("retrieval", "snapstream"): ("retrieval", "#0072b2"),
    ("exact retrieval", "snapstream"): ("exact retrieval", "#009e73"),
    ("question answering", "snapstream"): ("question answering", "#cc79a7"),
    ("multi-hop", "hops"): ("multi-hop, 4 hops on", "#56b4e9"),
    ("multi-hop", "snapstream"): ("multi-hop", "#d55e00"),
    ("second question, same row", "snapstream"): ("second question, same row", "#999999"),
}


def accuracy_panels(model: Path = TINY_MODEL) -> list[Panel]:
    """Accuracy against budget, a panel per group that was measured, all arms."""
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
    return panels


def bytes_panel() -> Panel:
    """Mean accuracy over the groups that every arm has, against the bytes of a row."""
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
    places = [math.log2(size) for size in sizes]
    return Panel(title=title, ticks=ticks, places=places, lines=lines, x_label="MiB per row")


def budget_panel() -> Panel:
    """Accuracy of the default by group of tasks, from all tokens kept to a sixteenth, and of hops where they matter."""
    found = compared()
    prompt_len = found[0]["settings"]["prompt_len"]
    rows = by_group(found)
    slots = [0, *sorted({n for arm, n in rows if arm == "snapstream"}, reverse=True)]
    lines = []
    for (group, arm), (name, colour) in BUDGET_LINES.items():
        cells = [(float(i), rows.get((arm if n else "full", n), {}).get(group)) for i, n in enumerate(slots)]
        points = [(place, *mean(own)) for place, own in cells if own]
        lines.append(Line(name=name, colour=colour, points=points))
    ticks = [part_of(n, prompt_len) for n in slots]
    return Panel(title="Accuracy, points", ticks=ticks, lines=lines, x_label="slots per prompt token")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A file of docs/figures: its text for readers who see no picture, and its panels (ValueError if not measured)."""

    text: str
    panels: Callable[[], list[Panel]]
    columns: int = 3
    panel_width: float = 2.6  # inches

    def svg(self) -> str:
        return chart(self.panels(), columns=self.columns, panel_width=self.panel_width)


PLOTS = {
    "accuracy_plot": Plot(
        text="Accuracy against budget, a panel per group of tasks, one line per arm", panels=accuracy_panels
    ),
    "draft_accuracy_plot": Plot(
        text="The same on the second model (Qwen3): accuracy against budget",
        panels=lambda: accuracy_panels(TINY_DRAFT_MODEL),
    ),
    "bytes_plot": Plot(
        text="Mean accuracy against the bytes of a row, one line per arm",
        panels=lambda: [bytes_panel()],
        columns=1,
        panel_width=7.8,
    ),
}
