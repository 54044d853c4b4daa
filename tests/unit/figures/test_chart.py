"""A chart shows every point where it belongs, names every line, and is the same file every time."""

from __future__ import annotations

import re

import pytest

from figures import chart as charts
from figures.chart import Line, Panel, chart

LINE = Line(name="a <line>", colour="#123456", points=[(0.0, 0.0, 0.0), (1.0, 100.0, 5.0)])


def test_points_stand_where_they_belong() -> None:
    svg = chart([Panel(title="one", ticks=["x", "y"], lines=[LINE])], columns=1)
    path, _ = re.findall(
        r'<path d="M ([^"]+)"[^>]*style="fill: none; stroke: #123456; stroke-width: 1.3', svg
    )  # the other is the legend's
    (x0, y0), (x1, y1) = (tuple(map(float, point.split())) for point in path.strip().split("\nL "))
    inches = charts.HEIGHT - charts.TOP - charts.BOTTOM
    assert x0 < x1 and y0 - y1 == pytest.approx(72 * inches)  # 0 at the bottom, 100 at the top
    assert "a &lt;line&gt;" in svg and ">one<" in svg


def test_the_same_panels_give_the_same_file_without_a_date() -> None:
    level = Line(name="level", colour="#000000", points=[(0.0, 50.0, 0.0)], is_level=True)
    bound = Line(name="bound", colour="#777777", points=LINE.points, is_bound=True)
    panels = [Panel(title=title, ticks=["x", "y"], lines=[LINE, level, bound]) for title in ("one", "two", "three")]
    svg = chart(panels, columns=2)
    assert svg == chart(panels, columns=2) and "<dc:date>" not in svg
    assert [svg.count(f">{name}<") for name in ("a &lt;line&gt;", "level", "bound")] == [1, 1, 1]  # one legend for all
    assert chart([*panels, panels[0]], columns=2) != svg
