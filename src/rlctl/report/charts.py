"""SVG charts: lines over steps and stacked bars, with page colors `c0` to `c9`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

Point = tuple[float, float]

WIDTH, HEIGHT = 360.0, 212.0
LEFT, RIGHT, TOP, BOTTOM = 42.0, 14.0, 20.0, 32.0
CHARACTER = 5.8
"""Width of a digit of an axis label."""
SPOKEN = 10
"""Values of a line that its text alternative names."""
MOST_POINTS = 240
"""Points of a line; more steps are averaged into as many, so that the page of a long run stays small."""
MOST_BARS = 60
SMOOTH_FROM = 20
"""Minimum steps of a line for a smoothed copy."""
LOG_RANGE = 300.0
"""Minimum ratio of the largest to the smallest value for a logarithmic axis."""
GAP = 1.5
"""Minimum distance of neighboring points, in multiples of the usual one, that breaks the line."""
COLORS = 10
SHARE = "share"
"""Unit of values from 0 to 1, whose axis ends there."""


@dataclass(frozen=True)
class Series:
    """A line: its name, its points in order of x, and the number of its color."""

    name: str
    points: Sequence[Point]
    color: int = 0
    band: Sequence[tuple[float, float, float]] = ()
    """(x, lowest, highest) of the runs whose mean the points are."""


def thinned(points: Sequence[Point], size: int) -> list[tuple[float, float, float, float]]:
    """Replace each `size` neighbors by one point: the means of x and value, the lowest and highest value."""
    kept = []
    for first in range(0, len(points), size):
        xs, ys = zip(*points[first : first + size], strict=True)
        kept.append((fmean(xs), fmean(ys), min(ys), max(ys)))
    return kept


def segments(points: Sequence[Point]) -> list[Sequence[Point]]:
    """Return the points in parts: where two neighbors are further apart than is usual, no line connects them."""
    distances = [after[0] - before[0] for before, after in pairwise(points)]
    widest = GAP * median(distances) if distances else 0.0
    ends = [place + 1 for place, distance in enumerate(distances) if distance > widest]
    return [points[first:last] for first, last in pairwise([0, *ends, len(points)])]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the exponential moving average over about a fifteenth of the points, without a bias to the first."""
    keep = 1 - 2 / (max(5.0, len(points) / 15) + 1)
    total = weight = 0.0
    averages = []
    for x, value in points:
        total, weight = keep * total + value, keep * weight + 1
        averages.append((x, total / weight))
    return averages


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round numbers between two values."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float, digits: int = 3) -> str:
    """Return a value with about `digits` significant digits."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.{max(1, digits - 2)}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1e4:
        return f"{value / 1000:.{digits}g}k"
    if size < 1000:
        return f"{value:.{digits}g}"
    return f"{value:.{digits - 4}f}".rstrip("0").rstrip(".") if digits > 4 else f"{value:.0f}"


def numbers(values: Sequence[float], distance: float) -> list[str]:
    """Return the values with as many digits as it takes to show each within a hundredth of `distance`."""
    texts: list[str] = []
    for digits in range(3, 17):
        texts = [number(value, digits) for value in values]
        errors = (abs(value - float(text.replace("k", "e3"))) for value, text in zip(values, texts, strict=True))
        if all(error <= 0.01 * distance for error in errors if math.isfinite(error)):
            break
    return texts


class Axes:
    """The frame of a chart: where a value stands, and the lines and labels of the scale."""

    def __init__(self, xs: Point, ys: Point, *, log: bool = False) -> None:
        self.log = log
        self._xs = xs if xs[1] > xs[0] else (xs[0] - 0.5, xs[0] + 0.5)
        low, high = (math.log10(ys[0]), math.log10(ys[1])) if log else ys
        if not high > low:
            low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
        self._ys = (low, high)
        marked = ticks(low, high)
        if log:
            whole = [10.0**power for power in ticks(low, high) if power == round(power)]
            marked = whole or [10**low, 10**high]
        distance = min((after - before for before, after in pairwise(marked)), default=math.inf)
        self._marks = list(zip(marked, numbers(marked, distance), strict=True))
        self.left = max(LEFT, 9 + CHARACTER * max(len(label) for _, label in self._marks))

    def x(self, value: float) -> float:
        low, high = self._xs
        return self.left + (value - low) / (high - low) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._ys
        value = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Iterable[tuple[float, ...]]) -> str:
        """Return points as an SVG path, ignoring values after x and y."""
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y, *_ in points]
        return "M" + "L".join(places)

    def frame(self, unit: str) -> str:
        """Return lines and labels of both axes: `unit` above the y axis, `step` below the x axis."""
        unit += " (logarithmic)" * self.log
        parts = [
            f"<text x=4 y=11>{html.escape(unit)}</text>",
            f"<text x={(self.left + WIDTH - RIGHT) / 2:.1f} y={HEIGHT - 4} class=x>step</text>",
        ]
        for value, label in self._marks:
            y = self.y(value)
            parts.append(f'<path class=grid d="M{self.left:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f"<text x={self.left - 5:.1f} y={y + 3.5:.1f} class=y>{label}</text>")
        low, high = self._xs
        for value in ticks(low, high, 5):
            if value == round(value):
                parts.append(f"<text x={self.x(value):.1f} y={HEIGHT - BOTTOM + 14} class=x>{value:,.0f}</text>")
        return "".join(parts)


def line_chart(series: Sequence[Series], label: str, steps: Point, unit: str = "value") -> str:
    """Return a line chart; nothing without points. The axis is logarithmic for wide positive ranges. Long lines are
    smoothed over faint points; a band shows the spread of runs."""
    drawable = [curve for curve in series if curve.points]
    values = [value for curve in drawable for _, value in curve.points]
    values += [end for curve in drawable for _, *ends in curve.band for end in ends]
    if not values:
        return ""
    log = min(values) > 0 and max(values) > LOG_RANGE * min(values)
    low, high = min(values), max(values)
    if not log:  # a little room, and zero where it is near
        room = 0.05 * (high - low)
        bottom = 0.0 if 0 <= low < 0.6 * high else low - room
        top = 0.0 if 0.6 * low < high <= 0 else high + room
        if unit == SHARE and 0 <= low <= high <= 1:
            low, high = (bottom, min(top, 1.0)) if high > low else (0.0, 1.0)
        else:
            low, high = bottom, top
    axes = Axes(steps, (low, high), log=log)
    spoken = ". ".join([label, *map(_spoken, drawable)])
    return _svg(axes.frame(unit) + "".join(_line(axes, curve) for curve in drawable), spoken)


def _spoken(curve: Series) -> str:
    """Return the text alternative of a line: some of its values, the first and the last included, and its range."""
    points, last = curve.points, len(curve.points) - 1
    places = sorted({round(last * place / (SPOKEN - 1)) for place in range(SPOKEN)})
    ends = [pick(points, key=lambda point: point[1]) for pick in (min, max)]
    sample = [*(points[place] for place in places), *ends]
    texts = numbers([value for _, value in sample], ends[1][1] - ends[0][1] or math.inf)
    *values, lowest, highest = (f"{text} at step {step:,.0f}" for text, (step, _) in zip(texts, sample, strict=True))
    extremes = f"; lowest {lowest}, highest {highest}" if last >= SPOKEN else ""
    return f"{curve.name}: {', '.join(values)}{extremes}"


def _line(axes: Axes, curve: Series) -> str:
    color, size = f"c{curve.color % COLORS}", max(1, math.ceil(len(curve.points) / MOST_POINTS))
    parts = segments(curve.points)
    courses = [thinned(part, size) for part in parts]
    bands = [[(x, low, high) for x, _, low, high in course] for course in courses] if size > 1 else []
    shapes = []
    for band in [curve.band[::size]] if curve.band else bands:
        outline = [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]
        shapes.append(f'<path class="{color} band" d="{axes.path(outline)}Z"/>')
    few = len(curve.points) < SMOOTH_FROM
    dotted = [point for course in courses if few or len(course) == 1 for point in course]
    if not few:
        shapes += [f'<path class="{color} faint" d="{axes.path(course)}"/>' for course in courses]
        smooth = dict(smoothed(curve.points))
        courses = [thinned([(x, smooth[x]) for x, _ in part], size) for part in parts]
    shapes += [f'<path class="{color}" d="{axes.path(course)}"/>' for course in courses]
    shapes += [f'<circle cx={axes.x(x):.1f} cy={axes.y(y):.1f} r=2 class="{color} dot"/>' for x, y, *_ in dotted]
    return f"<g><title>{html.escape(curve.name)}</title>{''.join(shapes)}</g>"


def bar_chart(steps: Sequence[tuple[float, Mapping[str, float]]], parts: Sequence[str], label: str) -> str:
    """Return stacked bars, one a step (or the mean of neighboring steps); the parts in the order of their colors."""
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
            f'height={axes.y(low) - axes.y(high):.1f} class="c{index % COLORS} bar">'
            f"<title>{when}: {html.escape(part)} {high - low:.2f} s</title></rect>"
            for index, (part, (low, high)) in enumerate(zip(parts, pairwise(edges), strict=True))
            if high - low > 0.002 * (highest or 1.0)
        ]
    return _svg(axes.frame("s") + "".join(drawn), label)


def _svg(content: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role=img aria-label="{html.escape(label)}">{content}</svg>'
