"""How far a run has come, in one figure with its noise: the same in the terminal, the report and the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rlctl.errors import listed
from rlctl.telemetry.metrics import Metrics, flatten

VALIDATION, BEFORE_STEPS = "validation/", "validation_at_start/"
"""Prefixes of validation's metrics, and of metrics before the first step."""
HEADLINES = {"reward_mean": "reward", "loss": "loss"}
"""Metrics that judge a run, with their titles; the first that the run has counts."""


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error (None: a single value has none)."""

    value: float
    stderr: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Return the mean of independent values, with std / sqrt(n) and n - 1 degrees of freedom."""
        return cls(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)

    def __str__(self) -> str:
        digits = 3 if abs(self.value) < 10 else 1
        return f"{self.value:.{digits}f}" + (f" ± {self.stderr:.{digits}f}" if self.stderr is not None else "")


@dataclass(frozen=True)
class MetricChange:
    """A metric at the start of a run and now."""

    metric: str
    validated: bool
    """Whether a validation measured it; otherwise the steps' prompts did."""
    first: Mean | None
    """None: there is one measurement, which is `last`."""
    last: Mean
    began: str
    """When `first` was measured: `before step 1`, `after step 5`, `steps 1 to 4`."""
    ended: str

    @property
    def source(self) -> str:
        return "validation" if self.validated else "training"

    def text(self) -> str:
        """Return a summary line: `validation reward: 0.312 ± 0.120 before step 1, 0.875 ± 0.085 after step 20`."""
        began = f"{self.first} {self.began}, " if self.first else ""
        return f"{self.source} {HEADLINES.get(self.metric, self.metric)}: {began}{self.last} {self.ended}"


