"""Plans: what is chosen, pinned, refused and said."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError, MachineError, NoPlanError
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.facts import ListedTensor
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs.adapters import lora_choice
from rlctl.planner.costs.memory import host_memory, training_memory
from rlctl.planner.costs.parameters import count
from rlctl.planner.costs.time import logprobs_time, offload_seconds, training_time
from rlctl.planner.from_config import cluster_from_config, pins_from_config
from rlctl.planner.inputs.cluster import GIB, ClusterFacts, cpu_device, make_cluster, match_device
from rlctl.planner.inputs.constants import DEFAULTS
from rlctl.planner.inputs.request import Goal, Request, Workload
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.planner.result import Plan
from rlctl.planner.search.layout_rules import training_problems
from rlctl.planner.views.explain import explain
from rlctl.planner.views.render import compare_text, plan_json, plan_text
from rlctl.settings.run import ClusterConfig
from rlctl.settings.training import LoraConfig
from rlctl.telemetry.phases import Phase
from support.catalog_models import make_plan, model
from support.plans import plan_of

CPU = ClusterFacts(cpu_device(2, 24 * GIB), 1, 0)


def plan(name: str, gpu: str = "h100", nodes: int = 1, per_node: int | None = None, **workload: object) -> Plan:
    return make_plan(model(name), make_cluster(gpu, nodes, per_node), Workload(**workload))


def test_a_plan_that_runs_comes_before_a_faster_one_that_does_not() -> None:
    """On nodes of six GPUs vLLM's eight ranks of tensor parallelism would leave four unused."""
    facts, cluster, workload = model("Qwen3-32B"), make_cluster("l40s", 8, 6), Workload(64, 32, mean_new_tokens=795)
    wide = make_plan(facts, cluster, workload, {"generation.tp": 8}, prefer_runnable=False)
    made = make_plan(facts, cluster, workload)
    assert not wide.runnable
    assert made.runnable


def test_gradients_in_bf16_leave_room_for_no_recompute() -> None:
    """The published NeMo-RL run of this model on a node: data parallel only, nothing recomputed."""
    workload = Workload(64, 32, mean_new_tokens=795)
    made = make_plan(model("Llama-3.1-8B"), make_cluster("h100"), workload, gradient_bytes=2)
    assert (made.training.parallel.dp, made.training.recompute) == (8, "none")


def test_rows_cost_the_tokens_that_are_in_them() -> None:
    """Dynamic batching costs its padding, and a row of one rollout the launches of a short micro-batch."""
    shape = {"mean_new_tokens": 795, "max_new_tokens": 4096}
    ways = {"packed": {}, "dynamic": {"packing": False, "dynamic": True}, "alone": {"packing": False}}
    seconds = {
        name: plan("Llama-3.1-8B", **shape, **way).seconds[Phase.TRAINING]  # type: ignore[arg-type]
        for name, way in ways.items()
    }
    assert seconds["packed"] < seconds["dynamic"] < 1.2 * seconds["packed"]
    assert seconds["packed"] < seconds["alone"] < 2 * seconds["packed"]


def rule_of(made: Plan, key: str = "training.backend") -> str:
    return next(reason.rule for reason in made.reasons if reason.value.startswith(f"{key}="))


@pytest.mark.parametrize(
    ("pins", "backend", "why"),
    [
        ({}, "megatron", "In published runs with one trainer on H100s, Megatron-Core was faster"),
        ({"training.pp": 2}, "megatron", "dtensor cannot: FSDP2 has no pipeline stages"),
        ({"training.replicate": 2}, "dtensor", "megatron cannot: training.replicate = 2: copies of sharded weights"),
        ({"training.backend": "dtensor"}, "dtensor", "Pinned: training.backend=dtensor"),
        ({"training.tp": 1, "training.pp": 1, "training.recompute": "none", "training.optimizer_offload": False},
         "dtensor", "megatron cannot: No plan fits 1 x 8 H100"),
    ],
)  # fmt: skip
def test_the_backend_is_the_one_that_can_and_megatron_where_both_do(
    pins: dict[str, object], backend: str, why: str
) -> None:
    made = make_plan(model("Llama-3.1-8B"), make_cluster("h100"), Workload(64, 32, mean_new_tokens=795), pins)
    assert (made.backend, made.config_values()["training.backend"]) == (backend, backend)
    assert why in rule_of(made)


def test_a_backend_that_refuses_what_is_asked_for_is_not_chosen() -> None:
    facts, cluster, asked = model("Llama-3.1-8B"), make_cluster("h100"), []

    def but(*able: str) -> Plan:
        def refusal(made: Plan) -> str | None:
            asked.append(made.backend)
            return None if made.backend in able else f"{made.backend} has no such thing."

        return make_plan(facts, cluster, Workload(), refusal=refusal)

    for able, chosen, why in (
        ("megatron", "megatron", "dtensor cannot: dtensor has no such thing."),
        ("dtensor", "dtensor", "megatron cannot: megatron has no such thing."),
        ("neither", "megatron", "No backend can run it. megatron: megatron has no such thing"),
    ):
        made = but(able)
        assert (made.backend, why in rule_of(made)) == (chosen, True), rule_of(made)
        said = "megatron: megatron has no such thing; dtensor: dtensor has no such thing"
        assert "; ".join(made.not_runnable_because) == ("" if able != "neither" else said)
    assert set(asked) == {"megatron", "dtensor"}


