"""Seconds of FSDP2 against published runs, and what they follow from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.engines import communication_seconds
from rlctl.planner.costs.time import (
    critic_time,
    logprobs_time,
    micro_batches,
    offload_seconds,
    refit_terms,
    remote_share,
    state_traffic,
    training_time,
)
from rlctl.planner.inputs.cluster import ClusterFacts, make_cluster
from rlctl.planner.inputs.constants import DEFAULTS
from rlctl.planner.inputs.request import Request, Workload
from support.catalog_models import model


def choice(fsdp: bool, rows: int = 4096, **sizes: int) -> TrainingChoice:
    sharding = "full" if fsdp else "optimizer"
    return TrainingChoice(ParallelSpec(**sizes), rows, sharding=sharding, gradient_bytes=2, logit_tokens=None)


def computing(facts: ModelFacts, training: TrainingChoice, cluster: ClusterFacts, new_tokens: float) -> float:
    """Seconds of training and log-probs of NeMo-RL 0.3's published steps: 2,048 rollouts, 512 an optimizer step."""
    work = Workload(64, 32, mean_new_tokens=new_tokens, optimizer_steps=4, reference=True)
    request = Request(facts, cluster, work)
    return training_time(request, training).total + logprobs_time(request, training)


def test_both_backends_take_as_long_as_was_published() -> None:
    """8B on 8 H100s: 38 + 19 s against 28 + 18 s; 70B on 64 of them: 97 + 28 s against 28 + 18 s."""
    node, nodes = make_cluster("h100"), make_cluster("h100", 8)
    small = [computing(model("Llama-3.1-8B"), choice(fsdp, dp=8), node, 790) for fsdp in (False, True)]
    assert small == pytest.approx([46, 57], rel=0.15)
    sizes = ((False, {"tp": 4, "pp": 4, "dp": 4}), (True, {"tp": 8, "dp": 8}))
    large = [computing(model("Llama-3.1-70B"), choice(fsdp, **size), nodes, 396) for fsdp, size in sizes]
    assert large == pytest.approx([46, 125], rel=0.3)


def test_each_micro_batch_gathers_the_weights_and_sums_gradients() -> None:
    request = Request(model("Llama-3.1-8B"), make_cluster("h100"), Workload(64, 32, mean_new_tokens=790))
    data = {rows: training_time(request, choice(True, rows, dp=8)) for rows in (4096, 8192)}
    numbers = [micro_batches(request, choice(True, rows, dp=8))[0] for rows in data]
    assert data[4096].data / data[8192].data == pytest.approx(numbers[0] / numbers[1], rel=1e-6)
    # Of 8 parameters a rank receives 7: 2 bytes in front of each pass, a part of the first hidden, and 4 of gradients.
    moved = numbers[0] * (2 * (1 - DEFAULTS.gather_overlap) + 2 + 4) * 8.03e9 * 7 / 8
    assert data[4096].data == pytest.approx(moved / (450e9 * 0.75), rel=0.01)


def test_states_of_fsdp_in_host_memory_are_two_moments() -> None:
    traffic = [state_traffic(replace(choice(fsdp, dp=8), optimizer_offload=True)) for fsdp in (False, True)]
    assert traffic == [24, 16], "the float32 weights of FSDP2 stay on the device"


def test_what_moves_to_host_memory_is_what_a_precision_has() -> None:
    """Both moments always, a float32 master next to bfloat16, and weights of 4 bytes where they are float32."""
    request = Request(model("Llama-3.1-8B"), make_cluster("h100"))
    half, single = choice(False, dp=8), replace(choice(False, dp=8), precision="float32")
    seconds = [offload_seconds(request, one) for one in (half, single, choice(True, dp=8))]
    assert [round(12 * one / seconds[0]) for one in seconds] == [12, 8, 8]
    rate = request.cluster.device.host_link * DEFAULTS.pinned_copy
    for one, weights in ((half, 2 * 8.03e9), (single, 4 * 8.03e9), (choice(True, dp=8), 4 * 8.03e9 / 8)):
        alone, shared = (critic_time(request, replace(one, critic=True), c) for c in (False, True))
        moved = 2 * (offload_seconds(request, one) + weights / rate)
        assert shared - alone == pytest.approx(moved, rel=0.01)


