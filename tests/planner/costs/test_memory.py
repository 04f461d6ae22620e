"""Memory against sums done by hand and against published profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from rlctl.config.parallel import ParallelSpec
from rlctl.errors import NoPlanError
from rlctl.models.facts import ModelFacts, QuantizedBase
from rlctl.models.quantized_base import packed_sizes
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.adapters import lora_choice, trained_parameters
from rlctl.planner.costs.checkpoint import save_of
from rlctl.planner.costs.engines import generation_time, group_rate, overhead_bytes, plan_kv, weight_bytes
from rlctl.planner.costs.memory import (
    activation_bytes,
    host_memory,
    layer_activation_bytes,
    logit_bytes,
    state_bytes,
    training_memory,
)
from rlctl.planner.costs.parameters import count, rank_parameters, stages
from rlctl.planner.costs.time import critic_time, training_time
from rlctl.planner.inputs.cluster import GIB, make_cluster
from rlctl.planner.inputs.constants import DEFAULTS
from rlctl.planner.inputs.request import Request, Workload
from rlctl.planner.make_plan import make_plan
from rlctl.planner.views.render import plan_text
from rlctl.settings.training import LoraConfig
from rlctl.weights.vllm import VllmParallel, VllmWorld
from support.catalog_models import model

LLAMA_8B, MOE_30B, DEEPSEEK = model("Llama-3.1-8B"), model("Qwen3-30B-A3B"), model("DeepSeek-V3")
ADAPTERS = lora_choice(LLAMA_8B, LoraConfig(rank=16))


def test_states_of_a_dense_model_follow_the_distributed_optimizer() -> None:
    """2 bytes of weight and 4 of gradient a parameter on each rank, 12 of optimizer state over the data ranks."""
    parameters = count(LLAMA_8B).total
    states = state_bytes(LLAMA_8B, stages(LLAMA_8B, TrainingChoice())[0], TrainingChoice(ParallelSpec(dp=8)))
    assert states == pytest.approx(
        {"weights": 2 * parameters, "gradients": 4 * parameters, "optimizer": 1.5 * parameters}
    )


def test_float32_needs_no_master_weights() -> None:
    parameters = count(LLAMA_8B).total
    states = state_bytes(
        LLAMA_8B, stages(LLAMA_8B, TrainingChoice())[0], TrainingChoice(ParallelSpec(dp=2), precision="float32")
    )
    assert states["optimizer"] == pytest.approx(4 * parameters)


@pytest.mark.parametrize(
    ("facts", "parallel", "sharding", "gpus", "bytes_of_one"),
    [
        (model("Qwen3-1.7B"), ParallelSpec(), "optimizer", 1, 14),
        (LLAMA_8B, ParallelSpec(dp=8), "optimizer", 8, 14),
        (LLAMA_8B, ParallelSpec(tp=4, dp=2), "optimizer", 8, 14),
        (LLAMA_8B, ParallelSpec(dp=16), "optimizer", 8, 12 / 2 + 2),
        (MOE_30B, ParallelSpec(ep=8, dp=8), "optimizer", 8, 14),
        (LLAMA_8B, ParallelSpec(dp=8), "full", 8, 12),
        (LLAMA_8B, ParallelSpec(dp=4), "full", 8, 12),
    ],
)
def test_a_node_holds_what_a_save_writes(
    facts: ModelFacts, parallel: ParallelSpec, sharding: Any, gpus: int, bytes_of_one: float
) -> None:
    """A bfloat16 weight, which one of its holders saves, its float32 master and two moments; FSDP2 has no other weight
    than the float32 one."""
    choice, cluster = TrainingChoice(parallel, sharding=sharding), make_cluster("h100", 1, gpus)
    saved, unsaved = (host_memory(facts, choice, cluster, True, 0.0, saves=saves) for saves in (True, False))
    assert saved - unsaved == pytest.approx(bytes_of_one * count(facts).total, rel=0.01)
    both = host_memory(facts, replace(choice, critic=True), cluster, True, 0.0, saves=True)
    both -= host_memory(facts, replace(choice, critic=True), cluster, True, 0.0, saves=False)
    assert both == 2 * (saved - unsaved)


def test_texts_are_not_trained_on_where_a_save_does_not_fit() -> None:
    cluster = make_cluster("h100", 1, 8)
    small = replace(cluster, device=replace(cluster.device, host_memory=96 * GIB))
    workload, facts = Workload(rollouts=False, prompts=64, generations=1), LLAMA_8B
    with pytest.raises(NoPlanError, match=r"saved state needs 1\d\d GiB of 96 of host memory"):
        make_plan(Request(facts, small, workload, save_copies=True))
    waiting = make_plan(Request(facts, small, workload))
    assert not waiting.save_copies
    assert waiting.host_memory < 96 * GIB
    assert make_plan(Request(facts, small, workload, saves=False)).host_memory < 96 * GIB
    assert make_plan(Request(facts, cluster, workload)).host_memory > 96 * GIB


@pytest.mark.parametrize(("nodes", "copies"), [(1, 2), (2, 4)])
def test_checkpoints_in_memory_are_two_and_on_several_nodes_twice(nodes: int, copies: int) -> None:
    """Each has 14 bytes a parameter: a bfloat16 weight, a float32 one and two moments."""
    cluster, facts = make_cluster("h100", nodes, 8), LLAMA_8B
    workload, pins = Workload(rollouts=False, prompts=64, generations=1), {"training.dp": 8 * nodes, "training.tp": 1}
    request = Request(facts, cluster, workload, pins)
    without, with_them = (make_plan(replace(request, memory_checkpoint_every=every)) for every in (0, 1))
    assert (without.memory_checkpoint_every, with_them.memory_checkpoint_every) == (0, 1)
    added, state = with_them.host_memory - without.host_memory, count(facts).total * 14
    of_a_node = state if nodes == 1 else count(facts).total * (12 / nodes + 2)  # each node's ranks hold all weights
    assert added == pytest.approx(copies * of_a_node, rel=0.01)
    assert "checkpoints in memory after each step" in plan_text(with_them, "llama")


def test_checkpoints_in_memory_are_left_out_where_they_do_not_fit_and_take_few_of_the_seconds() -> None:
    workload, facts = Workload(prompts=64, generations=8), LLAMA_8B
    cluster = make_cluster("h100", 1, 8)
    chosen = make_plan(Request(facts, cluster, workload, memory_checkpoint_every=None))
    assert chosen.training is not None
    every, copy_s = chosen.memory_checkpoint_every, save_of(chosen.request, chosen.training).copy_s
    assert copy_s <= 0.03 * every * chosen.total_s
    assert every == 1 or copy_s > 0.03 * (every - 1) * chosen.total_s
    small = replace(cluster, device=replace(cluster.device, host_memory=chosen.host_memory - GIB))
    short = make_plan(Request(facts, small, workload, memory_checkpoint_every=None))
    assert short.memory_checkpoint_every == 0
    assert "no checkpoints in memory" in plan_text(short, "llama")
    assert make_plan(Request(facts, cluster, workload)).memory_checkpoint_every == 0


def test_fsdp_shards_all_states_and_has_two_layers_whole() -> None:
    """4 bytes of weight, 4 of gradient and 8 of moments a parameter over the shards; whole are embedding and head with
    their gradients, two layers, and one layer's gradients twice."""
    parameters, element = count(LLAMA_8B).total, 2
    layer, table = 4096 * (4096 + 6144 + 3 * 14336) + 2 * 4096, 128256 * 4096
    choice = TrainingChoice(ParallelSpec(dp=16, replicate=2), sharding="full")
    (stage,) = stages(LLAMA_8B, choice)
    states = state_bytes(LLAMA_8B, stage, choice)
    whole = element * (2 * 2 * table + 2 * layer) + (element + 4) * layer
    assert states == pytest.approx(
        {"weights": parameters / 2, "gradients": parameters / 2, "optimizer": parameters, "gathered": whole}
    )
    cluster = make_cluster("h100", 2)
    asleep = host_memory(LLAMA_8B, choice, cluster, True, 0.0) - host_memory(LLAMA_8B, choice, cluster, False, 0.0)
    assert asleep == pytest.approx(8 * (states["weights"] + states["optimizer"] + DEFAULTS.engine_host_bytes))
    alone = TrainingChoice(sharding="full", precision="float32")
    assert state_bytes(LLAMA_8B, stage, alone)["gathered"] == 0, "one rank does without FSDP2"


