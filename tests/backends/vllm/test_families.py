"""Engines of every family, of directories that conversions wrote: what they compute with can be read back, spoiled and
replaced, by either receive path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine_host import FamilyEngine, hosted
from engine_policies import generate, largest_logprob_error
from rlctl.backends.vllm.messages import Sampling
from rlctl.checkpoints.convert import hf_to_megatron, megatron_to_hf
from rlctl.errors import WorkerError
from rlctl.refit.verify import Comparison, compare
from tiny_families import FAMILIES, write_tiny_family

TOLERANCE = 1e-4  # fp32 on both sides; observed 4e-6
PERTURBED = 0.1  # smallest change of log-probs that new weights must show
SAMPLING = Sampling(12)
# vLLM's loader of gpt-oss writes into parameters behind the reload's back: the direct path alone refits it.
LOADER_LOSES = {"gpt_oss"}
QUICK = {("deepseek_v3", 1), ("qwen3_moe", 2)}
CASES = [
    pytest.param((family, tp), id=f"{family}-tp{tp}", marks=() if (family, tp) in QUICK else pytest.mark.slow)
    for tp in (1, 2)
    for family in FAMILIES
]


@pytest.fixture(scope="module")
def host(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One process for all engines of this file, one after the other."""
    with hosted(placement, tmp_path_factory.mktemp("family-logs")) as group:
        yield group


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, host: Any, tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    family, tp = request.param
    directory = tmp_path_factory.mktemp(family)
    hf_to_megatron(write_tiny_family(directory / "published", family), directory / "megatron")
    megatron_to_hf(directory / "megatron", directory / "exported")
    return FamilyEngine(host, family, directory / "exported", tp)


def difference(engine: FamilyEngine) -> Comparison:
    return compare(engine.policy.fingerprints(), engine.call("readings"))


def paths_of(family: str) -> list[str]:
    return ["direct"] if family in LOADER_LOSES else ["loader", "direct"]


def test_exported_directories_load_without_warnings(engine: FamilyEngine) -> None:
    assert "WARNING" in engine.start_log  # about this machine: no allocator preloaded, no Triton
    about_models = re.compile(r"WARNING.*\b(weights?|checkpoint|parameters?|tokenizer|config)\b", re.IGNORECASE)
    assert [line for line in engine.start_log.splitlines() if about_models.search(line)] == []


def test_every_tensor_is_read_back(engine: FamilyEngine) -> None:
    found = difference(engine)
    assert found.equal, found
    assert found.tensors == len(engine.policy.tensors())
    assert not found.unread
    assert found.buffers > 0


def test_poisoned_engines_are_whole_after_one_refit(engine: FamilyEngine) -> None:
    tensors = set(engine.policy.tensors())
    for version, path in enumerate(paths_of(engine.family), 2):
        engine.policy.perturb(version)
        assert set(difference(engine).mismatched) == tensors
        assert largest_logprob_error(generate(engine, SAMPLING), engine.policy, SAMPLING) > PERTURBED
        assert engine.call("poison") >= len(tensors) / 4
        with pytest.raises(WorkerError, match="poisoned weights"):
            generate(engine, SAMPLING)
        assert set(difference(engine).mismatched) == tensors
        engine.policy.refit(engine, version, path)
        assert engine.call("received")[0].path == path
        assert difference(engine).equal, difference(engine)
        assert largest_logprob_error(generate(engine, SAMPLING), engine.policy, SAMPLING) < TOLERANCE


def test_one_wrong_element_is_found(engine: FamilyEngine) -> None:
    name = next(name for name in engine.policy.tensors() if "layers.1" in name and "norm" in name)
    experts = [n for n in engine.policy.tensors() if "experts.1." in n and ("down_proj" in n or "w2" in n)]
    for tensor in (name, *experts[-1:]):
        engine.host("break_parameter", tensor)
        assert difference(engine).mismatched == (tensor,)
        engine.policy.refit(engine, 9, "direct")
        assert difference(engine).equal


def test_a_changed_rotary_table_is_found(engine: FamilyEngine) -> None:
    table = next(name for name in engine.host("buffers") if name.endswith("cos_sin_cache"))
    engine.host("break_buffer", table)
    assert difference(engine).mismatched == (table,)
    engine.host("break_buffer", table, 0.5)  # exactly what it was
    assert difference(engine).equal