def test_over_nodes_a_ring_has_the_network_of_all_its_ranks_and_copies_spare_it() -> None:
    request = Request(model("Llama-3.1-70B"), make_cluster("h100", 8), Workload(64, 32, mean_new_tokens=396))
    whole, split = (training_time(request, choice(True, **sizes)).data
                    for sizes in ({"dp": 64}, {"tp": 8, "dp": 8}))  # fmt: skip
    per_row = whole / micro_batches(request, choice(True, dp=64))[0]
    per_split_row = split / micro_batches(request, choice(True, tp=8, dp=8))[0]
    assert per_row == pytest.approx(per_split_row, rel=0.15), "eight devices of a node move eight times as much"
    copies = training_time(request, choice(True, dp=64, replicate=8)).data
    assert copies < whole


def test_experts_that_are_spread_are_not_gathered() -> None:
    request = Request(model("Qwen3-30B-A3B"), make_cluster("h100"))
    spread, whole = (training_time(request, choice(True, dp=8, ep=ep)).data for ep in (8, 1))
    assert spread < 0.15 * whole


def test_a_node_holds_its_share_of_a_sharded_model() -> None:
    nodes = make_cluster("h100", 8)
    assert remote_share(choice(True, dp=64), nodes, True) == pytest.approx(7 / 8)
    assert remote_share(choice(True, dp=64, replicate=8), nodes, True) == 0
    assert remote_share(choice(False, dp=64), nodes, True) == 0


def test_engines_over_nodes_reduce_over_the_network_devices_of_all_their_ranks() -> None:
    """Two all-reduces of bfloat16 states a layer, each of which sends everything twice, over 8 NICs of 50 GB/s."""
    facts, cluster = model("DeepSeek-V3"), make_cluster("h100", 4)
    request = Request(facts, cluster, Workload())
    few, many = (communication_seconds(request, GenerationChoice(tp=32))(sequences) for sequences in (1000, 2000))
    moved = 2 * facts.layers * 2 * 1000 * facts.hidden * 2
    assert many - few == pytest.approx(moved / (8 * 50e9 * DEFAULTS.network_efficiency), rel=0.01)


def test_positions_of_a_prompt_need_no_logits() -> None:
    """Four completions of 16 tokens behind one prompt of 30: 94 tokens go through the layers, 64 through the head."""
    work = Workload(8, 4, 128, max_new_tokens=16, mean_new_tokens=16, prompt_tokens=30)
    assert replace(work, share_prompts=True).predicted_share(1.0) == pytest.approx(64 / 94)
    assert work.predicted_share(1.0) == pytest.approx(16 / 46)


@pytest.mark.parametrize(
    ("name", "engines", "shared", "owned", "held", "split"),
    [("Qwen3-30B-A3B", 4, {"ep": 8, "dp": 64}, 5.72e9, 15.3e9, {"ep": 8, "dp": 48}),
     ("Qwen3-235B-A22B", 8, {"tp": 8, "pp": 8, "ep": 8}, 44.8e9, 58.8e9, {"pp": 4, "ep": 8, "dp": 8})],
    ids=["30B", "235B"],
)  # fmt: skip
def test_a_refit_on_shared_devices_takes_what_it_moves(
    name: str, engines: int, shared: dict[str, int], owned: float, held: float, split: dict[str, int]
) -> None:
    """64 H100s. Optimizer states to pinned memory and an engine's old weights back, at four fifths of 55 GB/s; its new
    weights over 40% of the links, 450 and 50 GB/s; a transfer between devices apart takes 40% of this time or more."""
    request, generation = Request(model(name), make_cluster("h100", 8)), GenerationChoice(tp=engines)
    choices = [TrainingChoice(ParallelSpec(**sizes, etp=1)) for sizes in (shared, split)]
    together, apart = (refit_terms(request, one, generation, c) for one, c in zip(choices, (True, False), strict=True))
    assert together["offloading"] == pytest.approx(owned / 44e9, rel=0.01)
    assert together["waking"] == pytest.approx(held / 44e9, rel=0.01)
    far = held * (7 / 8 if "tp" in shared else 0)
    assert together["links"] == pytest.approx(far / 20e9 + (held - far) / 180e9, rel=0.01)
    assert sum(together.values()) < 2.5 * sum(apart.values())
    discarded = refit_terms(replace(request, discards=True), choices[0], generation, True)
    assert sum(together.values()) - sum(discarded.values()) == pytest.approx(together["waking"])
