"""Evaluation: models and checkpoints of runs sample the answers to tasks, which scorers judge.

    models x tasks ---> prompts that the file lacks ---> engines ---> scorers ---> file of samples ---> metrics

All models get the same prompts, the same seeds and the same sampling, so that they can be compared prompt by prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlctl.backends.clients import EngineClient, generate_groups
from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.model_source import Tell
from rlctl.cluster.ray_session import fetch
from rlctl.config.load import DEFAULT, Resolved
from rlctl.config.sources import Source, Value
from rlctl.config.user_code import MODEL
from rlctl.data.benchmarks import BENCHMARKS, known_benchmark, near_benchmark, open_benchmark
from rlctl.data.chat import PromptEncoder, load_tokenizer, template_digest
from rlctl.data.drawn_shapes import DRAWN_SHAPES
from rlctl.data.image_rows import shown_prompt
from rlctl.data.prompt_rows import GYM_PREFIX, PromptRow, PromptSource
from rlctl.data.prompts import MOST_QUESTIONS, open_episodes, open_prompts
from rlctl.data.records import suffix_of
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.errors import InputError, listed
from rlctl.jobs.generate import CompletionJob, completion_job, of_run, started_engines, with_room
from rlctl.methods.configuration import from_sources
from rlctl.preparation.prepare import TIME, with_time
from rlctl.rewards.extraction import vote
from rlctl.rewards.prepare_rewards import prepare_rewards
from rlctl.rewards.reward_model_scorer import reward_digest
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rewards.reward_worker import GroupScores, RewardWorker, ScoreRequest
from rlctl.rewards.statistics import Estimate, Sampled, metrics_of
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, episode_request, episode_seed
from rlctl.rollouts.prompt_order import PromptOrder
from rlctl.rollouts.scored_groups import groups_with_scores
from rlctl.rollouts.source import sample_seed
from rlctl.runs.directory import Checkpoint
from rlctl.runs.evaluation_file import SampleFile
from rlctl.settings.config import RolloutConfig
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardConfig, RewardTerm
from rlctl.telemetry.display import WorkProgress

GYM_PROMPTS = 200
"""Questions of a reasoning-gym task, which has as many as one likes, where --limit is not given."""
MOST_SAMPLES = 10_000_000
TEMPERATURE = "generation.temperature"
SHARED = (
    "data.system_prompt", "data.prompt_template", "data.prompt_suffix", "generation.max_new_tokens", "generation.stop",
    TEMPERATURE, "generation.top_p", "generation.top_k", "generation.min_p", "run.seed", TIME,
)  # fmt: skip
"""Keys that are the same for all models of an evaluation: those of the first run, or else of the first model, where the
command line sets none."""
CALLS_AHEAD = 4
"""Samples of one call to the engines, in multiples of what they decode at once: few calls, and seldom idle engines."""
FEWEST_A_CALL = 16
FIRST_EPISODE = 2**49
"""Positions of environments' seeds, which neither training nor validation reaches."""


@dataclass(frozen=True)
class Candidate:
    """A model that is evaluated, or a checkpoint of a run."""

    label: str
    resolved: Resolved
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class Task:
    """A task with the prompts that are asked."""

    label: str
    source: PromptSource
    data: DataConfig
    """How its prompts are put to a model."""
    rewards: RewardPlan | None
    """None: the environment alone gives rewards."""
    rows: tuple[int, ...]

    @cached_property
    def prompts(self) -> list[PromptRow]:
        return [self.source[row] for row in self.rows]


