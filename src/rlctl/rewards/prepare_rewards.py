"""From the configured reward to a tested plan, before anything expensive starts."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rlctl.checkpoints.model_files import require_name_or_directory
from rlctl.config.files import user_path
from rlctl.config.plugins import plugin_names
from rlctl.config.user_code import MODEL, is_reference, split_reference
from rlctl.data.prompt_records import USUAL_NAMES
from rlctl.data.prompt_rows import PromptDataset, PromptRow
from rlctl.errors import InputError, RlctlError, suggest
from rlctl.processes.child import shell_variables
from rlctl.rewards.extraction import GENERATED_ROWS, SAMPLED_ROWS, choose_extraction
from rlctl.rewards.reward_model_scorer import reward_model
from rlctl.rewards.reward_plan import MixedRewards, RewardPlan, Rewards, Trial
from rlctl.rewards.scorers import BUILT_IN, OF_FORM
from rlctl.rewards.scoring_process import LATE, Score, ScoringProcess, Work, outcomes
from rlctl.rewards.tag_scorers import TAG_SCORERS
from rlctl.settings.rewards import OnError, RewardConfig, RewardTerm, SourceReward

QUICK = frozenset(("task", "exact-match"))
"""Scorers that are tried in this process; their imports are there already."""


def prepare_rewards(
    reward: RewardConfig,
    dataset: PromptDataset,
    completion: str | None = None,
    *,
    apart: bool = False,
    opened: bool = False,
    time: str | None = None,
) -> RewardPlan:
    """Return the reward's plan for a dataset, after a trial of every scorer (`tried`). `completion` is tried too.
    `apart`: the training engine computes a reward model, untried here. `opened`: prompts open a thought. `time`: the
    time in a reward model's chat template. Raises InputError for unknown, unsuitable, unloadable or failing scorers."""
    terms = _checked_terms(reward, dataset)
    names = [term.name for term in terms]
    extraction, reason = choose_extraction(dataset) if reward.extract == "auto" else (reward.extract, None)
    # The first term that compares with the reference answer decides accuracy.
    accuracy = next((name for name in names if name in BUILT_IN and name not in OF_FORM), None)
    plan = RewardPlan(
        terms, extraction, reason, dataset.task, accuracy, reward.timeout_s, on_error=reward.on_error, opened=opened,
        time=time, variables=shell_variables(),
    )  # fmt: skip
    local = tuple(term for term in terms if not (apart and term.name.startswith(MODEL)))
    return replace(tried(replace(plan, terms=local), dataset, completion) if local else plan, terms=terms)


def _checked_terms(reward: SourceReward, dataset: PromptDataset) -> tuple[RewardTerm, ...]:
    terms = reward.terms or ((RewardTerm(name="task"),) if dataset.task else ())
    if not terms:
        raise InputError(
            f"No reward: {dataset.label} has no scorer.",
            "Give --reward exact-match, math-verify, ifeval, model:DIR or path/to/file.py:function.",
        )
    terms = tuple(term.model_copy(update={"name": _checked_name(term.name, dataset)}) for term in terms)
    for term in terms:
        _require_params(term)
    names = [term.name for term in terms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"Reward {twice!r} is given twice.", "Give it once, with the sum of the weights.")
    return terms


def _require_params(term: RewardTerm) -> None:
    takes = inspect.signature(TAG_SCORERS[term.name]).parameters if term.name in TAG_SCORERS else {}
    for name, value in term.params.items():
        if name not in takes:
            hint = f"It takes {', '.join(takes)}." if takes else f"Scorers with arguments are {', '.join(TAG_SCORERS)}."
            raise InputError(f"Reward {term.name!r} has no argument {name!r} (params of reward.terms).", hint)
        expected = str if isinstance(takes[name].default, str) else int | float
        if isinstance(value, bool) or not isinstance(value, expected):
            kind = "a text" if expected is str else "a number"
            raise InputError(
                f"Reward {term.name!r}: {name} is {value!r}, which is not {kind} (params of reward.terms)."
            )


def require_usable(reward: RewardConfig, label: str) -> str:
    """Return the names of the scorers of a dataset with remote rows. Raises InputError for unusable scorers."""
    terms = _checked_terms(
        reward, PromptDataset(label, 0, lambda index: PromptRow(index, label, "", None), {}, checked=0)
    )
    local = tuple(term for term in terms if not term.name.startswith(MODEL))
    plan = RewardPlan(local, "full", None, None, None, reward.timeout_s)
    with contextlib.closing(ScoringProcess(plan)) as process:
        process.start()
    return ", ".join(term.name for term in terms)


def mixed_rewards(
    datasets: Iterable[tuple[str, RewardConfig, PromptDataset]],
    completion: str | None = None,
    *,
    apart: bool = False,
    opened: bool = False,
    time: str | None = None,
) -> Rewards:
    """Return the plan of the only dataset, which has no label, or the plans of several by label. Arguments as for
    `prepare_rewards`."""
    plans = {
        label: prepare_rewards(reward, dataset, completion, apart=apart, opened=opened, time=time)
        for label, reward, dataset in datasets
    }
    return plans[""] if "" in plans else MixedRewards(plans)


