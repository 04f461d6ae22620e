"""The plan of a run's steps, shared by `rlctl plan`, dry runs and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import plan_from_config
from rlctl.planner.result import Plan
from rlctl.preparation.worker_specs import refusal_of
from rlctl.rewards.prepare_rewards import any_reward
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.phases import Phase
from rlctl.training.method import Method


def step_plan(
    config: RlctlConfig,
    facts: ModelFacts,
    method: Method,
    prompts: PromptStream | None,
    teachers: Sequence[ModelFacts],
    assume: str | None,
    top: int = 3,
    held_adapters: int = 1,
) -> Plan:
    """Return the plan of a run's steps for the lengths of `prompts` (None: assumed lengths). `rlctl plan`, dry runs and
    runs all call this function, so that they agree. `held_adapters`: adapters over one base. Raises NoPlanError if
    nothing fits."""
    lengths = prompts.lengths() if prompts else []
    mean = round(sum(lengths) / len(lengths)) if lengths else None
    refusal = refusal_of(config, facts, method, teachers)
    workload = method.workload(facts, mean)
    if prompts is not None and facts.vision is not None:
        workload = replace(workload, image_share=prompts.image_share())
    plan = plan_from_config(
        config, facts, workload, assume=assume, top=top, teachers=teachers, refusal=refusal, held_adapters=held_adapters
    )
    return plan if is_scored(method, prompts) else replace(plan, seconds=plan.seconds | {Phase.REWARD: 0.0})


def is_scored(method: Method, prompts: PromptStream | None) -> bool:
    datasets = prompts.datasets if prompts and method.config.rollout_settings else ()
    return method.config.has_scores(
        bool(datasets) and any_reward((dataset.label, dataset.reward, dataset.prompts) for dataset in datasets)
    )