@dataclass(frozen=True)
class Result:
    """The metrics of a model on a task."""

    task: str
    model: str
    prompts: int
    samples: int
    metrics: dict[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Return the result as --json and the Python API have it."""
        metrics = {name: {"value": one.value, "stderr": one.stderr} for name, one in self.metrics.items()}
        return {"task": self.task, "model": self.model, "samples": self.samples, "metrics": metrics}


@dataclass(frozen=True)
class Evaluation:
    """All that an evaluation is made of; nothing is started yet."""

    candidates: tuple[Candidate, ...]
    tasks: tuple[Task, ...]
    samples: int
    ks: tuple[int, ...]


def candidates(
    given: Sequence[str | Path], steps: Sequence[int], resolve: Callable[[str | None], Resolved], n: int
) -> tuple[Candidate, ...]:
    """Return the models and checkpoints to evaluate, in the order of `given`: a name is a model, and a path is a run,
    of which the newest checkpoint or those of `steps` are evaluated. `resolve` returns the configuration of the command
    line with a model.

    Raises InputError where there is none, or one is there twice, and for a step without a run.
    """
    if steps and not any(isinstance(one, Path) for one in given):
        raise InputError(f"--step {steps[0]} is a checkpoint of a run, and there is no --run-dir.", "Give --run-dir.")
    asked, found = resolve(None), list[Candidate]()
    for one in given:
        if isinstance(one, Path):
            found += [_of_run(one, step, asked) for step in (steps or [None])]
        else:
            found.append(_of_model(resolve(one)))
    if not given and asked.config.model.name:
        found = [_of_model(asked)]
    if not found:
        raise InputError("There is no model to evaluate.", "Give --model NAME, or --run-dir DIR.")
    labels = [one.label for one in found]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise InputError(f"{listed(sorted(twice))} is given twice.", "Name each model and each step once.")
    first = _leading(found)
    shared = dict(first.resolved.leaves())
    origin = f"eval, as {first.label}"
    values = {key: Value(key, shared[key], origin) for key in SHARED}
    if asked.origin[TEMPERATURE] == DEFAULT:
        # A run's own is that of its rollouts; one sample is the most likely one.
        values[TEMPERATURE] = Value(TEMPERATURE, 0.0 if n == 1 else 1.0, f"eval, with --n {n}")
    # The length that a run's prompts left room for says nothing about those of a task.
    own = set() if asked.origin["model.max_length"] != DEFAULT else {"model.max_length"}
    return tuple(replace(one, resolved=_with(one.resolved, list(values.values()), own)) for one in found)


def _leading(found: Sequence[Candidate]) -> Candidate:
    return next((one for one in found if one.checkpoint), found[0])


def _with(resolved: Resolved, values: Sequence[Value], left_out: set[str]) -> Resolved:
    """Return the configuration with those of `values` that are others than its own, and without `left_out`."""
    own = dict(resolved.leaves())
    below = [value for value in resolved.given() if value.key not in left_out]
    changed = [value for value in values if own.get(value.key) != value.value]
    return from_sources([Source(below), Source(changed, shared=True)], type(resolved.config))


def _of_run(directory: Path, step: int | None, asked: Resolved) -> Candidate:
    resolved, checkpoint = of_run(directory, step, asked)
    return Candidate(f"{directory.resolve().name} step {checkpoint.step}", resolved, checkpoint)


def _of_model(resolved: Resolved) -> Candidate:
    name = resolved.config.model.name or ""
    return Candidate(Path(name).name if Path(name).is_dir() else name, resolved)


def open_task(name: str, config: RolloutConfig, limit: int | None) -> Task:
    """Return the task that `--task` names, its scorers tried. Questions of reasoning-gym come from seeds that no run
    with the same `run.seed` trains on.

    Raises InputError for a task that does not exist, has no scorer, or cannot be fetched.
    """
    reward = config.reward
    known = known_benchmark(name)
    if name == DRAWN_SHAPES:
        data = config.data.model_copy(update={"name": name, "params": {}, "size": None})
        source = open_prompts(data, seed=config.run.seed + MOST_QUESTIONS)
        reward = RewardConfig(terms=(RewardTerm(name="exact-match"),), extract="full", timeout_s=reward.timeout_s)
    elif name.startswith(GYM_PREFIX):
        same = name.split(":")[1:2] == (config.data.name or "").removeprefix(GYM_PREFIX).split(":")[:1]
        params = {k: v for k, v in config.data.params.items() if same and k not in ("seed", "size")}
        data = config.data.model_copy(update={"name": name, "params": params, "size": None})
        source = open_prompts(data, seed=config.run.seed + MOST_QUESTIONS)
        reward = RewardConfig(extract=reward.extract, timeout_s=reward.timeout_s)
    elif known is not None:
        benchmark, path = known
        data = benchmark.data(path)
        data = data.model_copy(
            update={
                "system_prompt": config.data.system_prompt,
                "prompt_suffix": config.data.prompt_suffix,
                "prompt_template": config.data.prompt_template or data.prompt_template,
            }
        )
        source = open_benchmark(name, benchmark, path, data)
        reward = benchmark.reward.model_copy(update={"timeout_s": reward.timeout_s})
    else:
        _require_source(name)
        data = config.data.model_copy(update={"name": name, "params": {}, "size": None})
        source = open_prompts(data)
        # A run's terms may have the scorer of its own task among others.
        plain = {"name": "exact-match"}
        terms = [term.model_copy(update=plain) if term.name == "task" else term for term in reward.terms]
        reward = reward.model_copy(update={"terms": tuple(terms) or (RewardTerm(name="exact-match"),)})
    # A sample without a score would make the metrics those of other samples.
    on_error = "zero" if config.reward.on_error == "zero" else "stop"
    plan = prepare_rewards(reward.model_copy(update={"on_error": on_error}), source)
    if limit is None and _makes_rows(name):
        limit = GYM_PROMPTS
    count = min(len(source), limit or len(source))
    order = PromptOrder(len(source), config.run.seed)  # a part of a sorted data set is a fair one
    return Task(name, source, data, plan, tuple(order.at(place) for place in range(count)))


def open_environment(config: RolloutConfig, limit: int | None) -> Task:
    """Return the task of an environment that makes its own from seeds."""
    name, count = config.environment.name or "", limit or GYM_PROMPTS
    return Task(name, open_episodes(name, count), config.data, None, tuple(range(count)))


def refuse_idle_reward(rewards: Sequence[str], names: Sequence[str]) -> None:
    """Raise InputError where --reward would judge no task, since all of them bring scorers of their own."""
    if rewards and names and all(_brings_scorer(name) for name in names) and set(rewards) != {"task"}:
        raise InputError(
            f"--reward {rewards[0]} has no effect on --task {names[0]}, which has its own scorer.",
            "Leave it out, or put the questions into a data file.",
        )


def _brings_scorer(name: str) -> bool:
    return _makes_rows(name) or known_benchmark(name) is not None


def _makes_rows(name: str) -> bool:
    return name == DRAWN_SHAPES or name.startswith(GYM_PREFIX)


def _require_source(name: str) -> None:
    """Raise InputError for a name that is neither a file nor could be one of the hub's."""
    if "/" in name or suffix_of(Path(name)) or Path(name).exists():
        return
    raise InputError(
        f"--task {name}: there is no such task.",
        near_benchmark(name)
        or f"Tasks are reasoning-gym:TASK, {DRAWN_SHAPES}, {', '.join(BENCHMARKS)}, a JSON, CSV or Parquet file, or "
        "OWNER/DATASET of the hub.",
    )


def evaluation(
    found: tuple[Candidate, ...], names: Sequence[str], samples: int, ks: Sequence[int], limit: int | None
) -> Evaluation:
    """Return the evaluation of these models on these tasks, which are opened.

    Raises InputError for a task that is wrong or there twice, and for more samples than can be kept or fewer than
    pass@k needs."""
    if ks and max(ks) > samples:
        raise InputError(
            f"--k {max(ks)}: pass@{max(ks)} needs at least {max(ks)} samples.", f"Raise --n from {samples}."
        )
    config = _leading(found).resolved.config
    if not names and not config.environment.name:
        raise InputError("There is no task.", "Give --task, for example reasoning-gym:chain_sum or gsm8k, or --env.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--task {twice[0]} is given twice.", "Give it once; --n sets the samples of each prompt.")
    tasks = tuple(open_task(name, config, limit) for name in names) or (open_environment(config, limit),)
    if any(row.images for task in tasks for row in task.prompts):
        found = tuple(_seeing(one) for one in found)
    if (count := samples * sum(len(task.rows) for task in tasks) * len(found)) > MOST_SAMPLES:
        raise InputError(f"These are {count:,} samples; at most {MOST_SAMPLES:,} can be kept.", "Set --limit or --n.")
    return Evaluation(found, tasks, samples, tuple(ks))


def _seeing(found: Candidate) -> Candidate:
    """Return a model that is opened with the part that reads images; a run has its own setting."""
    resolved = found.resolved
    if found.checkpoint is not None or resolved.config.model.images is not None:
        return found
    return replace(found, resolved=resolved.with_values({"model.images": True}))


def evaluate(job: Evaluation, file: SampleFile, tell: Tell) -> list[Result]:
    """Sample and score what `file` lacks; return the metrics of each task and model, task by task."""
    encoded = [Encoded.of(job, candidate, tell) for candidate in at_one_time(job.candidates, file)]
    for one in encoded:
        for task in job.tasks:
            file.begin(task.label, one.candidate.label, one.settings(task))
    total = sum(len(task.rows) for task in job.tasks) * job.samples * len(job.candidates)
    there = total - sum(len(one.missing(task, file, job.samples)) for one in encoded for task in job.tasks)
    if there:
        tell(f"{there} of {total} samples are in {file.path}")
    with WorkProgress("samples", total, there) as progress:
        for one in encoded:
            _sample(one, job, file, tell, progress)
    return [_result(job, task, one.candidate.label, file) for task in job.tasks for one in encoded]


def at_one_time(found: Sequence[Candidate], file: SampleFile) -> list[Candidate]:
    """Return models whose chat templates write the same time: the first one's, else the time of the file's samples,
    else now."""
    time = with_time(_leading(found).resolved, file.setting(TIME)).config.model.chat_template_time
    return [replace(one, resolved=with_time(one.resolved, time)) for one in found]


@dataclass(frozen=True)
class Encoded:
    """A model with the tokens of every prompt."""

    candidate: Candidate
    job: CompletionJob
    encoders: Mapping[str, PromptEncoder]
    prompts: Mapping[str, list[tuple[int, ...]]]
    """By task, in the order of its rows."""
    identity: str
    play: EnvironmentEpisodes | None = None
    """How its episodes go; None: each prompt gets one answer."""

    @classmethod
    def of(cls, evaluation: Evaluation, candidate: Candidate, tell: Tell) -> Encoded:
        """Open the model and its tokenizer. Raises InputError for a prompt that leaves no room for an answer."""
        asked = sum(len(task.rows) for task in evaluation.tasks)
        job = completion_job(candidate.resolved, evaluation.samples, candidate.checkpoint, asked, tell)
        config, directory = job.config, job.model.source.directory
        tokenizer = load_tokenizer(directory, config.model)
        encoders = {
            task.label: PromptEncoder.build(tokenizer, config.model, task.data, directory) for task in evaluation.tasks
        }
        for note in dict.fromkeys(filter(None, [job.model.source.note, *(one.note for one in encoders.values())])):
            tell(f"{candidate.label}: {note}")
        first = evaluation.tasks[0]
        play = EnvironmentEpisodes.open(config, encoders[first.label], first.prompts[0])
        if play is not None:
            encoders = {label: play.showing_tools(encoder) for label, encoder in encoders.items()}
            for line in play.describe():
                tell(f"{candidate.label}: {line}")

        for task in evaluation.tasks:
            for note in encoders[task.label].notes_on(task.prompts):
                tell(f"{candidate.label}: {note}")

        def prompt(row: PromptRow, encoder: PromptEncoder) -> tuple[int, ...]:
            return encoder.encode(row) if play is None else tuple(play.measured(row, encoder))

        prompts = {
            task.label: with_room(job, [prompt(row, encoders[task.label]) for row in task.prompts], task.prompts, tell)
            for task in evaluation.tasks
        }
        weights = candidate.checkpoint
        identity = (
            hashlib.sha256(json.dumps(weights.state()["files"], sort_keys=True).encode()).hexdigest()
            if weights
            else model_fingerprint(directory, job.model.source.weights)
        )
        return cls(candidate, job, encoders, prompts, identity, play)

    def opens_thought(self, task: Task) -> bool:
        """Whether completions begin inside of a thought."""
        return self.encoders[task.label].opens_thought

    def sampling(self, task: Task) -> Sampling:
        encoder = self.encoders[task.label]
        return Sampling.from_config(
            self.job.config.generation,
            stop=encoder.stop,
            stop_token_ids=encoder.stop_token_ids,
            never=encoder.never_sampled,
        )

    def settings(self, task: Task) -> dict[str, Any]:
        """Return what the samples of a task follow from. The number of prompts and of samples is left out: each sample
        follows from its own seed, so that a file can grow."""
        data, config, sampling = task.data, self.job.config, self.sampling(task)
        template = config.model.chat_template
        return {
            "model": self.identity,
            "data": task.source.fingerprint(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            **({"min_p": sampling.min_p} if sampling.min_p else {}),
            "max_new_tokens": sampling.max_new_tokens,
            "max_length": config.model.max_length,
            "stop": sampling.stop,
            "seed": config.run.seed,
            "system_prompt": data.system_prompt,
            "prompt_template": data.prompt_template,
            "prompt_suffix": data.prompt_suffix,
            **({"special_tokens": kept} if (kept := data.special_tokens) != "text" else {}),
            "chat_template": template_digest(template) if template else None,
            "tokenizer": config.model.tokenizer,
            **({TIME: config.model.chat_template_time} if self._writes_time(task) else {}),
            **({"chat_template_kwargs": own} if (own := config.model.chat_template_kwargs) else {}),
            "scorers": [_identity_of(term) for term in task.rewards.terms] if task.rewards else [],
            "extract": task.rewards.extraction if task.rewards else None,
            **({"environment": self.play.manifest()} if self.play else {}),
        }

    def _writes_time(self, task: Task) -> bool:
        scorers = task.rewards.scorers if task.rewards else ()
        return self.encoders[task.label].writes_time or any(name.startswith(MODEL) for name in scorers)

    def missing(self, task: Task, file: SampleFile, samples: int) -> list[tuple[int, int]]:
        """Return row and number of each sample that the file lacks."""
        there = file.samples(task.label, self.candidate.label)
        return [(row, sample) for row in task.rows for sample in range(samples) if (row, sample) not in there]


def _identity_of(term: RewardTerm) -> str:
    digest = reward_digest(term.name)
    return f"{term.weight:g} x {term.name}" + (f" ({digest})" if digest else "")


def _sample(one: Encoded, job: Evaluation, file: SampleFile, tell: Tell, progress: WorkProgress) -> None:
    missing = {task.label: one.missing(task, file, job.samples) for task in job.tasks}
    if not any(missing.values()):
        return
    plan = one.job.checked_plan([len(prompt) for prompts in one.prompts.values() for prompt in prompts])
    planned = replace(one.job, resolved=one.job.resolved.with_plan(plan))
    started = started_engines(planned, plan, lambda text: tell(f"{one.candidate.label}: {text}"), one.play)
    with started as (engines, _, turn), turn:
        at_once = len(engines) * (planned.config.generation.max_concurrent or FEWEST_A_CALL)
        for task in job.tasks:
            with contextlib.ExitStack() as stack:
                scorer = None
                if task.rewards is not None:
                    time = one.job.config.model.chat_template_time
                    rewards = replace(task.rewards, opened=one.opens_thought(task), time=time)
                    scorer = stack.enter_context(contextlib.closing(RewardWorker(rewards, fetch)))
                whole = task.rewards is not None and task.rewards.compares
                size = len(missing[task.label]) if whole else max(FEWEST_A_CALL, CALLS_AHEAD * at_once)
                for part in _calls(missing[task.label], size):
                    file.add(_scored(one, task, part, engines, scorer))
                    progress.advance(f"{one.candidate.label}, {task.label}", sum(map(len, part.values())))


def _calls(missing: Sequence[tuple[int, int]], size: int) -> Iterator[dict[int, list[int]]]:
    part: dict[int, list[int]] = {}
    for number, (row, sample) in enumerate(missing):
        part.setdefault(row, []).append(sample)
        last_of_row = number + 1 == len(missing) or missing[number + 1][0] != row
        if last_of_row and sum(map(len, part.values())) >= size:
            yield part
            part = {}
    if part:
        yield part


def _scored(
    one: Encoded, task: Task, part: Mapping[int, list[int]], engines: EngineClient, scorer: RewardWorker | None
) -> list[dict[str, Any]]:
    config, places = one.job.config, {row: place for place, row in enumerate(task.rows)}
    rows = {row: task.prompts[places[row]] for row in part}
    seed = config.run.seed
    seeds = {row: tuple(sample_seed(seed, row, sample) for sample in samples) for row, samples in part.items()}
    if one.play is None:
        encoder = one.encoders[task.label]
        shown = {row: encoder.fitted(rows[row], one.prompts[task.label][places[row]]) for row in part}
        requests = [GroupRequest(row, shown[row].tokens, seeds[row], media=shown[row].media) for row in part]
    else:
        encoder = one.encoders[task.label]
        of_episode = {row: episode_seed(seed, FIRST_EPISODE + row) for row in part}
        requests = [episode_request(row, rows[row], encoder, seeds[row], of_episode[row]) for row in part]
    results = generate_groups(engines, requests, one.sampling(task), config.cluster.step_limit_s)
    answers: list[GroupScores | None] = [None] * len(results)
    if scorer is not None:
        asked = (ScoreRequest(rows[r.group], r.texts, r.transcripts if r.episodes else None) for r in results)
        answers = [*scorer.score(list(asked))]
    groups, _ = groups_with_scores(
        results, rows, seeds, answers, "zero" if config.reward.on_error == "zero" else "stop"
    )
    return [
        _record(one, task, group, rollout, sample)
        for group in groups
        for rollout, sample in zip(group.rollouts, part[group.position], strict=True)
    ]


def _record(one: Encoded, task: Task, group: RolloutGroup, rollout: Rollout, sample: int) -> dict[str, Any]:
    text = fetch(group.texts)[rollout.sample]
    turns = fetch(group.transcripts)[rollout.sample] if group.transcripts else None
    return {
        "task": task.label,
        "model": one.candidate.label,
        "row": group.position,
        "sample": sample,
        "prompt": shown_prompt(group.prompt.prompt),
        "answer": group.prompt.answer,
        "completion": text,
        **({"turns": [asdict(turn) for turn in turns]} if turns else {}),
        "answer_given": vote(text, task.rewards.extraction if task.rewards else "full", opened=one.opens_thought(task)),
        # Without a scorer of reference answers it is right where the reward is full.
        "right": ((rollout.reward if rollout.accuracy is None else rollout.accuracy) or 0.0) >= 1,
        "score": rollout.reward or 0.0,
        "tokens": rollout.response_tokens,
        "finish_reason": rollout.stop_reason,
        "seed": rollout.seed,
    }


def _result(job: Evaluation, task: Task, model: str, file: SampleFile) -> Result:
    there = file.samples(task.label, model)
    groups = [[there[row, sample] for sample in range(job.samples)] for row in task.rows]
    prompts = [[Sampled(one["right"], one["score"], one["answer_given"]) for one in group] for group in groups]
    judged = task.rewards is not None and task.rewards.accuracy_by is not None
    found = metrics_of(prompts, job.ks, judged=judged)
    return Result(task.label, model, len(prompts), len(prompts) * job.samples, found)
