"""Published step times against the plan that `rlctl plan` makes of the same run, and the fit of the constants.

`data/published_steps.csv` has a row for each run: publication, recipe, times. `data/published_settings.csv` has the
settings of the recipes as they were at their versions. A run without a recipe has its settings in `overrides`.
"""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from published_refits import gathered_refit_s

from rlctl.errors import NoPlanError, RlctlError
from rlctl.methods.configuration import resolve
from rlctl.planner.inputs.constants import DEFAULTS, FITTED, RESOLUTION, Constants
from rlctl.planner.make_plan import make_plan
from rlctl.planner.result import Plan
from rlctl.planner.search.feasible_plans import repriced
from rlctl.preparation.shown_plan import shown_plan
from rlctl.telemetry.phases import Phase

PHASES = {
    "training_s": Phase.TRAINING,
    "generation_s": Phase.GENERATION,
    "refit_s": Phase.REFIT,
    "logprobs_s": Phase.LOGPROBS,
}
WEIGHTS = {"step_s": 3.0, "training_s": 0.5, "generation_s": 0.5, "refit_s": 0.2, "logprobs_s": 0.5}
"""Weights of a row's times in the fit. The total is what users wait for."""
SPLIT = ("generation.colocated", "generation.devices")
"""Pins that say whether the engines have GPUs of their own: a published run is compared with one of its kind."""
SIZES = (
    *(f"training.{size}" for size in ("tp", "pp", "cp", "ep", "micro_batch_tokens")),
    *(f"generation.{size}" for size in ("tp", "pp", "dp")),
)
GROUPS = ("dense", "moe", "dtensor", "long", "gb200", "async", "fp8")


@dataclass(frozen=True)
class Step:
    """A published run and its plan."""

    fields: dict[str, str]
    plan: Plan

    @property
    def publication(self) -> str:
        return self.fields["publication"]

    @property
    def name(self) -> str:
        recipe = Path(self.fields["recipe"]).stem or self.plan.facts.family
        return f"{recipe[:42]} {self.plan.cluster.gpus} x {self.plan.cluster.device.name}"

    @property
    def groups(self) -> list[str]:
        return self.fields["groups"].split()

    def published(self, field: str) -> float | None:
        return float(self.fields[field]) if self.fields[field] else None

    def predicted(self, constants: Constants) -> dict[str, float]:
        """Return the predicted seconds of this plan's layout by field, under given constants. Other trainers gather the
        tensors of a colocated refit."""
        plan = self.plan
        seconds = plan.seconds if constants is DEFAULTS else repriced(plan, constants)
        if plan.colocated and plan.training and plan.generation and not self.publication.startswith("rlctl"):
            request = replace(plan.request, constants=constants)
            seconds = seconds | {Phase.REFIT: gathered_refit_s(request, plan.training, plan.generation)}
        return {"step_s": sum(seconds.values())} | {field: seconds[phase] for field, phase in PHASES.items()}

    def errors(self, constants: Constants) -> dict[str, float]:
        """Return ln(predicted / published) of each published time."""
        predicted = self.predicted(constants)
        seen = {field: self.published(field) for field in WEIGHTS}
        return {field: math.log(predicted[field] / value) for field, value in seen.items() if value}


