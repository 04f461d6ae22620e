"""Dry runs: the configuration, the plan and the engines' exact arguments of a command, without starting anything."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.backends.lookup import POLICY
from rlctl.checkpoints.megatron.megatron_directory import find
from rlctl.checkpoints.model_source import ModelSource, of_megatron
from rlctl.config.files import user_path
from rlctl.config.load import DEFAULT, PLANNER, Resolved
from rlctl.data.chat import EncodedPrompt, PromptEncoder
from rlctl.errors import InputError
from rlctl.jobs.backend_arguments import BackendArguments, differences
from rlctl.jobs.generate import CompletionJob
from rlctl.jobs.refit_test import RefitTestJob
from rlctl.jobs.without_model import check_without_model
from rlctl.methods.available import method_from_config
from rlctl.models.catalog import lookup_entry
from rlctl.planner.from_config import PROMPT_TOKENS, local_gpus
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.planner.views.render import columns, kept, plan_json, plan_text, wrapped
from rlctl.preparation.cpu_format import format_notes, with_cpu_format
from rlctl.preparation.open_model import NamedModel, find_model, published_facts, published_teacher
from rlctl.preparation.prepare import (
    ASSUMED_GPU,
    Job,
    check_plan,
    checked_method,
    prepare_job,
    runnable_plan,
    with_images,
)
from rlctl.preparation.run_workers import planned_teacher, planned_workers
from rlctl.rewards.reward_plan import Trial
from rlctl.rollouts.dataset import TextStream
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.settings.data import ModelConfig

OF_A_RECIPE = re.compile(r"file (.+), \S+")
"""Origin of a value that a key of a recipe gives."""
DECIDED = (DEFAULT, PLANNER, "prompts")
"""Origins of values that nobody set."""
SHOWN_LINES = 8
"""Lines of a prompt that are shown of its beginning, and as many of its end."""
SHOWN_COLUMNS = 60
"""Columns of a completion that are shown."""
LEAST_COLUMNS, MOST_COLUMNS = 12, 40
"""Columns that values take before their origins; longer ones push theirs to the right."""


@dataclass(frozen=True)
class DryRun:
    """Everything that is decided before a run starts."""

    resolved: Resolved
    plan: Plan
    arguments: BackendArguments
    notes: tuple[str, ...]
    first_look: FirstLook | None = None
    """None: no data was opened."""
    unchecked: tuple[str, ...] = ()
    """Parts of the run that were not checked, and why."""
    trials: tuple[Trial, ...] = ()
    """Scores of the first reference answers, where there is no `first_look` to have them."""

    @classmethod
    def of(cls, job: Job, told: Sequence[str] = ()) -> DryRun:
        """The dry run of a prepared job; `told` is what was said while it was prepared."""
        tried = _tried_here(job.resolved) if job.rewards else []
        notes = (*about(job), *tried, *_machine(job.resolved, job.plan), *format_notes(job.resolved), *told)
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
        """Return what differs from a recipe, what was not checked, the plan, what was set and what to know; with
        `explain` also the rule behind each value, every value with its origin, and the engines' arguments."""
        lines = self._differing()
        lines += [line for text in self.unchecked for line in wrapped(text, "not checked: ", " " * 13)]
        lines += [""] if self.unchecked else []
        lines += [plan_text(self.plan, self.resolved.config.model.name or "", reasons=explain), ""]
        by_recipe = f", by {self.recipe} where a key of it stands" if self.recipe else ""
        lines += [*wrapped(f"{'values' if explain else 'set'}{by_recipe}", "  ", "    "), *self._values(explain), ""]
        if explain:
            lines += [*self.arguments.text(), ""]
        lines += [*self.first_look.text(), ""] if self.first_look else []
        lines += [*(line for trial in self.trials for line in _given(trial)), ""] if self.trials else []
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
        """The file of a recipe, whose own keys are the origins of most values; None: there is none, or several."""
        found = {match[1] for one in self.resolved.origin.values() if (match := OF_A_RECIPE.fullmatch(one))}
        return found.pop() if len(found) == 1 else None

    def _differing(self) -> list[str]:
        told = [line.removeprefix("note: ").removeprefix("runs differently: ") for line in self.resolved.notes]
        lines = [line for text in told for line in wrapped(text, "    ", "      ")]
        return ["  differs from the file", *lines, ""] if lines else []

    def _values(self, every: bool) -> list[str]:
        origin = self.resolved.origin
        if self.recipe is not None:
            origin = {key: one.removeprefix(f"file {self.recipe}, ") for key, one in origin.items()}
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