def any_reward(datasets: Iterable[tuple[str, RewardConfig, PromptDataset]]) -> bool:
    return any(reward.terms or dataset.task for _, reward, dataset in datasets)


def require_known(reward: SourceReward) -> None:
    """Raise InputError for an unknown scorer or missing file or directory; hub models are checked when a run starts."""
    for term in reward.terms:
        if term.name.startswith(MODEL):
            require_name_or_directory(term.name.removeprefix(MODEL))
        if not term.name.startswith(MODEL) or user_path(term.name.removeprefix(MODEL)).is_dir():
            _known_name(term.name)


def _known_name(name: str) -> str:
    if name.startswith(MODEL):
        return f"{MODEL}{reward_model(name)}"
    if is_reference(name):
        path, function = split_reference(name)
        return f"{path}:{function}"
    names = (*BUILT_IN, *(plugin_names("rlctl.rewards") if name not in BUILT_IN else ()))
    if name in names:
        return name
    hint = suggest(name, names) or f"Rewards are {', '.join(names)}, model:DIR and path/to/file.py:function."
    raise InputError(f"Unknown reward {name!r} (--reward).", hint)


def _checked_name(name: str, dataset: PromptDataset) -> str:
    """Return the name for the scoring process. Raises InputError if the scorer does not fit the data."""
    if name not in BUILT_IN:
        return _known_name(name)
    if name == "task" and dataset.task is None:
        problem = f"Reward 'task' is the scorer of a reasoning-gym task, and {dataset.label} is none."
        raise InputError(problem, "Use exact-match, math-verify or path/to/file.py:function.")
    if name == "ifeval" and len(dataset) and not {"instruction_id_list", "kwargs"} <= dataset[0].fields.keys():
        problem = f"Reward 'ifeval' judges by `instruction_id_list` and `kwargs`, which {dataset[0].where} lacks."
        raise InputError(problem, "Use data with the fields of google/IFEval.")
    if name in ("task", "ifeval", *OF_FORM):
        return name
    for index in range(dataset.checked):  # a comparison
        row = dataset[index]
        if row.answer is None:
            advice = "Name the one that holds it with --answer-field NAME." if index == 0 else "Leave the row out."
            usual = [field for field in USUAL_NAMES["--answer-field"] if field in row.fields]
            guess = f"; `{usual[0]}` may be it" if usual else ""
            there = f"Its other fields are {', '.join(row.fields)}{guess}." if row.fields else "It has no other fields."
            problem = f"Reward {name!r} compares with a reference answer, and {row.where} has none."
            raise InputError(problem, f"{there} {advice}")
        if isinstance(row.answer, dict | list) and not (name == "bbox_giou" and isinstance(row.answer, list)):
            kind = "an object" if isinstance(row.answer, dict) else "a list"
            raise InputError(
                f"Reward {name!r} compares with a text or a number, and the reference answer of {row.where} is {kind}.",
                "A reward function (path/to/file.py:function) gets it unchanged.",
            )
    return name


TRIED_S = 10.0
"""Seconds after which no further reference answers are scored before a run."""
ROWS_AT_ONCE = 128
SHOWN_ROWS = 3
LONG_TEXT = "It goes on and on, and there is no end. " * 500
UNUSUAL = (("an empty text", ""), ("a text without numbers", "I do not know."), ("a long text", LONG_TEXT))
"""Completions that models write. Functions that expect an answer fail on them."""


def tried(plan: RewardPlan, dataset: PromptDataset, completion: str | None = None) -> RewardPlan:
    """Return the plan with scores of the first row's answer and `completion`, and notes on rejected reference answers
    and constant functions. Raises InputError for a failing function."""
    row = dataset[0]
    reference = plan.reference(row.answer if row.answer is not None else "")
    texts = [text for text in (reference, completion) if text is not None]
    rows = tuple(dataset[index] for index in range(min(2, len(dataset))))
    with _scoring(plan) as (score, process):
        trials = _trials(plan, row, texts, score)
        notes = [*_notes_of_references(plan, dataset, score), *_notes_of_functions(plan, rows, score)]
        compares = process is not None and process.compares
    return replace(plan, trials=trials, notes=tuple(notes), compares=compares, tried_rows=rows)


def tried_again(plan: RewardPlan) -> list[str]:
    """Repeat the trial of a tried plan on this machine; return how its outcome differs. Raises what `tried` raises."""
    with _scoring(plan) as (score, _):
        trials = _trials(plan, plan.tried_rows[0], [trial.completion for trial in plan.trials], score)
        notes = [note.removeprefix("note: ") for note in _notes_of_functions(plan, plan.tried_rows, score)
                 if note not in plan.notes]  # fmt: skip
    for before, now in zip(plan.trials, trials, strict=True):
        for name, value in now.scores.items():
            if value != before.scores[name]:
                gives, gave = ("no score" if score is None else f"{score:g}" for score in (value, before.scores[name]))
                excerpt = textwrap.shorten(repr(now.completion), 60, placeholder=" ...")
                notes.append(
                    f"{name} gives {gives} to {excerpt} ({now.where}), and gave {gave} where rlctl was started"
                )
    return notes


