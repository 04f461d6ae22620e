"""The report of a run from its directory: while it trains, at its end, and for `rlctl report`."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.config.load import DEFAULT, PLANNER
from rlctl.errors import InputError
from rlctl.report.page import write_page
from rlctl.report.reported_run import Forecast, ReportedRun
from rlctl.report.run_comparison import compare_memory, compare_run
from rlctl.runs.directory import RunDirectory
from rlctl.telemetry.metrics import read_metrics

LEAST_INTERVAL_S = 5.0
SHARE_OF_TIME = 0.01
"""Share of the run's time that writing its report may take."""
MOST_SAMPLES = 4
OF_THE_DATA = ("prompts",)
"""Origins of values that follow from the lengths of the prompts."""


class LiveReport:
    """Rewrites the report of a run while it trains: often at first, and never for more than a hundredth of the time."""

    def __init__(self, run: RunDirectory, tell: Callable[[str], None]) -> None:
        self._run, self._tell, self._due = run, tell, 0.0

    def step(self) -> None:
        """Write the report when it is due; called after each step. After a failure, `tell` receives it, and the next
        try is at the run's end."""
        begun = time.monotonic()
        if begun < self._due:
            return
        try:
            write_page(self._run.report, [reported(self._run, "running")])
        except Exception as error:  # noqa: BLE001 - a run does not fail for lack of a report
            self._due = math.inf
            self._tell(f"The report could not be written: {type(error).__name__}: {error}")
            return
        now = time.monotonic()
        self._due = now + max(LEAST_INTERVAL_S, (now - begun) / SHARE_OF_TIME)


def write_report(run: RunDirectory, state: str) -> list[dict[str, Any]]:
    """Write the report of a run that has taken a step; return the lines of its metrics."""
    lines = read_metrics(run.metrics)
    if lines:
        write_page(run.report, [reported(run, state, lines)])
    return lines


def compare_runs(directories: Sequence[Path], output: Path | None) -> Path:
    """Write the report of one run, or one page for several; return where. Raises InputError for a directory that holds
    no run, or a run without a step."""
    runs = [RunDirectory(directory) for directory in directories]
    reports = [reported(run, state_of(run)) for run in runs]
    if output is None:
        output = runs[0].report if len(runs) == 1 else Path("report.html").absolute()
    if not output.parent.is_dir():
        raise InputError(f"--output {output}: there is no directory {output.parent}.", "Name another place.")
    if output.exists() and not output.is_file():  # the page would replace /dev/null
        raise InputError(f"--output {output} cannot be written: it is not a file.", "Name another place.")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # several runs in directories of one name
        reports = [replace(report, name=str(directory)) for report, directory in zip(reports, directories, strict=True)]
    write_page(output, reports)
    return output


def state_of(run: RunDirectory) -> str:
    """Return `running`, `finished` or `stopped`."""
    if run.is_locked():
        return "running"
    lines = read_metrics(run.metrics)
    return "finished" if lines and lines[-1]["step"] >= (_steps(run.manifest()) or 0) else "stopped"


def reported(
    run: RunDirectory, state: str, lines: Sequence[Mapping[str, Any]] = (), *, begun: bool = True
) -> ReportedRun:
    """Return the report's contents. Raises InputError without a run, and with `begun` for a run without a step."""
    manifest = run.manifest()
    lines = lines or read_metrics(run.metrics)
    if begun and not lines:
        raise InputError(f"{run.path} has no finished step to report.", "Wait for its first step.")
    entries = {key: entry for key, entry in manifest["config"].items() if isinstance(entry, dict)}
    # Questions made from the run's seed are of one kind, regardless of the seed.
    kept = {"contents of the data": manifest.get("data"), "contents of the reward": manifest.get("rewards")}
    texts = {name: json.dumps(value, sort_keys=True) for name, value in kept.items() if value}
    return ReportedRun(
        name=str(_value(manifest, "run.name") or run.name),
        lines=lines,
        state=state,
        steps=_steps(manifest),
        updated=time.strftime("%Y-%m-%d %H:%M:%S"),
        titles=manifest.get("curves") or {},
        identity=_identity(manifest),
        facts=_facts(manifest, run),
        settings=_settings(manifest),
        config={
            key: json.dumps(entry.get("value"), ensure_ascii=False)
            for key, entry in entries.items()
            if entry.get("origin") not in (PLANNER, *OF_THE_DATA)
        },
        contents={name: re.sub(r'"(seed|held_out)": \d+(, )?', "", text) for name, text in texts.items()},
        forecasts=_forecasts(run.path),
        samples=_samples(run.path / "rollouts", [int(line["step"]) for line in lines], _telling),
        validated=_samples(run.path / "validation", validated_steps(lines), _first),
        messages=_messages(run.log),
    )


