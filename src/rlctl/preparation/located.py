"""Second stage of preparing a run: facts about its models. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.checkpoints.model_source import Tell
from rlctl.config.load import Resolved
from rlctl.models.facts import ModelFacts
from rlctl.preparation.cpu_format import format_notes, with_cpu_format
from rlctl.preparation.named import Named
from rlctl.preparation.open_model import open_model, open_teacher, published_facts, published_teacher

ASSUMED_GPU = "h100"
"""The GPU that a dry run plans for if the configuration asks for GPUs and this machine has none to look at."""


@dataclass(frozen=True)
class Located(Named):
    """A run whose model is known, and the number format of this machine's processor."""

    facts: ModelFacts
    teacher_facts: ModelFacts | None
    """Facts about the teacher or the reward model; None: the run has neither."""
    assume: str | None
    """The GPU to plan for where GPUs are asked for and this machine has none; None: this machine has to have them."""


def locate(named_run: Named, tell: Tell, *, assume: str | None) -> Located:
    """Find the models' directories. Raises InputError for a model that is neither here nor on the hub."""
    teacher = open_teacher(named_run.config, weights=False)
    facts = open_model(named_run.config.model, weights=False).facts
    resolved = _with_format(named_run.resolved, facts, tell, assume)
    return Located(resolved, named_run.method, facts, teacher.facts if teacher else None, assume)


def locate_published(named_run: Named, tell: Tell) -> Located:
    """Find out about the models without their files, as far as the catalog has them, for a run that is only planned."""
    facts = published_facts(named_run.config.model, tell)
    resolved = _with_format(named_run.resolved, facts, tell, ASSUMED_GPU)
    return Located(resolved, named_run.method, facts, published_teacher(named_run.config, tell), ASSUMED_GPU)


def _with_format(resolved: Resolved, facts: ModelFacts, tell: Tell, assume: str | None) -> Resolved:
    resolved = with_cpu_format(resolved, facts, assume)
    for note in format_notes(resolved):
        tell(note)
    return resolved