def test_adapters_alone_have_gradients_and_states() -> None:
    """Rank 16 on Llama-3.1-8B: A and B of each of the seven matrices of a layer."""
    choice = TrainingChoice(ParallelSpec(dp=8), adapters=ADAPTERS)
    qkv, out, up, down = 3 * 4096 + 6144, 4096 + 4096, 2 * 4096 + 2 * 14336, 14336 + 4096
    adapters = 32 * 16 * (qkv + out + up + down)
    (stage,) = stages(LLAMA_8B, choice)
    assert trained_parameters(LLAMA_8B, stage, choice).total == adapters
    weights = count(LLAMA_8B).total + adapters
    states = state_bytes(LLAMA_8B, stage, choice)
    assert states == pytest.approx({"weights": 2 * weights, "gradients": 4 * adapters, "optimizer": 1.5 * adapters})
    adapters = lora_choice(LLAMA_8B, LoraConfig(rank=16, targets=("attention",)))
    attention = TrainingChoice(ParallelSpec(tp=2, dp=8), adapters=adapters)
    # A of what splits outputs and B of what splits inputs are whole
    split = 32 * 16 * (3 * 4096 + 6144 / 2 + 4096 / 2 + 4096)
    assert trained_parameters(LLAMA_8B, stage, attention).total == split


