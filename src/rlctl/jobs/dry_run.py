"""Dry runs: a command's configuration, plan and engine arguments, without starting any process of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlctl.checkpoints.megatron.megatron_directory import find
from rlctl.checkpoints.model_files import ModelFiles, of_megatron
from rlctl.config.files import user_path
from rlctl.config.load import Resolved
from rlctl.errors import InputError
from rlctl.jobs.backend_arguments import BackendArguments, differences
from rlctl.jobs.completion_job import CompletionJob
from rlctl.jobs.refit_test_job import RefitTestJob
from rlctl.jobs.shared_base import require_adapters, require_shareable
from rlctl.jobs.shown_run import DryRun, of_this_machine, rewards_tried_here
from rlctl.jobs.without_model import check_without_model
from rlctl.methods.available import method_from_config
from rlctl.models.catalog import lookup_entry
from rlctl.planner.from_config import PROMPT_TOKENS
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.preparation.cpu_format import format_notes
from rlctl.preparation.job import Job, job_of
from rlctl.preparation.located import ASSUMED_GPU, locate_published
from rlctl.preparation.named import CLOCK, TIME, Named, name_run
from rlctl.preparation.open_model import NamedModel, find_model, published_facts
from rlctl.preparation.planned import plan_run, runnable_plan
from rlctl.preparation.worker_specs import planned_teacher, planned_workers
from rlctl.runs.directory import Checkpoint, RunDirectory
from rlctl.settings.data import ModelConfig


def dry_train(resolved: Resolved, completion: str | None = None) -> DryRun:
    """Check a training run, and return its configuration, plan, and notes on skipped checks. The rewards also score
    `completion` as a trial."""
    if resolved.config.run.dir:
        RunDirectory(Path(resolved.config.run.dir)).require_place()
    return _dry_train(resolved, completion)[0]


def dry_sweep(variants: Sequence[tuple[str, Resolved]]) -> DryRun:
    """Check a sweep; return the dry run of its first run, whose plan holds all adapters. `variants`: as in `run_sweep`.
    Raises ConfigError if the runs cannot share policy and engines."""
    for _, resolved in variants:
        require_adapters(resolved.config)
    report, first = _dry_train(variants[0][1], None, held_adapters=len(variants))
    for label, resolved in variants[1:]:
        if first is None:  # without its files, a model has a plan only
            break
        job = job_of(name_run(resolved, lambda _: None), lambda _: None, held_adapters=len(variants))
        require_shareable(label, first, job)
    runs = "; ".join(label for label, _ in variants)
    return replace(report, notes=(f"{len(variants)} runs over one base: {runs}", *report.notes))


def _dry_train(resolved: Resolved, completion: str | None, held_adapters: int = 1) -> tuple[DryRun, Job | None]:
    """Return the dry run and its job; None: the model is not here."""
    messages: list[str] = []
    named_run = name_run(resolved, messages.append)
    try:
        job = job_of(named_run, lambda _: None, completion=completion, held_adapters=held_adapters)
    except InputError as error:
        # The catalog has the facts for a plan, so a missing model needs no files.
        model = named_run.config.model
        if not model.name or lookup_entry(model.name) is None or not _model_is_absent(model):
            raise
        return _dry_train_without_model(named_run, error, completion, messages, held_adapters), None
    return DryRun.of(job, messages), job


def _dry_train_without_model(
    named_run: Named, absent: InputError, completion: str | None, messages: list[str], held_adapters: int
) -> DryRun:
    planned = plan_run(locate_published(named_run, lambda _: None, held_adapters=held_adapters))
    plan, facts, teachers, method = planned.early, planned.facts, planned.teacher_facts, planned.method
    resolved = planned.resolved.with_plan(plan, without=[TIME] if planned.resolved.origin[TIME] == CLOCK else [])
    checks = check_without_model(resolved.config, completion)
    unchecked = (f"tokenizer, chat template and lengths of prompts: {absent.message}", *checks.skipped)
    workers = planned_workers(resolved.config, facts, plan, Path(resolved.config.model.name or ""), None, method)
    if teachers:
        workers = replace(workers, teacher=planned_teacher(resolved.config, facts, teachers, plan, method))
    tried = rewards_tried_here(resolved) if checks.trials else []
    notes = (*messages, *format_notes(resolved), *checks.passed, *tried, *_assumed(resolved, plan))
    return DryRun(resolved, plan, BackendArguments.of(workers), notes, unchecked=unchecked, trials=checks.trials)


def dry_refit_test(resolved: Resolved) -> DryRun:
    """Plan the processes of `refit-test`. Needs neither the model's weights nor a GPU."""
    facts = published_facts(resolved.config.model)
    planned, plan = runnable_plan(resolved, facts, method_from_config(resolved.config, tries_loss=False), ASSUMED_GPU)
    job = RefitTestJob(planned.config, _unopened(resolved), facts, plan)
    return DryRun(planned, plan, BackendArguments.of(job.workers()), tuple(_assumed(resolved, plan)))


def dry_generate(resolved: Resolved, samples: int, checkpoint: Checkpoint | None, prompts: int) -> DryRun:
    """Plan the processes of `generate` for `prompts` prompts. Needs neither the model's weights nor a GPU."""
    model = NamedModel(_unopened(resolved), published_facts(resolved.config.model, engines_alone=True))
    job = CompletionJob(resolved, model, samples, checkpoint)
    plan = job.plan([PROMPT_TOKENS] * prompts, assume=ASSUMED_GPU)
    refuse_unrunnable(plan)
    job = replace(job, resolved=resolved.with_plan(plan))
    note = f"note: prompts are taken as {PROMPT_TOKENS} tokens long, for no tokenizer was opened"
    return DryRun(job.resolved, plan, job.arguments(plan), (*_assumed(resolved, plan), note))


def _unopened(resolved: Resolved) -> ModelFiles:
    name = resolved.config.model.name or ""
    local = find(user_path(name))
    return of_megatron(name, local) if local is not None else ModelFiles(Path(name), name)


def _assumed(resolved: Resolved, plan: Plan) -> list[str]:
    return [*differences(resolved), *of_this_machine(resolved, plan)]


def _model_is_absent(model: ModelConfig) -> bool:
    try:
        find_model(model.name or "", model.revision, weights=False)
    except InputError:
        return True
    return False
