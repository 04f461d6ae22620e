"""From a resolved configuration to a run: new, resumed, or only shown."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.checkpoints.source import resolve_model
from rlctl.config.load import DEFAULT, Resolved, Value, build
from rlctl.config.schema import ModelConfig
from rlctl.errors import InputError, MachineError
from rlctl.models.catalog import lookup
from rlctl.planner.from_config import plan_from_config
from rlctl.planner.plan import Plan
from rlctl.planner.render import plan_json, plan_text
from rlctl.rl.job import Job, check_resumable, prepare_job
from rlctl.rl.run import RunSummary, run_grpo
from rlctl.runs.directory import Checkpoint, RunDirectory, newest_run
from rlctl.telemetry.display import Display

RUNS = Path("runs")
ASSUMED_GPU = "h100"
"""What a dry run plans for where the configuration asks for GPUs and this machine has none to look at."""
# What a resumed run may change: how long, where and how it is watched; nothing that its numbers follow from.
CHANGEABLE = ("grpo.steps", "run.", "cluster.", "refit.", "generation.mean_length")


def train_grpo(resolved: Resolved, *, resume: bool, quiet: bool) -> RunSummary:
    """Run, or continue, a GRPO run; returns when it is finished or was asked to stop."""
    display = Display(steps=resolved.config.grpo.steps, quiet=quiet)
    if resume:
        return _resume(resolved, display)
    display.doing("model, data and plan")
    job = prepare_job(resolved, display.say)
    run = RunDirectory(Path(resolved.config.run.dir) if resolved.config.run.dir else RUNS / _name(job))
    run.create()
    try:
        run.write_manifest(job.manifest())
        _introduce(display, job, run)
        return run_grpo(job, run, display, None)
    finally:
        run.release()


def _resume(resolved: Resolved, display: Display) -> RunSummary:
    named = resolved.config.run.dir
    run = RunDirectory(Path(named) if named else newest_run(RUNS))
    run.reopen()
    try:
        stored = run.manifest()
        job = prepare_job(continued(stored, resolved), display.say)
        check_resumable(stored, job)
        display.steps = job.config.grpo.steps
        checkpoints = run.checkpoints()
        latest: Checkpoint | None = checkpoints[-1] if checkpoints else None
        run.prune(None)
        if latest is not None and latest.step >= job.config.grpo.steps:
            raise InputError(
                f"--resume: {run.path} has finished its {job.config.grpo.steps} steps.", "Give more with --steps."
            )
        run.write_manifest(job.manifest())
        _introduce(display, job, run)
        display.say(f"resuming after step {latest.step}" if latest else "no checkpoint yet: starting again from step 1")
        return run_grpo(job, run, display, latest)
    finally:
        run.release()


def continued(stored: dict[str, Any], resolved: Resolved) -> Resolved:
    """The stored configuration with what `resolved` newly sets, if a resumed run may change it.

    Raises InputError naming the first key that it may not.
    """
    values = {key: Value(key, entry["value"], entry["origin"]) for key, entry in stored["config"].items()}
    for key, value in resolved.leaves():
        if resolved.origin[key] == DEFAULT or (key in values and values[key].value == value):
            continue
        if not key.startswith(CHANGEABLE):
            raise InputError(
                f"--resume: `{key}` = {value!r} ({resolved.origin[key]}), but the run was begun with "
                f"{values[key].value!r}."
                if key in values
                else f"--resume: `{key}` was not set when the run was begun.",
                "Leave it out to continue, or start a new run.",
            )
        values[key] = Value(key, value, resolved.origin[key])
    return build({key: value for key, value in values.items() if value.origin != DEFAULT})


def _name(job: Job) -> str:
    parts = [Path(job.config.model.name or "model").name, (job.config.data.name or "data").split(":")[-1]]
    words = [re.sub(r"[^\w.-]+", "-", Path(part).stem if "/" in part else part) for part in parts]
    return "-".join([*words, time.strftime("%Y%m%d-%H%M%S")]).lower()


def _introduce(display: Display, job: Job, run: RunDirectory) -> None:
    """What is about to happen, in a few lines."""
    display.say(f"run: {run.path}")
    for line in _about(job):
        display.say(line)
    display.say(f"plan: {job.plan.name()}")


def _about(job: Job) -> list[str]:
    """Model, data and reward, and what there is to know about them."""
    notes = [job.source.note, job.prompts.encoder.note, *job.rewards.notes]
    return [
        f"model: {job.source.label}",
        f"data: {job.prompts.source.label} ({len(job.prompts.source)} prompts)",
        *job.rewards.describe(),
        *(f"note: {note}" for note in notes if note),
    ]


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    resolved: Resolved
    plan: Plan
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"config": self.resolved.to_json(), "plan": plan_json(self.plan), "notes": list(self.notes)}

    def text(self) -> str:
        width = max(len(key) for key, _ in self.resolved.leaves())
        lines = [f"{key:<{width}}  {value!r}  ({self.resolved.origin[key]})" for key, value in self.resolved.leaves()]
        plan = plan_text(self.plan, self.resolved.config.model.name or "")
        return "\n".join([*lines, "", plan, "", *self.notes])


def dry_run(resolved: Resolved) -> DryRun:
    """Configuration and plan with every check that needs no process, and notes on what could not be checked here."""
    model = resolved.config.model
    facts = lookup(model.name) if model.name else None
    try:
        job = prepare_job(resolved)
    except (InputError, MachineError) as error:
        # A model that is not on this machine, or a GPU that is not, can still be planned for.
        if facts is None or not (isinstance(error, MachineError) or _model_is_absent(model)):
            raise
        plan = plan_from_config(resolved.config, facts, assume=ASSUMED_GPU)
        unseen = "" if isinstance(error, MachineError) else "tokenizer, data and rewards were not checked; "
        note = f"note: {error.message} Planned from the catalog: {unseen}a GPU of type auto is taken as {ASSUMED_GPU}."
        return DryRun(resolved.with_values(plan.config_values()), plan, (note,))
    return DryRun(job.resolved, job.plan, tuple(_about(job)))


def _model_is_absent(model: ModelConfig) -> bool:
    try:
        resolve_model(model.name or "", model.revision, weights=False)
    except InputError:
        return True
    return False
