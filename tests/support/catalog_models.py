"""Models of the catalog, for tests of plans."""

from __future__ import annotations

from typing import Any

from rlctl.checkpoints.hf.model_facts import known_facts
from rlctl.models.facts import ModelFacts
from rlctl.planner import make_plan as planner
from rlctl.planner.inputs.cluster import ClusterFacts
from rlctl.planner.inputs.request import Request
from rlctl.planner.result import Plan


def model(name: str) -> ModelFacts:
    facts = known_facts(name)
    assert facts is not None
    return facts


def make_plan(facts: ModelFacts, cluster: ClusterFacts, *more: Any, **options: Any) -> Plan:
    """The plan of a request with these values; `options` are the planner's own too."""
    own = {key: options.pop(key) for key in ("top", "prefer_runnable", "refusal") if key in options}
    return planner.make_plan(Request(facts, cluster, *more, **options), **own)
