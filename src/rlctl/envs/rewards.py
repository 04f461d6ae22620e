"""From the configured reward to a plan that is known to work, before anything expensive starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from rlctl.checkpoints.model_source import require_name_or_directory
from rlctl.config.files import user_path
from rlctl.config.plugins import plugin_names
from rlctl.config.schema import MODEL, RewardConfig, RewardTerm, SourceReward
from rlctl.data.prompt_rows import USUAL_NAMES, PromptRow, PromptSource
from rlctl.envs.extraction import choose_extraction
from rlctl.envs.reward_model import reward_model
from rlctl.envs.scorers import BUILT_IN, OF_FORM, MixedRewards, RewardPlan, Rewards, Trial
from rlctl.envs.scoring_process import ScoringProcess, Work, outcomes
from rlctl.envs.user_function import is_reference, split_reference
from rlctl.errors import InputError, RlctlError, suggest

QUICK = frozenset(("task", "exact-match"))
"""Scorers that are tried in this process, which has imported all that they need."""


def prepare_rewards(
    reward: RewardConfig, source: PromptSource, completion: str | None = None, *, apart: bool = False
) -> RewardPlan:
    """Return the plan for this reward on this source, every scorer tried once on the first row's reference answer.

    `completion` is tried too. `apart`: a reward model is computed by the training engine, and is not tried. Raises
    InputError for a scorer that is unknown, does not fit the data, cannot be loaded, or raises.
    """
    terms = _checked_terms(reward, source)
    names = [term.name for term in terms]
    extraction, reason = choose_extraction(source) if reward.extract == "auto" else (reward.extract, None)
    # What decides accuracy: the first term that compares with the reference answer, if there is one.
    accuracy = next((name for name in names if name in BUILT_IN and name not in OF_FORM), None)
    plan = RewardPlan(terms, extraction, reason, source.task, accuracy, reward.timeout_s, on_error=reward.on_error)
    own = tuple(term for term in terms if not (apart and term.name.startswith(MODEL)))
    return replace(tried(replace(plan, terms=own), source[0], completion) if own else plan, terms=terms)


def _checked_terms(reward: SourceReward, source: PromptSource) -> tuple[RewardTerm, ...]:
    terms = reward.terms or ((RewardTerm(name="task"),) if source.task else ())
    if not terms:
        raise InputError(
            f"No reward: {source.label} brings no scorer of its own.",
            "Give --reward exact-match, math-verify, ifeval, model:DIR or path/to/file.py:function.",
        )
    terms = tuple(RewardTerm(name=_checked_name(term.name, source), weight=term.weight) for term in terms)
    names = [term.name for term in terms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"Reward {twice!r} is given twice.", "Give it once, with the sum of the weights.")
    return terms


def require_usable(reward: RewardConfig, label: str) -> str:
    """Return the names of the scorers of a source whose rows are not on this machine. Raises InputError for a scorer
    that no rows could bring, or that cannot be loaded."""
    terms = _checked_terms(
        reward, PromptSource(label, 0, lambda index: PromptRow(index, label, "", None), {}, checked=0)
    )
    own = tuple(term for term in terms if not term.name.startswith(MODEL))
    plan = RewardPlan(own, "full", None, None, None, reward.timeout_s)
    with contextlib.closing(ScoringProcess(plan)) as process:
        process.start()
    return ", ".join(term.name for term in terms)


def mixed_rewards(
    sources: Iterable[tuple[str, RewardConfig, PromptSource]], completion: str | None = None, *, apart: bool = False
) -> Rewards:
    """Return the plan of one source or of several by their labels; `completion` and `apart` as `prepare_rewards` takes
    them."""
    plans = {label: prepare_rewards(reward, source, completion, apart=apart) for label, reward, source in sources}
    return MixedRewards(plans) if len(plans) > 1 else next(iter(plans.values()))


def any_reward(sources: Iterable[tuple[str, RewardConfig, PromptSource]]) -> bool:
    """Return whether any of the sources has a scorer, named by the user or its own."""
    return any(reward.terms or source.task for _, reward, source in sources)


def require_known(reward: SourceReward) -> None:
    """Raises InputError for a scorer that no data could bring: an unknown name, or a file or directory that is not
    there. A reward model of the hub is looked for when a run starts."""
    for term in reward.terms:
        if term.name.startswith(MODEL):
            require_name_or_directory(term.name.removeprefix(MODEL))
        if not term.name.startswith(MODEL) or user_path(term.name.removeprefix(MODEL)).is_dir():
            _known_name(term.name)


def _known_name(name: str) -> str:
    """Return the name as the scoring process understands it."""
    if name.startswith(MODEL):
        return f"{MODEL}{reward_model(name)}"
    if is_reference(name):
        path, function = split_reference(name)
        return f"{path}:{function}"
    known = (*BUILT_IN, *(plugin_names("rlctl.rewards") if name not in BUILT_IN else ()))
    if name in known:
        return name
    hint = suggest(name, known) or f"Rewards are {', '.join(known)}, model:DIR and path/to/file.py:function."
    raise InputError(f"Unknown reward {name!r} (--reward).", hint)


def _checked_name(name: str, source: PromptSource) -> str:
    """Return the name as the scoring process understands it, if it fits the data."""
    if name not in BUILT_IN:
        return _known_name(name)
    if name == "task" and source.task is None:
        why = f"Reward 'task' is the scorer of a reasoning-gym task, and {source.label} is none."
        raise InputError(why, "Use exact-match, math-verify or path/to/file.py:function.")
    if name == "ifeval" and len(source) and not {"instruction_id_list", "kwargs"} <= source[0].fields.keys():
        why = f"Reward 'ifeval' judges by `instruction_id_list` and `kwargs`, which {source[0].where} lacks."
        raise InputError(why, "Use data with the fields of google/IFEval.")
    if name in ("task", "ifeval", *OF_FORM):
        return name
    for index in range(source.checked):  # a comparison
        row = source[index]
        if row.answer is None:
            told = "Name the one that holds it with --answer-field NAME." if index == 0 else "Leave the row out."
            usual = [field for field in USUAL_NAMES["--answer-field"] if field in row.fields]
            meant = f"; `{usual[0]}` may be it" if usual else ""
            there = f"Its other fields are {', '.join(row.fields)}{meant}." if row.fields else "It has no other fields."
            why = f"Reward {name!r} compares with a reference answer, and {row.where} has none."
            raise InputError(why, f"{there} {told}")
        if isinstance(row.answer, dict | list):
            kind = "an object" if isinstance(row.answer, dict) else "a list"
            raise InputError(
                f"Reward {name!r} compares with a text or a number, and the reference answer of {row.where} is {kind}.",
                "A reward function of your own (path/to/file.py:function) gets it as it is.",
            )
    return name


def tried(plan: RewardPlan, row: PromptRow, completion: str | None = None) -> RewardPlan:
    """Return the plan with what its scorers give the row's own answer, and `completion`, and with notes on those that
    do not find the reference answer right."""
    own = plan.reference(row.answer if row.answer is not None else "")
    texts = [text for text in (own, completion) if text is not None]
    work = [Work(number, text, row) for text in texts for number in range(len(plan.scorers))]
    if QUICK.issuperset(plan.scorers):  # they run no code of others
        scores = []
        for outcome in outcomes(work, plan, plan.build()):
            if isinstance(outcome, RlctlError):
                raise outcome
            scores.append(outcome)
    else:
        with contextlib.closing(ScoringProcess(replace(plan, on_error="stop"))) as process:
            scores = process.score(work)
    trials = []
    for number, text in enumerate(texts):
        found = scores[number * len(plan.scorers) :][: len(plan.scorers)]
        values = {term.name: score.value for term, score in zip(plan.terms, found, strict=True)}
        applying = [term.weight * value for term in plan.terms if (value := values[term.name]) is not None]
        trials.append(Trial(row.where, text, values, sum(applying) if applying else None))
    notes = tuple(
        f"note: {name} gives the reference answer of {row.where} {score.value:g}, not 1"
        + (f" ({score.failure})" if score.failure else "")
        for name, score in zip(plan.scorers, scores, strict=False)
        if name in set(BUILT_IN) - set(OF_FORM) and score.value not in (None, 1) and row.answer is not None
    )
    return replace(plan, trials=tuple(trials), notes=notes)
