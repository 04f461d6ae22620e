"""The report of runs: one self-contained HTML page with tiles, curves, times, samples and messages.

It needs no network and no script, follows the reader's light or dark colors, and stays small for a run of any length.
"""

from __future__ import annotations

import html
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.report.charts import COLORS, Series, bar_chart, line_chart, number
from rlctl.report.reported_run import Arm, Forecast, ReportedRun, alike, arms, differences, unlike
from rlctl.telemetry.conversation import as_text, conversation
from rlctl.telemetry.headline import VALIDATION, Change
from rlctl.telemetry.phases import Phase

WORDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
MAIN, TILES, TITLES, UNITS = (WORDS[kind] for kind in ("main", "tiles", "titles", "units"))
NO_SCORE = ("_stderr", "/response_tokens_mean", "/truncated_fraction", "/scorer_failures", "/dropped_rollouts")
"""How the names of those end that are no scores."""
ELSEWHERE = ("step", "seconds/", "refit_seconds/")
"""Values that no curve shows; the bars show seconds."""
LONGEST_TEXT = 1500
"""Characters of a message in a sample."""
TROUBLE = re.compile(r"(?i)\b(warning|skipped|failed|not finite|stopped|died|damaged|lost|nothing to learn|dropped)\b")
MOST_MESSAGES = 200


def write_page(path: Path, runs: Sequence[ReportedRun]) -> None:
    """Replace `path` by the report of one or several runs; a reader never sees a part of the page."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(page(runs), encoding="utf-8", errors="replace")
    os.replace(aside, path)


def page(runs: Sequence[ReportedRun], script: str = "") -> str:
    """Return the report of one or several runs. `script` keeps a page that is served up to date."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = _one(runs[0]) if len(runs) == 1 else _several(arms(runs))
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head><body><main>{body}</main>"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def _one(run: ReportedRun) -> str:
    state = f"{run.state}, no step finished yet"
    if run.lines:
        done = f"step {int(run.lines[-1]['step']):,}" + (f" of {run.steps:,}" if run.steps else "")
        state = f"{run.state}, {done}" if run.state else done
    state += f"; written {run.updated}" if run.updated else ""
    head = f"<h1>{_text(run.name)}</h1><p class=state role=status>{_text(state)}</p>"
    identity = _facts(run.identity)
    if not run.lines:
        return f"<header>{head}{identity}</header>{_messages(run)}"
    settings = _folded("Settings", _table(["key", "value", "set by"], run.settings)) if run.settings else ""
    return "".join([
        f"<header>{head}{identity}</header>",
        _tiles(run),
        _troubles(run),
        _curves([Arm((run,))]),
        _section("Where the time went", _times(run)),
        _section("Plan and measurement", _forecasts(run.forecasts)),
        _section("Samples", _samples(run.samples, "Step {:,}")),
        _section("Samples of validation", _samples(run.validated, "After step {:,}")),
        _section("The run", _facts(run.facts) + settings),
        _messages(run),
    ])  # fmt: skip


def _several(found: Sequence[Arm]) -> str:
    names, count = [arm.name for arm in found], sum(len(arm.runs) for arm in found)
    legend = "".join(f"<li><i class=c{index % COLORS}></i>{_text(name)}" for index, name in enumerate(names))
    bands = "<p>A line is the mean of its seeds, and the band reaches from the lowest to the highest of them.</p>"
    facts = [dict((*arm.runs[0].identity, *arm.runs[0].facts)) for arm in found]
    labels = list(dict.fromkeys(label for one in facts for label in one))
    rows = [[label, *(one.get(label, "-") for one in facts)] for label in labels]
    differ = [[key, *values] for key, values in differences(found)]
    return "".join([
        f"<header><h1>{count} runs</h1><ul class=legend>{legend}</ul>",
        bands if count > len(found) else "",
        "</header>",
        _section("Side by side", _side_by_side(found)),
        _section("Where the configurations differ", _table(["key", *names], differ) if differ else ""),
        _curves(found),
        _section("The runs", _table(["", *names], rows)),
    ])  # fmt: skip