@pytest.mark.parametrize(("sharding", "each"), [("optimizer", 2 + 12 / 8), ("full", 12 / 8)])
def test_waiting_adapters_take_host_memory(sharding: Literal["optimizer", "full"], each: float) -> None:
    """Rank 16 on Llama-3.1-8B has 41,943,040 parameters in adapters. Three adapters wait, and one changes places."""
    alone = TrainingChoice(ParallelSpec(dp=8), sharding=sharding, adapters=ADAPTERS)
    together = replace(alone, adapters=replace(ADAPTERS, held=4))
    need = [host_memory(LLAMA_8B, choice, make_cluster("h100"), False, 0.0) for choice in (alone, together)]
    assert need[1] - need[0] == pytest.approx(8 * 4 * each * 41_943_040)


def test_a_sweep_that_host_memory_does_not_hold_is_refused_with_the_number_that_fits() -> None:
    device = make_cluster("h100").device
    small = replace(make_cluster("h100"), device=replace(device, host_memory=300 * GIB))
    work, adapters = Workload(16, 8, max_length=2048), replace(ADAPTERS, held=800)
    with pytest.raises(NoPlanError, match="of 300 of host memory a node") as refused:
        make_plan(Request(LLAMA_8B, small, work, adapters=adapters))
    assert "It fits with 100 of the 800 runs at once." in str(refused.value.hint)
    fits = make_plan(Request(LLAMA_8B, small, work, adapters=replace(ADAPTERS, held=8)))
    assert [reason.rule for reason in fits.reasons if reason.value == "adapters=8"]
    assert "8 adapters with their optimizer states, which take turns" in plan_text(fits, "x")


def test_modules_trained_whole_have_gradients_and_states_and_no_second_weights() -> None:
    lora = LoraConfig(rank=16, modules_to_save=("embed_tokens", "lm_head"))
    plain, whole = (TrainingChoice(ParallelSpec(dp=8), sharding="full", adapters=lora_choice(LLAMA_8B, each))
                    for each in (LoraConfig(rank=16), lora))  # fmt: skip
    (stage,) = stages(LLAMA_8B, plain)
    tables, (before, after) = 2 * 128256 * 4096 / 8, (state_bytes(LLAMA_8B, stage, each) for each in (plain, whole))
    assert after["gradients"] - before["gradients"] == 4 * tables
    assert after["optimizer"] - before["optimizer"] == 8 * tables
    assert after["weights"] == before["weights"]


def test_float32_weights_wait_in_host_memory_as_they_are() -> None:
    choice, cluster = TrainingChoice(ParallelSpec(dp=8), precision="float32"), make_cluster("h100")
    (stage,) = stages(LLAMA_8B, choice)
    states = state_bytes(LLAMA_8B, stage, choice)
    asleep = host_memory(LLAMA_8B, choice, cluster, True, 0.0) - host_memory(LLAMA_8B, choice, cluster, False, 0.0)
    assert asleep == pytest.approx(8 * (states["weights"] + states["optimizer"] + DEFAULTS.engine_host_bytes))


