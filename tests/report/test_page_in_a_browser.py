"""The report in a real browser, wide and on a phone: nothing overflows, no label covers another, nothing is logged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.report.page import write_page
from rlctl.report.reported_run import Forecast, ReportedRun
from support.browser import Browser, installed_browser, running_browser

SHAPES = {"wide": (1280, 900), "phone": (390, 844)}
# Elements beyond the window's edge, but for the contents of a table that scrolls; texts cut at the edge of their box.
OVERFLOWING = """[...document.querySelectorAll('main *')].filter(one => {
    if (one.closest('.wide') && !one.matches('.wide')) return false;
    const box = one.getBoundingClientRect();
    if (box.width === 0) return false;
    const cut = one.scrollWidth > one.clientWidth + 1 && !one.matches('.wide') && one.clientWidth > 0;
    return box.right > innerWidth + 1 || box.left < -1 || (cut && !(one instanceof SVGElement));
}).map(one => one.outerHTML.slice(0, 120))"""
# Labels of a chart beyond its frame, and pairs of labels that cover each other.
LABELS = """[...document.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width).flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(one => [one.textContent, one.getBoundingClientRect()]);
    const outside = texts.filter(([, box]) => box.left < frame.left - 0.5 || box.right > frame.right + 0.5
        || box.top < frame.top - 0.5 || box.bottom > frame.bottom + 0.5);
    const pairs = texts.flatMap(([text, a], at) => texts.slice(at + 1).filter(([, b]) => a.left < b.right
        && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(([other]) => [text, other]));
    return [...outside.map(([text]) => [svg.ariaLabel.slice(0, 40), text]), ...pairs];
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = installed_browser()
    if program is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with running_browser(program, tmp_path_factory.mktemp("profile")) as running:
        yield running


def long_run() -> ReportedRun:
    """A run whose values, names and texts are as wide as real ones become."""
    lines = [
        {
            "step": step, "reward_mean": 1234.56 + step / 1000, "accuracy": 1.0, "entropy": 10.8 + step / 1e5,
            "truncated_fraction": 1.0 - step / 1e6, "loss": 1e-9 * step, "grad_norm": 10.0**step, "kl": -0.001 * step,
            "tokens_per_s": 99_990.0 + step, "a_metric/with_a_long_name_without_any_blank_in_it_at_all": step * 1e7,
            "response_tokens_mean": 16.0, "validation": {"reward_mean": 0.1 * step, "accuracy": 0.1 * step},
            "seconds": {"generation": 2.0, "training": 3.0, "refit": 0.5, "total": 5.5}, "system": {"memory_gib": 9.5},
        }
        for step in range(1, 9)
    ]  # fmt: skip
    sample = {"prompt": "What is 3 + 4?", "completion": "x" * 400, "answer": "7", "reward": 1.0, "truncated": True}
    return ReportedRun(
        name="a-run-with-a-long-name-" + "x" * 60,
        lines=lines,
        steps=8,
        state="finished",
        identity=[("model", "/a/path/" + "directory/" * 20), ("command", "rlctl train grpo " + "--set a.b=c " * 20)],
        settings=[("generation.max_new_tokens", "16", "preset"), ("data.name", '"' + "y" * 90 + '"', "command line")],
        forecasts=[Forecast("generation", "s", 1.5, 2.0)],
        samples=[(1, [sample]), (8, [sample])],
        messages=["WARNING: " + "z" * 300],
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_fits_the_window_and_logs_nothing(browser: Browser, tmp_path: Path, shape: str, scheme: str) -> None:
    path = tmp_path / "report.html"
    write_page(path, [long_run()])
    browser.messages.clear()
    browser.open(path.as_uri(), *SHAPES[shape], scheme)
    browser.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
    browser.picture(tmp_path / f"{shape}-{scheme}.png")
    assert browser.value("document.documentElement.scrollWidth") <= SHAPES[shape][0]
    assert browser.value(OVERFLOWING) == []
    assert browser.value(LABELS) == []
    assert browser.messages == []


def test_a_comparison_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "comparison.html"
    write_page(path, [long_run(), long_run()])
    browser.messages.clear()
    browser.open(path.as_uri(), *SHAPES["phone"])
    browser.picture(tmp_path / "comparison.png")
    assert browser.value("document.documentElement.scrollWidth") <= SHAPES["phone"][0]
    assert browser.value(LABELS) == []
    assert browser.messages == []


def test_a_screen_reader_finds_the_values_of_curves_and_samples_before_times(browser: Browser, tmp_path: Path) -> None:
    """The accessibility tree is Chromium's."""
    path = tmp_path / "report.html"
    write_page(path, [long_run()])
    browser.open(path.as_uri(), *SHAPES["wide"])
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    images = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") in ("image", "img")]
    reward = next(name for name in images if name.startswith("mean reward over the steps"))
    assert "1.23e3" not in reward
    assert all(value in reward for value in ("1234.561 at step 1", "1234.568 at step 8"))
    titles = [node["name"]["value"] for node in nodes if node.get("role", {}).get("value") == "heading"]
    assert titles.index("Samples") < titles.index("Where the time went") < titles.index("Plan and measurement")
