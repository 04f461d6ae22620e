"""From the configured reward to a plan that is known to work, before anything expensive starts."""

from __future__ import annotations

import contextlib
import dataclasses

from rlctl.config.plugins import plugin_names
from rlctl.config.schema import RewardConfig, RewardTerm
from rlctl.data.names import suggest
from rlctl.data.prompt_rows import PromptSource
from rlctl.envs.extraction import choose_extraction, written_as
from rlctl.envs.scorers import BUILT_IN, RewardPlan
from rlctl.envs.scoring_process import ScoringProcess, Work
from rlctl.envs.user_function import is_reference, split_reference
from rlctl.errors import InputError


def prepare_rewards(reward: RewardConfig, source: PromptSource) -> RewardPlan:
    """Return the plan for this reward on this source, every scorer tried once on the first row's reference answer.

    Raises InputError for a scorer that is unknown, does not fit the data, cannot be loaded, or raises.
    """
    terms = _checked_terms(reward, source)
    extraction, reason = choose_extraction(source) if reward.extract == "auto" else (reward.extract, None)
    plan = RewardPlan(terms, extraction, reason, source.task, _reference_scorer(terms, source), reward.timeout_s)
    return dataclasses.replace(plan, notes=_trial(plan, source))


def require_known(reward: RewardConfig) -> None:
    """Raises InputError for a scorer that no data could bring: an unknown name, or a file that is not there."""
    for term in reward.terms:
        _known_name(term.name)


def _known_name(name: str) -> str:
    """Return the name as the scoring process understands it."""
    if name in BUILT_IN:
        return name
    if is_reference(name):
        path, function = split_reference(name)
        return f"{path}:{function}"
    plugins = plugin_names("rlctl.rewards")
    if name in plugins:
        return name
    known = (*BUILT_IN, *plugins)
    hint = suggest(name, known) or f"Rewards are {', '.join(known)} and path/to/file.py:function."
    raise InputError(f"Unknown reward {name!r} (--reward).", hint)


def _checked_terms(reward: RewardConfig, source: PromptSource) -> tuple[RewardTerm, ...]:
    """Return the terms, with paths made absolute; a task's own scorer where none are given."""
    terms = reward.terms or ((RewardTerm(name="task"),) if source.task else ())
    if not terms:
        raise InputError(
            f"No reward: {source.label} brings no scorer of its own.",
            "Give --reward exact-match, math-verify or path/to/file.py:function.",
        )
    checked = tuple(RewardTerm(name=_checked_name(term.name, source), weight=term.weight) for term in terms)
    names = [term.name for term in checked]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"Reward {name!r} is given twice.", "Give it once, with the sum of the weights.")
    return checked


def _checked_name(name: str, source: PromptSource) -> str:
    """Return the name as the scoring process understands it, if it fits the data."""
    if name not in BUILT_IN:
        return _known_name(name)
    if name == "task":
        if source.task is None:
            raise InputError(
                f"Reward 'task' is the scorer of a reasoning-gym task, and {source.label} is none.",
                "Use exact-match, math-verify or path/to/file.py:function.",
            )
    elif source[0].answer is None:
        raise InputError(
            f"Reward {name!r} compares with a reference answer, and {source[0].where} has none.",
            "Name the field that holds it with --set data.answer_field=...",
        )
    return name


def _reference_scorer(terms: tuple[RewardTerm, ...], source: PromptSource) -> str | None:
    """Return the scorer that decides accuracy: the task's own, or else one of the terms, or else an exact match."""
    if source.task is not None:
        return "task"
    for term in terms:
        if term.name in ("math-verify", "exact-match"):
            return term.name
    return None if source[0].answer is None else "exact-match"


def _trial(plan: RewardPlan, source: PromptSource) -> tuple[str, ...]:
    """Scores the first row's own answer with every scorer; notes on those that do not find it right."""
    row = source[0]
    completion = written_as(str(row.answer if row.answer is not None else ""), plan.extraction)
    with contextlib.closing(ScoringProcess(plan)) as process:
        scores = process.score([Work(index, completion, row) for index in range(len(plan.scorers))])
    return tuple(
        f"note: {name} gives the reference answer of {row.where} {score.value:g}, not 1"
        + (f" ({score.failure})" if score.failure else "")
        for name, score in zip(plan.scorers, scores, strict=True)
        if name in BUILT_IN and score.value < 1 and row.answer is not None
    )