@dataclass(frozen=True)
class FirstLook:
    """The first prompt, or text, of each source as the model reads it, all lengths, and what the rewards give."""

    prompts: tuple[FirstPrompt, ...]
    prompt_tokens: tuple[int, ...]
    """Lengths of the first prompts, or texts, that the run uses."""
    kind: str = "prompt"
    """Word for a row of the data."""

    @classmethod
    def of(cls, job: Job) -> FirstLook:
        prompts = []
        for source in job.prompts.sources:
            row = replace(source.prompts[0], source=source.label)
            plan = job.rewards.of(source.label) if job.rewards else None
            read = job.prompts.encoded(row)
            trained = None
            if isinstance(job.prompts, TextStream):
                trained = max((int(one.mask_T.sum()) for one in job.prompts.texts(row)), default=0)
            text, trials = _with_images_named(read, source.encoder), plan.trials if plan else ()
            images, seen = len(read.media), sum(part.tokens for part in read.media)
            prompts.append(FirstPrompt(row.where, len(read.tokens), text, trials, trained, images, seen))
        return cls(tuple(prompts), job.prompt_tokens, job.prompts.kind)

    def text(self) -> list[str]:
        """Return lines with all of it; a long prompt is shown by its beginning and its end."""
        lines = []
        for prompt in self.prompts:
            trained = "" if prompt.trained is None else f", {prompt.trained:,} of them with a loss"
            several = "s" * (prompt.images > 1)
            images = f", {prompt.image_tokens:,} of {prompt.images} image{several}" if prompt.images else ""
            lines += [f"  {f'first {self.kind}':<12}  {prompt.where}, {prompt.tokens:,} tokens{images}{trained}"]
            lines += _shown(prompt.text)
            lines += [line for trial in prompt.trials for line in _given(trial)]
        ordered = sorted(self.prompt_tokens)
        shares = {"shortest": 0.0, "median": 0.5, "95%": 0.95, "longest": 1.0}
        found = (f"{name} {ordered[round(share * (len(ordered) - 1))]:,}" for name, share in shares.items())
        return [*lines, f"  tokens of the first {len(ordered):,} {self.kind}s  {', '.join(found)}"]


@dataclass(frozen=True)
class FirstPrompt:
    """One prompt as the model reads it, and what the rewards give its completions."""

    where: str
    tokens: int
    text: str
    """The prompt with its special tokens."""
    trials: tuple[Trial, ...]
    """Its reference answer, and the completion that the user gave if there is one."""
    trained: int | None = None
    """Tokens with a loss, where it is a text to train on."""
    images: int = 0
    image_tokens: int = 0
    """Tokens that its images are read as."""


def _with_images_named(read: EncodedPrompt, encoder: PromptEncoder) -> str:
    """Return a prompt as text, in which the size of each image stands for it."""
    pieces, after, decode = list[Any](), 0, encoder.tokenizer.decode
    for part in read.media:
        before = decode(list(read.tokens[after : part.start]), skip_special_tokens=False)
        height, width = part.data.shape[:2]
        pieces += [before, f"[image of {width} x {height} pixels, {part.tokens:,} tokens]"]
        after = part.start + part.tokens
    return "".join(map(str, [*pieces, decode(list(read.tokens[after:]), skip_special_tokens=False)]))


def _shown(text: str) -> list[str]:
    lines = [
        f"    | {line}".rstrip()
        for paragraph in text.split("\n")
        for line in textwrap.wrap(paragraph, columns() - 6, drop_whitespace=False, replace_whitespace=False) or [""]
    ]
    left_out = len(lines) - 2 * SHOWN_LINES
    if left_out <= 0:
        return lines
    return [*lines[:SHOWN_LINES], f"    ... {left_out:,} more lines ...", *lines[-SHOWN_LINES:]]


def _given(trial: Trial) -> list[str]:
    each = ", ".join(f"{name} {'does not apply' if value is None else f'{value:g}'}"
                     for name, value in trial.scores.items())  # fmt: skip
    total = "none" if trial.reward is None else f"{trial.reward:g}"
    short = textwrap.shorten(trial.completion, SHOWN_COLUMNS, placeholder=" ...")
    return wrapped(f"{total} for {short!r} ({each})", "  reward        ", " " * 16)


