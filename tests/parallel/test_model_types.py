"""Every model type of the table of models (`docs/models.md`) at tiny size on CPUs, against transformers: log-probs,
loss and gradients of the dtensor backend, and log-probs of an engine after a verified refit.

With `RLCTL_RECORD=FILE` the outcomes are added to that file (`docs/models_compared.yaml`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.backends.base import EngineWorker
from rlctl.backends.messages import Sampling
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError
from rlctl.refit.verify import compare
from rlctl.tiny_models.of_transformers import tiny_class_model, write_tiny_class
from support.engine_host import FamilyEngine, SwappingEngine
from support.engine_policies import generate, largest_logprob_error
from support.parallel_cases import assemble, of_family, run_case
from support.parallel_families import make_batch
from support.pool import Pools
from support.reference_policy import Optim
from support.transformers_reference import expected

COMPARED = Path(__file__).parents[2] / "docs" / "models_compared.yaml"
TRAINER, ENGINE, GRADIENTS = 1e-5, 1e-4, 1e-5


@pytest.fixture(scope="module")
def host(family_host: Any) -> Iterator[Any]:
    yield family_host
    family_host.call(SwappingEngine.close)


def trained(pools: Pools, directory: Path, model_type: str) -> dict[str, Any]:
    """The largest differences of log-probs and of gradients (relative to the largest of a parameter, or 1), and of the
    loss, from transformers'."""
    facts, wanted = facts_in(directory), expected(tiny_class_model(model_type), make_batch())
    (rank,) = pools(1).run(run_case, of_family(facts, ParallelSpec()), directory, make_batch(), None, facts)
    first, second = rank.results
    assert first is not None
    assert second is not None
    gradients, _ = assemble([rank.grads])
    clipped = max(1.0, (first.grad_norm + 1e-6) / Optim().clip)
    largest = max(
        float((gradients[name] * clipped - value).abs().max() / max(1.0, value.abs().max()))
        for name, value in wanted.module_grads.items()
    )
    logprobs = max(float((value - wanted.logprobs[key]).abs().max()) for key, value in rank.logprobs.items())
    return {"logprobs": logprobs, "loss": abs(first.loss - wanted.losses[0]), "gradients": largest,
            "rows": "padded" if facts.unpacked else "packed"}  # fmt: skip


def sampled(host: Any, directory: Path, model_type: str) -> dict[str, Any]:
    """The largest difference of an engine's log-probs from transformers' after a refit into poisoned weights, or why
    engines on CPUs are refused."""
    try:
        engine = FamilyEngine(host, model_type, directory, 1)
    except ConfigError as error:
        return {"refused": error.message.removeprefix("model.name: None has ").removesuffix(".")}
    engine.host(SwappingEngine.spoil)
    engine.policy.refit(engine, 1, "auto")
    readings = compare(engine.policy.fingerprints(), engine.call(EngineWorker.readings))
    assert readings.equal, readings
    return {"logprobs": largest_logprob_error(generate(engine, Sampling(24)), engine.policy, Sampling(24))}


def recorded() -> dict[str, Any]:
    return yaml.safe_load(COMPARED.read_text()) if COMPARED.exists() else {}


def record(model_type: str, part: str, outcome: dict[str, Any]) -> None:
    if name := os.environ.get("RLCTL_RECORD"):
        file = Path(name)
        before = yaml.safe_load(file.read_text()) if file.exists() else {}
        both = before.get(model_type, {}) | {part: outcome}
        file.write_text(yaml.safe_dump(before | {model_type: both}))


def types(part: str) -> list[str]:
    """The types with a recorded outcome of a part, or those of `RLCTL_TYPES`. A type whose engine differs has a `cause`
    in the file in place of a number, written by hand."""
    named = os.environ.get("RLCTL_TYPES")
    found = [name for name, parts in recorded().items() if part in parts and "cause" not in parts[part]]
    return named.split() if named else found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types("trainer"))
def test_a_type_of_the_table_is_trained_as_transformers_computes(pools: Pools, model_type: str, tmp_path: Path) -> None:
    write_tiny_class(tmp_path, model_type)
    outcome = trained(pools, tmp_path, model_type)
    record(model_type, "trainer", outcome)
    assert outcome["logprobs"] <= TRAINER
    assert outcome["loss"] <= TRAINER
    assert outcome["gradients"] <= GRADIENTS


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types("engine"))
def test_an_engine_of_a_type_of_the_table_samples_as_transformers_computes(
    host: Any, model_type: str, tmp_path: Path
) -> None:
    write_tiny_class(tmp_path, model_type)
    outcome = sampled(host, tmp_path, model_type)
    record(model_type, "engine", outcome)
    assert outcome.get("refused") == recorded().get(model_type, {}).get("engine", {}).get("refused")
    assert outcome.get("logprobs", 0.0) <= ENGINE
