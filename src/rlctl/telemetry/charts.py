"""Charts as SVG text: lines over steps, and stacked bars. Colours are those of the page's style, `c0` to `c9`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]

WIDTH, HEIGHT = 360.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 42.0, 14.0, 8.0, 22.0
MOST_POINTS = 240
"""Points of a line; more steps are averaged into as many, so that the page of a long run stays small."""
MOST_BARS = 60
SMOOTH_FROM = 20
"""Steps from which a line also has a smoothed one."""
LOG_RANGE = 300.0
"""Ratio of the largest to the smallest value from which the axis is logarithmic."""
COLOURS = 10


@dataclass(frozen=True)
class Series:
    """A line: its name, its points in order of x, and the number of its colour."""

    name: str
    points: Sequence[Point]
    colour: int = 0


@dataclass(frozen=True)
class Thinned:
    """One point in place of several: their means, and the lowest and highest of their values."""

    x: float
    mean: float
    low: float
    high: float


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Thinned]:
    """Return at most `most` points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(points) / most))
    found = []
    for first in range(0, len(points), size):
        part = points[first : first + size]
        values = [value for _, value in part]
        found.append(Thinned(sum(x for x, _ in part) / len(part), sum(values) / len(part), min(values), max(values)))
    return found


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the exponential moving average over about a fifteenth of the points, without a bias to the first."""
    keep = 1 - 2 / (max(5.0, len(points) / 15) + 1)
    total = weight = 0.0
    found = []
    for x, value in points:
        total, weight = keep * total + value, keep * weight + 1
        found.append((x, total / weight))
    return found


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers between two values, `about` as many as asked for."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """Return a value in a few characters."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace(".0e", "e")
    if size >= 1e4:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def labels(values: Sequence[float]) -> list[str]:
    """Return the labels of an axis; values that few characters do not tell apart are shown by their distance from the
    lowest."""
    found = [number(value) for value in values]
    if len(set(found)) == len(found):
        return found
    return [found[0], *(f"+{number(value - values[0])}" for value in values[1:])]


class Axes:
    """The frame of a chart: where a value stands, and the lines and labels of the scale."""

    def __init__(self, xs: Point, ys: Point, *, log: bool = False) -> None:
        self.log = log
        self._xs = xs if xs[1] > xs[0] else (xs[0] - 0.5, xs[0] + 0.5)
        low, high = (math.log10(ys[0]), math.log10(ys[1])) if log else ys
        if not high > low:
            low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
        self._ys = (low, high)

    def x(self, value: float) -> float:
        low, high = self._xs
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._ys
        value = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        """Return the points as an SVG path."""
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points]
        return "M" + "L".join(places)

    def frame(self) -> str:
        """Return the lines and labels of both scales."""
        parts = []
        values = self._y_ticks()
        for value, label in zip(values, labels(values), strict=True):
            y = self.y(value)
            parts.append(f'<path class=grid d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f"<text x={LEFT - 5} y={y + 3.5:.1f} class=y>{label}</text>")
        low, high = self._xs
        for value in ticks(low, high, 5):
            if value == round(value):
                parts.append(f"<text x={self.x(value):.1f} y={HEIGHT - 6} class=x>{value:,.0f}</text>")
        return "".join(parts)

    def _y_ticks(self) -> list[float]:
        low, high = self._ys
        if not self.log:
            return ticks(low, high)
        return [10.0**power for power in ticks(low, high, 3) if power == round(power)] or [10**low, 10**high]


def line_chart(series: Sequence[Series], label: str, steps: Point) -> str:
    """Return a chart of lines over the steps from the first to the last; nothing where no line has a point.

    The axis is logarithmic where positive values span widely. A line of many steps is shown as its smoothed course, and
    its own points faint behind it.
    """
    shown = [one for one in series if one.points]
    values = [value for one in shown for _, value in one.points]
    if not values:
        return ""
    log = min(values) > 0 and max(values) > LOG_RANGE * min(values)
    axes = Axes(steps, (min(values), max(values)) if log else _span(values), log=log)
    return _svg(axes.frame() + "".join(_line(axes, one) for one in shown), label)


def _span(values: Sequence[float]) -> Point:
    """Return the ends of an axis: a little room, and zero where it is near."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low)
    if low >= 0:
        return (0.0 if low < 0.6 * high else low - room, high + room)
    return (low - room, 0.0 if high <= 0 and high > 0.6 * low else high + room)


def _line(axes: Axes, one: Series) -> str:
    colour, points = f"c{one.colour % COLOURS}", thinned(one.points)
    course = [(point.x, point.mean) for point in points]
    title = f"<title>{html.escape(one.name)}</title>"
    if len(one.points) < SMOOTH_FROM:
        dots = "".join(f'<circle cx={axes.x(x):.1f} cy={axes.y(y):.1f} r=2 class="{colour} dot"/>' for x, y in course)
        return f'<g>{title}<path class="{colour}" d="{axes.path(course)}"/>{dots}</g>'
    upper, lower = [(p.x, p.high) for p in points], [(p.x, p.low) for p in reversed(points)]
    band = f'<path class="{colour} band" d="{axes.path([*upper, *lower])}Z"/>' if len(one.points) > MOST_POINTS else ""
    smooth = [(point.x, point.mean) for point in thinned(smoothed(one.points))]
    faint = f'<path class="{colour} faint" d="{axes.path(course)}"/>'
    return f'<g>{title}{band}{faint}<path class="{colour}" d="{axes.path(smooth)}"/></g>'


def bar_chart(steps: Sequence[tuple[float, Mapping[str, float]]], parts: Sequence[str], label: str) -> str:
    """Return stacked bars, one a step (or the mean of neighbouring steps); the parts in the order of their colours."""
    size = max(1, math.ceil(len(steps) / MOST_BARS))
    groups = [steps[first : first + size] for first in range(0, len(steps), size)]
    bars = [
        (group, {part: sum(values.get(part, 0.0) for _, values in group) / len(group) for part in parts})
        for group in groups
    ]
    highest = max((sum(values.values()) for _, values in bars), default=0.0)
    axes = Axes((steps[0][0] - 0.5, steps[-1][0] + 0.5), (0.0, highest or 1.0))
    drawn = []
    for group, values in bars:
        left, right = axes.x(group[0][0] - 0.5), axes.x(group[-1][0] + 0.5)
        edges = [0.0]
        for part in parts:
            edges.append(edges[-1] + values[part])
        when = f"step {group[0][0]:.0f}" + (f" to {group[-1][0]:.0f}" if len(group) > 1 else "")
        drawn += [
            f"<rect x={left + 0.3:.1f} y={axes.y(high):.1f} width={max(right - left - 0.6, 0.4):.1f} "
            f'height={axes.y(low) - axes.y(high):.1f} class="c{index % COLOURS} bar">'
            f"<title>{when}: {html.escape(part)} {high - low:.2f} s</title></rect>"
            for index, (part, (low, high)) in enumerate(zip(parts, pairwise(edges), strict=True))
            if high - low > 0.002 * (highest or 1.0)
        ]
    return _svg(axes.frame() + "".join(drawn), label)


def _svg(content: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role=img aria-label="{html.escape(label)}">{content}</svg>'