def test_fsdp_shards_adapters_and_a_critic_as_it_does_the_weights() -> None:
    plain = TrainingChoice(ParallelSpec(dp=8), sharding="full", reference=True)
    (stage,) = stages(LLAMA_8B, plain)
    whole, adapted = (state_bytes(LLAMA_8B, stage, replace(plain, adapters=a)) for a in (None, ADAPTERS))
    own = trained_parameters(LLAMA_8B, stage, replace(plain, adapters=ADAPTERS)).total / 8
    gathered = 2 * (2 * 128256 * 4096 + 2 * (4096 * (4096 + 6144 + 3 * 14336) + 2 * 4096))
    assert adapted == pytest.approx(
        {"weights": whole["weights"] + 4 * own, "gradients": 4 * own, "optimizer": 8 * own, "gathered": gathered}
    )  # and no reference
    states = {name: value for name, value in whole.items() if name not in ("reference", "gathered")}
    both = state_bytes(LLAMA_8B, stage, replace(plain, critic=True))
    assert both == whole | {"critic": sum(states.values())}
    assert state_bytes(LLAMA_8B, stage, replace(plain, critic=True, critic_offload=True)) == whole


def test_a_critic_has_the_states_of_a_policy_on_the_device_or_in_turns_with_it() -> None:
    (stage,) = stages(LLAMA_8B, TrainingChoice())
    plain = TrainingChoice(ParallelSpec(dp=8))
    policy = state_bytes(LLAMA_8B, stage, plain)
    resident, turns = replace(plain, critic=True), replace(plain, critic=True, critic_offload=True)
    assert state_bytes(LLAMA_8B, stage, resident) == policy | {"critic": sum(policy.values())}
    assert state_bytes(LLAMA_8B, stage, turns) == policy
    h100 = make_cluster("h100", 1, 8)
    alone, both = (host_memory(LLAMA_8B, choice, h100, True, 0.0, saves=False) for choice in (plain, turns))
    assert both - alone == pytest.approx(8 * (policy["weights"] + policy["optimizer"]))
    request = Request(LLAMA_8B, h100)
    training = training_time(request, plain, False).total
    seconds = [critic_time(request, choice) for choice in (resident, turns)]
    assert training < critic_time(request, resident, False) < seconds[0] < seconds[1]
    assert critic_time(request, plain) == 0


def test_a_reference_policy_is_a_copy_of_the_weights_unless_adapters_are_trained() -> None:
    (stage,) = stages(LLAMA_8B, TrainingChoice())
    held = state_bytes(LLAMA_8B, stage, TrainingChoice(reference=True))
    assert held["reference"] == held["weights"]
    assert "reference" not in state_bytes(LLAMA_8B, stage, TrainingChoice(reference=True, adapters=ADAPTERS))


def test_given_stages_hold_their_layers() -> None:
    choice = TrainingChoice(ParallelSpec(pp=4, first_stage_layers=5, last_stage_layers=7))
    assert [stage.layers for stage in stages(LLAMA_8B, choice)] == [5, 10, 10, 7]
    assert ParallelSpec(pp=4, first_stage_layers=4).stage_layers(32) is None  # 28 over three stages
    even, shifted = TrainingChoice(ParallelSpec(pp=4)), TrainingChoice(ParallelSpec(pp=4, first_stage_layers=2))
    request = Request(LLAMA_8B, make_cluster("h100", 1, 8))
    peaks = [training_memory(request, c, 0.0, 8).total for c in (even, shifted)]
    assert peaks[1] < peaks[0]  # the first stage holds the activations of most micro-batches


@pytest.mark.parametrize("facts", [LLAMA_8B, MOE_30B, DEEPSEEK], ids=lambda f: f.family)
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 1, 8), (1, 8, 4), (4, 4, 2)])
def test_parameters_of_all_ranks_add_up(facts: ModelFacts, tp: int, pp: int, ep: int) -> None:
    """What is split is held once in all, what is replicated once a tensor rank. No rank has a layer that predicts
    several tokens: policies are built without."""
    ep = ep if facts.moe else 1
    choice = TrainingChoice(ParallelSpec(tp=tp, pp=pp, ep=ep, sequence_parallel=False, etp=1))
    ranks = [rank_parameters(facts, stage, choice) for stage in stages(facts, choice)]
    held = sum(tp * rank.dense + ep * rank.experts for rank in ranks)
    assert held == pytest.approx(count(facts).total, rel=0.01)
    assert sum(stage.layers for stage in stages(facts, choice)) == facts.layers


