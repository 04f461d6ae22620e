"""Checks of data, rewards and environment in a dry run without the model's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from rlctl.data.holdout import columns_of_prompts, hold_out, open_validation
from rlctl.data.mixing import SourceSettings, source_settings
from rlctl.data.prompt_rows import GYM_PREFIX, PromptDataset
from rlctl.data.prompts import download_of, open_prompts
from rlctl.environments.environment_plan import EnvironmentPlan, plan_environment
from rlctl.environments.process import EnvironmentHost
from rlctl.errors import AbsentError
from rlctl.methods.available import method_from_config
from rlctl.rewards.prepare_rewards import prepare_rewards, require_usable
from rlctl.rewards.reward_plan import Trial
from rlctl.settings.config import RlctlConfig
from rlctl.training.method import Method


@dataclass(frozen=True)
class Checks:
    """Results of the checks."""

    passed: tuple[str, ...]
    """Lines about data, rewards and environment."""
    skipped: tuple[str, ...]
    """Unchecked parts of the run, with reasons."""
    trials: tuple[Trial, ...]
    """Scores of the first reference answers, and of the user's trial completion."""


def check_without_model(config: RlctlConfig, completion: str | None = None) -> Checks:
    """Open the data, try the rewards (also on `completion`) and import the environment, without a tokenizer. Data of
    the hub that is not on this machine is skipped. Raises InputError for other problems."""
    passed, skipped, trials = list[str](), list[str](), list[Trial]()
    opened = list[PromptDataset]()
    method = method_from_config(config, tries_loss=False)
    any_scored = config.has_scores(any(map(_has_scorer, _sources(config))))
    for origin in _sources(config):
        name = origin.label or str(origin.data.name)
        scored = any_scored and (_has_scorer(origin) or not origin.environment.name)
        try:
            dataset = open_prompts(origin.data, config.run.seed, method.rows)
        except AbsentError:
            fetched = f"the dataset is not on this machine; {download_of(str(origin.data.name))} fetches it"
            skipped.append(f"rows of {name}{' and their rewards' * scored}: {fetched}")
            if scored:
                passed.append(f"reward: {require_usable(origin.reward, name)} can be loaded")
            continue
        opened.append(dataset)
        passed.append(f"data: {name} ({len(dataset):,} row{'s' * (len(dataset) != 1)})")
        if scored:
            plan = prepare_rewards(origin.reward, dataset, completion, apart=True)
            passed += plan.describe()
            trials += plan.trials
    skipped += _validation(config, method, opened)
    passed += _environment(config)
    return Checks(tuple(passed), tuple(skipped), tuple(trials))


def _sources(config: RlctlConfig) -> tuple[SourceSettings, ...]:
    """Return the sources with rows."""
    return tuple(source for source in source_settings(config) if not source.makes_tasks)


def _has_scorer(source: SourceSettings) -> bool:
    return bool(source.reward.terms) or (source.data.name or "").startswith(GYM_PREFIX)


def _validation(config: RlctlConfig, method: Method, opened: list[PromptDataset]) -> Iterator[str]:
    if not config.validation.wanted:
        return
    held_out = None
    if config.validation.holdout:
        if len(opened) != 1:
            return  # the source is absent, which `skipped` says already
        columns = columns_of_prompts(config, config.data)
        held_out = hold_out(opened[0], config.validation.holdout, config.run.seed, columns)[1]
    try:
        open_validation(config, held_out, method.rows)
    except AbsentError:
        name = str(config.validation.data.name)
        yield f"rows of {name}: the dataset is not on this machine; {download_of(name)} fetches it"


def _environment(config: RlctlConfig) -> Iterator[str]:
    plans = list[EnvironmentPlan]()
    for environment in rollouts.plays if (rollouts := config.rollout_settings) else ():
        if (plan := plan_environment(environment)) in plans:
            continue
        plans.append(plan)
        with closing(EnvironmentHost(plan)) as host:
            host.start()
        yield f"environment: {plan.label} can be loaded; no episode was begun"
