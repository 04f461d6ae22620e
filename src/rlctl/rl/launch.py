"""From a resolved configuration to a run: new, resumed, or only shown."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.checkpoints.source import resolve_model
from rlctl.config.load import DEFAULT, PLANNER, Resolved, Value, build
from rlctl.config.schema import ModelConfig
from rlctl.errors import InputError, MachineError
from rlctl.models.catalog import lookup
from rlctl.planner.from_config import plan_from_config
from rlctl.planner.plan import Plan
from rlctl.planner.render import plan_json, plan_text
from rlctl.rl.arguments import EngineArguments, differences
from rlctl.rl.job import Job, content_changes, planned_crew, prepare_job, require_devices
from rlctl.rl.run import RunSummary, run_grpo
from rlctl.runs.directory import RunDirectory, newest_run
from rlctl.runs.interrupt import StopRequest
from rlctl.telemetry.display import Display

RUNS = Path("runs")
ASSUMED_GPU = "h100"
"""What a dry run plans for where the configuration asks for GPUs and this machine has none to look at."""
# What a resumed run may change: how long, where and how it is watched; nothing that its numbers follow from. The model
# may have moved: what it holds is compared.
CHANGEABLE = (
    "grpo.steps", "run.dir", "run.goal", "run.checkpoint_every", "run.keep_last", "run.keep_best", "run.save_final",
    "run.log_rollouts", "run.tensorboard", "run.wandb", "cluster.", "refit.", "generation.mean_length",
    "reward.timeout_s", "model.name", "grpo.logprob_diff_warning", "grpo.logprob_diff_error",
)  # fmt: skip
# How the same computation is laid out over devices: numbers agree within rounding. What the planner decided is planned
# again when one of these changes.
LAYOUT = (
    "cluster.nodes", "cluster.gpus_per_node", "cluster.gpu",
    *(f"training.{key}" for key in (
        "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "sequence_parallel", "first_stage_layers", "last_stage_layers",
        "recompute", "optimizer_offload", "micro_batch_tokens", "threads",
    )),
    *(f"generation.{key}" for key in (
        "engines", "tp", "pp", "dp", "ep", "colocated", "memory_fraction", "kv_cache_bytes", "max_concurrent",
        "max_batched_tokens", "threads",
    )),
)  # fmt: skip


def train_grpo(resolved: Resolved, *, resume: bool, quiet: bool, allow_changes: bool = False) -> RunSummary:
    """Run, or continue, a GRPO run; returns when it is finished or was asked to stop."""
    with Display(steps=resolved.config.grpo.steps, quiet=quiet) as display, StopRequest(display.say) as stop:
        display.doing("model, data and plan")
        if resume:
            return _resume(resolved, display, stop, allow_changes)
        return _begin(resolved, display, stop)


def _begin(resolved: Resolved, display: Display, stop: StopRequest) -> RunSummary:
    job = prepare_job(resolved, display.say)
    require_devices(job)
    run = RunDirectory(Path(resolved.config.run.dir) if resolved.config.run.dir else RUNS / _name(job))
    with _locked(run, run.create):
        try:
            run.write_manifest(job.manifest())
            _introduce(display, job, run)
            return run_grpo(job, run, display, stop, resume=False)
        except BaseException as error:
            if not run.has_steps():
                run.abandon(keep_logs=isinstance(error, Exception))
            raise


def _resume(resolved: Resolved, display: Display, stop: StopRequest, allow_changes: bool) -> RunSummary:
    named = resolved.config.run.dir
    run = RunDirectory(Path(named) if named else newest_run(RUNS))
    with _locked(run, run.reopen):
        job = resumed_job(run, resolved, display.say, allow_changes=allow_changes)
        display.steps = job.config.grpo.steps
        run.clear_partial()
        run.write_manifest(job.manifest())
        _introduce(display, job, run)
        return run_grpo(job, run, display, stop, resume=True)


def resumed_job(run: RunDirectory, resolved: Resolved, tell: Callable[[str], None], *, allow_changes: bool) -> Job:
    """What the run in `run` goes on with: its stored configuration and what `resolved` newly sets.

    Raises InputError for a change of what its numbers follow from, unless `allow_changes`: then `tell` hears of it.
    """
    stored = run.manifest()
    merged, changes = continued(stored, resolved)
    job = prepare_job(merged, tell)
    require_devices(job)
    for change in [*changes, *content_changes(stored, job)]:
        if not allow_changes:
            raise InputError(
                f"--resume: {change}.", "Restore it, start a new run, or add --allow-changes to go on with the change."
            )
        tell(f"going on although {change}")
    checkpoints = run.checkpoints()
    if checkpoints and checkpoints[-1].step >= job.config.grpo.steps:
        raise InputError(
            f"--resume: {run.path} has finished its {job.config.grpo.steps} steps.", "Give more with --steps."
        )
    return job


@contextlib.contextmanager
def _locked(run: RunDirectory, lock: Callable[[], None]) -> Iterator[None]:
    """Hold the run directory while the block writes to it."""
    lock()
    try:
        with run.writing():
            yield
    finally:
        run.release()


def continued(stored: dict[str, Any], resolved: Resolved) -> tuple[Resolved, list[str]]:
    """The stored configuration with what `resolved` newly sets, and what of that a resumed run should not change."""
    values = {key: Value(key, entry["value"], entry["origin"]) for key, entry in stored["config"].items()}
    given = [(key, value, resolved.origin[key]) for key, value in resolved.leaves() if resolved.origin[key] != DEFAULT]
    given = [(key, value, origin) for key, value, origin in given if key not in values or values[key].value != value]
    if any(key in LAYOUT for key, _, _ in given):
        values = {key: value for key, value in values.items() if value.origin != PLANNER}
    changes = []
    for key, value, origin in given:
        if not key.startswith(CHANGEABLE) and key not in LAYOUT:
            before = f"the run was begun with {values[key].value!r}" if key in values else "it was not set at first"
            changes.append(f"`{key}` = {value!r} ({origin}), but {before}")
        values[key] = Value(key, value, origin)
    return build({key: value for key, value in values.items() if value.origin != DEFAULT}), changes


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
    return [
        f"model: {job.source.label}",
        f"data: {job.prompts.source.label} ({len(job.prompts.source)} prompts)",
        *job.rewards.describe(),
        *(f"note: {note}" for note in (job.source.note, job.prompts.encoder.note) if note),
        *differences(job.resolved),
    ]


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    resolved: Resolved
    plan: Plan
    arguments: EngineArguments
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.resolved.to_json(),
            "plan": plan_json(self.plan),
            "arguments": self.arguments.to_json(),
            "pinned": self.arguments.pinned(self.resolved),
            "changed": list(self.resolved.changed),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        width = max(len(key) for key, _ in self.resolved.leaves())
        lines = [f"{key:<{width}}  {value!r}  ({self.resolved.origin[key]})" for key, value in self.resolved.leaves()]
        plan = plan_text(self.plan, self.resolved.config.model.name or "")
        pinned = [f"pinned: {line}" for line in self.arguments.pinned(self.resolved)]
        return "\n".join([*lines, "", plan, "", *self.arguments.text(), "", *pinned, *self.notes])


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
        resolved = resolved.with_values(plan.config_values())
        crew = planned_crew(resolved.config, facts, plan, Path(model.name or ""), None)
        return DryRun(resolved, plan, EngineArguments.of(crew), (*differences(resolved), note))
    return DryRun(job.resolved, job.plan, EngineArguments.of(job.crew_spec()), tuple(_about(job)))


def _model_is_absent(model: ModelConfig) -> bool:
    try:
        resolve_model(model.name or "", model.revision, weights=False)
    except InputError:
        return True
    return False