def change(lines: Sequence[Metrics], metric: str, *, training: bool = False) -> MetricChange | None:
    """Return how a metric changed; None if unknown. Uses the first and last validation, with standard errors over
    prompts; without validation (or with `training`) the means of the first and last fifth of steps. `metric`:
    unprefixed, such as `reward_mean`."""
    series = columns(lines)
    if (points := series.get(VALIDATION + metric)) and not training:
        errors = dict(series.get(VALIDATION + error_of(metric), []))
        (began, first), (ended, last) = points[0], points[-1]
        before = Mean(first, errors.get(began)) if len(points) > 1 else None
        return MetricChange(metric, True, before, Mean(last, errors.get(ended)), _after(began), _after(ended))
    if not (points := series.get(metric)):
        return None
    some = max(math.ceil(len(points) / 5), min(2, len(points) // 2), 1)
    first, last = points[:some], points[-some:]
    before = Mean.of([value for _, value in first]) if len(points) > 1 else None
    return MetricChange(metric, False, before, Mean.of([value for _, value in last]), _in(first), _in(last))


def headline(lines: Sequence[Metrics]) -> MetricChange | None:
    return next((headline_change for metric in HEADLINES if (headline_change := change(lines, metric))), None)


def error_of(metric: str) -> str:
    return metric.removesuffix("_mean").removesuffix("_fraction") + "_stderr"


def columns(lines: Sequence[Metrics]) -> dict[str, list[tuple[float, float]]]:
    """Return every metric as (step, value). A validation before the first step is one of step 0."""
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in flatten(line):
            if not math.isfinite(value):  # of another program, or an edited file
                continue
            early = name.startswith(BEFORE_STEPS)
            name = name.replace(BEFORE_STEPS, VALIDATION, early)
            series.setdefault(name, []).append((line["step"] - early, value))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in series.items()}


def _after(step: float) -> str:
    return f"after step {step:,.0f}" if step else "before step 1"


def _in(points: Sequence[tuple[float, float]]) -> str:
    first, last = points[0][0], points[-1][0]
    return f"in steps {first:,.0f} to {last:,.0f}" if last > first else f"in step {first:,.0f}"


LEAST_SHARE = 0.05
"""Minimum share of steps with a condition for a line in the summary."""


@dataclass(frozen=True)
class Condition:
    """Something that keeps a step from teaching much."""

    share: Callable[[Metrics], float | None]
    """The share of the step's completions or groups that it holds for; None: the step does not say."""
    above: float
    """It holds for the step where its share is larger."""
    mark: str
    """The words of the step line."""
    said: str
    """The part of a sentence that follows `in 3 of 20 steps`."""
    advice: str

    def holds(self, metrics: Metrics) -> bool:
        """Return whether a reader of the step should see it."""
        return (self.share(metrics) or 0.0) > self.above


NO_CALLS = Condition(
    lambda metrics: float(metrics.get("environment", {}).get("tool_calls", 1) == 0),
    0.999,
    "no tool called",
    "no completion called a tool, or none in a form that can be read",
    "Compare a completion with the form of a call, which --dry-run shows. A model that was not trained for tools "
    "learns the form by train sft, or needs an example in data.system_prompt.",
)
NO_SIGNAL = Condition(
    lambda metrics: metrics.get("groups_without_signal"),
    0.999,
    "nothing to learn",
    "all rollouts of each prompt had the same reward, so that there was nothing to learn from",
    "Choose easier or harder prompts, more --generations, a higher generation.temperature, or a --reward with partial "
    "credit.",
)
CONDITIONS = (
    NO_CALLS,
    Condition(
        lambda metrics: metrics.get("stop_reasons", {}).get("length", 0) / metrics.get("sampled_rollouts", math.inf),
        0.25,
        "{:.0%} cut off",
        "more than a quarter of the completions ended at the token limit ({:.0%} on average)",
        "Raise --max-new-tokens, and --max-length where that is the nearer limit, unless the answer comes first.",
    ),
    Condition(
        lambda metrics: 1 - metrics.get("answered_fraction", 1),
        0.9,
        "{:.0%} without an answer",
        "nearly all completions ({:.0%}) had no answer that the reward could read",
        "Say in the prompt how to write the answer (data.system_prompt, data.prompt_suffix), or choose another "
        "reward.extract.",
    ),
    NO_SIGNAL,
)


def marks(metrics: Metrics) -> str:
    """Return a step line's conditions; empty: none."""
    texts = [condition.mark.format(condition.share(metrics)) for condition in CONDITIONS if condition.holds(metrics)]
    return "! " + ", ".join(texts) if texts else ""


def findings(lines: Sequence[Metrics]) -> list[str]:
    """Return a sentence with advice for each condition that held in some steps and still holds in half of the last
    fifth: training removes some conditions. If no tool is called, equal rewards follow from that."""
    conditions = [condition for condition in CONDITIONS if _held(condition, lines) and _lasts(condition, lines)]
    sentences = [
        f"{_told(condition, lines)}. {condition.advice}"
        for condition in conditions
        if condition is not NO_SIGNAL or NO_CALLS not in conditions
    ]
    return [*restarts(lines), *sentences]


def restarts(lines: Sequence[Metrics]) -> list[str]:
    """Return a sentence on the steps that restarted the policy, with the last cause; empty without a restart."""
    hit = [line for line in lines if "policy_restarts" in line]
    if not hit:
        return []
    steps = listed([str(line["step"]) for line in hit])
    times, cause = sum(line["policy_restarts"] for line in hit), hit[-1]["policy_failure"]
    return [f"The policy was lost and started again {times} time(s), in step {steps}. The last cause: {cause}"]


def calls_nothing(lines: Sequence[Metrics]) -> bool:
    """Return whether the model called no tool to the end, though it has some."""
    return bool(lines) and bool(_held(NO_CALLS, lines)) and _lasts(NO_CALLS, lines)


def removed(lines: Sequence[Metrics]) -> list[str]:
    """Return a sentence for each condition that held in some steps and no longer holds in the last ones."""
    indices, last = [], _last(lines)
    for condition in CONDITIONS:
        if _held(condition, lines) and not _lasts(condition, lines):
            share = fmean(condition.share(line) or 0.0 for line in last)
            indices.append(
                f"{_told(condition, lines)}; training removed this: {share:.0%} in the last {len(last)} steps."
            )
    return indices


def _last(lines: Sequence[Metrics]) -> Sequence[Metrics]:
    return lines[-math.ceil(len(lines) / 5) :]


def _held(condition: Condition, lines: Sequence[Metrics]) -> list[float]:
    """Return the shares of the steps with a condition; empty if these are few."""
    shares = [condition.share(line) or 0.0 for line in lines if condition.holds(line)]
    return shares if len(shares) >= LEAST_SHARE * len(lines) else []


def _lasts(condition: Condition, lines: Sequence[Metrics]) -> bool:
    last = _last(lines)
    return 2 * sum(map(condition.holds, last)) >= len(last)


def _told(condition: Condition, lines: Sequence[Metrics]) -> str:
    shares = _held(condition, lines)
    return f"In {len(shares):,} of {len(lines):,} steps {condition.said.format(fmean(shares))}"
