"""Tasks of an evaluation, with prompts and scorers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlctl.data.benchmarks import BENCHMARKS, known_benchmark, near_benchmark, open_benchmark
from rlctl.data.drawn_shapes import DRAWN_SHAPES
from rlctl.data.holdout import open_apart
from rlctl.data.mixing import SourceSettings, errors_of_source, source_settings
from rlctl.data.prompt_rows import GYM_PREFIX, PromptDataset, PromptRow
from rlctl.data.prompts import MOST_QUESTIONS, open_episodes, open_prompts
from rlctl.data.records import suffix_of
from rlctl.errors import InputError
from rlctl.rewards.prepare_rewards import prepare_rewards
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rollouts.prompt_order import PromptOrder
from rlctl.settings.config import RolloutConfig
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import EnvironmentConfig, RewardConfig, RewardTerm

GYM_PROMPTS = 200
"""Default number of questions for tasks that generate questions without end."""


@dataclass(frozen=True)
class Task:
    """A task with the selected prompts."""

    label: str
    dataset: PromptDataset
    data: DataConfig
    """Settings that turn rows into prompts."""
    rewards: RewardPlan | None
    """The task's scorers; None: only the environment gives rewards."""
    rows: tuple[int, ...]
    environment: EnvironmentConfig | None = None
    """Where it is played; None: as the section `environment` says."""
    note: str = ""
    """Remark for the user on its rows."""

    @cached_property
    def prompts(self) -> list[PromptRow]:
        return [self.dataset[row] for row in self.rows]


def open_task(name: str, config: RolloutConfig, limit: int | None) -> Task:
    """Return the task of `--task` after a trial of its scorers. Questions of reasoning-gym come from seeds that no run
    with the same `run.seed` trains on.

    Raises InputError for a task that does not exist, has no scorer, or cannot be fetched.
    """
    reward = config.reward
    benchmark_entry = known_benchmark(name)
    if name == DRAWN_SHAPES:
        data = config.data.model_copy(update={"name": name, "params": {}, "size": None})
        dataset = open_prompts(data, seed=config.run.seed + MOST_QUESTIONS)
        reward = RewardConfig(terms=(RewardTerm(name="exact-match"),), extract="full", timeout_s=reward.timeout_s)
    elif name.startswith(GYM_PREFIX):
        same = name.split(":")[1:2] == (config.data.name or "").removeprefix(GYM_PREFIX).split(":")[:1]
        params = {k: v for k, v in config.data.params.items() if same and k not in ("seed", "size")}
        data = config.data.model_copy(update={"name": name, "params": params, "size": None})
        dataset = open_prompts(data, seed=config.run.seed + MOST_QUESTIONS)
        reward = RewardConfig(extract=reward.extract, timeout_s=reward.timeout_s)
    elif benchmark_entry is not None:
        benchmark, path = benchmark_entry
        data = benchmark.data(path)
        data = data.model_copy(
            update={
                "system_prompt": config.data.system_prompt,
                "prompt_suffix": config.data.prompt_suffix,
                "prompt_template": config.data.prompt_template or data.prompt_template,
            }
        )
        dataset = open_benchmark(name, benchmark, path, data)
        reward = benchmark.reward.model_copy(update={"timeout_s": reward.timeout_s})
    else:
        _require_source(name)
        data = config.data.model_copy(update={"name": name, "params": {}, "size": None})
        dataset = open_prompts(data)
        # `task` in a run's reward is the scorer of the run's data, which does not apply to this task.
        plain = {"name": "exact-match"}
        terms = [term.model_copy(update=plain) if term.name == "task" else term for term in reward.terms]
        if not terms and not config.environment.name:
            terms = [RewardTerm(name="exact-match")]
        reward = reward.model_copy(update={"terms": tuple(terms)})
    alone = not (reward.terms or dataset.task) and bool(config.environment.name)  # the environment gives all rewards
    plan = None if alone else _scorers(reward, dataset, config)
    return Task(name, dataset, data, plan, _drawn(dataset, config, limit, _makes_rows(name)))


def open_sources(config: RolloutConfig, limit: int | None) -> tuple[Task, ...]:
    """Return the sources of the configuration's data as tasks, each with its environment and scorers, after a trial of
    the scorers. Tasks of environments come from seeds that no run trains on. Raises InputError."""
    return tuple(_of_source(source, config, limit) for source in source_settings(config))


def _of_source(source: SourceSettings, config: RolloutConfig, limit: int | None) -> Task:
    environment, label, note = source.environment, source.label, ""
    with errors_of_source(label):
        if source.makes_tasks:
            count, label = limit or GYM_PROMPTS, label or str(environment.name)
            dataset, rows = open_episodes(label, count), tuple(range(count))
        else:
            dataset, note = open_apart(config, source.data)
            rows = _drawn(dataset, config, limit, _makes_rows(source.data.name or ""))
        scored = bool(source.reward.terms or dataset.task or not environment.name)
        plan = _scorers(source.reward, dataset, config) if scored else None
    return Task(label or dataset.label, dataset, source.data, plan, rows, environment, note)


def _scorers(reward: RewardConfig, dataset: PromptDataset, config: RolloutConfig) -> RewardPlan:
    # No sample may be left out: all models' metrics must cover the same samples.
    on_error = "zero" if config.reward.on_error == "zero" else "stop"
    return prepare_rewards(reward.model_copy(update={"on_error": on_error}), dataset)


def _drawn(dataset: PromptDataset, config: RolloutConfig, limit: int | None, endless: bool) -> tuple[int, ...]:
    count = min(len(dataset), limit or (GYM_PROMPTS if endless else len(dataset)))
    order = PromptOrder(len(dataset), config.run.seed)  # shuffled, so that --limit samples a sorted data set evenly
    return tuple(order.at(place) for place in range(count))


def refuse_idle_reward(rewards: Sequence[str], names: Sequence[str]) -> None:
    """Raise InputError if --reward has no effect because all tasks have their own scorers."""
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
    """Raise InputError for a name that is neither a file nor a possible dataset name of the hub."""
    if "/" in name or suffix_of(Path(name)) or Path(name).exists():
        return
    raise InputError(
        f"--task {name}: there is no such task.",
        near_benchmark(name)
        or f"Tasks are reasoning-gym:TASK, {DRAWN_SHAPES}, {', '.join(BENCHMARKS)}, a JSON, CSV or Parquet file, or "
        "OWNER/DATASET of the hub.",
    )