def test_a_family_that_only_dtensor_can_train_goes_to_it() -> None:
    tensors = (ListedTensor("model.layers.{layer}.mlp.up_proj.weight", (3072, 1024), tuple(range(28))),)
    facts = replace(model("Qwen3-0.6B"), family="cohere", listed=tensors)
    made = make_plan(facts, make_cluster("h100"), Workload())
    assert (made.backend, made.runnable) == ("dtensor", True)
    assert "megatron cannot: model.name: family cohere has no weight map for the backend megatron" in rule_of(made)
    assert not make_plan(facts, make_cluster("h100"), Workload(), {"training.backend": "megatron"}).runnable
    neither = make_plan(
        facts, make_cluster("h100"), Workload(), refusal=lambda plan: f"{plan.backend} has no such thing."
    )
    family, other = neither.not_runnable_because
    assert ("cohere has no weight map" in family, other) == (True, "dtensor: dtensor has no such thing")


def test_70b_needs_model_parallelism() -> None:
    made = plan("Llama-3.1-70B", nodes=8)
    assert made.training.parallel.tp * made.training.parallel.pp >= 4
    assert made.training.parallel.world_size == 64


def test_moe_spreads_its_experts_or_its_layers() -> None:
    made = plan("Qwen3-235B-A22B", nodes=16)
    assert made.training.parallel.ep * made.training.parallel.pp >= 16


@pytest.mark.parametrize("gpu", ["h100", "h200", "a100", "b200", "gb200", "l40s"])
def test_memory_of_every_phase_fits_the_device(gpu: str) -> None:
    made = plan("Qwen3-4B", gpu)
    assert all(memory.total <= made.cluster.device.memory for memory in made.memory.values())
    assert made.host_memory <= made.cluster.device.host_memory


def test_every_value_has_a_reason() -> None:
    made = plan("Llama-3.1-70B", nodes=8)
    told = " ".join(reason.value for reason in made.reasons)
    for key in made.config_values():
        assert key.replace("generation.max_batched_tokens", "generation.tp") in told, key
    assert all(reason.rule for reason in made.reasons)
    assert made.rejected


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"training.tp": 4, "training.pp": 4, "generation.tp": 4}, {"tp": 4, "pp": 4, "dp": 4}),
        ({"training.cp": 2}, {"cp": 2}),
        ({"training.recompute": "full"}, {"recompute": "full"}),
        ({"training.optimizer_offload": True}, {"optimizer_offload": True}),
        ({"training.micro_batch_tokens": 8192}, {"micro_batch_tokens": 8192}),
        ({"training.vpp": 2, "training.pp": 2}, {"vpp": 2, "pp": 2}),
    ],
)
def test_pins_are_kept_and_the_rest_is_planned_around_them(
    pins: dict[str, object], expected: dict[str, object]
) -> None:
    made = make_plan(model("Llama-3.1-70B"), make_cluster("h100", 8), Workload(), pins)
    chosen = made.training.chosen()
    assert {key: chosen[key] for key in expected} == expected
    assert made.training.parallel.world_size == 64


def test_generation_pins_are_kept() -> None:
    pins = {
        "generation.tp": 2,
        "generation.engines": 3,
        "generation.memory_fraction": 0.5,
        "generation.max_concurrent": 99,
    }
    made = make_plan(model("Llama-3.1-8B"), make_cluster("h100"), Workload(), pins)
    assert made.generation is not None
    assert (made.generation.tp, made.generation.engines, made.generation.memory_fraction) == (2, 3, 0.5)
    assert made.generation.max_concurrent == 99


