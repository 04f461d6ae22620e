"""What a plan reads of this machine."""

from __future__ import annotations

import subprocess

import pytest

from rlctl.errors import ConfigError, MachineError
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.catalog import lookup
from rlctl.planner import from_config
from rlctl.planner.costs.engines import generation_time
from rlctl.planner.costs.time import CPU_MERGED_BYTES_PER_S
from rlctl.planner.from_config import cluster_from_config, local_gpus, moment_bytes
from rlctl.planner.result import Plan
from rlctl.telemetry.phases import Phase
from support.plans import plan_of

LISTED = "0, GPU-aa11, NVIDIA H100 80GB HBM3\n1, GPU-aa22, NVIDIA H100 80GB HBM3\n2, GPU-bb33, NVIDIA A100-SXM4-80GB\n"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_config.shutil, "which", lambda name: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess([], 0, LISTED, "")
    monkeypatch.setattr(from_config.subprocess, "run", lambda *_, **__: done)


@pytest.mark.parametrize(
    ("wanted", "types"),
    [
        (None, ["H100", "H100", "A100"]),
        ("2,0", ["A100", "H100"]),
        ("GPU-bb,GPU-aa11", ["A100", "H100"]),
        ("", []),
        ("-1", []),
        ("1,7,0", ["H100"]),  # CUDA ends the list at what is not there
        ("GPU-aa", []),  # two begin like this
    ],
)
def test_a_plan_counts_the_gpus_that_are_left_to_the_process(
    driver: None, monkeypatch: pytest.MonkeyPatch, wanted: str | None, types: list[str]
) -> None:
    if wanted is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert [name.split()[1][:4] for name in local_gpus()] == types


def test_a_driver_that_hangs_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(from_config.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(from_config.subprocess, "run", hang)
    with pytest.raises(MachineError, match="nvidia-smi did not answer"):
        local_gpus()


def test_spare_nodes_are_left_out_of_the_plan() -> None:
    cluster = {"gpu": "h100", "gpus_per_node": 8, "nodes": 4}
    found = cluster_from_config(RlConfig.model_validate({"cluster": cluster | {"spare_nodes": 1}}), "h100")
    assert found == cluster_from_config(RlConfig.model_validate({"cluster": cluster | {"nodes": 3}}), "h100")
    with pytest.raises(ConfigError, match=r"cluster\.spare_nodes = 4 leaves none of the 4 node"):
        cluster_from_config(RlConfig.model_validate({"cluster": cluster | {"spare_nodes": 4}}), "h100")


def test_the_optimizers_moments_are_planned() -> None:
    """Adam's two moments may be narrow."""
    narrow = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "uint8"}
    assert [moment_bytes(one) for one in ({}, narrow)] == [8, 3]


def test_what_an_engine_is_told_changes_what_is_planned_of_it() -> None:
    facts, pins = lookup("meta-llama/Llama-3.1-8B"), ["generation.tp=1", "generation.memory_fraction=0.5"]
    machine = ["cluster.gpu=h100", "cluster.nodes=1", "cluster.gpus_per_node=8", "model.name=x"]

    def planned(*sets: str) -> Plan:
        assert facts is not None
        return plan_of(resolve(sets=[*machine, *pins, *sets], environment={}).config, facts)

    def tokens(plan: Plan) -> int:
        assert plan.generation is not None
        return plan.generation.kv_cache_tokens

    usual = planned()
    weights, graphs = (usual.memory["generation"].parts[part] for part in ("weights", "CUDA graphs"))
    narrow = planned("vllm.quantization=fp8_per_block")
    assert 0.5 < narrow.memory["generation"].parts["weights"] / weights < 0.6  # embedding and head are as they were
    assert narrow.seconds[Phase.GENERATION] < usual.seconds[Phase.GENERATION]
    cache = planned("vllm.kv_cache_dtype=fp8")
    assert tokens(cache) == pytest.approx(2 * tokens(usual), rel=1e-3)
    eager = planned("vllm.enforce_eager=true")
    assert eager.memory["generation"].parts["CUDA graphs"] == 0
    assert usual.memory["training"].parts["engine asleep"] - eager.memory["training"].parts["engine asleep"] == graphs
    assert eager.seconds[Phase.GENERATION] > usual.seconds[Phase.GENERATION]