def read_steps(data: Path, tell: Callable[[str], None] = print) -> list[Step]:
    """Plan all published runs as `rlctl plan` does; a run without a plan is told and left out."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the recipes' datasets are not read
    found = []
    with tempfile.TemporaryDirectory() as folder, (data / "published_steps.csv").open(newline="") as file:
        write_recipes(data / "published_settings.csv", Path(folder))
        for fields in csv.DictReader(file):
            try:
                found.append(Step(fields, plan_of(fields, Path(folder))))
            except RlctlError as error:
                tell(f"   NO PLAN: {fields['publication']} {fields['recipe']}: {error.message}")
    return found


def plan_of(fields: dict[str, str], folder: Path) -> Plan:
    given = [f"cluster.gpu={fields['gpu']}", f"generation.mean_length={fields['mean_new_tokens']}"]
    files = [folder / fields["recipe"]] if fields["recipe"] else []
    resolved = resolve(files=files, environment={}, overrides=[*fields["overrides"].split(), *given])
    return shown_plan(resolved, 1, lambda _: None)


def write_recipes(settings: Path, folder: Path) -> None:
    """Write the recipes again as YAML files, below a folder for each version."""
    trees: dict[Path, dict[str, Any]] = defaultdict(dict)
    with settings.open(newline="") as file:
        for row in csv.DictReader(file):
            *sections, key = row["key"].split(".")
            place = trees[folder / row["version"] / row["recipe"]]
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = yaml.safe_load(row["value"])
    for path, tree in trees.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(tree))


# --- the fit


def loss(steps: Sequence[Step], constants: Constants) -> float:
    """Return the mean of |e| + 3 e^2 over the rows of a publication, where e is ln(predicted / published), and then
    over publications, with the root of their rows as weight: rows of one publication depend on each other.

    Of a recipe that several releases published, a row counts less for each later one: software becomes faster."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step, age in zip(steps, ages(steps), strict=True):
        errors = step.errors(constants)
        weight = sum(WEIGHTS[field] for field in errors)
        total = sum(WEIGHTS[field] * (abs(e) + 3 * e * e) for field, e in errors.items())
        groups[step.publication].append((1 / (1 + age), total / weight))
    rows = {name: sum(weight for weight, _ in values) for name, values in groups.items()}
    means = {name: sum(weight * value for weight, value in values) / rows[name] for name, values in groups.items()}
    return sum(math.sqrt(rows[name]) * mean for name, mean in means.items()) / sum(map(math.sqrt, rows.values()))


def ages(steps: Sequence[Step]) -> list[int]:
    """Return for each step the number of later releases that published its recipe."""
    releases: dict[str, set[str]] = defaultdict(set)
    for step in steps:
        releases[Path(step.fields["recipe"]).name].add(step.fields["recipe"])
    return [sum(one > step.fields["recipe"] for one in releases[Path(step.fields["recipe"]).name]) for step in steps]


def fit(steps: Sequence[Step], start: Constants = DEFAULTS, rounds: int = 3) -> Constants:
    """Fit the constants in `FITTED` within their bounds, by coordinate descent with ever smaller steps."""
    constants, best = start, loss(steps, start)
    factors = dict.fromkeys(FITTED, 1.25)
    for _ in range(rounds):
        for name, (low, high) in FITTED.items():
            for factor in (factors[name], 1 / factors[name]):
                tried = replace(constants, **{name: min(high, max(low, getattr(constants, name) * factor))})
                if (error := loss(steps, tried)) < best - 1e-6:
                    constants, best = tried, error
                    break
            else:
                factors[name] = 1 + (factors[name] - 1) / 2
    return constants


def middle() -> Constants:
    """Return the constants that a fit without any row would have: the geometric middle of their bounds."""
    return replace(DEFAULTS, **{name: math.sqrt(max(low, high / 100) * high) for name, (low, high) in FITTED.items()})


def left_out(steps: Sequence[Step], key: Callable[[Step], str], rounds: int = 5) -> dict[int, dict[str, float]]:
    """Return the errors of each step, by its index, under constants that were fitted to the steps with other keys. Each
    fit begins at the middle of the bounds, so that it knows nothing of the rows left out."""
    found = {}
    for name in dict.fromkeys(map(key, steps)):
        constants = fit([step for step in steps if key(step) != name], middle(), rounds)
        found |= {i: step.errors(constants) for i, step in enumerate(steps) if key(step) == name}
    return found


def model_of(step: Step) -> str:
    """Return the model and the GPU of a step: their rows depend on each other, whichever publication has them."""
    facts = step.plan.facts
    return f"{facts.family} {facts.layers} x {facts.hidden} on {step.plan.cluster.device.name}"


# --- what it prints


def summary(errors: Sequence[float]) -> str:
    """Return median, bias, whether it is beyond chance, and the worst of ln(predicted / published)."""
    sizes = [abs(math.exp(e) - 1) for e in errors]
    mean = sum(errors) / len(errors)
    deviation = math.sqrt(sum((e - mean) ** 2 for e in errors) / max(1, len(errors) - 1))
    chance = 2 * deviation / math.sqrt(len(errors))
    worst = max(errors, key=abs)
    verdict = "" if len(errors) < 3 else " within chance" if abs(mean) <= chance else " BEYOND CHANCE"
    return (
        f"median {100 * median(sizes):3.0f}%  bias {100 * (math.exp(mean) - 1):+4.0f}%{verdict}  "
        f"worst {100 * (math.exp(worst) - 1):+4.0f}%"
    )


