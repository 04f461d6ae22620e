"""Dry runs: the configuration, the plan and the engines' exact arguments of a command, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.apps.backend_arguments import BackendArguments, differences
from rlctl.apps.generate import CompletionJob
from rlctl.apps.open_model import NamedModel, find_model, published_facts
from rlctl.apps.planned_crew import planned_crew, planned_teacher
from rlctl.apps.prepare import ASSUMED_GPU, Job, check_plan, checked_algorithm, prepare_job, runnable_plan
from rlctl.apps.refit_test import RefitTestJob
from rlctl.backends.lookup import POLICY
from rlctl.checkpoints.megatron.megatron_directory import find
from rlctl.checkpoints.model_source import ModelSource, of_megatron
from rlctl.config.load import DEFAULT, PLANNER, Resolved
from rlctl.config.paths import user_path
from rlctl.config.schema import ModelConfig
from rlctl.errors import InputError, MachineError
from rlctl.models.catalog import lookup
from rlctl.planner.from_config import PROMPT_TOKENS, local_gpus
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.planner.views.render import columns, kept, plan_json, plan_text, wrapped
from rlctl.runs.directory import Checkpoint, RunDirectory

DECIDED = (DEFAULT, PLANNER, "prompts")
"""Origins of values that nobody set."""
LEAST_COLUMNS, MOST_COLUMNS = 12, 40
"""Columns that values take before their origins; longer ones push theirs to the right."""


@dataclass(frozen=True)
class DryRun:
    """Everything that is decided before a run starts."""

    resolved: Resolved
    plan: Plan
    arguments: BackendArguments
    notes: tuple[str, ...]

    @classmethod
    def of(cls, job: Job, told: Sequence[str] = ()) -> DryRun:
        """The dry run of a prepared job; `told` is what was said while it was prepared."""
        return cls(job.resolved, job.plan, BackendArguments.of(job.crew_spec()), (*about(job), *told))

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.resolved.to_json(),
            "plan": plan_json(self.plan),
            "arguments": self.arguments.to_json(),
            "pinned": self.arguments.pinned(self.resolved),
            "notes": list(self.notes),
        }

    def text(self, explain: bool) -> str:
        """Return the plan, what was set and what to know; with `explain` also the rule behind each value, every value
        with its origin, and the engines' arguments."""
        lines = [plan_text(self.plan, self.resolved.config.model.name or "", reasons=explain), ""]
        lines += ["  values" if explain else "  set", *self._values(explain), ""]
        if explain:
            lines += [*self.arguments.text(), ""]
        lines += ["  to know", *self._notes(), ""]
        if not explain:
            lines.append("  --explain shows the rule behind each value, all values, and the engines' arguments.")
        return "\n".join(lines).rstrip()

    def _values(self, every: bool) -> list[str]:
        """Return lines of key, value and origin; without `every`, of those that somebody set."""
        origin = self.resolved.origin
        rows = [
            (key, f"{value!r}", origin[key])
            for key, value in self.resolved.leaves()
            if every or origin[key] not in DECIDED
        ]
        keys = max((len(key) for key, _, _ in rows), default=0)
        origins = max((len(origin) for _, _, origin in rows), default=0)
        room = min(MOST_COLUMNS, max(LEAST_COLUMNS, columns() - keys - origins - 8))
        values = min(max((len(value) for _, value, _ in rows), default=0), room)
        indent = " " * (keys + 6)
        return [
            line
            for key, value, origin in rows
            for line in wrapped(f"{value:<{values}}  {kept(origin)}", f"    {key:<{keys}}  ", indent)
        ]

    def _notes(self) -> list[str]:
        notes = [*(f"pinned: {line}" for line in self.arguments.pinned(self.resolved)), *self.notes]
        return [line for note in notes for line in wrapped(note.removeprefix("note: "), "    ", "      ")]