def test_experts_one_after_the_other_and_rows_of_one_rollout_have_their_own_time() -> None:
    def training_s(name: str, gpu: str, *sets: str) -> float:
        facts = lookup(name)
        assert facts is not None
        machine = ["model.name=x", f"cluster.gpu={gpu}", "cluster.nodes=1", "cluster.gpus_per_node=8"]
        config = resolve(sets=[*machine, "training.backend=megatron", *sets], environment={}).config
        return plan_of(config, facts).seconds[Phase.TRAINING]

    of_experts = "Qwen/Qwen3-30B-A3B", "h200", "training.pp=1", "training.ep=8"
    assert training_s(*of_experts, "megatron.moe_grouped_gemm=false") > training_s(*of_experts)
    assert training_s(*of_experts, "training.lora.rank=8") != training_s(*of_experts)
    dense = "meta-llama/Llama-3.1-8B", "h100", "generation.max_new_tokens=4096", "generation.mean_length=256"
    packed, alone = training_s(*dense), training_s(*dense, "training.packing=false")
    padded = training_s(*dense, "training.packing=false", "generation.mean_length=4096")
    assert packed < alone < padded / 2  # it is the tokens that are computed, not the longest row's


@pytest.mark.parametrize(
    ("name", "sets", "way", "why"),
    [
        ("meta-llama/Llama-3.1-8B", ["cluster.gpu=h100"], "delta", "keep the base"),
        ("meta-llama/Llama-3.1-8B", ["cluster.gpu=h100", "training.lora.refit=merged"], "merged", "Pinned"),
        ("meta-llama/Llama-3.1-8B", ["cluster.gpu=h100", "vllm.quantization=fp8"], "merged", "vllm.quantization"),
        ("HuggingFaceTB/SmolLM2-135M", ["cluster.gpu=cpu", "training.lora.refit=adapters"], "adapters", "Pinned"),
        (
            "HuggingFaceTB/SmolLM2-135M",
            ["cluster.gpu=cpu", "model.dtype=bfloat16", "training.lora.refit=adapters"],
            "adapters",
            "Pinned",
        ),
        ("HuggingFaceTB/SmolLM2-135M", ["cluster.gpu=cpu"], "delta", r" s with adapters."),
        ("deepseek-ai/DeepSeek-V3", ["cluster.gpu=h200", "cluster.nodes=32"], "merged", "latent attention"),
    ],
)
def test_the_plan_says_how_adapters_reach_the_engines(name: str, sets: list[str], way: str, why: str) -> None:
    plan = adapted_plan(name, *sets)
    assert plan.config_values()["training.lora.refit"] == way
    assert [why in reason.rule for reason in plan.reasons if reason.value == f"training.lora.refit={way}"] == [True]


