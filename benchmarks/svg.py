"""Line charts as SVG, by hand: a grid of small panels under one legend. Deterministic, so that a test can compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 250, 190  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 38, 10, 26, 36  # margins inside a panel
FONT = 'font-family="system-ui, sans-serif"'


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points ``(x, y, error)`` from left to right; x counts panel ticks from 0."""

    name: str
    colour: str
    points: Sequence[tuple[float, float, float]]
    is_level: bool = False  # drawn dashed across the panel at its only y


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart: ticks of the x axis, lines, y from 0 to 100."""

    title: str
    ticks: Sequence[str]
    lines: Sequence[Line]
    x_label: str = ""
    places: Sequence[float] = field(default=())  # of the ticks; evenly spaced if empty


def _panel(panel: Panel, left: float, top: float, width: float) -> list[str]:
    places = list(panel.places) or [float(i) for i in range(len(panel.ticks))]
    low, high = min(places), max(places)
    inner, floor = width - LEFT - RIGHT, top + HEIGHT - BOTTOM

    def x(place: float) -> float:
        pad = 8
        return left + LEFT + pad + (inner - 2 * pad) * ((place - low) / (high - low) if high > low else 0.5)

    def y(value: float) -> float:
        return floor - (HEIGHT - TOP - BOTTOM) * value / 100

    start, end = left + LEFT, left + width - RIGHT
    out = [f'<text x="{start:.1f}" y="{top + 16:.1f}" font-size="12" font-weight="600">{escape(panel.title)}</text>']
    for value in (0, 25, 50, 75, 100):
        out.append(f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{start - 5:.1f}" y="{y(value) + 3:.1f}" font-size="9" text-anchor="end">{value}</text>')
    for place, tick in zip(places, panel.ticks, strict=True):
        out.append(
            f'<text x="{x(place):.1f}" y="{floor + 13:.1f}" font-size="9" text-anchor="middle">{escape(tick)}</text>'
        )
    if panel.x_label:
        middle = (start + end) / 2
        label = escape(panel.x_label)
        out.append(f'<text x="{middle:.1f}" y="{floor + 27:.1f}" font-size="9" text-anchor="middle">{label}</text>')
    for line in reversed(panel.lines):  # the first on top
        if line.is_level:
            level = y(line.points[0][1])
            out.append(
                f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{level:.1f}" y2="{level:.1f}" stroke="{line.colour}" '
                'stroke-dasharray="4 3"/>'
            )
            continue
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b, _ in line.points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.6"/>')
        for a, b, error in line.points:
            out.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.4" fill="{line.colour}"/>')
            if error:
                low_y, high_y = y(max(0, b - error)), y(min(100, b + error))
                out.append(
                    f'<line x1="{x(a):.1f}" x2="{x(a):.1f}" y1="{low_y:.1f}" y2="{high_y:.1f}" stroke="{line.colour}"/>'
                )
    return out


def chart(panels: Sequence[Panel], *, columns: int, panel_width: float = WIDTH) -> str:
    """All panels in rows of ``columns``, and a legend of every line that any of them has."""
    lines = list({line.name: line for panel in panels for line in panel.lines}.values())
    rows = -(-len(panels) // columns)
    width, floor = columns * panel_width, rows * HEIGHT
    body: list[str] = []
    for index, panel in enumerate(panels):
        body += _panel(panel, index % columns * panel_width, index // columns * HEIGHT, panel_width)
    place, baseline = LEFT, floor + 16
    for line in lines:
        length = 40 + 6 * len(line.name)
        if place > LEFT and place + length > width:
            place, baseline = LEFT, baseline + 16
        dash = ' stroke-dasharray="4 3"' if line.is_level else ""
        body.append(
            f'<line x1="{place}" x2="{place + 18}" y1="{baseline - 4}" y2="{baseline - 4}" stroke="{line.colour}" '
            f'stroke-width="2"{dash}/><text x="{place + 23}" y="{baseline}" font-size="10">{escape(line.name)}</text>'
        )
        place += length
    height = baseline + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" {FONT}>'
    return "\n".join([head, f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>', *body, "</svg>"]) + "\n"
