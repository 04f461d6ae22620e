"""The report: one self-contained HTML page with tiles, curves, times, samples and messages (`page.html.jinja`). It
needs no network or script, follows light and dark mode, and stays small for long runs."""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from rlctl.config.files import replace_file
from rlctl.report.charts import COLORS, Series, bar_chart, line_chart, number
from rlctl.report.reported_run import Arm, Forecast, ReportedRun, alike, arms, differences, unlike
from rlctl.runs.request_tree import request_tree
from rlctl.telemetry.conversation import as_text, conversation
from rlctl.telemetry.headline import VALIDATION, MetricChange
from rlctl.telemetry.phases import Phase

WORDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
MAIN, TILES, TITLES, UNITS = (WORDS[kind] for kind in ("main", "tiles", "titles", "units"))
NO_SCORE = ("_stderr", "/response_tokens_mean", "/truncated_fraction", "/scorer_failures", "/dropped_rollouts")
"""Suffixes of metric names that are no scores."""
OF_SOURCE = "sources/"
"""Beginning of the names of a source's metrics; the source and the metric follow."""
ELSEWHERE = ("step", "seconds/", "refit_seconds/")
"""Values that no curve shows; the bars show seconds."""
LONGEST_TEXT = 1500
"""Characters of a message in a sample."""
TROUBLE = re.compile(r"(?i)\b(warning|skipped|failed|not finite|stopped|died|damaged|lost|nothing to learn|dropped)\b")
MOST_MESSAGES = 200


def write_page(path: Path, runs: Sequence[ReportedRun]) -> None:
    """Replace `path` by the report of one or several runs; a reader never sees a part of the page."""
    replace_file(path, page(runs).encode(errors="replace"), durable=False)


def page(runs: Sequence[ReportedRun], script: str = "") -> str:
    """Return the report of one or several runs. `script` keeps a page that is served up to date."""
    style = Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    content = _one(runs[0]) if len(runs) == 1 else _several(arms(runs))
    return _template().render(
        title=title, style=style, script=Markup(script), colors=COLORS, most_messages=MOST_MESSAGES, **content
    )


@functools.cache
def _template() -> Template:
    here = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined)
    environment.filters["anchor"] = lambda title: title.lower().replace(" ", "-")
    return environment.get_template("page.html.jinja")


def _one(run: ReportedRun) -> dict[str, Any]:
    state = f"{run.state}, no step finished yet"
    if run.lines:
        done = f"step {int(run.lines[-1]['step']):,}" + (f" of {run.steps:,}" if run.steps else "")
        state = f"{run.state}, {done}" if run.state else done
    state += f"; written {run.updated}" if run.updated else ""
    if not run.lines:
        return {"run": run, "state": state}
    return {
        "run": run,
        "state": state,
        "tiles": _tiles(run),
        "troubles": [message for message in run.messages if TROUBLE.search(message)],
        "curves": _curves([Arm((run,))]),
        "times": _times(run),
        "forecasts": _forecasts(run.forecasts),
        "trained": _samples(run.samples),
        "validated": _samples(run.validated),
    }


def _several(arms: Sequence[Arm]) -> dict[str, Any]:
    facts = [dict((*arm.runs[0].identity, *arm.runs[0].facts)) for arm in arms]
    labels = list(dict.fromkeys(label for labeled in facts for label in labeled))
    rows, apart = _side_by_side(arms)
    return {
        "run": None,
        "count": sum(len(arm.runs) for arm in arms),
        "names": [arm.name for arm in arms],
        "side_by_side": rows,
        "apart": apart,
        "differences": [[key, *values] for key, values in differences(arms)],
        "curves": _curves(arms),
        "rows": [[label, *(labeled.get(label, "-") for labeled in facts)] for label in labels],
    }


def _side_by_side(arms: Sequence[Arm]) -> tuple[list[list[str]], list[str]]:
    """Return all runs' figures, and keys that runs measured differently, which get separate rows."""
    changes = _changes(arms)
    rows, apart = [], dict[str, None]()
    for metric, ones in changes.items():
        ways: dict[str, dict[int, MetricChange]] = {}
        sources = len({change.validated for change in ones if change}) > 1
        both = [*enumerate(ones), *((place, arm.change(metric, training=True)) for place, arm in enumerate(arms))]
        for place, change in both if sources else enumerate(ones):
            if change is not None:
                measured = VALIDATION * change.validated + metric
                key = f"{change.source} {sorted(arms[place].runs[0].way(measured).items())}"
                ways.setdefault(key, {})[place] = change
        for group in ways.values():
            label = f"{next(iter(group.values())).source} {TILES[metric]}"
            label += f" of {', '.join(arms[place].name for place in group)}" if len(ways) > 1 else ""
            cells = ["-"] * len(arms)
            for place, change in group.items():
                before = f"{change.first} {change.began} \N{RIGHTWARDS ARROW} " if change.first else ""
                cells[place] = f"{before}{change.last} {change.ended}"
            rows.append([label, *cells])
        if len(ways) > 1:
            reasons = [*unlike(arms, metric), *unlike(arms, VALIDATION + metric)]
            apart |= dict.fromkeys(["whether the run validates"] * sources + reasons)
    standing = [[dict(_standing(run)) for run in arm.runs] for arm in arms]
    for label in dict.fromkeys(label for arm in standing for run in arm for label in run):
        cells = [dict.fromkeys(" ".join(run[label]) for run in arm if label in run) for arm in standing]
        rows.append([label, *("; ".join(cell) or "-" for cell in cells)])
    return rows, list(apart)


