"""Engines that keep some tensors as published and others quantized: in one refit the first are written directly, and
the others go through vLLM's loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.backends.base import EngineWorker
from rlctl.backends.messages import Sampling
from rlctl.errors import WorkerError
from rlctl.refit.verify import TensorComparison, compare
from rlctl.tiny_models.text import write_tiny_family
from support.engine_host import FamilyEngine, SwappingEngine
from support.engine_policies import generate

SAMPLING = Sampling(12)
SMALL_BUFFERS = 300_000  # bytes; tensors of both paths share rounds, and some are larger
# vLLM quantizes the linear layers while it loads them, on this platform to FP8 with a scale for each row.
ONLINE = {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}}
QUANTIZED = {"dtype": "bfloat16", "vllm": ONLINE}


@pytest.fixture(scope="module")
def host(family_host: Any) -> Iterator[Any]:
    """The process of all engines of this file, one after the other."""
    yield family_host
    family_host.call(SwappingEngine.close)


def difference(engine: FamilyEngine) -> TensorComparison:
    return compare(engine.policy.fingerprints(), engine.call(EngineWorker.readings))


def counted(engine: FamilyEngine) -> Counter[str]:
    """Tensors by path, the same in every worker."""
    first, *others = engine.host(SwappingEngine.ways)
    assert all(ways == first for ways in others)
    assert set(first) == set(engine.policy.tensors())
    return Counter(path for path, _ in first.values())


def poisoned_and_refitted(engine: FamilyEngine, version: int) -> None:
    engine.policy.perturb(version)
    engine.call(EngineWorker.poison)
    with pytest.raises(WorkerError, match="poisoned weights"):
        generate(engine, SAMPLING)
    engine.policy.refit(engine, version, "auto", SMALL_BUFFERS)
    assert engine.call(EngineWorker.received)[0].path == "mixed"


def sampled(engine: FamilyEngine) -> list[tuple[list[int], np.ndarray]]:
    return [(columns.tokens_T.tolist(), columns.logprobs_T) for _, columns, _ in generate(engine, SAMPLING)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param("qwen3_moe", 1, marks=pytest.mark.guard),
        ("llama-tied", 1),
        ("deepseek_v3", 1),  # three minutes: a CPU multiplies FP8 numbers one by one
        ("qwen3_moe", 2),
        ("deepseek_v3", 2),
    ],
)
def test_quantized_layers_are_as_in_an_engine_started_from_the_weights(
    host: Any, family: str, tp: int, tmp_path: Path
) -> None:
    engine = FamilyEngine(host, family, write_tiny_family(tmp_path / "published", family), tp, **QUANTIZED)
    started = sampled(engine)
    for version in (1, 2):
        poisoned_and_refitted(engine, version)
    assert all(
        need.whole_only.startswith("the loader takes whole tensors") for need in engine.call(EngineWorker.refit_needs)
    )
    found = counted(engine)
    assert found["direct"] > 0
    assert found["loader"] > 0
    compared = difference(engine)
    assert compared.equal
    assert {name for name, _ in compared.unread} == {
        name for name, (path, _) in engine.host(SwappingEngine.ways)[0].items() if path == "loader"
    }
    assert all("Fp8PtpcOnlineLinearMethod" in why for _, why in compared.unread)
    refitted = sampled(engine)
    fresh = sampled(FamilyEngine(host, family, engine.policy.save(tmp_path / "perturbed"), tp, **QUANTIZED))
    for (tokens, logprobs), (expected_tokens, expected), (old_tokens, _) in zip(refitted, fresh, started, strict=True):
        assert tokens == expected_tokens != old_tokens
        assert np.array_equal(logprobs, expected)
