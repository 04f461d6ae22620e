"""Contents of a report of one or several runs. Runs that differ only by seed are grouped; differently measured values
are separate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rlctl.telemetry.headline import VALIDATION, Mean, MetricChange, change, columns, findings
from rlctl.telemetry.metrics import Metrics

SEED = "run.seed"
OWN = ("run.dir", "run.name", "run.goal")
"""Keys that differ in every run."""
SAMPLED = (
    "data.", "reward.", "environment.", "model.chat_template", "generation.max_new_tokens", "generation.temperature",
    "generation.top_p", "generation.top_k", "generation.min_p", "generation.stop", "generation.stop_token_ids",
)  # fmt: skip
"""Keys (or how they begin) that rewards follow from, apart from the weights."""
SCHEDULE = ("validation.every", "validation.at_start", "validation.at_end", "validation.stop_after")
"""Keys of validation that change when it measures, and not what."""


@dataclass(frozen=True)
class Forecast:
    """A predicted and a measured value."""

    name: str
    unit: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class ReportedRun:
    """All that the report shows of a run."""

    name: str
    lines: Sequence[Metrics]
    """The lines of metrics.jsonl; none where no step is finished."""
    state: str = ""
    """`running`, `finished` or `stopped`; empty: not known."""
    steps: int | None = None
    """Steps that the run is to take."""
    updated: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Titles of the algorithm's curves, by their names in metrics.jsonl."""
    identity: Sequence[tuple[str, str]] = ()
    """Label and text of the run's identity: model, data, algorithm, command, commit, versions."""
    facts: Sequence[tuple[str, str]] = ()
    """Label and text of how and where it ran."""
    settings: Sequence[tuple[str, str, str]] = ()
    """Key, value and origin of what somebody set."""
    config: Mapping[str, str] = field(default_factory=dict)
    """All configuration values as text, without the planner's."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Digests of data and reward functions, by name."""
    forecasts: Sequence[Forecast] = ()
    samples: Sequence[tuple[int, Sequence[Mapping[str, Any]]]] = ()
    """Rollouts of some steps."""
    validated: Sequence[tuple[int, Sequence[Mapping[str, Any]]]] = ()
    """Samples of some validations, by the number of steps that were finished before them."""
    messages: Sequence[str] = ()

    @property
    def findings(self) -> list[str]:
        """Sentences on what kept steps from teaching much, with what to do about it."""
        return findings(self.lines)

    def points(self, name: str) -> list[tuple[float, float]]:
        return self.columns.get(name, [])

    @cached_property
    def columns(self) -> dict[str, list[tuple[float, float]]]:
        """Every metric as (step, value). A validation before the first step is one of step 0."""
        return columns(self.lines)

    def way(self, metric: str) -> dict[str, str]:
        """Return how a metric was measured, besides weights and seed; empty: always alike."""
        validated = metric.startswith(VALIDATION)
        if not (validated or metric in ("reward_mean", "accuracy") or metric.startswith("reward_")):
            return {"run.algorithm": self.config.get("run.algorithm", "")} if metric == "loss" else {}
        prefixes = (*SAMPLED, "validation.") if validated else SAMPLED
        left_out = (*SCHEDULE, "generation.temperature") if validated else ()  # validation has its own temperature
        values = {key: value for key, value in self.config.items() if key.startswith(prefixes) and key not in left_out}
        return {**values, **self.contents}


@dataclass(frozen=True)
class Arm:
    """Runs that differ only by seed; usually one run."""

    runs: tuple[ReportedRun, ...]

    @property
    def name(self) -> str:
        names = [run.name for run in self.runs]
        if len(names) == 1:
            return names[0]
        listing = ", ".join(names) if len(names) < 4 else f"{names[0]}, ..., {names[-1]}"
        return f"{listing} ({len(names)} seeds)"

    @cached_property
    def columns(self) -> dict[str, list[tuple[float, float]]]:
        """Every metric as (step, mean over the seeds)."""
        if len(self.runs) == 1:
            return self.runs[0].columns
        return {
            name: [(step, sum(values) / len(values)) for step, values in self._values(name)]
            for name in dict.fromkeys(name for run in self.runs for name in run.columns)
        }

    def band(self, name: str) -> list[tuple[float, float, float]]:
        """Return (step, lowest, highest) over seeds; empty with one seed."""
        if len(self.runs) == 1:
            return []
        return [(step, min(values), max(values)) for step, values in self._values(name)]

    def _values(self, name: str) -> list[tuple[float, list[float]]]:
        by_step: dict[float, list[float]] = {}
        for run in self.runs:
            for step, value in run.points(name):
                by_step.setdefault(step, []).append(value)
        return sorted(by_step.items())

    def change(self, metric: str, *, training: bool = False) -> MetricChange | None:
        """Return how a metric has changed: of several seeds their means, with the standard errors over the seeds."""
        changes = [run_change for run in self.runs if (run_change := change(run.lines, metric, training=training))]
        if len(changes) < 2:
            return changes[0] if changes else None
        firsts = [arm_change.first.value for arm_change in changes if arm_change.first]
        return replace(
            changes[0],
            first=Mean.of(firsts) if len(firsts) == len(changes) else None,
            last=Mean.of([arm_change.last.value for arm_change in changes]),
            began=changes[0].began,
            ended=f"{changes[0].ended}, {len(changes)} seeds",
        )

    def values(self, key: str) -> str:
        return ", ".join(dict.fromkeys(run.config.get(key, "-") for run in self.runs))


def arms(runs: Sequence[ReportedRun]) -> list[Arm]:
    """Group runs that differ only by seed, in order of appearance."""
    by_config: dict[Any, list[ReportedRun]] = {}
    for place, run in enumerate(runs):
        settings = {key: value for key, value in run.config.items() if key != SEED and key not in OWN}
        by_config.setdefault(repr(sorted(settings.items())) if settings else place, []).append(run)
    together = [
        [tuple(group)] if len({run.config.get(SEED) for run in group}) == len(group) else [(run,) for run in group]
        for group in by_config.values()
    ]
    return [Arm(seeds) for group in together for seeds in group]


def differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Return each key whose values are not the same in all arms, with its value in each."""
    keys = sorted({key for arm in arms for run in arm.runs for key in run.config} - set(OWN))
    rows = [(key, [arm.values(key) for arm in arms]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def alike(arms: Sequence[Arm], metric: str) -> list[list[int]]:
    """Group the arms with a metric by how they measured it."""
    groups: dict[str, list[int]] = {}
    for place, arm in enumerate(arms):
        if metric in arm.columns:
            groups.setdefault(repr(sorted(arm.runs[0].way(metric).items())), []).append(place)
    return list(groups.values())


def unlike(arms: Sequence[Arm], metric: str) -> list[str]:
    """Return how a metric's measurement differs between arms."""
    ways = [arm.runs[0].way(metric) for arm in arms if metric in arm.columns]
    keys = dict.fromkeys(key for way in ways for key in way)
    return [key for key in keys if len({way.get(key) for way in ways}) > 1]
