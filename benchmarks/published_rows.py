"""Reads `published_recipes.csv` and turns each row into the planner's inputs: model, machine, layout and workload.

A row that cannot be used is returned with the reason.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.config.parallel import ParallelSpec
from rlctl.models.catalog import lookup
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, LoraChoice, TrainingChoice
from rlctl.planner.inputs.cluster import ClusterFacts, make_cluster
from rlctl.planner.inputs.request import Workload

PROVEN = ("published", "CI-tested", "documented recommended", "documented minimum (runs)")
PHASES = {"training": "train_s", "generation": "gen_s", "refit": "refit_s", "logprobs": "logprob_s"}

# Names that Megatron-Bridge's performance tables use.
NAMES = {
    "LLAMA3_8B": "Meta-Llama-3-8B",
    "LLAMA3_70B": "Meta-Llama-3-70B",
    "LLAMA3.1_405B": "Llama-3.1-405B",
    "DeepSeekV3": "DeepSeek-V3",
    "DeepSeekV3 (w/o MTP)": "DeepSeek-V3",
    "DeepSeekV3 (w/ MTP)": "DeepSeek-V3",
    "Qwen3_30B_a3B": "Qwen3-30B-A3B",
    "Qwen3_235B_a22B": "Qwen3-235B-A22B",
    "GPT OSS 120B": "gpt-oss-120b",
}


class Unusable(Exception):
    """The reason why a row cannot be planned."""


@dataclass(frozen=True)
class Row:
    """One published configuration as inputs of the planner."""

    number: int
    fields: dict[str, str]
    facts: ModelFacts
    cluster: ClusterFacts
    training: TrainingChoice
    generation: GenerationChoice | None
    workload: Workload
    colocated: bool

    @property
    def name(self) -> str:
        model = self.fields["model"].split(" (")[0].rsplit("/", 1)[-1]
        return (
            f"{self.number:>3} {model[:28]:<28} {self.fields['algorithm'][:5]:<5} {self.cluster.gpus:>4} "
            f"{self.cluster.device.name:<5}"
        )

    def published(self, field: str) -> float | None:
        """Return a number of the row, or None if it was not published."""
        try:
            return float(self.fields[field])
        except ValueError:
            return None


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def size(fields: dict[str, str], key: str, default: int = 1) -> int:
    text = fields[key].strip().rstrip("*")
    return int(float(text)) if text.replace(".", "").isdigit() else default


def device_of(fields: dict[str, str]) -> str:
    text = fields["gpu_type"].lower()
    for name in ("gb300", "gb200", "b300", "b200", "h200", "h100", "h20"):
        if text.startswith(name):
            return name
    raise Unusable(f"GPU type: {fields['gpu_type'] or 'not stated'}")


def facts_of(fields: dict[str, str]) -> ModelFacts:
    name = fields["model"].split(" (converted")[0]
    facts = lookup(NAMES.get(fields["model"], name))
    if facts is None:
        raise Unusable(f"model not in the catalog: {name or 'not stated'}")
    return replace(facts, mtp_layers=0) if "w/o MTP" in fields["model"] else facts


def precision_of(fields: dict[str, str]) -> str:
    text = fields["train_precision"].lower()
    if "nvfp4" in text:
        return "fp4"
    return "fp8" if "fp8" in text or (not text and fields["kind"] == "pretrain") else "bf16"


def parse(number: int, fields: dict[str, str]) -> Row:
    """Turn a row into inputs of the planner. Raises Unusable with the reason."""
    facts, per_node = facts_of(fields), size(fields, "gpus_per_node", 0)
    gpus = size(fields, "num_gpus", 0) or size(fields, "train_gpus", 0)
    if not gpus or not per_node:
        raise Unusable("GPUs not stated")
    if not size(fields, "max_total_seq_len", 0):
        raise Unusable("length not stated")
    if fields["gen_backend"] not in ("", "vllm", "sglang"):
        raise Unusable(f"generation by {fields['gen_backend']}")
    if "TP/PP not stated" in fields["notes"]:
        raise Unusable("TP and PP not stated")
    cluster = make_cluster(device_of(fields), max(1, gpus // per_node), min(per_node, gpus))
    train_gpus = size(fields, "train_gpus", gpus)
    workload = workload_of(fields)
    colocated = fields["colocated"] == "True"
    training = training_of(fields, facts, train_gpus, workload)
    return Row(number, fields, facts, cluster, training, generation_of(fields, workload), workload, colocated)


def workload_of(fields: dict[str, str]) -> Workload:
    length, batch = size(fields, "max_total_seq_len"), size(fields, "train_gbs", 0)
    if fields["kind"] != "rl" and fields["algorithm"] not in ("distillation",):
        pairs = 2 if fields["algorithm"] == "dpo" else 1
        return Workload(
            prompts=(batch or 1) * pairs,
            generations=1,
            max_length=length,
            rollouts=False,
            packing=False,
            prompt_tokens=0,
        )
    rollouts = size(fields, "rollouts_per_step", 0)
    if not rollouts:
        raise Unusable("rollouts a step not stated")
    generations = size(fields, "gens_per_prompt", 16)
    mean = float(fields["avg_gen_len"]) if fields["avg_gen_len"] else None
    penalty = fields["kl_ref_policy"]
    return Workload(
        prompts=max(1, rollouts // generations), generations=generations, max_length=length, mean_new_tokens=mean,
        prompt_tokens=min(150, length // 4), optimizer_steps=max(1, rollouts // batch) if batch else 1,
        reference=penalty not in ("0", "0.0", "kl_loss=False"), packing=packs(fields), **lag_of(fields),
    )  # fmt: skip


def lag_of(fields: dict[str, str]) -> dict[str, Any]:
    """Return how old rollouts may be; asynchronous recipes update engines without waiting for rollouts under way."""
    if fields["async_rl"] != "True":
        return {}
    return {"staleness": size(fields, "async_lag", 1), "in_flight": "keep"}


def packs(fields: dict[str, str]) -> bool:
    return "True" in (fields["seq_packing"], fields["dynamic_batching"]) or fields["seq_packing"].startswith("remove")


def training_of(fields: dict[str, str], facts: ModelFacts, gpus: int, workload: Workload) -> TrainingChoice:
    tp, pp, cp = size(fields, "tp"), size(fields, "pp"), size(fields, "cp")
    if gpus % (tp * pp * cp):
        raise Unusable(f"TP x PP x CP does not divide {gpus} GPUs")
    tokens = size(fields, "train_mb_tokens", 0) if packs(fields) else 0
    tokens = tokens or size(fields, "train_mbs") * workload.max_length
    megatron = fields["train_backend"] == "megatron"
    nemo = "nemo" in fields["source"].lower() or "bridge" in fields["source"]
    fsdp = not megatron or ("FSDP=" in fields["notes"] and "FSDP=0" not in fields["notes"])
    splits = fields["sp"] == "True" or facts.moe or fields["kind"] == "pretrain" or fields["status"] == "published"
    parallel = ParallelSpec(
        tp=tp, pp=pp, vpp=size(fields, "vpp"), cp=cp, ep=size(fields, "ep") if facts.moe else 1,
        etp=size(fields, "etp") if facts.moe else 1, dp=gpus // (tp * pp * cp),
        sequence_parallel=tp > 1 and bool(splits),
    )  # fmt: skip
    return TrainingChoice(
        parallel,
        adapters=adapters_of(fields),
        micro_batch_tokens=max(tokens, workload.max_length) if workload.rollouts else tokens,
        recompute="full" if fields["act_ckpt"] == "True" else "none",
        optimizer_offload=fields["optimizer_cpu_offload"].startswith(("True", "frac=1")),
        sharding="full" if fsdp else "optimizer", precision=precision_of(fields),
        gradient_bytes=2 if nemo else 4, grouped_experts=fields["kind"] == "pretrain" or "v0.3" not in fields["source"],
        dispatcher="flex" if fields["kind"] == "pretrain" or "flex" in fields["recompute_detail"] else "alltoall",
        logit_tokens=1024 if "defer_fp32_logits=True" in fields["recompute_detail"] else None,
    )  # fmt: skip


def adapters_of(fields: dict[str, str]) -> LoraChoice | None:
    """Return the adapters of a LoRA row. An unstated rank counts as 16; frozen weights are much larger anyway."""
    if "lora" not in (fields["algorithm"] + fields["source_path"] + fields["notes"]).lower():
        return None
    rank = re.search(r"LoRA rank (\d+)", fields["notes"])
    return LoraChoice(int(rank[1]) if rank else 16)


def generation_of(fields: dict[str, str], workload: Workload) -> GenerationChoice | None:
    gpus = size(fields, "gen_gpus", 0)
    if fields["gen_backend"] == "" or not gpus:
        return None
    tp, pp, ep = size(fields, "gen_tp"), size(fields, "gen_pp"), size(fields, "gen_ep")
    if fields["status"] == "published" and not fields["gen_tp"]:
        facts_size = fields["model"]
        tp = 4 if any(mark in facts_size for mark in ("70B", "32B", "30B")) else 1
    dp = max(1, ep // tp) if ep > 1 else 1
    weights = 1.0 if "fp8" in fields["gen_precision"] else 2.0
    engines = max(1, gpus // (tp * pp * dp))
    concurrent = max(8, min(1024, -(-workload.samples // (engines * dp))))
    fraction = float(fields["gpu_mem_util"]) if fields["gpu_mem_util"].replace(".", "").isdigit() else 0.6
    return GenerationChoice(
        engines,
        tp,
        pp,
        dp,
        ep if ep > 1 else 1,
        memory_fraction=fraction,
        max_concurrent=concurrent,
        weight_bytes=weights,
    )


def usable(path: Path) -> tuple[list[Row], list[tuple[int, dict[str, str], str]]]:
    """Return (rows that can be planned, the others with the reason)."""
    rows, skipped = [], []
    for number, fields in enumerate(read(path)):
        try:
            rows.append(parse(number, fields))
        except Unusable as why:
            skipped.append((number, fields, str(why)))
    return rows, skipped