@pytest.mark.parametrize(
    ("name", "key", "value", "nearest", "limit"),
    [
        ("Llama-3.1-70B", "training.tp", 3, 2, "64 attention heads"),
        ("Llama-3.1-70B", "training.pp", 200, 16, "80 layers"),
        ("Qwen3-30B-A3B", "training.ep", 24, 16, "128 experts"),
        ("Llama-3.1-8B", "generation.tp", 5, 4, "32 attention heads"),
        ("Llama-3.1-8B", "training.micro_batch_tokens", 100, 4096, "one rollout of 4,096 tokens"),
        ("Llama-3.1-8B", "training.ep", 2, 1, "a model with experts"),
    ],
)
def test_impossible_pins_name_the_limit_and_the_nearest_value(
    name: str, key: str, value: int, nearest: int, limit: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(model(name), make_cluster("h100", 2), Workload(), {key: value})
    assert f"{key} = {value}" in caught.value.message
    assert limit in caught.value.message
    assert caught.value.hint is not None
    assert f"{key}={nearest}" in caught.value.hint


def test_a_change_that_is_named_really_helps() -> None:
    pins = {"training.optimizer_offload": False}
    with pytest.raises(NoPlanError, match=r"training\.optimizer_offload=true|optimizer_offload=False a plan fits"):
        make_plan(model("Llama-3.1-8B"), make_cluster("h100", 1, 1), Workload(), pins)
    assert make_plan(
        model("Llama-3.1-8B"), make_cluster("h100", 1, 1), Workload(), {"training.optimizer_offload": True}
    )


def test_the_optimizer_of_fsdp_is_explained_by_its_two_moments() -> None:
    """Its float32 weights are no state: 8 bytes of 8.03 billion parameters over 8 ranks."""
    made = make_plan(model("Llama-3.1-8B"), make_cluster("h100"), Workload(64, 8), {"training.backend": "dtensor"})
    assert f"{8.03e9 / GIB:.2f} GiB = 8 bytes x (dense / 8 ranks" in explain(made)


def float8(gpu: str, **more: object) -> RlConfig:
    values = {"model": {"name": "Llama-3.1-8B"}, "cluster": {"gpu": gpu, "nodes": 1}, "megatron": {"fp8": "hybrid"}}
    return RlConfig.model_validate(values | more)


def test_float8_training_is_planned_where_it_is_asked_for() -> None:
    facts = model("Llama-3.1-8B")
    usual = plan_of(float8("h100", megatron={}), facts)
    made = plan_of(float8("h100"), facts)
    assert (usual.training.precision, made.training.precision) == ("bf16", "fp8")
    assert made.runnable
    assert made.seconds[Phase.TRAINING] < usual.seconds[Phase.TRAINING]
    assert any(reason.value == "precision=fp8" and "megatron.fp8" in reason.rule for reason in made.reasons)
    parts = [plan.training.parallel.tp * plan.training.parallel.pp for plan in (usual, made)]
    weights = [plan.memory["logprobs"].parts["weights"] * n for plan, n in zip((usual, made), parts, strict=True)]
    tables = 2 * 128256 * 4096  # embedding and head; all else has float8 copies, transposed ones among them
    assert weights[1] == pytest.approx(2 * weights[0] - 2 * tables, rel=0.01)
    assert made.memory["refit"].parts["weights"] * parts[1] == pytest.approx(weights[0], rel=0.01)  # dropped
    assert "2 copies of the matrices in float8" in explain(made)
    assert made.generation.weight_bytes == 2.0  # engines hold what a refit gives them


@pytest.mark.parametrize(
    ("gpu", "more", "why"),
    [
        ("cpu", {}, "needs GPUs"),
        ("a100", {}, "A100 has no units for it"),
        ("h100", {"megatron": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}, "H100 has no units for its recipe mxfp8"),
        ("h100", {"model": {"name": "Llama-3.1-8B", "dtype": "float32"}}, "model.dtype is float32"),
        ("h100", {"training": {"lora": {"rank": 8}}}, "adapters"),
    ],
)
def test_float8_is_refused_where_it_cannot_be_by_its_key(gpu: str, more: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"megatron\.fp8 = .*{why}"):
        plan_of(float8(gpu, **more), model("Llama-3.1-8B"))


def test_float8_takes_sides_that_are_multiples_of_16() -> None:
    facts, cluster = model("Llama-3.1-8B"), make_cluster("h100", 1)
    narrow = replace(facts, intermediate=14336 + 64)
    for tp, precision, broken in ((2, "fp8", False), (8, "fp8", True), (8, "bf16", False)):
        choice = TrainingChoice(ParallelSpec(tp=tp, dp=8 // tp, etp=1), precision=precision)
        found = training_problems(Request(narrow, cluster, Workload(max_length=2048)), choice, 8)
        assert [problem.key for problem in found] == ["training.tp"] * broken
    assert make_plan(narrow, cluster, Workload(), training_precision="fp8").training.parallel.tp < 8


def test_states_in_host_memory_are_a_last_resort() -> None:
    facts = model("Llama-3.1-8B")
    asked = {"training.optimizer_offload": True}
    made = make_plan(facts, make_cluster("h100", 1), Workload())
    assert not made.training.optimizer_offload
    assert make_plan(facts, make_cluster("h100", 1), Workload(), asked).training.optimizer_offload
    alone = make_plan(facts, make_cluster("h100", 1, 1), Workload())
    assert alone.training.optimizer_offload
    assert any("Nothing else fits" in reason.rule for reason in alone.reasons)


def test_a_reference_waits_in_host_memory_before_states_of_the_optimizer_do() -> None:
    """Four H100 hold the weights, gradients and states of 14 billion parameters, and no copy of the weights."""
    facts, four = model("Qwen3-14B"), make_cluster("h100", 1, 4)
    pins = {"training.backend": "dtensor", "training.optimizer_offload": False}
    plain, copied = (make_plan(facts, four, Workload(reference=r), pins).training for r in (False, True))
    assert (plain.reference_offload, copied.reference_offload) == (False, True)
    roomy = make_plan(facts, make_cluster("h100", 1), Workload(reference=True), pins).training
    assert not roomy.reference_offload
    held = replace(copied, reference_offload=False)
    workload = Workload(reference=True)
    request = Request(facts, four, workload)
    whole = pytest.approx(count(facts).total, rel=1e-3)  # float32, a quarter on each
    assert training_memory(request, held, 0.0, 1).parts["reference"] == whole
    assert "reference" not in training_memory(request, copied, 0.0, 1).parts
    assert logprobs_time(request, copied) > logprobs_time(request, held)
    assert host_memory(facts, copied, four, False, 0.0) > host_memory(facts, held, four, False, 0.0)


def test_states_in_host_memory_cost_the_host_link_and_leave_the_device() -> None:
    facts, cluster = model("Llama-3.1-8B"), make_cluster("h100", 1)
    pins = {"training.tp": 1, "training.pp": 1, "training.recompute": "full", "training.micro_batch_tokens": 4096}
    there, here = (
        make_plan(facts, cluster, Workload(64, 8), {**pins, "training.optimizer_offload": offload})
        for offload in (False, True)
    )
    assert there.runnable
    assert here.runnable
    owned = 8.03e9 / 8
    parts = here.memory["training"].parts
    assert there.memory["training"].parts["optimizer"] == pytest.approx(12 * owned, rel=0.01)
    # The embedding's states visit at once, where activations were.
    assert parts["optimizer"] == pytest.approx(12 * 128256 * 4096 - parts["activations"] - parts["logits"])
    # 12 bytes a parameter down and 12 up, at four fifths of 55 GB/s; without it they come back after generation.
    streamed = here.seconds[Phase.TRAINING] - there.seconds[Phase.TRAINING]
    onload = offload_seconds(Request(facts, cluster), there.training)
    assert streamed + onload == pytest.approx(24 * owned / (0.8 * 55e9), rel=0.02)
    assert "24 bytes" in explain(here)
    assert "24 bytes" not in explain(there)


def test_on_a_cpu_states_in_host_memory_save_nothing_and_it_says_so() -> None:
    facts, workload = model("SmolLM2-135M"), Workload(8, 4, 128)
    there, here = (
        make_plan(facts, CPU, workload, {"training.optimizer_offload": offload, "training.dp": 1})
        for offload in (False, True)
    )
    assert here.runnable
    assert here.memory["training"].parts["optimizer"] >= there.memory["training"].parts["optimizer"]
    assert not make_plan(facts, CPU, workload).training.optimizer_offload
    rule = next(reason.rule for reason in here.reasons if reason.value.startswith("training.optimizer_offload"))
    assert "saves nothing" in rule


def test_laptop_plan_is_runnable_and_uses_the_cores() -> None:
    made = make_plan(model("SmolLM2-135M"), CPU, Workload(8, 4, 128, max_new_tokens=16))
    values = made.config_values()
    assert made.runnable
    assert values["training.tp"] * values["training.dp"] * values["training.threads"] == 2
    assert values["generation.threads"] == 2
    assert values["generation.kv_cache_bytes"] >= 128 * 30 * 2 * 3 * 64 * 4
    assert made.training.precision == "float32"


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (1, 1), (3, 1)])
def test_cpu_layouts_can_be_pinned(tp: int, dp: int) -> None:
    made = make_plan(model("SmolLM2-135M"), CPU, Workload(8, 4, 128), {"training.tp": tp, "training.dp": dp})
    assert (made.training.parallel.tp, made.training.parallel.dp) == (tp, dp)
    assert made.training.threads is not None
    assert made.training.threads >= 1


def test_a_cpu_without_memory_is_refused() -> None:
    with pytest.raises(NoPlanError):
        make_plan(model("Llama-3.1-8B"), CPU, Workload(8, 4, 128))


@pytest.mark.parametrize(
    ("pins", "key"),
    [
        ({"generation.tp": 8}, "generation.tp = 8"),
        ({"generation.tp": 4, "generation.pp": 2}, "generation.pp = 2"),
    ],
)
def test_what_train_cannot_run_is_named_by_key(pins: dict[str, object], key: str) -> None:
    made = make_plan(model("Llama-3.1-8B"), make_cluster("h100", 2, 6), Workload(), pins)
    assert not made.runnable
    assert any(why.startswith(key) for why in made.not_runnable_because)
    with pytest.raises(ConfigError, match=key.split(" ")[0]):
        refuse_unrunnable(made)


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("Llama-3.1-8B", {"training.pp": 2, "training.vpp": 2}),
        ("Llama-3.1-8B", {"training.optimizer_offload": True}),
        ("Llama-3.1-8B", {"training.cp": 2, "training.micro_batch_tokens": 8192, "training.recompute": "selective"}),
        ("Qwen3-30B-A3B", {"training.ep": 4, "training.tp": 2, "training.etp": 1, "generation.ep": 1}),
    ],
)
def test_every_layout_of_training_is_runnable(name: str, pins: dict[str, object]) -> None:
    made = make_plan(model(name), make_cluster("h100", 4), Workload(), {**pins, "generation.dp": 1})
    assert made.not_runnable_because == []
    assert all(made.config_values()[key] == value for key, value in pins.items())