def test_tied_embeddings_are_held_twice_under_pipeline_parallelism_only() -> None:
    facts = model("Llama-3.2-1B")
    alone = sum(rank_parameters(facts, s, TrainingChoice()).total for s in stages(facts, TrainingChoice()))
    split = sum(
        rank_parameters(facts, s, TrainingChoice(ParallelSpec(pp=2))).total
        for s in stages(facts, TrainingChoice(ParallelSpec(pp=2)))
    )
    assert split - alone == pytest.approx(facts.vocab * facts.hidden)


def test_activations_of_a_layer_are_the_sum_of_what_each_operation_keeps() -> None:
    """Llama 8B, bf16: 4 hidden-sized tensors, q, k, v, attention output, gate, up and their product."""
    h, ffn = 4096, 14336
    expected = 2 * (4 * h + (4096 + 2 * 1024) + 4096 + 3 * ffn)
    assert layer_activation_bytes(LLAMA_8B, TrainingChoice(), False, DEFAULTS) == expected


def test_sequence_parallelism_splits_what_tensor_parallelism_does_not() -> None:
    without = layer_activation_bytes(
        LLAMA_8B, TrainingChoice(ParallelSpec(tp=4, sequence_parallel=False)), False, DEFAULTS
    )
    with_it = layer_activation_bytes(
        LLAMA_8B, TrainingChoice(ParallelSpec(tp=4, sequence_parallel=True)), False, DEFAULTS
    )
    assert without - with_it == pytest.approx(2 * 4 * 4096 * 3 / 4)


