"""The plots that are not of one evaluation: README.md's decode speed and accuracy, and the turns of an agent."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from statistics import mean

from benchmarks import tables as speed
from evals import plots as accuracy
from evals import tables as cells
from figures.chart import Line, Panel, chart
from figures.markdown import link

NAME = "speed_and_accuracy"
TEXT = "Decode speed and accuracy against the slots of a row"


def svg() -> str:
    """SVG; ValueError if one side was not measured."""
    right = accuracy.budget_panel()
    return chart([_speed_panel(list(right.ticks)), right], columns=2, panel_width=3.9)


def _speed_panel(ticks: list[str]) -> Panel:
    figures = speed.newest("decode")[1]["figures"]
    arms = [(float(ticks.index("all" if arm["budget"] == "full" else arm["budget"])), arm) for arm in figures["arms"]]
    slowest = figures["arms"][0]["tokens_per_s"]
    bound = [(place, slowest * arm.get("predicted", 1.0), 0.0) for place, arm in arms]
    measured = [(place, arm["tokens_per_s"], 0.0) for place, arm in arms]
    lines = [
        Line(name="speed, measured", colour="#000000", points=measured),
        Line(name="speed, as the bytes predict", colour="#000000", points=bound, is_bound=True),
    ]
    title = f"Decode, tokens/s ({figures['rows']} rows, {figures['prompt_len']:,} tokens)"
    top = 1.1 * max(value for line in lines for _, value, _ in line.points)
    return Panel(title=title, ticks=ticks, lines=lines, x_label="slots per prompt token", top=top)


def section(document: Path, plot_folder: Path) -> str:
    """Markdown of the plot with both sources underneath; ValueError if one side was not measured."""
    path, result = speed.newest("decode")
    accuracy.budget_panel()
    folder = cells.folder()
    image = f"![{TEXT}]({link(plot_folder / f'{NAME}.svg', document)})"
    left = f"{result['figures']['model']}; {result['device']}; `{result['command']}`; [record]({link(path, document)})"
    found = cells.compared()
    asked = f"the tiny model that ships, prompts of {found[0]['settings']['prompt_len']:,} tokens"
    right = f"{asked}; {cells.devices(found)}; `python -m evals.run`; [records]({link(folder, document)})"
    return f"{image}\n\n<sub>Left: {left}. Right: {right}.</sub>\n"


TURNS_NAME = "agent_turns"
COLOURS = ("#000000", "#999999", "#c03030", "#3060c0", "#308030")


def turns_svg() -> str:
    """Seconds until the end of each turn of an agent's transcript, a line per server; ValueError if not measured."""
    figures = speed.newest("agent_turns")[1]["figures"]
    names = {"store": "snapstream", "no_store": "snapstream, no store"}
    lines = []
    for (side, runs), colour in zip(figures["sides"].items(), COLOURS, strict=False):
        ends = accumulate(mean(run["turns"][turn]["total_s"] for run in runs) for turn in range(figures["turns"]))
        points = [(float(turn), end, 0.0) for turn, end in enumerate(ends)]
        lines.append(Line(name=names.get(side, side), colour=colour, points=points))
    ticks = [str(turn + 1) for turn in range(figures["turns"])]
    top = 1.05 * max(line.points[-1][1] for line in lines)
    title = "Seconds until the end of a turn"
    return chart([Panel(title=title, ticks=ticks, lines=lines, x_label="turn", top=top)], columns=1, panel_width=5.0)