def _trials(plan: RewardPlan, row: PromptRow, texts: Sequence[str], score: Scoring) -> tuple[Trial, ...]:
    scores = iter(score([Work(number, text, row) for text in texts for number in range(len(plan.scorers))], "stop"))
    trials = []
    for text in texts:
        values = {term.name: next(scores).value for term in plan.terms}
        applying = [term.weight * value for term in plan.terms if (value := values[term.name]) is not None]
        trials.append(Trial(row.where, text, values, sum(applying) if applying else None))
    return tuple(trials)


Scoring = Callable[[list[Work], OnError], list[Score]]


@contextlib.contextmanager
def _scoring(plan: RewardPlan) -> Iterator[tuple[Scoring, ScoringProcess | None]]:
    """Yield a function that scores, and its process; no process if all scorers are quick built-in ones."""
    if QUICK.issuperset(plan.scorers):
        scorers = plan.build()

        def score_here(work: list[Work], on_error: OnError) -> list[Score]:
            scores = []
            for outcome in outcomes(work, plan, scorers):
                if isinstance(outcome, RlctlError):
                    raise outcome
                assert isinstance(outcome, Score)  # there is no time limit
                scores.append(outcome)
            return scores

        yield score_here, None
        return
    with contextlib.closing(ScoringProcess(plan)) as process:

        def score(work: list[Work], on_error: OnError) -> list[Score]:
            process.plan = replace(plan, on_error=on_error)
            return process.score(work)

        yield score, process


def _notes_of_references(plan: RewardPlan, dataset: PromptDataset, score: Scoring) -> Iterator[str]:
    judging = [n for n, name in enumerate(plan.scorers) if name in BUILT_IN and name not in (*OF_FORM, "ifeval")]
    if not judging:
        return
    rows = [row for row in dataset.sample(GENERATED_ROWS if dataset.task else SAMPLED_ROWS) if row.answer is not None]
    wrong: dict[int, list[tuple[PromptRow, Score]]] = {number: [] for number in judging}
    deadline, tried_rows = time.monotonic() + TRIED_S, 0
    batches = -(-len(rows) // ROWS_AT_ONCE)
    for first in range(batches):
        batch = rows[first::batches]  # spread over the data, since time may allow only some batches
        if tried_rows and time.monotonic() > deadline:
            break
        work = [Work(number, plan.reference(row.answer), row) for row in batch for number in judging]
        for piece, result in zip(work, score(work, "drop"), strict=True):
            if result.value is not None and result.value < 1 and not (result.failure or "").startswith(LATE):
                wrong[piece.scorer].append((piece.row, result))
        tried_rows += len(batch)
    total = f"{tried_rows:,} rows" if tried_rows == len(dataset) else f"{tried_rows:,} rows tried of {len(dataset):,}"
    for number, wrong_rows in wrong.items():
        if wrong_rows:
            examples = sorted(wrong_rows, key=lambda wrong_row: wrong_row[0].index)[:SHOWN_ROWS]
            yield (
                f"note: {plan.scorers[number]} calls the reference answers of {len(wrong_rows):,} of the "
                f"{total} wrong, so these rows can never be right: "
                f"{'; '.join(_shown(row, result) for row, result in examples)}"
                f"{'; ...' if len(wrong_rows) > len(examples) else ''}"
            )


def _shown(row: PromptRow, score: Score) -> str:
    failure = f" ({score.failure})" if score.failure else ""
    return f"{row.where}, {textwrap.shorten(repr(row.answer), 60, placeholder=' ...')}, has {score.value:g}{failure}"


def _notes_of_functions(plan: RewardPlan, rows: Sequence[PromptRow], score: Scoring) -> Iterator[str]:
    """Yield notes on user functions, called with a batch of model-like completions. Raises InputError for a failure
    unless `reward.on_error=zero`."""
    functions = [n for n, name in enumerate(plan.scorers) if name not in BUILT_IN and not name.startswith(MODEL)]
    if not functions:
        return
    batch = [(plan.reference("" if row.answer is None else row.answer), row) for row in rows]
    batch += [(text, rows[0]) for _, text in UNUSUAL]
    for number in functions:
        try:
            scores = score([Work(number, *example) for example in batch], "zero" if plan.on_error == "zero" else "stop")
        except InputError as error:
            raise InputError(
                f"{error.message} That was a trial before the run, with completions that models write.",
                error.hint or "Let the function take them, or set reward.on_error=zero, which gives 0 there.",
            ) from error
        label, values = plan.labels[number], [score.value for score in scores if score.value is not None]
        if failed := [score.failure for score in scores if score.failure]:
            yield f"note: {label} fails on {len(failed)} of {len(batch)} trial completions: {failed[0]}"
        elif len(values) == len(batch) and len(set(values)) == 1:
            yield (
                f"note: {label} gives {values[0]:g} to all trial completions (reference answers, "
                f"{', '.join(name for name, _ in UNUSUAL)}): nothing is learned from a reward that never varies"
            )
