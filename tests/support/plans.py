"""Plans of configurations, with the workload that their training method has."""

from __future__ import annotations

from typing import Any

from rlctl.methods.available import method_from_config
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import plan_from_config
from rlctl.planner.inputs.request import Workload
from rlctl.planner.result import Plan
from rlctl.settings.config import RlctlConfig


def workload_of(config: RlctlConfig, facts: ModelFacts, tokens: int | None = None) -> Workload:
    """Return the work of a step, for prompts or texts of a mean length."""
    return method_from_config(config, tries_loss=False).workload(facts, tokens)


def plan_of(
    config: RlctlConfig, facts: ModelFacts, tokens: int | None = None, workload: Workload | None = None, **options: Any
) -> Plan:
    """Return the plan of a configuration."""
    return plan_from_config(config, facts, workload or workload_of(config, facts, tokens), **options)