def test_recompute_modes_are_ordered() -> None:
    stage = stages(LLAMA_8B, TrainingChoice())[0]
    sizes = [
        activation_bytes(LLAMA_8B, stage, TrainingChoice(recompute=mode), 8) for mode in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.15 * sizes[0]


def test_full_recompute_keeps_one_input_a_layer_and_one_whole_layer() -> None:
    stage = stages(LLAMA_8B, TrainingChoice())[0]
    size = activation_bytes(LLAMA_8B, stage, TrainingChoice(recompute="full", micro_batch_tokens=1000), 1)
    layer = layer_activation_bytes(LLAMA_8B, TrainingChoice(), False, DEFAULTS)
    assert size == pytest.approx(1000 * (32 * 2 * 4096 + layer))


def test_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_stages() -> None:
    first = stages(LLAMA_8B, TrainingChoice(ParallelSpec(pp=4)))[0]
    four = activation_bytes(LLAMA_8B, first, TrainingChoice(ParallelSpec(pp=4)), 16)
    alone = activation_bytes(LLAMA_8B, first, TrainingChoice(ParallelSpec(pp=4)), 1)
    assert four == pytest.approx(4 * alone)


def test_context_parallelism_divides_activations_and_logits() -> None:
    request, layouts = Request(LLAMA_8B, make_cluster("h100")), (ParallelSpec(dp=8), ParallelSpec(cp=4, dp=2))
    one, four = (training_memory(request, TrainingChoice(one, 32768), 0.0, 4) for one in layouts)
    assert four.parts["activations"] == pytest.approx(one.parts["activations"] / 4)
    assert four.parts["optimizer"] == pytest.approx(one.parts["optimizer"])


def test_logits_are_split_over_the_vocabulary_and_limited_by_the_chunk() -> None:
    assert logit_bytes(
        LLAMA_8B, TrainingChoice(ParallelSpec(tp=2, sequence_parallel=False)), 4096, True
    ) == 1024 * 128256 / 2 * (2 + 4 + 4)
    assert logit_bytes(LLAMA_8B, TrainingChoice(logit_tokens=None), 4096, False) == 4096 * 128256 * (2 + 4)


def test_layers_that_do_not_divide_shorten_the_end_stages() -> None:
    assert ParallelSpec(pp=8).stage_layers(61) == [7, 8, 8, 8, 8, 8, 8, 6]
    assert ParallelSpec(pp=16).stage_layers(61) is not None
    assert ParallelSpec(pp=4).stage_layers(5) is None


def test_the_fullest_stage_may_be_the_third() -> None:
    """GLM-4.5 has experts from its fourth layer on: stages of 1, 3, 3, ... layers have 0, 1, 3, ..."""
    facts, choice = model("GLM-4.5"), TrainingChoice(ParallelSpec(pp=32, ep=8, dp=8), recompute="full")
    peak = training_memory(Request(facts, make_cluster("h100", 32)), choice, 0.0, 64)
    weights = [state_bytes(facts, stage, choice)["weights"] for stage in stages(facts, choice)]
    assert peak.parts["weights"] == weights[2] > 1.2 * weights[1]


@pytest.mark.parametrize(
    ("name", "tp", "gib"),
    [("Llama-3.1-8B", 1, 14.99), ("Qwen3-32B", 1, 61.03), ("Qwen3-32B", 2, 30.59), ("Qwen3-0.6B", 1, 1.12)],
)
def test_engine_weights_match_vllm_s_published_profile(name: str, tp: int, gib: float) -> None:
    assert weight_bytes(model(name), GenerationChoice(tp=tp)) / GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        pytest.param(name, *sizes, marks=() if sizes in quick else pytest.mark.slow)
        for name, quick in {
            "Llama-3.1-8B": [(1, 1), (2, 4)], "Qwen3-0.6B": [(2, 1), (1, 2)], "Qwen3-30B-A3B": [(2, 4)],
            "gemma-3-1b-it": [(1, 2)], "gpt-oss-20b": [(2, 1)],
        }.items()
        for sizes in [(1, 1), (2, 1), (1, 2), (2, 4)]
    ],
)  # fmt: skip
def test_engine_weights_are_those_of_the_fullest_rank(name: str, tp: int, pp: int) -> None:
    """Layers and embeddings as vLLM places them: some families have both embeddings on every stage."""
    facts = model(name)
    world = VllmWorld(facts, VllmParallel(tp=tp, pp=pp))
    fullest = max(sum(spec.size for spec in world.layout(rank).params.values()) for rank in range(world.size))
    expected = weight_bytes(facts, GenerationChoice(tp=tp, pp=pp))
    assert 2 * fullest == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("name", "gib"), [("Llama-3.1-8B", 1.89), ("Qwen3-14B", 2.21)])
def test_engine_activations_match_vllm_s_published_profile(name: str, gib: float) -> None:
    parts = overhead_bytes(model(name), GenerationChoice(max_concurrent=1024))
    assert parts["activations"] / GIB == pytest.approx(gib, rel=0.08)


def test_kv_heads_are_repeated_beyond_their_number() -> None:
    """Llama 8B has 8 KV heads: 16 ranks hold one each, as 8 do."""
    request = Request(LLAMA_8B, make_cluster("h100", 2))
    tokens = [plan_kv(request, GenerationChoice(tp=tp, memory_fraction=0.5)) for tp in (8, 16)]
    per_token = [size / count_ for size, count_ in tokens]
    assert per_token[0] == pytest.approx(per_token[1], rel=1e-3)


def test_latent_kv_of_mla_is_on_every_rank() -> None:
    request = Request(DEEPSEEK, make_cluster("h200", 4))
    one, two = (plan_kv(request, GenerationChoice(tp=tp, memory_fraction=0.9)) for tp in (16, 32))
    assert one[0] / one[1] == pytest.approx(two[0] / two[1], rel=1e-3)
    assert one[0] / one[1] == pytest.approx(61 * 576 * 2, rel=1e-3)


def test_a_longer_tail_takes_longer_than_the_mean_says() -> None:
    """The same mean with a higher limit: the last rollout ends later."""
    cluster = make_cluster("h100")
    short, long = (Workload(64, 32, limit, mean_new_tokens=400) for limit in (2048, 16384))
    engine = GenerationChoice(8, kv_cache_tokens=250_000)
    seconds = [generation_time(Request(LLAMA_8B, cluster, work), engine).total for work in (short, long)]
    assert seconds[1] > 2 * seconds[0]


