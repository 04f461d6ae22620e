"""Second stage of preparing a run: facts about its models. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import Resolved
from rlctl.models.facts import ModelFacts
from rlctl.preparation.cpu_format import format_notes, with_cpu_format
from rlctl.preparation.named import Named
from rlctl.preparation.open_model import (
    open_further_teachers,
    open_model,
    open_teacher,
    published_facts,
    published_teachers,
)
from rlctl.preparation.start_adapter import with_adapter

ASSUMED_GPU = "h100"
"""The GPU type of a dry run if the configuration requests GPUs and this machine has none."""


@dataclass(frozen=True)
class Located(Named):
    """A run with facts about its models. The configuration contains the number format for this machine's CPU."""

    facts: ModelFacts
    teacher_facts: tuple[ModelFacts, ...]
    """Facts about each teacher that the run computes, or about the reward model; empty: it has neither."""
    assume: str | None
    """GPU type to plan for if this machine lacks the requested GPUs; None: this machine must have them."""
    held_adapters: int = field(default=1, kw_only=True)
    """Adapters over one base that the processes hold: the runs of a sweep."""


def locate(named_run: Named, tell: Tell, *, assume: str | None, held_adapters: int = 1) -> Located:
    """Read the facts from the models' configurations. Raises InputError for a model that is neither on this machine nor
    on the hub."""
    teacher = open_teacher(named_run.config, weights=False)
    further = open_further_teachers(named_run.config, teacher, weights=False)
    facts = open_model(named_run.config.model, weights=False).facts
    resolved = with_adapter(_with_format(named_run.resolved, facts, tell, assume), facts, tell)
    teachers = tuple(model.facts for model in (teacher, *further) if model)
    return Located(resolved, named_run.method, facts, teachers, assume, held_adapters=held_adapters)


def locate_published(named_run: Named, tell: Tell, *, held_adapters: int = 1) -> Located:
    """Take the facts from the catalog if it has the models, without their files. For runs that are only planned."""
    facts = published_facts(named_run.config.model, tell, planned=True)
    resolved = with_adapter(_with_format(named_run.resolved, facts, tell, ASSUMED_GPU), facts, tell)
    teachers = published_teachers(named_run.config, tell)
    return Located(resolved, named_run.method, facts, teachers, ASSUMED_GPU, held_adapters=held_adapters)


def _with_format(resolved: Resolved, facts: ModelFacts, tell: Tell, assume: str | None) -> Resolved:
    resolved = with_cpu_format(resolved, facts, assume)
    for note in format_notes(resolved):
        tell(note)
    return resolved