def test_batches_smaller_than_the_ranks_are_refused_by_rule() -> None:
    facts, cluster = model("Llama-3.1-8B"), make_cluster("h100")
    problems = training_problems(Request(facts, cluster, Workload(2, 2)), TrainingChoice(ParallelSpec(dp=8)), 8)
    assert [problem.key for problem in problems] == ["training.dp"]


def test_interleaved_stages_must_divide_the_layers() -> None:
    facts, cluster = model("Llama-3.1-8B"), make_cluster("h100")
    choice = TrainingChoice(ParallelSpec(pp=8, vpp=3))
    assert [p.key for p in training_problems(Request(facts, cluster), choice, 8)] == ["training.vpp"]


def test_experts_with_tensor_parallelism_need_sequence_parallelism() -> None:
    facts, cluster = model("Qwen3-30B-A3B"), make_cluster("h100")
    choice = TrainingChoice(ParallelSpec(tp=2, dp=4, sequence_parallel=False))
    assert "training.sequence_parallel" in [p.key for p in training_problems(Request(facts, cluster), choice, 8)]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H20-3e", "h20"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "l40"),
        ("Tesla T4", None),
    ],
)
def test_drivers_names_are_recognized(reported: str, name: str | None) -> None:
    assert match_device(reported) == name


def test_texts_name_model_machine_and_numbers() -> None:
    made = plan("Llama-3.1-8B")
    text = plan_text(made, "meta-llama/Llama-3.1-8B")
    assert "8.0B" in text
    assert "H100" in text
    assert "8.030B parameters" in explain(made)
    other = make_plan(model("Llama-3.1-8B"), make_cluster("h100"), Workload(), {"training.tp": 4})
    assert any(line.startswith("* training.tp") for line in compare_text([made, other], ["a", "b"]).splitlines())
    assert made.generation is not None
    (tokens,) = [line for line in compare_text([made, other], ["a", "b"]).splitlines() if "kv_cache_tokens" in line]
    assert f"{made.generation.kv_cache_tokens:,}" in tokens