@pytest.mark.parametrize(
    ("name", "sets", "words"),
    [
        ("meta-llama/Llama-3.1-8B", ["cluster.gpu=h100", "training.lora.refit=adapters"], "compiled and captured"),
        (
            "meta-llama/Llama-3.1-8B",
            ["cluster.gpu=h100", "training.lora.refit=delta", "vllm.quantization=fp8"],
            "delta is refused: vllm.quantization = fp8",
        ),
        (
            "HuggingFaceTB/SmolLM2-135M",
            ["cluster.gpu=cpu", "run.algorithm=distillation", "teacher.policy=true", "training.lora.refit=adapters"],
            "own teacher averages merged weights",
        ),
        ("Qwen/Qwen3-30B-A3B", ["cluster.gpu=cpu", "training.lora.refit=adapters"], "layers of experts"),
        ("HuggingFaceTB/SmolLM2-135M", ["cluster.gpu=cpu", "training.lora.dropout=0.1"], "ratios of fresh tokens"),
        (
            "Qwen/Qwen3-30B-A3B",
            ["cluster.gpu=h100", "training.lora.refit=delta", "training.lora.targets=all-linear"],
            "engines stack routed experts",
        ),
        (
            "HuggingFaceTB/SmolLM2-135M",
            ["cluster.gpu=cpu", "training.lora.refit=delta", "training.lora.modules_to_save=[lm_head]"],
            "modules that are trained whole .* are sent with all weights",
        ),
        (
            "HuggingFaceTB/SmolLM2-135M",
            ["cluster.gpu=cpu", "training.lora.rank=0", "training.lora.refit=delta"],
            "no ef",
        ),
    ],
)
def test_a_way_of_adapters_that_cannot_serve_the_run_is_refused(name: str, sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        adapted_plan(name, *sets)
    assert caught.value.hint
    assert ("training.lora.exclude=['*.experts.*']" in caught.value.hint) == (words == "engines stack routed experts")


def test_a_kept_base_takes_the_room_of_the_adapted_matrices() -> None:
    """Llama 3.1 8B has 32 layers with 6144 x 4096, 4096 x 4096 and three 14336 x 4096 matrices of two bytes an
    element."""
    one = "cluster.gpu=h100", "cluster.nodes=1", "cluster.gpus_per_node=8", "generation.tp=2"
    kept, merged = (adapted_plan("meta-llama/Llama-3.1-8B", *one, f"training.lora.refit={way}")
                    for way in ("delta", "merged"))  # fmt: skip
    expected = 32 * 4096 * (6144 + 4096 + 3 * 14336)  # of two ranks
    assert kept.memory["generation"].parts["base of adapters"] == expected
    assert "base of adapters" not in merged.memory["generation"].parts
    assert kept.memory["refit"].parts["engine weights"] - merged.memory["refit"].parts["engine weights"] == expected


def adapted_plan(name: str, *sets: str) -> Plan:
    facts = lookup(name)
    assert facts is not None
    adapters = ["model.name=x", "training.lora.rank=16"]
    return plan_of(resolve(sets=[*adapters, *sets], environment={}).config, facts)


def test_a_plan_of_several_adapters_counts_their_changes() -> None:
    """SmolLM2-135M has 30 layers of seven matrices; rank 16 gives 4,884,480 parameters. Each has 12 bytes of weights
    and moments, which leave and come back."""
    facts = lookup("HuggingFaceTB/SmolLM2-135M")
    assert facts is not None
    sets = ["model.name=x", "cluster.gpu=cpu", "training.lora.rank=16", "training.lora.refit=delta", "training.dp=1"]
    config = resolve(sets=[*sets, "model.dtype=float32", "generation.engines=1"], environment={}).config
    alone, turns = (plan_of(config, facts, held_adapters=held) for held in (1, 4))
    changes = turns.seconds[Phase.REFIT] - 2 * alone.seconds[Phase.REFIT]
    merged = 4 * 30 * (576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536) / CPU_MERGED_BYTES_PER_S
    copied = 2 * 12 * 4_884_480 / (turns.request.cluster.device.memory_bandwidth / 2)
    assert changes == pytest.approx(merged + copied, rel=1e-3)


def swept(name: str, held: int, *sets: str) -> Plan:
    facts = lookup(name)
    assert facts is not None
    config = resolve(sets=["model.name=x", "training.lora.rank=16", *sets], environment={}).config
    return plan_of(config, facts, held_adapters=held)


SMALL, LARGE = ("HuggingFaceTB/SmolLM2-135M", 2, "cluster.gpu=cpu", "training.dp=1"), (
    "meta-llama/Llama-3.1-8B", 4, "cluster.gpu=h100", "cluster.gpus_per_node=8",
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "engines", "runs", "rule"),
    [
        (SMALL, 2, 2, "sample its next batch while the policy trains the other runs"),
        ((*SMALL, "generation.engines=4"), 4, 2, "sample its next batch while the policy trains the other runs"),
        ((*SMALL, "generation.engines=3"), 3, 1, "generation.engines = 3 is no multiple of 2 runs"),
        ((*SMALL, "training.offload=true"), 1, 1, "training.offload moves the policy to host memory"),
        (LARGE, None, 1, "engines on the policy's GPUs sleep while it trains; generation.colocated=false"),
        ((*LARGE, "generation.colocated=false"), 4, 4, "sample its next batch while the policy trains the other runs"),
    ],
)  # fmt: skip
def test_runs_of_a_sweep_have_engines_of_their_own_where_these_can_sample_meanwhile(
    asked: tuple, engines: int | None, runs: int, rule: str
) -> None:
    plan = swept(*asked)
    assert plan.generation is not None
    assert plan.generation.runs == runs
    assert engines in (None, plan.generation.engines)
    assert any(reason.value.startswith("engines of a run=") and rule in reason.rule for reason in plan.reasons)


def test_a_step_with_own_engines_waits_for_the_part_of_its_rollouts_that_outlasts_the_other_runs() -> None:
    """Four runs take turns in the policy; while one samples, the three others take a step."""
    plan = swept(*LARGE, "generation.colocated=false", "generation.devices=4", "generation.tp=1")
    assert plan.generation is not None
    assert plan.generation.of_run == 1
    sampled = generation_time(plan.request, plan.generation).total + plan.request.constants.reward_s
    trains = plan.total_s - plan.seconds[Phase.WAITING]
    assert plan.total_s == pytest.approx(max(trains, (sampled + trains) / 4))


def test_engines_have_room_for_the_base_that_they_keep() -> None:
    """Llama-3.1-8B has 6.98 billion weights in the adapted matrices of its layers, of 2 bytes."""
    plan = swept("meta-llama/Llama-3.1-8B", 1, "cluster.gpu=h100", "generation.tp=1", "training.lora.refit=delta")
    assert plan.memory["generation"].parts["base of adapters"] == pytest.approx(2 * 32 * 218_103_808)
    assert plan.generation is not None
    held = sum(size for name, size in plan.memory["generation"].parts.items() if name != "policy asleep")
    assert held <= plan.generation.memory_fraction * plan.cluster.device.memory
