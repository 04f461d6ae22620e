"""The reward of a run as plain data: weighted scorers, which the scoring process builds from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rlctl.config.user_code import MODEL
from rlctl.data.prompt_rows import GymTask, PromptRow, answer_text
from rlctl.rewards.extraction import ANSWER, DESCRIPTION, TAG, Extraction, extract, written_as
from rlctl.rewards.scorers import (
    BY_THEMSELVES,
    CALL_SHARE,
    RIGHT_ABOVE,
    BatchScorer,
    DapoMath,
    ExactMatch,
    IfEval,
    MathVerify,
    Scorer,
    Tagged,
    TaskScorer,
)
from rlctl.rewards.tag_scorers import TAG_SCORERS
from rlctl.rewards.user_function import user_scorer
from rlctl.settings.rewards import OnError, RewardTerm


@dataclass(frozen=True)
class Trial:
    """The scores of one completion, from before a run."""

    where: str
    """The location of the prompt's row."""
    completion: str
    scores: dict[str, float | None]
    """By scorer; None: it does not apply."""
    reward: float | None
    """Their weighted sum; None: no scorer applies."""


@dataclass(frozen=True)
class RewardPlan:
    """The reward of a run as plain data; made by `rewards.prepare_rewards`."""

    terms: tuple[RewardTerm, ...]
    extraction: Extraction
    extraction_reason: str | None
    """Why this extraction; None: the user chose it."""
    task: GymTask | None
    accuracy_by: str | None
    """The term that says whether a completion is right; None: no term compares with the reference answer."""
    timeout_s: float
    notes: tuple[str, ...] = ()
    """Notes for the user before the run."""
    trials: tuple[Trial, ...] = ()
    """Trials of the first row's reference answer and of the user's completion, if any."""
    on_error: OnError = "drop"
    """Reaction to a user function that fails on a completion."""
    opened: bool = False
    """Whether prompts open a thought, so answers follow its end."""
    time: str | None = None
    """`model.chat_template_time`, which the chat template of a reward model writes too."""
    compares: bool = False
    """Whether a function takes `completions`, so that its scores depend on the other completions of the call."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Environment variables of user functions."""
    tried_rows: tuple[PromptRow, ...] = field(default=(), repr=False, compare=False)
    """The rows of the trial, for another machine to repeat it."""

    @property
    def scorers(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the scorers in metrics: a function's name, with its file or path only if two share a name."""
        forms = [
            (name.rpartition("/" if name.startswith(MODEL) else ":")[2], name.rpartition("/")[2], name)
            for name in self.scorers
        ]
        counts = [Counter(column) for column in zip(*forms, strict=True)]
        return tuple(next(name for name, count in zip(form, counts, strict=True) if count[name] == 1) for form in forms)

    def right(self, score: float | None) -> bool:
        """Return whether a score of `accuracy_by` means a right answer."""
        above = RIGHT_ABOVE.get(self.accuracy_by or "")
        return score is not None and (score >= 1.0 if above is None else score > above)

    def answers(self, completions: Sequence[str], accuracies: Sequence[float] | None = None) -> tuple[bool, ...] | None:
        """Return whether each completion has a readable (or right) answer; None without a reference scorer."""
        if self.accuracy_by in (None, "ifeval"):
            return None
        right = [False] * len(completions) if accuracies is None else [accuracy >= 1.0 for accuracy in accuracies]
        return tuple(is_right or self._answers(text) for is_right, text in zip(right, completions, strict=True))

    def _answers(self, completion: str) -> bool:
        if self.accuracy_by == "geo3k":
            return extract(completion, "boxed") is not None
        if self.accuracy_by in BY_THEMSELVES:
            return bool((ANSWER if self.accuracy_by == "dapo-math" else TAG).search(completion))
        ways: tuple[Extraction, ...] = (self.extraction,)
        if self.accuracy_by == "math-verify" and self.extraction_reason is not None:
            ways = ("boxed", "answer-tag", "last-number")
        return any(extract(completion, way, opened=self.opened) is not None for way in ways)

    def of(self, source: str) -> RewardPlan:
        return self

    def reference(self, answer: Any) -> str:
        how = self.accuracy_by if self.accuracy_by in BY_THEMSELVES else self.extraction
        return written_as(answer_text(answer), how, opened=self.opened)

    def build(self) -> list[Scorer | BatchScorer]:
        """Return the scorers in the order of `scorers`, importing their libraries."""
        chosen = (
            self.extraction if self.extraction_reason is None else None
        )  # math-verify follows only the user's choice
        made: dict[str, Callable[..., Scorer]] = {
            **TAG_SCORERS,
            "task": lambda: TaskScorer(cast(GymTask, self.task), self.extraction, opened=self.opened),
            "exact-match": lambda: ExactMatch(self.extraction, opened=self.opened),
            "ifeval": IfEval,
            "dapo-math": DapoMath,
            "math-verify": lambda: MathVerify(chosen, opened=self.opened),
            "tagged-answer": lambda: Tagged("answer"),
            "tagged-integer": lambda: Tagged("integer"),
            "tagged-format": lambda: Tagged("format"),
        }

        def other(name: str) -> Scorer | BatchScorer:
            if name.startswith(MODEL):
                # Imports what reads models, a fifth of the start of a scoring process.
                from rlctl.rewards.reward_model_scorer import ModelScorer

                return ModelScorer(name, self.time)
            return user_scorer(name, CALL_SHARE * self.timeout_s)

        return [made[term.name](**term.params) if term.name in made else other(term.name) for term in self.terms]

    def describe(self) -> list[str]:
        params = (", ".join(f"{name}={value}" for name, value in term.params.items()) for term in self.terms)
        calls = [f"{term.name}({args})" if args else term.name for term, args in zip(self.terms, params, strict=True)]
        weighted = zip(self.terms, calls, strict=True)
        terms = " + ".join(name if term.weight == 1 else f"{term.weight:g} x {name}" for term, name in weighted)
        reason = self.extraction_reason or "reward.extract"
        accuracy = f"accuracy: {self.accuracy_by or 'none, no reward compares with an answer'}"
        return [f"reward: {terms}", f"answer: {DESCRIPTION[self.extraction]} ({reason})", accuracy, *self.notes]


@dataclass(frozen=True)
class MixedRewards:
    """The rewards of a run with several prompt datasets, by dataset label."""

    plans: dict[str, RewardPlan]
    """Without the datasets whose environments give all rewards."""

    @property
    def scorers(self) -> tuple[str, ...]:
        return tuple(name for plan in self.plans.values() for name in plan.scorers)

    @property
    def compares(self) -> bool:
        return any(plan.compares for plan in self.plans.values())

    def of(self, source: str) -> RewardPlan | None:
        return self.plans.get(source)

    def describe(self) -> list[str]:
        return [f"{label}: {line}" for label, plan in self.plans.items() for line in plan.describe()]


Rewards = RewardPlan | MixedRewards
"""How the rollouts of a run are scored."""