def _value(manifest: Mapping[str, Any], key: str) -> Any:
    entry = manifest["config"].get(key)
    return entry.get("value") if isinstance(entry, dict) else None


def _steps(manifest: Mapping[str, Any]) -> int | None:
    steps = _value(manifest, "run.steps")
    return steps if isinstance(steps, int) else None


def _identity(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    command, model, data = manifest.get("command") or [], manifest.get("model") or {}, manifest.get("data") or {}
    packages = {"rlctl": manifest.get("rlctl"), "python": manifest.get("python"), **(manifest.get("packages") or {})}
    labels = {
        "model": model.get("label") or _value(manifest, "model.name"),
        "data": _value(manifest, "data.name") or ", ".join(name for name in data if isinstance(data[name], dict)),
        "algorithm": (manifest.get("algorithm") or {}).get("name"),
        "command": shlex.join(["rlctl", *map(str, command[1:])]) if command else "",
        "commit": ", ".join(
            f"{repository} {commit}" for repository, commit in (manifest.get("commits") or {}).items() if commit
        ),
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
    }
    return [(label, str(value)) for label, value in labels.items() if value]


def _facts(manifest: Mapping[str, Any], run: RunDirectory) -> list[tuple[str, str]]:
    plan = manifest.get("plan") or {}
    labels = {
        "machine": _machine(plan.get("cluster") or {}),
        "training": _sizes(plan.get("training") or {}, ("backend", "tp", "pp", "cp", "ep", "dp", "precision")),
        "generation": _sizes(plan.get("generation") or {}, ("engines", "tp", "dp")),
        "directory": str(run.path),
        **(manifest.get("host") or {}),
    }
    return [(label, str(value)) for label, value in labels.items() if value]


def _machine(cluster: Mapping[str, Any]) -> str:
    gpus = cluster.get("gpus_per_node")
    parts = [
        f"{cluster['nodes']} node{'s' * (cluster['nodes'] != 1)}" if cluster.get("nodes") else "",
        f"{gpus} {cluster.get('gpu')} GPU{'s' * (gpus != 1)} a node" if gpus else "no GPU",
        f"{cluster['memory_gib']} GiB of memory" if cluster.get("memory_gib") else "",
    ]
    return ", ".join(part for part in parts if part)


def _sizes(part: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {part[name]}" for name in names if part.get(name) is not None)


def _settings(manifest: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    entries = [(key, entry) for key, entry in sorted(manifest["config"].items()) if isinstance(entry, dict)]
    return [
        (key, json.dumps(entry.get("value"), ensure_ascii=False), str(entry.get("origin")))
        for key, entry in entries
        if entry.get("origin") not in (DEFAULT, PLANNER, None)
    ]


def _forecasts(run: Path) -> list[Forecast]:
    with contextlib.suppress(InputError, OSError, KeyError, TypeError, ValueError, RecursionError):
        times = [Forecast(row.name, "s", row.predicted, row.measured) for row in compare_run(run)]
        compared = [row for row in times if row.predicted >= 0.005 or row.measured >= 0.005]
        memory = [
            Forecast(f"memory, {row.name} process", "GiB", row.predicted, row.measured) for row in compare_memory(run)
        ]
        return [*compared, *memory]
    return []


def validated_steps(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of finished steps after which the run was validated."""
    begun = [0] if lines and lines[0].get("validation_at_start") else []
    return begun + [int(line["step"]) for line in lines if line.get("validation")]


def _samples(
    directory: Path, steps: Sequence[int], selected: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> list[tuple[int, list[dict[str, Any]]]]:
    if not steps:
        return []
    chosen = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    samples_by_step = []
    for step in chosen:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            text = (directory / f"step_{step}.jsonl").read_text(encoding="utf-8")
            lines = text.split("\n")  # others may be in a completion
            samples = [sample for sample in map(json.loads, filter(None, lines)) if isinstance(sample, dict)]
            if samples:
                samples_by_step.append((step, selected(samples)))
    return samples_by_step


def _first(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first samples of a validation, which are of the same prompts each time."""
    return samples[:MOST_SAMPLES]


def _telling(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return some samples in order, with the highest and the lowest reward among them."""
    by_reward = sorted(range(len(samples)), key=lambda index: -float(samples[index].get("reward") or 0.0))
    half = MOST_SAMPLES // 2
    kept = {*by_reward[:half], *by_reward[-half:]}
    return [sample for index, sample in enumerate(samples) if index in kept]


def _messages(log: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-2000:]
    return []