def test_configuration_keys_become_pins_and_plan_values_valid_keys() -> None:
    config = RlConfig.model_validate(
        {
            "training": {"tp": 2},
            "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100"},
            "generation": {"max_new_tokens": 2048},
        }
    )
    assert pins_from_config(config) == {"training.tp": 2}
    made = plan_of(config, model("Llama-3.1-8B"))
    assert made.training.parallel.tp == 2
    for key, value in made.config_values().items():
        section, name = key.split(".")
        changed = config.model_dump() | {section: config.model_dump()[section] | {name: value}}
        RlConfig.model_validate(changed)


def test_a_gpu_preset_on_a_machine_without_is_the_machine_s_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    config = RlConfig(cluster=ClusterConfig(nodes=1, gpus_per_node=8))
    with pytest.raises(MachineError):
        cluster_from_config(config)
    assert cluster_from_config(config, assume="h100").gpus == 8
    assert cluster_from_config(RlConfig(cluster=ClusterConfig(gpu="cpu"))).is_cpu


@pytest.mark.parametrize(
    ("kind", "nodes", "per_node"), [("h100", 1, 8), ("gb200", 1, 4), ("gb200", 2, 4), ("gh200", 2, 1), ("auto", 2, 4)]
)
def test_a_preset_has_the_gpus_of_its_nodes(
    kind: str, nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.planner.from_config.local_gpus", lambda: ["NVIDIA GB200"] * 4)
    config = resolve({1: "1node", 2: "2nodes"}[nodes], overrides=[f"cluster.gpu={kind}"], environment={}).config
    found = cluster_from_config(config)
    assert (found.nodes, found.gpus_per_node) == (nodes, per_node)
    assert found.device.name == (kind if kind != "auto" else "gb200")


def test_planning_imports_no_engine() -> None:
    code = (
        "import sys; from rlctl.models.catalog import lookup; from rlctl.planner.inputs.cluster import make_cluster;"
        "from rlctl.planner.make_plan import make_plan; from rlctl.planner.inputs.request import Request, Workload;"
        "make_plan(Request(lookup('Qwen3-8B'), make_cluster('h100'), Workload()));"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'megatron') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.strip() == "[]"


def test_a_plan_is_the_same_when_made_again() -> None:
    first, second = (plan("Qwen3-32B", nodes=4) for _ in range(2))
    assert plan_json(first) == plan_json(second)
    assert replace(first, pins={}) == replace(second, pins={})


def test_adapters_fit_where_all_weights_do_not_and_train_faster() -> None:
    facts, cluster, workload = model("Llama-3.1-70B"), make_cluster("h100", 1, 8), Workload(64, 8, max_length=2048)
    whole = {"training.optimizer_offload": False}
    with pytest.raises(NoPlanError):
        make_plan(facts, cluster, workload, whole)
    made = make_plan(facts, cluster, workload, whole, adapters=lora_choice(facts, LoraConfig(rank=16)))
    assert made.runnable
    assert "LoRA rank 16" in made.name()
    assert "adapters" in explain(made)
    small = model("Llama-3.1-8B")
    pins = {"training.tp": 1, "training.pp": 1, "training.cp": 1, "training.recompute": "full"}
    pins["training.micro_batch_tokens"] = 8192
    adapters = lora_choice(small, LoraConfig(rank=16))
    plans = [make_plan(small, cluster, workload, pins, adapters=each) for each in (None, adapters)]
    full, low = (training_time(made.request, made.training) for made in plans)
    # Of four forward passes' worth of multiplications with the weights, four fifths of a pass's time, three are left,
    # which is 0.8. Narrow products of adapters take 0.06 of a pass.
    assert 0.82 < low.compute / full.compute < 0.88
    assert low.total < full.total


def test_layers_of_given_stages_are_planned_with() -> None:
    facts, cluster = model("Qwen3-8B"), make_cluster("h100", 1, 8)
    pins = {"training.pp": 4, "training.first_stage_layers": 6, "training.last_stage_layers": 10}
    made = make_plan(facts, cluster, Workload(), pins)
    assert made.training.parallel.first_stage_layers == 6
    assert made.training.parallel.vpp == 1 or all(n % made.training.parallel.vpp == 0 for n in (6, 10))
    with pytest.raises(ConfigError, match="36 layers with first 7 do not split evenly"):
        make_plan(facts, cluster, Workload(), {"training.pp": 4, "training.first_stage_layers": 7})
    with pytest.raises(ConfigError, match=r"needs training\.pp > 1"):
        make_plan(facts, cluster, Workload(), {"training.pp": 1, "training.last_stage_layers": 7})


def test_a_pinned_mover_is_in_the_plan_and_in_its_seconds() -> None:
    facts, cluster = model("Llama-3.1-8B"), make_cluster("h100", 1, 8)
    usual, disk = (make_plan(facts, cluster, Workload(), pins) for pins in ({}, {"refit.mover": "disk"}))
    assert (usual.mover, disk.mover) == ("cuda-ipc", "disk")
    assert disk.seconds[Phase.REFIT] > usual.seconds[Phase.REFIT]
    assert any(reason.value == "mover=disk" and reason.rule.startswith("Pinned") for reason in disk.reasons)
    with pytest.raises(ConfigError, match="the engines compute on a CPU"):
        make_plan(model("Qwen3-0.6B"), CPU, Workload(), {"refit.mover": "cuda-ipc"})
    with pytest.raises(ConfigError, match="separate devices"):
        make_plan(facts, cluster, Workload(), {"refit.mover": "cuda-ipc", "generation.colocated": False})
    with pytest.raises(ConfigError, match="NCCL takes one process of each GPU"):
        make_plan(facts, cluster, Workload(), {"refit.mover": "collective"})
    apart = make_plan(facts, cluster, Workload(), {"refit.mover": "collective", "generation.colocated": False})
    assert apart.mover == "collective"
    refit = apart.memory["refit"].parts["refit communicators"]
    assert refit == DEFAULTS.communicator_bytes * (1 if "KV" in apart.memory["refit"].parts else apart.generation.tp)


def test_sleeping_engines_are_planned_with_graphs_and_their_copies_of_weights() -> None:
    """7 GiB on the device (vLLM's issue 47654), and pinned copies of the weights, which torch rounds up to powers of
    two: by 1 / ln 2 on average for sizes of all kinds."""
    plan = make_plan(model("Qwen3-8B"), make_cluster("h100", 1, 8), Workload())
    assert plan.memory["training"].parts["engine asleep"] == 7 * GIB
    assert plan.memory["training"].total < 75.3 * GIB
    facts, choice = model("Llama-3.1-8B"), TrainingChoice(ParallelSpec(dp=8))
    with_engines, without = (host_memory(facts, choice, make_cluster("h100", 1, 8), True, size) for size in (GIB, 0.0))
    assert with_engines - without == pytest.approx(8 * GIB / math.log(2))


@pytest.mark.parametrize(
    ("name", "nodes", "sizes", "tps"),
    [
        ("Llama-3.1-8B", 1, {"dp": 8}, [1]),
        ("Qwen3-30B-A3B", 4, {"ep": 8}, [2, 4]),
        ("Llama-3.1-70B", 8, {"tp": 4, "pp": 4}, [4, 8]),
    ],
)
def test_equal_plans_are_decided_by_published_layouts(
    name: str, nodes: int, sizes: dict[str, int], tps: list[int]
) -> None:
    """NeMo-RL's published layouts of these models on as many H100s."""
    made = make_plan(model(name), make_cluster("h100", nodes), Workload(64, 32, mean_new_tokens=795), gradient_bytes=2)
    assert {size: getattr(made.training.parallel, size) for size in sizes} == sizes
    assert made.generation.tp in tps


@pytest.mark.parametrize(
    ("name", "gpu", "nodes", "goal"),
    [
        ("Llama-3.1-8B", "h100", 1, "fast"),
        ("Llama-3.1-8B", "h100", 1, "safe"),
        ("Qwen3-30B-A3B", "h100", 2, "fast"),
        ("Llama-3.1-70B", "a100", 8, "fast"),
        ("Qwen3-8B", "h100", 4, "cheap"),
    ],
)
def test_each_alternative_is_listed_once_with_its_disadvantage(name: str, gpu: str, nodes: int, goal: Goal) -> None:
    """A layout of one side is timed with the chosen other side. A shorter step within the prediction's error (18%) is
    "not clearly faster", and a rule says what speaks against every plan that is not slower."""
    made = make_plan(model(name), make_cluster(gpu, nodes), Workload(64, 16, goal=goal))
    text = plan_text(made, name)
    assert text.count("not chosen") == 1
    named = [f"{one.side} {one.layout}" for one in made.next_best] + [other.plan for other in made.rejected]
    assert len(set(named)) == len(named)
    halves = {one.layout for one in made.next_best} | {half.name() for half in (made.training, made.generation)}
    for other in made.alternatives:
        shown = [one for one in made.rejected if one.plan == other.name()]
        parts = {half.partition(" ")[2] for half in other.name().removesuffix("; split").split("; ")}
        assert shown or parts <= halves or goal == "cheap"
    for one in made.next_best:
        if one.seconds is None or goal == "cheap":
            continue
        ratio = one.seconds / made.total_s
        if 1 / 1.18 <= ratio < 1:
            assert re.fullmatch(r"not clearly faster; \S.+", one.why)
        elif ratio < 1:
            assert re.fullmatch(r"\d+% faster; \S.+", one.why)
        else:
            assert re.match(r"not clearly slower|\d+% slower", one.why)


def test_goals_change_what_is_chosen() -> None:
    """Fast: the shortest step; safe: more memory left; cheap: the fewest GPU seconds, on a part of the machine."""
    facts, cluster = model("Qwen3-8B"), make_cluster("h100", 4, 8)
    made = {
        goal: make_plan(facts, cluster, Workload(32, 8, max_length=4096, goal=goal))
        for goal in ("fast", "safe", "cheap")
    }
    peak = {goal: max(memory.total for memory in plan.memory.values()) for goal, plan in made.items()}
    assert peak["safe"] <= 0.86 * cluster.device.memory
    assert made["fast"].total_s <= min(made["safe"].total_s, made["cheap"].total_s) * 1.03
    assert made["cheap"].cluster.gpus < cluster.gpus
    spent = {goal: plan.total_s * plan.cluster.gpus for goal, plan in made.items()}
    assert spent["cheap"] < 0.7 * spent["fast"]
    assert made["cheap"].reasons[0].rule == "This part of the 4 x 8 GPUs uses the fewest GPU seconds a step."
    assert any("more GPU seconds" in other.why for other in made["cheap"].rejected)


def test_more_ranks_than_cores_share_them() -> None:
    large = ClusterFacts(cpu_device(2, 64 * GIB), 1, 0)
    made = make_plan(model("Qwen3-0.6B"), large, Workload(8, 4, 256), {"training.pp": 2, "training.cp": 2})
    assert (made.training.parallel.world_size, made.training.threads) == (4, 1)
    alone = make_plan(model("Qwen3-0.6B"), large, Workload(8, 4, 256))
    assert made.mfu <= alone.mfu  # a core does not compute twice as much for two ranks


@pytest.mark.parametrize("ep", [4, 32])
def test_experts_that_are_spread_find_their_ranks_on_a_cpu(ep: int) -> None:
    large = ClusterFacts(cpu_device(2, 4096 * GIB), 1, 0)
    made = make_plan(model("Qwen3-30B-A3B"), large, Workload(8, 4, 256), {"training.ep": ep})
    assert made.training.parallel.ep == ep
    assert made.training.parallel.dp * made.training.parallel.tp % ep == 0


def test_engines_on_devices_of_their_own_share_none_with_the_policy_in_a_refit() -> None:
    facts, cluster = model("Qwen3-30B-A3B"), make_cluster("h100", 4)
    pins = {"generation.colocated": False}
    made = make_plan(facts, cluster, Workload(64, 8), pins)
    refit = made.memory["refit"].parts
    assert not {"weights", "engine weights"} <= set(refit)
    assert made.memory["refit"].total > refit["staging"] > 0


def test_the_smallest_machine_is_named_with_what_keeps_its_plan_from_running() -> None:
    facts, constants = model("Qwen2.5-72B"), replace(DEFAULTS, engine_asleep_bytes=1.2 * GIB)
    with pytest.raises(NoPlanError, match=r"that fits is 8 x 6 A10G.*do not fill nodes of 6 GPUs"):
        make_plan(facts, make_cluster("a10g", 2, 6), Workload(), constants=constants)
    assert not make_plan(facts, make_cluster("a10g", 8, 6), Workload(), constants=constants).runnable


@pytest.mark.parametrize(("name", "nodes", "tp"), [("DeepSeek-V3", 32, 32), ("Qwen3-235B-A22B", 16, 16)])
def test_an_engine_over_nodes_runs_and_pays_for_the_network(name: str, nodes: int, tp: int) -> None:
    """The sizes of NeMo-RL's published runs."""
    pins = {"generation.tp": tp, "generation.pp": 1, "generation.dp": 1, "generation.ep": 1}
    made = make_plan(model(name), make_cluster("h100", nodes), Workload(64, 32, mean_new_tokens=795), pins)
    assert made.runnable
    (reason,) = [one for one in made.reasons if one.value.startswith("replica_nodes")]
    assert reason.value == f"replica_nodes={tp // 8}"
    exchange, step = map(float, re.findall(r"takes ([\d.]+) of the ([\d.]+) ms", reason.rule)[0])
    assert 0.2 * step < exchange < step
    device = replace(made.cluster.device, network=made.cluster.device.network / 8)
    slower = make_plan(model(name), replace(made.cluster, device=device), made.workload, pins)
    assert slower.seconds[Phase.GENERATION] > 1.1 * made.seconds[Phase.GENERATION]


def test_a_split_step_takes_the_sum_of_both_sides_and_an_asynchronous_one_the_longer_side() -> None:
    facts, cluster = model("Qwen3-8B"), make_cluster("h100")
    pins = {"generation.devices": 4}
    turns = make_plan(facts, cluster, Workload(), pins)
    beside = make_plan(facts, cluster, Workload(staleness=1), pins)
    assert (turns.runnable, beside.runnable, turns.colocated, turns.mover) == (True, True, False, "collective")
    work = turns.seconds[Phase.TRAINING] + turns.seconds[Phase.LOGPROBS] + turns.seconds[Phase.OTHER]
    refit = turns.seconds[Phase.REFIT]
    assert turns.total_s == pytest.approx(work + turns.rollouts_s + refit)
    assert turns.waits == pytest.approx({"policy": turns.rollouts_s, "engines": work})
    work = beside.seconds[Phase.TRAINING] + beside.seconds[Phase.LOGPROBS] + beside.seconds[Phase.OTHER]
    assert beside.total_s == pytest.approx(max(work, beside.rollouts_s) + beside.seconds[Phase.REFIT])
    assert beside.waits == pytest.approx(
        {"policy": max(0.0, beside.rollouts_s - work), "engines": max(0.0, work - beside.rollouts_s)}
    )
    assert beside.beside is not None
    assert beside.beside.colocated
    said = " ".join(plan_text(beside, "x").split())
    assert "waits" in said
    assert f"on the policy's devices a step would take {beside.beside.total_s:.1f} s" in said


def test_the_devices_are_divided_so_that_neither_side_waits_long() -> None:
    facts, cluster = model("Qwen3-8B"), make_cluster("h100")
    best = make_plan(facts, cluster, Workload(staleness=1))
    assert not best.colocated
    for devices in range(1, 8):
        other = make_plan(facts, cluster, Workload(staleness=1), {"generation.devices": devices})
        assert other.training.parallel.world_size == 8 - devices
        assert other.total_s >= 0.97 * best.total_s  # simplicity counts for a little
    assert best.config_values()["generation.devices"] == 8 - best.training.parallel.world_size


def test_engines_that_never_run_empty_spend_less_on_the_same_rollouts() -> None:
    facts, cluster, pins = model("Qwen3-8B"), make_cluster("h100"), {"generation.devices": 4}
    waits, keeps = (
        make_plan(facts, cluster, Workload(staleness=4, in_flight=way), pins).rollouts_s for way in ("wait", "keep")
    )
    assert keeps < waits


def test_new_weights_wait_for_episodes_unless_these_spend_long_in_tools() -> None:
    facts, cluster, pins = model("Qwen3-8B"), make_cluster("h100"), {"generation.devices": 4}
    short, long = (make_plan(facts, cluster, Workload(staleness=1, tools_s=seconds), pins) for seconds in (0.1, 1000))
    assert [plan.config_values()["refit.in_flight"] for plan in (short, long)] == ["wait", "turns"]
    said = {reason.value: reason.rule for reason in long.reasons}
    assert "spend 1000 s in tools" in said["refit.in_flight=turns"]
    shared = make_plan(facts, cluster, Workload(staleness=1, tools_s=1000), {"generation.colocated": True})
    assert shared.in_flight == "wait"
    asked = make_plan(facts, cluster, Workload(staleness=1, tools_s=1000, in_flight="keep"), pins)
    assert asked.in_flight == "keep"


def test_without_any_lag_the_policy_waits_for_its_own_rollouts() -> None:
    facts, cluster, pins = model("Qwen3-8B"), make_cluster("h100"), {"generation.devices": 4}
    made = make_plan(facts, cluster, Workload(staleness=0), pins)
    assert made.seconds[Phase.WAITING] == pytest.approx(made.rollouts_s)


def test_engines_of_a_split_over_nodes_have_nodes_of_their_own() -> None:
    facts, pins = model("Qwen3-8B"), {"generation.devices": 8}
    assert make_plan(facts, make_cluster("h100", 2), Workload(), pins).engines_have_nodes
    assert not make_plan(facts, make_cluster("h100", 2), Workload(), {"generation.devices": 4}).engines_have_nodes
    two = ClusterFacts(cpu_device(2, 24 * GIB), 2, 0)
    made = make_plan(model("Qwen3-0.6B"), two, Workload(4, 4, 256), {"generation.colocated": False})
    assert (made.engines_have_nodes, made.mover, made.generation.engines) == (True, "collective", 1)


def test_a_cpu_is_divided_by_cores() -> None:
    facts = model("Qwen3-0.6B")
    four = ClusterFacts(cpu_device(4, 64 * GIB), 1, 0)
    made = make_plan(facts, four, Workload(8, 4, 256), {"generation.devices": 3})
    assert (made.colocated, made.mover) == (False, "shared-memory")
    assert made.generation.threads * made.generation.engines == 3
    assert made.training.threads * made.training.parallel.world_size == 1
    assert make_plan(facts, four, Workload(8, 4, 256, staleness=1)).colocated  # a processor computes for both anyway
    with pytest.raises(ConfigError, match="4 engines of 1 need more than 3 devices"):
        make_plan(facts, four, Workload(8, 4, 256), {"generation.devices": 3, "generation.engines": 4})


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"generation.devices": 8}, "leaves the policy none of the 8 GPUs"),
        ({"generation.devices": 2, "generation.colocated": True}, "generation.colocated is true"),
        ({"generation.devices": 2, "refit.mover": "cuda-ipc"}, "separate devices"),
    ],
)
def test_devices_of_engines_that_cannot_be_are_refused(pins: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(model("Qwen3-8B"), make_cluster("h100"), Workload(), pins)


@pytest.mark.parametrize("goal", ["fast", "cheap"])
def test_one_gpu_is_not_divided(goal: Goal) -> None:
    """Nor is a part of one GPU, with the goal that looks for the fewest."""
    facts, work = model("Qwen3-0.6B"), Workload(prompts=12, generations=4, max_length=512, goal=goal)
    for pins, words in (
        ({"generation.devices": 1}, "leaves the policy none of the 1 GPU"),
        ({"generation.colocated": False}, "there is only one GPU"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_plan(facts, make_cluster("h100", 1, 1), work, pins)
        made = make_plan(facts, make_cluster("h100", 1, 4), work, pins)
        assert made.training.parallel.world_size + made.generation.gpus <= made.cluster.gpus


def test_engines_on_the_policys_gpus_take_turns_with_it_and_leave_no_tail() -> None:
    one, lagging = make_cluster("h100", 1, 1), Workload(staleness=4, in_flight="keep")
    facts = model("Qwen3-0.6B")
    made, turns = make_plan(facts, one, lagging), make_plan(facts, one, Workload())
    assert made.runnable
    assert made.colocated
    reason = next(one for one in made.reasons if one.value.startswith("generation.colocated"))
    assert "pause while the policy trains" in reason.rule
    scoring = turns.seconds[Phase.REWARD]
    assert 0 < made.seconds[Phase.WAITING] < turns.seconds[Phase.GENERATION]
    assert made.rollouts_s == pytest.approx(made.seconds[Phase.WAITING] + scoring)  # scored while the policy trains
    asked = make_plan(model("Qwen3-8B"), make_cluster("h100"), lagging, {"generation.colocated": True})
    assert asked.runnable
    assert asked.waits is None
