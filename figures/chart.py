"""Line charts as SVG: a grid of small panels. Deterministic, so that a test can compare the files.

Only ``chart`` needs matplotlib (a development extra), and imports it when it draws. The background is white, so that a
chart reads the same on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

LEFT, RIGHT, TOP, BOTTOM = 0.45, 0.12, 0.28, 0.45  # margins of a panel, inches
HEIGHT = 2.1  # of a panel with its margins, inches
LEGEND_LINE = 0.2  # inches
STYLE = {
    "svg.hashsalt": "snapstream", "svg.fonttype": "none",
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 8.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.edgecolor": "#888888", "axes.linewidth": 0.6,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points ``(x, y, error)`` from left to right; x counts the panel's ticks from 0, or is one of its places."""

    name: str
    colour: str
    points: Sequence[tuple[float, float, float]]
    is_level: bool = False  # drawn dashed across the panel at its only y
    is_bound: bool = False  # drawn dotted, without marks


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart: ticks of the x axis, lines, y from 0 to ``top``."""

    title: str
    ticks: Sequence[str]
    lines: Sequence[Line]
    x_label: str = ""
    places: Sequence[float] = ()  # of the ticks; evenly spaced if empty
    top: float = 100.0


def chart(panels: Sequence[Panel], *, columns: int, panel_width: float = 2.6) -> str:
    """SVG of all panels in rows of ``columns``, each ``panel_width`` inches wide, over a legend of all their lines."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    legend_columns = max(1, min(len(names), int(columns * panel_width / 1.75)))
    legend = 0.1 + LEGEND_LINE * -(-len(names) // legend_columns)
    width, height = columns * panel_width, rows * HEIGHT + legend
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        for index, panel in enumerate(panels):
            left = index % columns * panel_width + LEFT
            floor = height - (index // columns + 1) * HEIGHT + BOTTOM
            size = panel_width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
            axes = figure.add_axes((left / width, floor / height, size[0] / width, size[1] / height))
            _draw(axes, panel)
        marks = dict(entry for axes in figure.axes for entry in _legend_entries(axes))
        figure.legend([marks[name] for name in names], names, loc="lower center", ncols=legend_columns, frameon=False)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _draw(axes: Any, panel: Panel) -> None:
    places = list(panel.places) or [float(i) for i in range(len(panel.ticks))]
    margin = 0.06 * (max(places) - min(places)) or 0.5
    axes.set_title(panel.title, fontsize=9, fontweight="bold", loc="left")
    axes.set_xticks(places, panel.ticks)
    axes.set_xlim(min(places) - margin, max(places) + margin)
    axes.set_ylim(0, panel.top)
    axes.set_xlabel(panel.x_label)
    for line in reversed(panel.lines):  # the first on top
        if line.is_level:
            axes.axhline(line.points[0][1], color=line.colour, linestyle="--", linewidth=1.2, label=line.name)
        elif line.is_bound:
            axes.plot(*_columns(line)[:2], color=line.colour, linestyle=":", linewidth=1.4, label=line.name)
        else:
            x, y, errors = _columns(line)
            axes.errorbar(x, y, yerr=errors if any(errors) else None, color=line.colour, marker="o", markersize=3.2,
                          linewidth=1.3, elinewidth=0.9, label=line.name, clip_on=False)  # fmt: skip


def _legend_entries(axes: Any) -> list[tuple[str, Any]]:
    marks, labels = axes.get_legend_handles_labels()
    return list(zip(labels, marks, strict=True))


def _columns(line: Line) -> tuple[list[float], list[float], list[float]]:
    return [x for x, _, _ in line.points], [y for _, y, _ in line.points], [error for _, _, error in line.points]
