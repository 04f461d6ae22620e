"""Published refits: from shard to shard between two groups of GPUs, and by gathering on shared GPUs."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import median

from rlctl.config.parallel import ParallelSpec
from rlctl.models.catalog import lookup
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.engines import weight_bytes
from rlctl.planner.costs.time import offload_seconds, refit_time, tensor_count
from rlctl.planner.inputs.cluster import make_cluster
from rlctl.planner.inputs.request import Request

GATHERED_TENSOR_S, GATHERED_BYTES_PER_S = 0.00056, 2.7e9
"""Gathering, naming and loading one tensor, and the bytes of its weights that an engine worker takes over in a second:
fitted to the colocated refits that NeMo-RL v0.3 to v0.7 published (4 to 17 s). rlctl gathers no tensor."""

OWNERS = {"Qwen3": "Qwen/", "DeepSeek": "deepseek-ai/"}


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


def gathered_refit_s(request: Request, choice: TrainingChoice, generation: GenerationChoice) -> float:
    """Return the seconds of a colocated refit by trainers that gather one tensor after the other and move states
    through pageable memory."""
    constants, facts = request.constants, request.facts
    seconds = constants.refit_fixed_s + weight_bytes(facts, generation) / GATHERED_BYTES_PER_S
    if generation.matrix_bytes <= 1 and choice.precision != "float32":
        seconds += tensor_count(facts) * constants.refit_quantize_s
    states = offload_seconds(request, choice) * constants.pinned_copy / constants.pageable_copy
    return seconds + tensor_count(facts) * GATHERED_TENSOR_S + states


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"([A-Z]+)(\d+)", text)}


def _policy(sizes: dict[str, int]) -> TrainingChoice:
    dp = max(sizes.get("DP", 1), sizes.get("EP", 1))
    parallel = ParallelSpec(tp=sizes.get("TP", 1), pp=sizes.get("PP", 1), ep=sizes.get("EP", 1), etp=1, dp=dp)
    return TrainingChoice(parallel)