def _tiles(run: ReportedRun) -> list[tuple[str, tuple[str, str]]]:
    tiles = []
    for name, (change,) in _changes([Arm((run,))]).items():
        if change:
            before = f"; {change.first} {change.began}" if change.first else ""
            tiles.append((f"{change.source} {TILES[name]}", (str(change.last), change.ended + before)))
    return tiles + _standing(run)


def _changes(arms: Sequence[Arm]) -> dict[str, list[MetricChange | None]]:
    changes = {metric: [arm.change(metric) for arm in arms] for metric in TILES}
    reward, accuracy = (
        [change and (change.first, change.last) for change in changes[name]] for name in ("reward_mean", "accuracy")
    )
    if reward == accuracy:
        del changes["accuracy"]
    return changes


def _standing(run: ReportedRun) -> list[tuple[str, tuple[str, str]]]:
    """Return label, value and small print of progress and time."""
    totals = [value for _, value in run.points("seconds/total")]
    done = int(run.lines[-1]["step"])
    figures = [("steps", (f"{done:,}", f"of {run.steps:,}" if run.steps else ""))]
    if totals:
        recent = median(totals[-20:])
        if run.state == "running" and run.steps:
            figures.append(("time left", (duration((run.steps - done) * recent), f"{recent:.1f} s a step")))
        else:
            figures.append(("time", (duration(sum(totals)), f"{recent:.1f} s a step")))
    if speed := run.points("tokens_per_s"):
        figures.append(("tokens/s", (number(median(value for _, value in speed[-20:])), "saving left out")))
    if gpu := run.points("system/gpu_memory_gib"):
        figures.append(("GPU memory", (f"{max(value for _, value in gpu):.1f} GiB", "the fullest GPU")))
    for machine_part in ("GPU", "node"):
        machine = [line["system"] for line in run.lines if isinstance(line.get("system"), Mapping)]
        names = Counter(str(line[key]) for line in machine if (key := f"slowest_{machine_part.lower()}") in line)
        for name, steps in names.most_common(1):
            figures.append((f"slowest {machine_part}", (name, f"in {steps} of {names.total()} steps, by its clock")))
    if memory := run.points("system/memory_gib"):
        share = max((value for _, value in run.points("system/memory_percent")), default=0.0)
        figures.append(("memory", (f"{max(value for _, value in memory):.1f} GiB", f"{share:.0f}% of the node")))
    return figures