def dry_train(resolved: Resolved, completion: str | None = None) -> DryRun:
    """Configuration and plan with every check that needs no process, and notes on what could not be checked here; the
    rewards are tried on `completion` too."""
    resolved = with_images(resolved)
    model = resolved.config.model
    if resolved.config.run.dir:
        RunDirectory(Path(resolved.config.run.dir)).require_place()
    told: list[str] = []
    method = checked_method(resolved, told.append)
    try:
        job = prepare_job(resolved, completion=completion)
    except InputError as error:
        # A model of the catalog can be planned for without its files.
        if not model.name or lookup_entry(model.name) is None or not _model_is_absent(model):
            raise
        facts, teacher = published_facts(model), published_teacher(resolved.config)
        resolved = with_cpu_format(resolved, facts, ASSUMED_GPU)
        resolved, plan = check_plan(resolved, facts, method, ASSUMED_GPU, teacher=teacher)
        resolved = resolved.with_plan(plan)
        checks = check_without_model(resolved.config, completion)
        unchecked = (f"tokenizer, chat template and lengths of prompts: {error.message}", *checks.skipped)
        workers = planned_workers(resolved.config, facts, plan, Path(model.name or ""), None, method)
        if teacher is not None:
            workers = replace(workers, teacher=planned_teacher(resolved.config, facts, teacher, plan, method))
        tried = _tried_here(resolved) if checks.trials else []
        notes = (*told, *format_notes(resolved), *checks.passed, *tried, *_assumed(resolved, plan))
        arguments = BackendArguments.of(workers)
        return DryRun(resolved, plan, arguments, notes, unchecked=unchecked, trials=checks.trials)
    return DryRun.of(job, told)


def dry_refit_test(resolved: Resolved) -> DryRun:
    """Plan what `refit-test` would start. Needs neither the model's weights nor a GPU."""
    facts = published_facts(resolved.config.model)
    planned, plan = runnable_plan(resolved, facts, method_from_config(resolved.config, tries_loss=False), ASSUMED_GPU)
    job = RefitTestJob(planned.config, _unopened(resolved), facts, plan)
    return DryRun(planned, plan, BackendArguments.of(job.workers()), tuple(_assumed(resolved, plan)))


def dry_generate(resolved: Resolved, samples: int, checkpoint: Checkpoint | None, prompts: int) -> DryRun:
    """Plan what `generate` would start for that many prompts. Needs neither the model's weights nor a GPU."""
    model = NamedModel(_unopened(resolved), published_facts(resolved.config.model, engines_alone=True))
    job = CompletionJob(resolved, model, samples, checkpoint)
    plan = job.plan([PROMPT_TOKENS] * prompts, assume=ASSUMED_GPU)
    refuse_unrunnable(plan)
    job = replace(job, resolved=resolved.with_plan(plan))
    note = f"note: prompts are taken as {PROMPT_TOKENS} tokens long, for no tokenizer was opened"
    return DryRun(job.resolved, plan, job.arguments(plan), (*_assumed(resolved, plan), note))


def _unopened(resolved: Resolved) -> ModelSource:
    name = resolved.config.model.name or ""
    local = find(user_path(name))
    return of_megatron(name, local) if local is not None else ModelSource(Path(name), name)


def _assumed(resolved: Resolved, plan: Plan) -> list[str]:
    return [*differences(resolved), *_machine(resolved, plan)]


def _machine(resolved: Resolved, plan: Plan) -> list[str]:
    if resolved.config.cluster.gpu != "auto" or plan.cluster.is_cpu or local_gpus():
        return []
    return [f"note: this machine has no GPU; planned for {plan.cluster.device.name.upper()}"]


def _tried_here(resolved: Resolved) -> list[str]:
    address = resolved.config.cluster.ray_address
    told = f"note: the rewards were tried on this machine; a run tries them again on a node of the cluster at {address}"
    return [told] if address is not None else []


def _model_is_absent(model: ModelConfig) -> bool:
    try:
        find_model(model.name or "", model.revision, weights=False)
    except InputError:
        return True
    return False


def about(job: Job) -> list[str]:
    """Model, data and reward, and what there is to know about them."""
    environment = job.prompts.environment
    return [
        f"model: {job.source.label}",
        *job.prompts.describe(),
        *(environment.describe() if environment else []),
        *(job.rewards.describe() if job.rewards else [f"reward: {environment.plan.label if environment else 'none'}"]),
        *([f"teacher: {job.teacher.source.label}"] if job.teacher is not None and job.config.named_teacher else []),
        *_other_backend(job.plan),
        *([job.validation.describe(job.config)] if job.validation else []),
        *(f"note: {note}" for note in (job.source.note, job.prompts.encoder.note, *job.notes) if note),
        *differences(job.resolved),
    ]


def _other_backend(plan: Plan) -> list[str]:
    """Say why another backend than the usual one trains, where nobody asked for it."""
    if plan.backend == POLICY or "training.backend" in plan.pins:
        return []
    why = next(reason.rule for reason in plan.reasons if reason.value == f"training.backend={plan.backend}")
    return [f"backend: {plan.backend}; {why}"]
