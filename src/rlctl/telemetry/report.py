"""`report.html` of a run: curves and the step-time breakdown, in one file that needs nothing else."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.telemetry.metrics import Metric, flatten
from rlctl.telemetry.phases import Phase

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "response_tokens_mean": "response tokens",
    "grad_norm": "gradient norm",
    "skipped_steps": "optimizer steps skipped",
    "tokens_per_s": "tokens/s",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
td, th { padding: .2rem .8rem; text-align: right }
svg { max-width: 100%; height: auto }
"""


def write_report(path: Path, name: str, lines: Sequence[dict[str, Any]], declared: Sequence[Metric] = ()) -> None:
    """Write the report of the metrics `lines` (one a step, in order) to `path`; needs at least one line.

    `declared` metrics that name a curve have one, in addition to those that every run has.
    """
    titles = CURVES | {metric.name: metric.curve for metric in declared if metric.curve}
    body = [f"<h1>{html.escape(name)}</h1>", _summary(lines), "<h2>Curves</h2>", _svg(_curves(lines, titles))]
    body += ["<h2>Where the time went</h2>", _svg(_times(lines)), _time_table(lines)]
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>{html.escape(name)}</title><style>{STYLE}</style>{''.join(body)}"
    )


def _summary(lines: Sequence[dict[str, Any]]) -> str:
    seconds = sum(line["seconds"]["total"] for line in lines)
    known = [line for line in (lines[0], lines[-1]) if line.get("reward_mean") is not None]
    reward = [f"{line['reward_mean']:.3f} at step {line['step']}" for line in known]
    rewards = f" Mean reward {', '.join(reward)}." if reward else ""
    return f"<p>{len(lines)} steps in {seconds:.0f} s.{rewards}</p>"


def _curves(lines: Sequence[dict[str, Any]], titles: Mapping[str, str]) -> Figure:
    from matplotlib.figure import Figure

    values = [dict(flatten(line)) for line in lines]
    series = {name: [found.get(name) for found in values] for name in titles}
    shown = [(name, title) for name, title in titles.items() if any(value is not None for value in series[name])]
    figure = Figure(figsize=(11, 2.6 * max(1, (len(shown) + 1) // 2)), layout="constrained")
    steps = [line["step"] for line in lines]
    for index, (name, title) in enumerate(shown, 1):
        axes = figure.add_subplot((len(shown) + 1) // 2, 2, index)
        points = [(step, value) for step, value in zip(steps, series[name], strict=True) if value is not None]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 60 else None)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    return figure


def _times(lines: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(
        [line["step"] for line in lines],
        [[line["seconds"][phase.value] for line in lines] for phase in Phase],
        labels=[phase.value for phase in Phase],
    )
    axes.set_ylabel("seconds a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    return figure


def _time_table(lines: Sequence[dict[str, Any]]) -> str:
    total = sum(line["seconds"]["total"] for line in lines) or 1.0
    rows = []
    for phase in Phase:
        seconds = sum(line["seconds"][phase.value] for line in lines)
        rows.append(f"<tr><td>{phase.value}<td>{seconds:.1f}<td>{seconds / len(lines):.2f}<td>{seconds / total:.1%}")
    return f"<table><tr><th>phase<th>seconds<th>a step<th>share{''.join(rows)}</table>"


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]