def _side_by_side(found: Sequence[Arm]) -> str:
    """Return the figures of each run; those that were not measured in the same way have rows of their own."""
    changes = _changes(found)
    rows, apart = [], dict[str, None]()
    for metric, ones in changes.items():
        ways: dict[str, dict[int, Change]] = {}
        sources = len({one.validated for one in ones if one}) > 1
        both = [*enumerate(ones), *((place, arm.change(metric, training=True)) for place, arm in enumerate(found))]
        for place, one in both if sources else enumerate(ones):
            if one is not None:
                measured = VALIDATION * one.validated + metric
                key = f"{one.source} {sorted(found[place].runs[0].way(measured).items())}"
                ways.setdefault(key, {})[place] = one
        for group in ways.values():
            label = f"{next(iter(group.values())).source} {TILES[metric]}"
            label += f" of {', '.join(found[place].name for place in group)}" if len(ways) > 1 else ""
            cells = ["-"] * len(found)
            for place, one in group.items():
                before = f"{one.first} {one.began} \N{RIGHTWARDS ARROW} " if one.first else ""
                cells[place] = f"{before}{one.last} {one.ended}"
            rows.append([label, *cells])
        if len(ways) > 1:
            why = [*unlike(found, metric), *unlike(found, VALIDATION + metric)]
            apart |= dict.fromkeys(["whether the run validates"] * sources + why)
    standing = [[dict(_standing(run)) for run in arm.runs] for arm in found]
    for label in dict.fromkeys(label for arm in standing for run in arm for label in run):
        cells = [dict.fromkeys(" ".join(run[label]) for run in arm if label in run) for arm in standing]
        rows.append([label, *("; ".join(cell) or "-" for cell in cells)])
    told = "Figures that were not measured in the same way are in rows and panels of their own. They differ in: "
    table = _table(["", *(arm.name for arm in found)], rows)
    return table + (f"<p>{_text(told + ', '.join(apart))}.</p>" if apart else "")


def _tiles(run: ReportedRun) -> str:
    tiles = []
    for name, (one,) in _changes([Arm((run,))]).items():
        if one:
            before = f"; {one.first} {one.began}" if one.first else ""
            tiles.append((f"{one.source} {TILES[name]}", (str(one.last), one.ended + before)))
    shown = [
        f"<div class=tile><dt>{_text(label)}</dt><dd>{_text(value)}</dd><small>{_text(more)}</small></div>"
        for label, (value, more) in tiles + _standing(run)
    ]
    return f"<dl class=tiles id=tiles>{''.join(shown)}</dl>"


def _changes(found: Sequence[Arm]) -> dict[str, list[Change | None]]:
    """Return how each metric of `TILES` has changed in each arm; the accuracy only where it is not the reward too."""
    changes = {metric: [arm.change(metric) for arm in found] for metric in TILES}
    reward, accuracy = (
        [one and (one.first, one.last) for one in changes[name]] for name in ("reward_mean", "accuracy")
    )
    if reward == accuracy:
        del changes["accuracy"]
    return changes


def _standing(run: ReportedRun) -> list[tuple[str, tuple[str, str]]]:
    """Return label, value and small print of how far the run is and what it takes."""
    totals = [value for _, value in run.points("seconds/total")]
    done = int(run.lines[-1]["step"])
    found = [("steps", (f"{done:,}", f"of {run.steps:,}" if run.steps else ""))]
    if totals:
        recent = median(totals[-20:])
        if run.state == "running" and run.steps:
            found.append(("time left", (duration((run.steps - done) * recent), f"{recent:.1f} s a step")))
        else:
            found.append(("time", (duration(sum(totals)), f"{recent:.1f} s a step")))
    if speed := run.points("tokens_per_s"):
        found.append(("tokens/s", (number(median(value for _, value in speed[-20:])), "saving left out")))
    if gpu := run.points("system/gpu_memory_gib"):
        found.append(("GPU memory", (f"{max(value for _, value in gpu):.1f} GiB", "the fullest GPU")))
    if memory := run.points("system/memory_gib"):
        share = max((value for _, value in run.points("system/memory_percent")), default=0.0)
        found.append(("memory", (f"{max(value for _, value in memory):.1f} GiB", f"{share:.0f}% of the node")))
    return found