def test_length_distribution_keeps_its_mean_and_limit() -> None:
    for mean in (100.0, 795.0, 3283.0):
        lengths = Workload(64, 32, 4096, mean_new_tokens=mean).lengths(1.0)
        assert sum(share for _, share in lengths.buckets) == pytest.approx(1.0)
        assert sum(share * length for length, share in lengths.buckets) == pytest.approx(mean, rel=0.01)
        assert lengths.longest <= lengths.limit


def test_muon_has_one_momentum_for_a_matrix_of_a_layer_and_its_products_take_time() -> None:
    """Counted by hand: Llama-3.1-8B has 2 [4096, 4096], 2 [1024, 4096] and 3 [14336, 4096] matrices in each of 32
    layers, and a Newton-Schulz step of [r, c] has 2 r (2 r c + r r) operations."""
    facts, adam = model("Llama-3.1-8B"), TrainingChoice(ParallelSpec(dp=8))
    muon, hidden = replace(adam, muon_steps=5), 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    (stage,) = stages(facts, adam)
    states = [state_bytes(facts, stage, choice)["optimizer"] for choice in (adam, muon)]
    assert states[0] - states[1] == 4 * hidden / 8
    request = Request(facts, make_cluster("h100", 1), Workload())
    more = training_time(request, muon, False).optimizer - training_time(request, adam, False).optimizer
    steps = ((2, 4096, 4096), (2, 1024, 4096), (3, 4096, 14336))
    operations = 5 * 32 * sum(count * 2 * r * r * (2 * c + r) for count, r, c in steps)
    device = request.cluster.device
    work = operations / 8 / (device.flops("bf16") * request.constants.matmul_efficiency)
    sent = 2 * 2 * hidden / 8 * 7 / 8 / group_rate(request, 1, 8)
    assert more == pytest.approx(request.workload.optimizer_steps * (work + sent))


def test_muon_plans_each_expert_of_a_stage() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts, each 3 [768, 2048] matrices, over 8 ranks."""
    facts, adam = model("Qwen3-30B-A3B"), TrainingChoice(ParallelSpec(dp=8, ep=8))
    (stage,) = stages(facts, adam)
    states = [state_bytes(facts, stage, c)["optimizer"] for c in (adam, replace(adam, muon_steps=5))]
    dense = 2048 * (2 * 32 * 128 + 2 * 4 * 128 + 128)  # queries and output, keys and values, router
    assert states[0] - states[1] == pytest.approx(4 * 48 * (dense + 128 * 3 * 768 * 2048) / 8)


@pytest.mark.parametrize(("name", "linear", "tables", "norms"), [
    # a layer: query and output 2 q h, key and value 2 kv h, gate, up and down 3 f h; embedding and head 2 v h
    ("Qwen3-8B", 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288), 2 * 151936 * 4096, 36 * (2 * 4096 + 2 * 128)),
    ("Qwen3-32B", 64 * 5120 * (2 * 8192 + 2 * 1024 + 3 * 25600), 2 * 151936 * 5120, 64 * (2 * 5120 + 2 * 128)),
])  # fmt: skip
def test_packed_layers_count_their_codes_scales_and_zero_points(
    name: str, linear: int, tables: int, norms: int
) -> None:
    """AWQ: half a byte of code, and for 128 weights two bytes of scale and one of zero point (engine: half a byte).
    A rank's count leaves out the last norm."""
    facts = replace(model(name), quantized=QuantizedBase("awq", 4, 128, left_out=("lm_head",)))
    choice = TrainingChoice(sharding="full", adapters=lora_choice(facts, LoraConfig(rank=16)), reference=True)
    stage = stages(facts, choice)[0]
    states, adapters = state_bytes(facts, stage, choice), trained_parameters(facts, stage, choice).total
    assert states["weights"] == linear * (1 / 2 + 3 / 128) + 4 * (tables + norms + adapters)
    assert packed_sizes(facts).engine_bytes == linear * (1 / 2 + 2.5 / 128)
    assert "reference" not in states  # the base without adapters
    assert states["dequantized"] == 3 * facts.hidden * facts.intermediate
    assert states["gathered"] == pytest.approx(2 * tables + 2 * 2 * norms / facts.layers, rel=1e-4)
