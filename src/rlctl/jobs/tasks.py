"""Tasks of an evaluation: their prompts and scorers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlctl.data.benchmarks import BENCHMARKS, known_benchmark, near_benchmark, open_benchmark
from rlctl.data.drawn_shapes import DRAWN_SHAPES
from rlctl.data.prompt_rows import GYM_PREFIX, PromptDataset, PromptRow
from rlctl.data.prompts import MOST_QUESTIONS, open_episodes, open_prompts
from rlctl.data.records import suffix_of
from rlctl.errors import InputError
from rlctl.rewards.prepare_rewards import prepare_rewards
from rlctl.rewards.reward_plan import RewardPlan
from rlctl.rollouts.prompt_order import PromptOrder
from rlctl.settings.config import RolloutConfig
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import RewardConfig, RewardTerm

GYM_PROMPTS = 200
"""Questions of a reasoning-gym task, which has as many as one likes, where --limit is not given."""


@dataclass(frozen=True)
class Task:
    """A task with the prompts that are asked."""

    label: str
    dataset: PromptDataset
    data: DataConfig
    """How its prompts are put to a model."""
    rewards: RewardPlan | None
    """None: the environment alone gives rewards."""
    rows: tuple[int, ...]

    @cached_property
    def prompts(self) -> list[PromptRow]:
        return [self.dataset[row] for row in self.rows]


def open_task(name: str, config: RolloutConfig, limit: int | None) -> Task:
    """Return the task that `--task` names, its scorers tried. Questions of reasoning-gym come from seeds that no run
    with the same `run.seed` trains on.

    Raises InputError for a task that does not exist, has no scorer, or cannot be fetched.
    """
    reward = config.reward
    known = known_benchmark(name)
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
        dataset = open_benchmark(name, benchmark, path, data)
        reward = benchmark.reward.model_copy(update={"timeout_s": reward.timeout_s})
    else:
        _require_source(name)
        data = config.data.model_copy(update={"name": name, "params": {}, "size": None})
        dataset = open_prompts(data)
        # A run's terms may have the scorer of its own task among others.
        plain = {"name": "exact-match"}
        terms = [term.model_copy(update=plain) if term.name == "task" else term for term in reward.terms]
        reward = reward.model_copy(update={"terms": tuple(terms) or (RewardTerm(name="exact-match"),)})
    # A sample without a score would make the metrics those of other samples.
    on_error = "zero" if config.reward.on_error == "zero" else "stop"
    plan = prepare_rewards(reward.model_copy(update={"on_error": on_error}), dataset)
    if limit is None and _makes_rows(name):
        limit = GYM_PROMPTS
    count = min(len(dataset), limit or len(dataset))
    order = PromptOrder(len(dataset), config.run.seed)  # a part of a sorted data set is a fair one
    return Task(name, dataset, data, plan, tuple(order.at(place) for place in range(count)))


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