def duration(seconds: float) -> str:
    """Return a time as a person says it: `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _troubles(run: ReportedRun) -> str:
    told = [message for message in run.messages if TROUBLE.search(message)]
    if not told and not run.findings:
        return ""
    items = "".join(f"<li>{_text(message)}" for message in (*run.findings, *told[-10:]))
    more = f"<p>The last 10 of {len(told)}; all are at the end of the page.</p>" if len(told) > 10 else ""
    return f"<section class=trouble id=to-look-at><h2>To look at</h2><ul>{items}</ul>{more}</section>"


def _curves(found: Sequence[Arm]) -> str:
    """Return the panels of all metrics, each once: those of `MAIN`, then folded those of the machine and all others."""
    names = list(dict.fromkeys(name for arm in found for name in arm.columns if not name.startswith(ELSEWHERE)))
    validation = [name for name in names if name.startswith(VALIDATION) and not name.endswith(NO_SCORE)]
    main = [one for name in MAIN for one in (validation if name == "validation" else [name]) if one in names]
    machine = [name for name in names if name.startswith("system/")]
    rest = [name for name in names if name not in {*main, *machine}]
    values = {name: {value for arm in found for _, value in arm.columns.get(name, ())} for name in rest}
    constant = {name: next(iter(own)) for name, own in values.items() if len(own) == 1}
    titles = {**TITLES, **{name: title for arm in found for name, title in arm.runs[0].titles.items()}, **MAIN}
    titles |= {name: _title(name, titles) for name in names}
    main = _merged(found, main, titles)
    rest = [name for name in _merged(found, [*main, *rest], titles) if name not in {*main, *constant}]
    same = "".join(f"<li>{_text(name)} = {number(value)}" for name, value in constant.items())
    never = f"<p>Never changed:</p><ul>{same}</ul>" if same else ""
    return "".join([
        _section("Curves", _panels(found, main, titles)),
        _folded("Diagnostics", _panels(found, rest, titles) + never),
        _folded("Machine", _panels(found, machine, titles)),
    ])  # fmt: skip


def _merged(found: Sequence[Arm], names: Iterable[str], titles: dict[str, str]) -> list[str]:
    """Return the names without those of the same values as an earlier one, which then has their titles too."""
    first: dict[Any, str] = {}
    for name in names:
        values: Any = tuple(tuple(arm.columns.get(name, ())) for arm in found)
        if len({value for points in values for _, value in points}) == 1:
            values = name  # many things are always 0
        if (same := first.setdefault(values, name)) != name:
            titles[same] = f"{titles[same]}; {titles[name]}"
    return list(first.values())


def _title(name: str, titles: Mapping[str, str]) -> str:
    return titles.get(name) or name.replace("_", " ").replace("/", ": ")


def _panels(found: Sequence[Arm], names: Iterable[str], titles: Mapping[str, str]) -> str:
    """Return a panel of each metric; runs that measured it in another way have a panel of their own."""
    panels = []
    counted = [points[end][0] for arm in found for points in arm.columns.values() for end in (0, -1)]
    steps = (float(min(counted)), float(max(counted)))
    for name in names:
        groups = alike(found, name)
        unit = next((unit for pattern, unit in UNITS.items() if re.search(pattern, name)), "value")
        for group in groups:
            title = _title(name, titles)
            title += f" of {', '.join(found[place].name for place in group)}" if len(groups) > 1 else ""
            series = [
                Series(found[place].name, found[place].columns[name], place, found[place].band(name)) for place in group
            ]
            chart = line_chart(series, f"{title} over the steps", steps, unit)
            last = f" <b>{number(series[0].points[-1][1])}</b>" if len(found) == 1 else ""
            panels.append(f"<figure><figcaption>{_text(title)}{last}</figcaption>{chart}</figure>")
    return f"<div class=panels>{''.join(panels)}</div>" if panels else ""


def _times(run: ReportedRun) -> str:
    parts = [phase.value for phase in Phase if any(value for _, value in run.points(f"seconds/{phase.value}"))]
    steps = [(line["step"], line["seconds"]) for line in run.lines if line.get("seconds")]
    if not steps or not parts:
        return ""
    legend = "".join(f"<li><i class=c{index % COLORS}></i>{part}" for index, part in enumerate(parts))
    total = sum(seconds["total"] for _, seconds in steps) or 1.0
    rows = []
    for part in parts:
        seconds = sum(value for _, value in run.points(f"seconds/{part}"))
        rows.append([part, f"{seconds:.1f}", f"{seconds / len(steps):.2f}", f"{seconds / total:.1%}"])
    chart = bar_chart(steps, parts, "seconds of each step by phase")
    table = _table(["phase", "seconds", "a step", "share"], rows)
    return (
        f"<ul class=legend>{legend}</ul><div class=beside>"
        f"<figure><figcaption>seconds a step</figcaption>{chart}</figure>{table}</div>"
    )


def _forecasts(forecasts: Sequence[Forecast]) -> str:
    if not forecasts:
        return ""
    rows = []
    for one in forecasts:
        ratio = f"{one.measured / one.predicted:.2f}" if one.predicted else "-"
        rows.append([one.name, f"{one.predicted:.2f} {one.unit}", f"{one.measured:.2f} {one.unit}", ratio])
    told = "<p>Seconds of a step are medians, and memory is the most of any process. Where the last column is above 1, "
    told += "more was taken than planned.</p>"
    return told + _table(["", "planned", "measured", "measured / planned"], rows)


def _samples(samples: Sequence[tuple[int, Sequence[Mapping[str, Any]]]], heading: str) -> str:
    found = []
    for step, rows in samples:
        found.append(f"<h3>{heading.format(step) if step else 'Before step 1'}</h3>")
        found += map(_sample, rows)
    return "".join(found)


def _sample(row: Mapping[str, Any]) -> str:
    reward, *said, completion = row.get("reward"), *conversation(row)
    terms = [f"{name} {number(value)}" for name, value in (row.get("terms") or {}).items() if value is not None]
    told = [f"reward {number(reward)}" if isinstance(reward, int | float) else "no reward"]
    told[0] += f" ({', '.join(terms)})" if len(terms) > 1 else ""
    told += [f"answer {as_text(row['answer'])}"] if row.get("answer") is not None else []
    told += [f"cut off ({row.get('stop_reason', 'length')})"] if row.get("truncated") else []
    messages = "".join(
        f"<div class={kind}><b>{_text(role)}</b><pre>{_text(_cut(text))}</pre></div>"
        for kind, (role, text) in [*(("said", one) for one in said), ("completion", completion)]
    )
    rendered = row.get("rendered")
    seen = f"<pre>{_text(_cut(rendered))}</pre>" if isinstance(rendered, str) and rendered else ""
    seen = f"<details><summary>The prompt as the model saw it</summary>{seen}</details>" if seen else ""
    return f"<article>{messages}<p>{_text('; '.join(told))}</p>{seen}</article>"


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th scope=row>{_text(label)}</th><td>{_text(value)}</td></tr>" for label, value in facts)
    return f"<table class=facts>{rows}</table>" if facts else ""


def _messages(run: ReportedRun) -> str:
    if not run.messages:
        return ""
    return _folded("Messages of the run", f"<pre>{_text(chr(10).join(run.messages[-MOST_MESSAGES:]))}</pre>")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th scope=col>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide tabindex=0><table><tr>{heads}</tr>{body}</table></div>"


def _section(title: str, content: str) -> str:
    return f"<section id={_id(title)}><h2>{_text(title)}</h2>{content}</section>" if content else ""


def _folded(title: str, content: str) -> str:
    return f"<details id={_id(title)}><summary>{_text(title)}</summary>{content}</details>" if content else ""


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters)"


_text: Callable[[str], str] = html.escape
