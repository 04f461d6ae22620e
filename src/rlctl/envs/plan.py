"""What a run is rewarded for, as plain data that a scoring process can build its scorers from."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.config.schema import RewardTerm
from rlctl.data.rows import GymTask
from rlctl.envs.extraction import DESCRIPTION, Extraction
from rlctl.envs.scorers import Scorer, build_scorer


@dataclass(frozen=True)
class RewardPlan:
    """Made by `rewards.prepare_rewards`."""

    terms: tuple[RewardTerm, ...]
    extraction: Extraction
    extraction_reason: str | None
    """Why this extraction; None: the user chose it."""
    task: GymTask | None
    accuracy_by: str | None
    """The scorer that says whether a completion is right; None: nothing to compare with."""
    timeout_s: float
    notes: tuple[str, ...] = ()
    """What the user should know before the run."""

    @property
    def scorers(self) -> tuple[str, ...]:
        """Names of all scorers to run on each completion: the terms, and the one behind the accuracy."""
        names = tuple(term.name for term in self.terms)
        return names if self.accuracy_by is None or self.accuracy_by in names else (*names, self.accuracy_by)

    def build(self) -> list[Scorer]:
        """The scorers, in the order of `scorers`; imports what they need."""
        given = self.extraction_reason is None
        return [build_scorer(name, self.task, self.extraction, extraction_given=given) for name in self.scorers]

    def describe(self) -> list[str]:
        """Lines that say what is rewarded, how answers are found, and what to mind."""
        terms = " + ".join(term.name if term.weight == 1 else f"{term.weight:g} x {term.name}" for term in self.terms)
        reason = self.extraction_reason or "reward.extract"
        accuracy = f"accuracy: {self.accuracy_by}" if self.accuracy_by else "accuracy: none, without reference answers"
        return [f"reward: {terms}", f"answer: {DESCRIPTION[self.extraction]} ({reason})", accuracy, *self.notes]