def dry_train(resolved: Resolved) -> DryRun:
    """Configuration and plan with every check that needs no process, and notes on what could not be checked here."""
    model = resolved.config.model
    facts = lookup(model.name) if model.name else None
    if resolved.config.run.dir:
        RunDirectory(Path(resolved.config.run.dir)).require_place()
    told: list[str] = []
    checked_algorithm(resolved, told.append)
    try:
        job = prepare_job(resolved)
    except (InputError, MachineError) as error:
        # A model that is not on this machine, or a GPU that is not, can still be planned for.
        if facts is None or not (isinstance(error, MachineError) or _model_is_absent(model)):
            raise
        taught = resolved.config.teacher
        named = ModelConfig(name=taught.model, revision=taught.revision)
        teacher = published_facts(named) if taught.model else None
        check_plan(resolved, facts, ASSUMED_GPU, teacher=teacher)
        resolved, plan = runnable_plan(resolved, facts, ASSUMED_GPU, teacher=teacher)
        notes = [*told, error.message]
        if not isinstance(error, MachineError):
            notes.append("Tokenizer, data and rewards were not checked: the plan is made from the catalog.")
        crew = planned_crew(resolved.config, facts, plan, Path(model.name or ""), None)
        if teacher is not None:
            crew = replace(crew, teacher=planned_teacher(resolved.config, facts, teacher, plan))
        return DryRun(resolved, plan, BackendArguments.of(crew), (*notes, *_assumed(resolved, plan)))
    return DryRun.of(job, told)


def dry_refit_test(resolved: Resolved) -> DryRun:
    """Plan what `refit-test` would start. Needs neither the model's weights nor a GPU."""
    facts = published_facts(resolved.config.model)
    planned, plan = runnable_plan(resolved, facts, ASSUMED_GPU)
    job = RefitTestJob(planned.config, _unopened(resolved), facts, plan)
    return DryRun(planned, plan, BackendArguments.of(job.crew()), tuple(_assumed(resolved, plan)))


def dry_generate(resolved: Resolved, samples: int, checkpoint: Checkpoint | None, prompts: int) -> DryRun:
    """Plan what `generate` would start for that many prompts. Needs neither the model's weights nor a GPU."""
    model = NamedModel(_unopened(resolved), published_facts(resolved.config.model, engines_alone=True))
    job = CompletionJob(resolved, model, samples, checkpoint)
    plan = job.plan([PROMPT_TOKENS] * prompts, assume=ASSUMED_GPU)
    refuse_unrunnable(plan)
    job = replace(job, resolved=resolved.with_values(plan.config_values()))
    note = f"note: prompts are taken as {PROMPT_TOKENS} tokens long, for no tokenizer was opened"
    return DryRun(job.resolved, plan, job.arguments(plan), (*_assumed(resolved, plan), note))


def _unopened(resolved: Resolved) -> ModelSource:
    """Where the model is or would be."""
    name = resolved.config.model.name or ""
    local = find(user_path(name))
    return of_megatron(name, local) if local is not None else ModelSource(Path(name), name)


def _assumed(resolved: Resolved, plan: Plan) -> list[str]:
    """Notes on what was assumed about the machine."""
    if resolved.config.cluster.gpu != "auto" or plan.cluster.is_cpu or local_gpus():
        return differences(resolved)
    return [*differences(resolved), f"note: this machine has no GPU; planned for {plan.cluster.device.name.upper()}"]


def _model_is_absent(model: ModelConfig) -> bool:
    try:
        find_model(model.name or "", model.revision, weights=False)
    except InputError:
        return True
    return False


def about(job: Job) -> list[str]:
    """Model, data and reward, and what there is to know about them."""
    return [
        f"model: {job.source.label}",
        *job.prompts.describe(),
        *(job.rewards.describe() if job.rewards is not None else ["reward: none"]),
        *([f"teacher: {job.teacher.source.label}"] if job.teacher is not None else []),
        *_other_backend(job.plan),
        *([job.validation.describe(job.config)] if job.validation else []),
        *(f"note: {note}" for note in (job.source.note, job.prompts.encoder.note) if note),
        *differences(job.resolved),
    ]


def _other_backend(plan: Plan) -> list[str]:
    """Say why another backend than the usual one trains, where nobody asked for it."""
    if plan.backend == POLICY or "training.backend" in plan.pins:
        return []
    why = next(reason.rule for reason in plan.reasons if reason.value == f"training.backend={plan.backend}")
    return [f"backend: {plan.backend}; {why}"]