def duration(seconds: float) -> str:
    """Return a time in words: `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _curves(arms: Sequence[Arm]) -> dict[str, Any]:
    """Return all metrics' panels, each once: `MAIN` and the method's open, others folded."""
    names = list(dict.fromkeys(name for arm in arms for name in arm.columns if not name.startswith(ELSEWHERE)))
    validation = [name for name in names if name.startswith(VALIDATION) and not name.endswith(NO_SCORE)]
    main = [metric for name in MAIN for metric in (validation if name == "validation" else [name]) if metric in names]
    declared = {name for arm in arms for name in arm.runs[0].titles}  # metrics of the method, or of a user's loss
    main += [name for name in names if name in declared and name not in main]
    machine = [name for name in names if name.startswith("system/")]
    rest = [name for name in names if name not in {*main, *machine}]
    values = {name: {value for arm in arms for _, value in arm.columns.get(name, ())} for name in rest}
    constant = {name: next(iter(distinct)) for name, distinct in values.items() if len(distinct) == 1}
    titles = {**TITLES, **{name: title for arm in arms for name, title in arm.runs[0].titles.items()}, **MAIN}
    titles |= {name: _title(name, titles) for name in names}
    main = _merged(arms, main, titles)
    rest = [name for name in _merged(arms, [*main, *rest], titles) if name not in {*main, *constant}]
    return {
        "main": _panels(arms, main, titles),
        "rest": _panels(arms, rest, titles),
        "constant": [(name, number(value)) for name, value in constant.items()],
        "machine": _panels(arms, machine, titles),
    }


def _merged(arms: Sequence[Arm], names: Iterable[str], titles: dict[str, str]) -> list[str]:
    first: dict[Any, str] = {}
    for name in names:
        values: Any = tuple(tuple(arm.columns.get(name, ())) for arm in arms)
        if len({value for points in values for _, value in points}) == 1:
            values = name  # many things are always 0
        if (same := first.setdefault(values, name)) != name:
            titles[same] = f"{titles[same]}; {titles[name]}"
    return list(first.values())


def _title(name: str, titles: Mapping[str, str]) -> str:
    if name in titles:
        return titles[name]
    before, is_of_source, rest = name.partition(OF_SOURCE)
    of_source = ""
    if is_of_source and before in ("", VALIDATION, "episode_seconds/"):  # a source's name may be a path
        source, _, metric = rest.rpartition("/")
        name, of_source = f"{before}{metric}", f" of {source.rpartition('/')[2]}"
    return name.replace("_", " ").replace("/", ": ") + of_source


def _panels(arms: Sequence[Arm], names: Iterable[str], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a panel per metric; differently measured runs get another."""
    panels = []
    counted = [points[end][0] for arm in arms for points in arm.columns.values() for end in (0, -1)]
    steps = (float(min(counted)), float(max(counted)))
    for name in names:
        groups = alike(arms, name)
        unit = next((unit for pattern, unit in UNITS.items() if re.search(pattern, name)), "value")
        for group in groups:
            title = _title(name, titles)
            title += f" of {', '.join(arms[place].name for place in group)}" if len(groups) > 1 else ""
            series = [
                Series(arms[place].name, arms[place].columns[name], place, arms[place].band(name)) for place in group
            ]
            chart = line_chart(series, f"{title} over the steps", steps, unit)
            last = number(series[0].points[-1][1]) if len(arms) == 1 else ""
            panels.append({"title": title, "last": last, "chart": Markup(chart)})
    return panels


def _times(run: ReportedRun) -> dict[str, Any] | None:
    parts = [phase.value for phase in Phase if any(value for _, value in run.points(f"seconds/{phase.value}"))]
    steps = [(line["step"], line["seconds"]) for line in run.lines if line.get("seconds")]
    if not steps or not parts:
        return None
    total = sum(seconds["total"] for _, seconds in steps) or 1.0
    rows = []
    for part in parts:
        seconds = sum(value for _, value in run.points(f"seconds/{part}"))
        rows.append([part, f"{seconds:.1f}", f"{seconds / len(steps):.2f}", f"{seconds / total:.1%}"])
    chart = bar_chart(steps, parts, "seconds of each step by phase")
    return {"phases": parts, "rows": rows, "chart": Markup(chart)}


def _forecasts(forecasts: Sequence[Forecast]) -> list[list[str]]:
    rows = []
    for forecast in forecasts:
        ratio = f"{forecast.measured / forecast.predicted:.2f}" if forecast.predicted else "-"
        rows.append(
            [
                forecast.name,
                f"{forecast.predicted:.2f} {forecast.unit}",
                f"{forecast.measured:.2f} {forecast.unit}",
                ratio,
            ]
        )
    return rows


def _samples(samples: Sequence[tuple[int, Sequence[Mapping[str, Any]]]]) -> list[tuple[int, list[dict[str, Any]]]]:
    return [(step, [_sample(row) for row in rows]) for step, rows in samples]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    reward, *context, completion = row.get("reward"), *conversation(row)
    terms = [f"{name} {number(value)}" for name, value in (row.get("terms") or {}).items() if value is not None]
    outcome = [f"reward {number(reward)}" if isinstance(reward, int | float) else "no reward"]
    outcome[0] += f" ({', '.join(terms)})" if len(terms) > 1 else ""
    outcome += [f"answer {as_text(row['answer'])}"] if row.get("answer") is not None else []
    outcome += [f"cut off ({row.get('stop_reason', 'length')})"] if row.get("truncated") else []
    messages = [*(("said", *message) for message in context), ("completion", *completion)]
    if tree := request_tree(row):
        messages.insert(0, ("said", "requests", "\n".join(tree)))
    rendered = row.get("rendered")
    return {
        "messages": [(kind, role, _cut(text)) for kind, role, text in messages],
        "images": [image for image in row.get("images") or () if _embedded(image)],
        "more_images": row.get("more_images") or 0,
        "outcome": "; ".join(outcome),
        "rendered": _cut(rendered) if isinstance(rendered, str) else "",
    }


def _embedded(image: Any) -> bool:
    """Return whether a sample holds an image as a thumbnail: the page loads no files."""
    return isinstance(image, Mapping) and str(image.get("thumbnail", "")).startswith("data:image/")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters)"
