"""Charts: scales, thinning and smoothing."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

import pytest

from rlctl.report.charts import (
    MOST_BARS,
    Series,
    bar_chart,
    line_chart,
    number,
    numbers,
    smoothed,
    thinned,
    ticks,
)


def parsed(svg: str) -> ET.Element:
    """The chart as XML; attributes without quotes, which HTML takes, get some."""
    import re

    return ET.fromstring(re.sub(r"=([\w.-]+)(?=[\s/>])", r'="\1"', svg))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("text")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.13, 0.87, [0.2, 0.4, 0.6, 0.8]),
        (-5, 5, [-4, -2, 0, 2, 4]),
        (1, 12, [5, 10]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_number_takes_few_characters() -> None:
    values = [0, 0.5, 12.3456, 182, 41_332, 2.5e6, 2e-6, 6.9e-11, -0.25]
    assert [number(value) for value in values] == [
        "0", "0.5", "12.3", "182", "41.3k", "2.5e6", "2e-6", "6.9e-11", "-0.25",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        [10.75, 10.8, 10.85, 10.9], [10.80, 10.81, 10.82, 10.83], [9.95, 10.0, 10.05], [1234.56, 1234.57],
        [41_300, 41_310],
        [1_000_100, 1_000_200], [-0.0512, -0.0511], [0.0001234, 0.0001235], [0.0, 1e-7, 2e-7], [999.9, 1000.0, 1000.1],
    ],
)  # fmt: skip
def test_labels_of_an_axis_are_its_values_and_differ(values: list[float]) -> None:
    texts = numbers(values, min(after - before for before, after in pairwise(values)))
    assert len(set(texts)) == len(values)
    assert [float(text.replace("k", "e3")) for text in texts] == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("points", [[(1, 1.0), (2, 1.0)], [(1, 0.97), (2, 1.0)], [(1, 0.0), (2, 1.0)], [(1, 0.5)]])
def test_an_axis_of_shares_ends_at_one(points: list[tuple[float, float]]) -> None:
    marks = [text for text in texts(line_chart([Series("a", points)], "a", (1, 2), "share"))[2:] if "." in text]
    assert max(map(float, [*marks, "0"])) <= 1.0
    chart = line_chart([Series("a", [(1, 1.02), (2, 1.1)])], "a", (1, 2), "share")  # not a share after all
    assert any(float(text) > 1 for text in texts(chart)[2:])


def test_a_line_has_its_values_as_text() -> None:
    points = [(float(step), math.sin(step)) for step in range(1, 101)]
    label = parsed(line_chart([Series("first", points), Series("second", [(1, 0.25)])], "reward", (1, 100))).get(
        "aria-label"
    )
    assert label is not None
    assert label.startswith("reward. first: 0.841 at step 1, ")
    assert "-0.506 at step 100; lowest -1 at step 11, highest 1 at step 33. second: 0.25 at step 1" in label
    assert len(label) < 400


def test_thinning_keeps_the_mean_and_the_ends_of_what_it_joins() -> None:
    points = [(float(step), float(step % 10)) for step in range(10_000)]
    found = thinned(points, 50)
    assert len(found) == 200
    assert sum(mean for _, mean, _, _ in found) / len(found) == pytest.approx(4.5, abs=0.02)
    assert found[0] == (24.5, 4.5, 0, 9)


def test_smoothing_keeps_a_constant_and_takes_noise_away() -> None:
    assert [value for _, value in smoothed([(step, 2.5) for step in range(50)])] == pytest.approx([2.5] * 50)
    noisy = [(step, float((-1) ** step)) for step in range(200)]
    assert max(abs(value) for _, value in smoothed(noisy)[10:]) < 0.2


def test_a_chart_of_many_steps_is_no_larger_than_one_of_few_hundred() -> None:
    def chart(steps: int) -> str:
        return line_chart(
            [Series("reward", [(s, math.sin(s / 50)) for s in range(1, steps + 1)])], "reward", (1, steps)
        )

    assert len(chart(10_000)) < 2 * len(chart(300))
    assert "10,000" in texts(chart(10_000))
    assert "band" in chart(10_000)


def test_axes_show_whole_steps_and_a_wide_span_on_a_logarithmic_scale() -> None:
    short = line_chart([Series("a", [(1, 0.1), (2, 0.4), (3, 0.2)])], "a", (1, 3))
    assert [text for text in texts(short) if text in "123"] == ["1", "2", "3"]
    assert "0" in texts(short)  # zero is near
    assert "0" not in texts(line_chart([Series("a", [(1, 100.0), (2, 104.0)])], "a", (1, 2)))
    wide = line_chart([Series("kl", [(step, 10.0**-step) for step in range(1, 7)])], "kl", (1, 6))
    assert {"0.01", "1e-4"} <= set(texts(wide))


def test_a_line_has_a_gap_where_nothing_was_measured_and_a_band_where_there_are_several_runs() -> None:
    def lines(points: list[tuple[float, float]], **more: Any) -> list[str]:
        chart = parsed(line_chart([Series("a", points, **more)], "a", (1, 30)))
        return [path.get("class", "") for path in chart.iter("path") if path.get("class") != "grid"]

    steps = [(float(step), step / 10) for step in range(1, 13)]
    assert lines(steps) == ["c0"]
    assert lines([point for point in steps if point[0] not in (5, 6)]) == ["c0", "c0"]
    assert lines([point for point in steps if point[0] % 4 == 0]) == ["c0"]  # measured every fourth step
    many = [(float(step), step / 10) for step in range(1, 31) if step not in (5, 6, 20)]
    assert lines(many) == ["c0 faint"] * 3 + ["c0"] * 3
    assert lines(steps, band=[(step, value - 1, value + 1) for step, value in steps]) == ["c0 band", "c0"]


def test_a_single_step_and_constant_values_have_a_chart() -> None:
    for points in ([(1, 0.0)], [(1, 5.0)], [(1, -2.0), (2, -2.0)], [(1, 1e300), (2, 1e-300)]):
        assert len(list(parsed(line_chart([Series("a", points)], "a", (1, 1))).iter("circle"))) == len(points)
    assert line_chart([Series("a", [])], "a", (1, 1)) == ""


def test_bars_stack_the_parts_of_each_step() -> None:
    steps = [(1, {"generation": 2.0, "training": 4.0}), (2, {"generation": 1.0, "training": 5.0, "other": 0.0})]
    chart = parsed(bar_chart(steps, ["generation", "training", "other"], "seconds"))
    assert [title.text for title in chart.iter("title")] == [
        "step 1: generation 2.00 s", "step 1: training 4.00 s", "step 2: generation 1.00 s", "step 2: training 5.00 s",
    ]  # fmt: skip
    first, second, *_ = chart.iter("rect")
    assert float(second.get("y", 0)) + float(second.get("height", 0)) == pytest.approx(
        float(first.get("y", 0)), abs=0.1
    )
    assert float(second.get("height", 0)) == pytest.approx(2 * float(first.get("height", 0)), abs=0.3)
    many = bar_chart([(step, {"training": 1.0}) for step in range(1, 1001)], ["training"], "seconds")
    assert many.count("<rect") <= MOST_BARS
    assert "step 1 to 17: training 1.00 s" in many