def percentiles(errors: Sequence[float]) -> tuple[float, float]:
    """Return the factors that a prediction is multiplied with for the range that holds nine of ten published times, and
    of a few all but the lowest and the highest."""
    ordered = sorted(-e for e in errors)
    cut = max(1, round(0.05 * len(ordered)))
    return math.exp(ordered[cut]), math.exp(ordered[-1 - cut])


def show_steps(steps: Sequence[Step], rows: bool, columns: dict[str, dict[int, dict[str, float]]]) -> None:
    """Print the errors of all rows, by phase and by group, one line for each of `columns`."""
    for i, step in enumerate(steps):
        predicted, seen = step.predicted(DEFAULTS), step.published("step_s")
        cells = " ".join(
            f"{field[:-2]} {predicted[field]:.0f}/{value:g}" for field in PHASES if (value := step.published(field))
        )
        outside = "  ".join(f"{100 * (math.exp(errors[i]['step_s']) - 1):+4.0f}%" for errors in columns.values())
        if rows:
            print(f"   {step.publication:<22} {step.name:<58} {predicted['step_s']:.0f}/{seen:g}  {outside}  {cells}")
    for title, errors in columns.items():
        print(f"\n-- {title}")
        for name, chosen in selections(steps, errors):
            if chosen:
                print(f"   {name:<12} {len(chosen):>3} times  {summary(chosen)}")


def selections(steps: Sequence[Step], errors: dict[int, dict[str, float]]) -> Iterator[tuple[str, list[float]]]:
    for field in WEIGHTS:
        yield field, [one[field] for one in errors.values() if field in one]
    for group in GROUPS:
        yield group, [errors[i]["step_s"] for i, step in enumerate(steps) if group in step.groups]


def show_choices(steps: Sequence[Step]) -> None:
    """Compare the planner's own choice for each model and machine with the newest published layout, both predicted: it
    must not be slower beyond the resolution, and a reason is printed for each size that differs."""
    newest = {(model_of(step), step.plan.cluster.gpus, step.plan.workload.staleness): step for step in steps}
    slower = 0
    for step in newest.values():
        request = step.plan.request
        pins = {key: value for key, value in request.pins.items() if key in ("training.backend", *SPLIT)}
        try:
            own = make_plan(replace(request, pins=pins), prefer_runnable=False)
        except NoPlanError as error:
            print(
                f"   {step.name}: published {step.plan.name()}: {step.plan.total_s:.0f} s\n       NONE: {error.message}"
            )
            slower += 1
            continue
        worse = own.total_s > step.plan.total_s * (1 + RESOLUTION)
        slower += worse
        verdict = "SLOWER" if worse else "equal" if own.equals(step.plan) else "faster"
        print(f"   {step.name}: published {step.plan.name()}: {step.plan.total_s:.0f} s")
        print(f"       own {own.name()}: {own.total_s:.0f} s, {verdict}")
        theirs, ours = step.plan.config_values(), own.config_values()
        for reason in own.reasons:
            key = reason.value.split("=")[0]
            if key in SIZES and theirs.get(key) != ours.get(key):
                print(f"       {reason.value} (published {theirs.get(key)}): {reason.rule}")
    print(f"   {len(newest) - slower} of {len(newest)} own choices are no slower than the published layout")


def show_fit(steps: Sequence[Step]) -> None:
    """Fit the constants to all rows and print them next to those that the planner has."""
    fitted = fit(steps)
    print(f"   loss {loss(steps, DEFAULTS):.3f} with the planner's constants, {loss(steps, fitted):.3f} fitted")
    for name, bounds in FITTED.items():
        value = getattr(fitted, name)
        print(f"   {name:<22} {getattr(DEFAULTS, name):.3g} -> {value:.3g}{'  AT A BOUND' * (value in bounds)}")


def show_ranges(errors: dict[int, dict[str, float]]) -> None:
    """Print the ranges for `RANGES` in the planner's constants."""
    for field in WEIGHTS:
        values = [one[field] for one in errors.values() if field in one]
        low, high = percentiles(values)
        print(f'    "{field[:-2]}": ({low:.2f}, {high:.2f}),')
