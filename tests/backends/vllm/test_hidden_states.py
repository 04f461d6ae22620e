"""`rlctl diverge` on engines: faults in vLLM's modules and in refits are found where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.backends.base import EngineWorker, EpisodeWorker
from rlctl.backends.hidden_states import OUT, joined
from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.divergence.causes import cause_of
from rlctl.divergence.compare import Examined, examine, first_parting
from rlctl.divergence.reference import Reference, load_reference
from rlctl.tiny_models.text import write_tiny_family
from support.divergence_cases import EARLIER, PREDICTED, SEQUENCES, earlier, plant
from support.divergence_cases import Fault as Wrong
from support.engine_faults import (
    epsilon,
    gate_and_up,
    not_normalized,
    permuted,
    scale,
    stale,
    theta,
    transposed,
    without_window,
)
from support.engine_host import FamilyEngine, SwappingEngine
from support.pool import slowly
from support.rows import every_row

GUARDED = ("llama-bfloat16", "qwen3_moe-float16", "gemma3-bfloat16", "deepseek_v3-bfloat16", "gpt_oss-bfloat16")
"""Each family in one format; a start of the engine takes a second or two."""
LENGTHS = [len(sequence) for sequence in SEQUENCES]


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Any], None]
    point: str
    operation: str
    words: str
    refits: bool = False
    """It is in the tensors of a refit; others are in vLLM's modules."""


FAULTS = {
    "llama": [
        Fault(gate_and_up, "layers.1.mlp", "matrix", "gate_proj and mlp.up_proj are exchanged", refits=True),
        Fault(transposed, "layers.0.attention", "matrix", "o_proj is transposed", refits=True),
        Fault(stale, "layers.1.mlp", "weights", f"has the weights of {EARLIER}", refits=True),
        Fault(epsilon, "layers.1.mlp", "norm", "epsilon 0.001"),
        Fault(scale, "layers.1.attention", "attention scale", "2 times the model's"),
        Fault(theta, "layers.0.attention", "rotary embedding", "theta 500000"),
    ],
    "qwen3_moe": [
        Fault(permuted, "layers.0.mlp", "experts", "exchanged (1 and 3)", refits=True),
        Fault(not_normalized, "layers.1.mlp", "router", "does not normalize"),
    ],
    "gemma3": [Fault(without_window, "layers.0.attention", "sliding window", "no sliding window")],
}
OVERRIDES: dict[str, dict[str, Any]] = {"qwen3_moe": {"num_experts": 4}, "gemma3": {"sliding_window": 16}}
# transformers' norms within latent attention have this epsilon, whatever config.json says.
OVERRIDES["deepseek_v3"] = {"rms_norm_eps": 1e-6}


@pytest.fixture(scope="module")
def host(family_host: Any) -> Iterator[Any]:
    yield family_host
    family_host.call(SwappingEngine.close)


def states_of(engine: FamilyEngine, reference: Reference, dtype: str = "float32") -> list[Examined]:
    """The points of an engine; all of the reference's."""
    states = []
    for number, sequence in enumerate(SEQUENCES):
        engine.call(EngineWorker.record_states, reference.paths())
        request = GroupRequest(number, tuple(sequence), (number,))
        engine.call(EpisodeWorker.generate, [request], Sampling(1), 60.0)
        states += engine.call(EngineWorker.recorded_states, number, len(sequence), PREDICTED)
    whole = joined(states, LENGTHS)
    assert {name for name in whole if name.endswith(OUT)} == {f"{point}{OUT}" for point in reference.points[1:]}
    return examine(reference, whole, getattr(torch, dtype))


FIVE = ("llama", "qwen3_moe", "gemma3", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", slowly(FIVE, guards=("llama", "qwen3_moe")))
def test_faults_of_an_engine_are_located(host: Any, tmp_path: Path, family: str) -> None:
    directory = write_tiny_family(tmp_path / family, family, **OVERRIDES.get(family, {}))
    reference = load_reference(directory, SEQUENCES, torch.float32)
    before = plant(directory, Wrong("", "", "", "", tensors=earlier))
    reference.remember(EARLIER, load_reference(before, SEQUENCES, torch.float32))
    engine = FamilyEngine(host, family, directory, 1)
    assert [str(one.measure) for one in states_of(engine, reference) if one.measure.parts] == []
    kept = {name: value.clone() for name, value in engine.policy.tensors().items()}
    version = iter(range(1, 99))

    def check(fault: Fault) -> None:
        if fault.refits:
            fault.plant(engine.policy.tensors())
            engine.policy.refit(engine, next(version), "auto")
        else:
            engine.host(SwappingEngine.on_model, fault.plant)
        first = first_parting(states_of(engine, reference))
        if fault.refits:
            for name, value in engine.policy.tensors().items():
                value.copy_(kept[name])
            engine.policy.refit(engine, next(version), "auto")
        assert first is not None
        cause = cause_of(reference, first, torch.float32)
        assert (first.measure.point, cause.operation) == (fault.point, fault.operation), cause
        assert fault.words in cause.words

    for fault in FAULTS.get(family, ()):
        every_row([fault], check)
        if not fault.refits:  # live modules keep their fault
            engine = FamilyEngine(host, family, directory, 1)


@pytest.mark.slow
@pytest.mark.guard
def test_an_epsilon_that_transformers_does_not_read_is_named(host: Any, tmp_path: Path) -> None:
    """vLLM takes the epsilon of config.json in all norms."""
    directory = write_tiny_family(tmp_path / "deepseek", "deepseek_v3", rms_norm_eps=1e-4)
    reference = load_reference(directory, SEQUENCES, torch.float32)
    first = first_parting(states_of(FamilyEngine(host, "deepseek_v3", directory, 1), reference))
    assert first is not None
    cause = cause_of(reference, first, torch.float32)
    assert (first.measure.point, cause.operation) == ("layers.0.attention", "norm")
    assert cause.words == "self_attn.q_a_layernorm and self_attn.kv_a_layernorm have the epsilon 0.0001"


# vLLM refuses Gemma 3 in float16, and divides DeepSeek's hidden states there by `routed_scaling_factor`.
NARROW = {f"{family}-bfloat16": (family, "bfloat16") for family in FIVE}
NARROW |= {f"{family}-float16": (family, "float16") for family in FIVE if family not in ("gemma3", "deepseek_v3")}


@pytest.mark.parametrize(("family", "dtype"), slowly(NARROW, guards=GUARDED))
def test_narrow_engines_without_a_fault(host: Any, tmp_path: Path, family: str, dtype: str) -> None:
    directory = write_tiny_family(tmp_path / family, family, **OVERRIDES.get(family, {}))
    reference = load_reference(directory, SEQUENCES, getattr(torch, dtype))
    engine = FamilyEngine(host, family, directory, 1, dtype=dtype)
    engine.policy.refit(engine, 1, "auto")
    found = states_of(engine, reference, dtype)
    assert [str(one.measure) for one in found if one.measure.parts] == []
