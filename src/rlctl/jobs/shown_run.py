"""Display of a run before its start: configuration, plan and the exact arguments of engines and backends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlctl.backends.lookup import POLICY
from rlctl.config.load import DEFAULT, PLANNER, Resolved
from rlctl.jobs.backend_arguments import BackendArguments, differences
from rlctl.jobs.first_look import FirstLook, trial_lines
from rlctl.planner.from_config import local_gpus
from rlctl.planner.result import Plan
from rlctl.planner.views.render import columns, kept, plan_json, plan_text, wrapped
from rlctl.preparation.cpu_format import format_notes
from rlctl.preparation.job import Job
from rlctl.rewards.reward_plan import Trial

OF_A_RECIPE = re.compile(r"file (.+), \S+")
"""Origin of a value that comes from a key of a recipe."""
DECIDED = (DEFAULT, PLANNER, "prompts")
"""Origins of values that the user did not set."""
LEAST_COLUMNS, MOST_COLUMNS = 12, 40
"""Minimum and maximum width of the column of values. Longer values push their origins to the right."""


@dataclass(frozen=True)
class DryRun:
    """Everything that rlctl decides before a run starts."""

    resolved: Resolved
    plan: Plan
    arguments: BackendArguments
    notes: tuple[str, ...]
    first_look: FirstLook | None = None
    """None: no data was opened."""
    unchecked: tuple[str, ...] = ()
    """Unchecked parts of the run, with reasons."""
    trials: tuple[Trial, ...] = ()
    """Scores of the first reference answers if there is no `first_look`, which contains them otherwise."""

    @classmethod
    def of(cls, job: Job, messages: Sequence[str] = ()) -> DryRun:
        """Return the dry run of a prepared job. `messages`: notices from its preparation."""
        tried = rewards_tried_here(job.resolved) if job.rewards else []
        notes = (*about(job), *tried, *of_this_machine(job.resolved, job.plan), *format_notes(job.resolved), *messages)
        return cls(job.resolved, job.plan, BackendArguments.of(job.workers_spec()), notes, FirstLook.of(job))

    def to_json(self) -> dict[str, Any]:
        return {
            "unchecked": list(self.unchecked),
            "config": self.resolved.to_json(),
            "plan": plan_json(self.plan),
            "arguments": self.arguments.to_json(),
            "pinned": self.arguments.pinned(self.resolved),
            "notes": list(self.notes),
            "first_look": asdict(self.first_look) if self.first_look else None,
            "trials": [asdict(trial) for trial in self.trials],
        }

    def text(self, explain: bool) -> str:
        """Return the differences from a recipe, unchecked parts, the plan, user-set values and notes. `explain`: also
        the rule behind each value, every value with its origin, and the exact arguments."""
        lines = self._differing()
        lines += [line for text in self.unchecked for line in wrapped(text, "not checked: ", " " * 13)]
        lines += [""] if self.unchecked else []
        lines += [plan_text(self.plan, self.resolved.config.model.name or "", reasons=explain), ""]
        by_recipe = f", by {self.recipe} where a key of it stands" if self.recipe else ""
        lines += [*wrapped(f"{'values' if explain else 'set'}{by_recipe}", "  ", "    "), *self._values(explain), ""]
        if explain:
            lines += [*self.arguments.text(), ""]
        lines += [*self.first_look.text(), ""] if self.first_look else []
        lines += [*(line for trial in self.trials for line in trial_lines(trial)), ""] if self.trials else []
        others = (line for line in self.notes if line not in self.resolved.notes)
        pinned = (line.replace(f"(file {self.recipe}, ", "(") for line in self.arguments.pinned(self.resolved))
        notes = [*(f"pinned: {line}" for line in pinned), *others]
        lines += [
            "  to know",
            *[line for note in notes for line in wrapped(note.removeprefix("note: "), "    ", "      ")],
            "",
        ]
        if not explain:
            lines.append("  --explain shows the rule behind each value, all values, and the engines' arguments.")
        return "\n".join(lines).rstrip()

    @property
    def recipe(self) -> str | None:
        """The recipe file that most values come from; None: there is no recipe, or several."""
        names = {match[1] for origin in self.resolved.origin.values() if (match := OF_A_RECIPE.fullmatch(origin))}
        return names.pop() if len(names) == 1 else None

    def _differing(self) -> list[str]:
        notes = [line.removeprefix("note: ").removeprefix("runs differently: ") for line in self.resolved.notes]
        lines = [line for text in notes for line in wrapped(text, "    ", "      ")]
        return ["  differs from the file", *lines, ""] if lines else []

    def _values(self, every: bool) -> list[str]:
        origin = self.resolved.origin
        if self.recipe is not None:
            origin = {key: source.removeprefix(f"file {self.recipe}, ") for key, source in origin.items()}
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


def of_this_machine(resolved: Resolved, plan: Plan) -> list[str]:
    if resolved.config.cluster.gpu != "auto" or plan.cluster.is_cpu or local_gpus():
        return []
    return [f"note: this machine has no GPU; planned for {plan.cluster.device.name.upper()}"]


def rewards_tried_here(resolved: Resolved) -> list[str]:
    address = resolved.config.cluster.ray_address
    note = f"note: the rewards were tried on this machine; a run tries them again on a node of the cluster at {address}"
    return [note] if address is not None else []


def _teachers(job: Job) -> list[str]:
    """Return a line about each teacher, with its weight and its sources among several."""
    section = job.config.teacher_section
    if section is None or (job.config.named_teacher is None and not section.served):
        return []
    models, tokenizer_teachers = iter(job.teachers), job.config.tokenizer_teachers
    lines = list[str]()
    for number, entry in enumerate(section.models or (None,)):
        if entry is not None and entry.endpoint is not None:
            parts = [f"teacher: {entry.model or 'the model'} at {entry.endpoint}"]
        else:
            parts = [
                f"teacher: {next(models).files.label}",
                *(["own tokenizer"] if number in tokenizer_teachers else []),
            ]
        if entry is not None:
            parts += [f"weight {entry.weight:g}"] if len(section.models) > 1 else []
            parts += [f"for {', '.join(entry.sources)}"] if entry.sources else []
        lines.append(", ".join(parts))
    return lines


def about(job: Job) -> list[str]:
    """Return lines about model, data, reward and other parts of the run, followed by notes."""
    environment = job.prompts.environment
    return [
        f"model: {job.base_model.label}",
        *job.prompts.describe(),
        *(environment.describe() if environment else []),
        *(job.rewards.describe() if job.rewards else [f"reward: {environment.label if environment else 'none'}"]),
        *_teachers(job),
        *_other_backend(job.plan),
        *([job.validation.describe(job.config)] if job.validation else []),
        *(f"note: {note}" for note in (job.base_model.note, job.prompts.encoder.note, *job.notes) if note),
        *differences(job.resolved),
    ]


def _other_backend(plan: Plan) -> list[str]:
    """Return a line with the reason if the planner chose another backend than the default."""
    if plan.backend == POLICY or "training.backend" in plan.pins:
        return []
    rule = next(reason.rule for reason in plan.reasons if reason.value == f"training.backend={plan.backend}")
    return [f"backend: {plan.backend}; {rule}"]
