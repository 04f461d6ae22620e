"""Models of the catalog, for tests of plans."""

from __future__ import annotations

from rlctl.models.catalog import lookup
from rlctl.models.facts import ModelFacts


def model(name: str) -> ModelFacts:
    facts = lookup(name)
    assert facts is not None
    return facts
