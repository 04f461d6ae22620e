"""Models of the catalog, for tests of plans."""

from __future__ import annotations

from rlctl.checkpoints.hf.model_facts import known_facts
from rlctl.models.facts import ModelFacts


def model(name: str) -> ModelFacts:
    facts = known_facts(name)
    assert facts is not None
    return facts
