"""Refits of published systems. Some gather each tensor before they hand it over, and their step times include that.
Others send shard to shard, as rlctl does."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rlctl.config.parallel import ParallelSpec
from rlctl.models.catalog import lookup
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.parameters import count
from rlctl.planner.costs.time import offload_seconds, refit_time, tensor_count
from rlctl.planner.inputs.cluster import GIB, ClusterFacts, make_cluster
from rlctl.planner.inputs.constants import Constants
from rlctl.planner.inputs.request import Request


@dataclass(frozen=True)
class GatheringConstants(Constants):
    """The planner's constants, with those of a refit that gathers tensors."""

    refit_tensor_s: float = 0.0006
    """Seconds to gather a tensor over its group, hand it over and load it."""
    refit_bytes_per_s: float = 12e9
    """Bytes of a full copy that one device can gather, hand over and load in a second."""
    staging_bytes: float = 1.0 * GIB
    """Bytes of the bucket of gathered tensors that a refit holds on each side."""


OWNERS = {"Qwen3": "Qwen/", "DeepSeek": "deepseek-ai/"}
GATHERING = GatheringConstants()
BOUNDS: dict[str, tuple[float, float]] = {
    "matmul_efficiency": (0.35, 0.80),
    "traffic": (1.0, 5.0),
    "expert_overlap": (0.0, 0.8),
    "tensor_overlap": (0.0, 0.9),
    "fp8_efficiency": (0.25, 0.65),
    "fp4_efficiency": (0.15, 0.55),
    "attention_efficiency": (0.2, 0.75),
    "expert_host_s": (0.0, 0.0006),
    "moe_layer_host_s": (0.0002, 0.004),
    "length_sigma": (0.5, 1.5),
    "decode_step_s": (0.001, 0.010),
    "decode_bandwidth_efficiency": (0.5, 0.9),
    "refit_fixed_s": (0.2, 6.0),
}
"""Physical limits of what a fit may choose."""
GATHERING_BOUNDS = BOUNDS | {"refit_tensor_s": (0.0, 0.002), "refit_bytes_per_s": (2e9, 50e9)}


def gathering_refit_time(
    facts: ModelFacts,
    choice: TrainingChoice,
    generation: GenerationChoice,
    cluster: ClusterFacts,
    colocated: bool,
    constants: GatheringConstants,
) -> float:
    """Return the seconds of a refit in a published system."""
    payload = count(facts).total * (4 if choice.precision == "float32" else 2)
    each = tensor_count(facts) * constants.refit_tensor_s
    if colocated:
        offload = offload_seconds(Request(facts, cluster, constants=constants), choice)
        return constants.refit_fixed_s + each + payload / constants.refit_bytes_per_s + offload
    rate = cluster.device.network * constants.network_efficiency * 0.6
    return constants.refit_fixed_s / 2 + each / 4 + payload / max(1, generation.tp) / rate


def show_shard_to_shard(path: Path) -> None:
    """Print the predicted and published seconds of refits that send shard to shard between two groups of GPUs."""
    errors = []
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["mode"].endswith("shard-to-shard")]
    for row in rows:
        facts = lookup(OWNERS.get(row["model"].partition("-")[0], "") + row["model"])
        if facts is None or row["precision"] != "bf16" or "->" not in row["mapping"]:
            continue
        trains, serves = (_sizes(part) for part in row["mapping"].split("->"))
        policy = _policy(trains)
        generation = GenerationChoice(tp=serves.get("TP", 1))
        gpus = policy.parallel.world_size + generation.tp * serves.get("DP", 1)
        cluster = make_cluster(row["hardware"].lower(), -(-gpus // 8), 8)
        predicted = refit_time(Request(facts, cluster), policy, generation, False)
        seen = median(float(text) for text in row["seconds"].split("-"))
        errors.append(abs(predicted / seen - 1))
        print(f"   {row['model']:<16} {row['mapping']:<22} {row['hardware']:<6} {predicted:.2f}/{row['seconds']} s")
    print(f"median error {100 * median(errors):.0f}% of {len(errors)}")


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"([A-Z]+)(\d+)", text)}


def _policy(sizes: dict[str, int]) -> TrainingChoice:
    dp = max(sizes.get("DP", 1), sizes.get("EP", 1))
    parallel = ParallelSpec(tp=sizes.get("TP", 1), pp=sizes.get("PP", 1), ep=sizes.get("EP", 1), etp=1, dp=dp)
    return TrainingChoice(parallel)
