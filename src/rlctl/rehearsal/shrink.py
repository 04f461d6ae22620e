"""Reduction of a configuration to a size that a machine without GPUs can run.

Parallel sizes become at most 2, with at most four training processes. Numbers of prompts, tokens and steps become
small. Keys that only GPUs need are dropped. All other keys keep their values and origins.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.backends.base import resolve_dtype
from rlctl.config.facts import REHEARSAL_DETAIL
from rlctl.config.load import DEFAULT, PLANNER, Resolved
from rlctl.config.parallel import SIZES, ParallelSpec
from rlctl.config.user_code import MODEL
from rlctl.data.mixing import source_settings
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file
from rlctl.planner.choice import TEACHER_SIZES, GenerationChoice
from rlctl.planner.result import Plan
from rlctl.preparation.worker_specs import training_of
from rlctl.settings.config import RlctlConfig
from rlctl.settings.rewards import EnvironmentConfig, RewardTerm, SourceReward
from rlctl.weights.adapter_sites import places, sites

STEPS = 2
PROMPTS, GENERATIONS, NEW_TOKENS = 2, 4, 16
TURNS = 3
"""Maximum number of turns in an environment."""
MOST_PROCESSES = 4
"""Maximum number of training processes."""
MOST_LENGTH = 2048
"""Maximum number of tokens of prompt and completion."""
VALIDATED = 4
"""Number of validation prompts."""
REHEARSAL = "rehearsal"
"""Origin of values that a rehearsal sets."""
VARYING = """
def varies(completion, **row):
    return sum("a" <= letter <= "m" for letter in completion.lower()) / max(1, len(completion))
"""
"""A reward function: the share of letters from a to m. Equal rewards give no gradient, and this share varies between
random completions."""
GPU_FIELDS = (
    "megatron.fp8", "megatron.fp4", "megatron.transformer_impl", "megatron.moe_grouped_gemm", "megatron.moe_permute",
    "megatron.moe_router_fusion", "megatron.moe_token_dispatcher", "megatron.moe_flex", "megatron.moe_enable_deepep",
    "megatron.apply_rope_fusion", "megatron.bias_activation_fusion", "megatron.bias_dropout_fusion",
    "megatron.masked_softmax_fusion", "megatron.gradient_accumulation_fusion", "megatron.overlap_p2p_comm",
    "megatron.batch_p2p_comm", "megatron.deallocate_pipeline_outputs", "megatron.tp_comm", "megatron.attention_backend",
    "megatron.cuda_graph", "megatron.enable_cuda_graph", "ddp.overlap", "ddp.fp8", "optimizer.fp8",
    "optimizer.optimizer_cuda_graph", "vllm.quantization", "vllm.kv_cache", "vllm.calculate_kv_scales",
    "vllm.enforce_eager", "vllm.attention_backend", "vllm.moe_backend", "vllm.compilation", "vllm.cudagraph",
    "vllm.hf_overrides", "vllm.all2all", "vllm.enable_eplb", "vllm.gpu_memory", "refit.mover", "refit.directory",
    "generation.memory_fraction", "generation.kv_cache_bytes", "generation.max_concurrent", "refit.staging_mb",
    "generation.max_batched_tokens", "training.micro_batch_tokens", "training.first_stage_layers",
    "training.last_stage_layers", "training.threads", "generation.threads",
)  # fmt: skip
"""Prefixes of keys for kernels, memory or links of GPUs, and of keys that need more layers than a tiny model has."""


@dataclass(frozen=True)
class StandIns:
    """Files that replace the models, rows and scorers that the configuration names."""

    folder: Path
    model: Path
    """The directory of the tiny model."""
    teacher: Path | None = None
    """The directory of the tiny teacher or reward model."""
    keeps_tokenizer: bool = False
    """Whether `model.tokenizer` is available on this machine."""
    stop: str = ""
    """Stop text that occurs in some completions of a random model."""
    rows: tuple[tuple[str, Path], ...] = ()
    """(name of unavailable data, file of generated rows)."""

    @property
    def scorer(self) -> Path:
        """The file of the scorer that varies."""
        return self.folder / "rehearsal.py"

    def data(self, name: str | None) -> str | None:
        """Return the generated file that replaces the data `name`, or `name` if the data is available."""
        return next((str(path) for source_name, path in self.rows if source_name == name), name)


@dataclass(frozen=True)
class ReplacedValue:
    """A key that the rehearsal changes."""

    key: str
    was: Any
    now: Any


def shrunk(resolved: Resolved, plan: Plan, stand_ins: StandIns) -> Resolved:
    """Return the configuration of the rehearsal; `resolved` holds the values of `plan`."""
    values = small_values(resolved.config, plan, stand_ins)
    left_out = [key for key in resolved.origin if key.startswith(GPU_FIELDS) and key not in values]
    return resolved.replacing(values, REHEARSAL, without=left_out)


def changes(before: Resolved, after: Resolved) -> tuple[list[ReplacedValue], list[ReplacedValue]]:
    """Return (keys that the rehearsal reduces, user-set keys that the rehearsal drops), in the schema's order."""
    then, now = dict(before.leaves()), dict(after.leaves())
    replaced = [ReplacedValue(key, then.get(key), now.get(key)) for key in then | now if then.get(key) != now.get(key)]
    set_by_rehearsal = [value for value in replaced if after.origin.get(value.key) == REHEARSAL]
    smaller = [value for value in set_by_rehearsal if REHEARSAL_DETAIL not in after.schema.facts(value.key)]
    left_out = [value for value in replaced if after.origin.get(value.key) != REHEARSAL]
    plain = (None, False, "auto", [], {})
    return smaller, [
        value for value in left_out if before.origin[value.key] not in (DEFAULT, PLANNER) and value.was not in plain
    ]


def small_values(config: RlctlConfig, plan: Plan, stand_ins: StandIns) -> dict[str, Any]:
    """Return the values that a rehearsal sets, by key."""
    values: dict[str, Any] = {
        "cluster.gpu": "cpu", "cluster.nodes": 1, "cluster.gpus_per_node": 0, "cluster.ray_address": None,
        "run.dir": str(stand_ins.folder / "run"), "run.steps": STEPS, "run.epochs": None, "run.checkpoint_every": 1,
        "run.log_rollouts": 2 * PROMPTS * GENERATIONS, "run.show_samples": 0, "run.keep_last": STEPS,
        "model.name": str(stand_ins.model), "model.revision": None,
        "model.dtype": resolve_dtype(config.model.dtype, "cpu" if plan.cluster.is_cpu else "cuda"),
        "model.max_length": min(config.model.max_length or plan.facts.max_length, MOST_LENGTH),
    }  # fmt: skip
    if stand_ins.teacher is not None and config.named_teacher:
        values |= _teachers(config, str(stand_ins.teacher))
    if config.served_teachers and not config.named_teacher:  # no server has the tiny model's tokens
        values |= {"teacher.models": (), "teacher.mix": "probabilities", "teacher.field": None, "teacher.policy": True}
    if not stand_ins.keeps_tokenizer:
        values |= {"model.tokenizer": None, "generation.stop_token_ids": ()}
    if config.validation.every:
        values["validation.every"] = 1
    if config.validation.wanted:
        values |= {"validation.max_prompts": VALIDATED}
    if config.validation.holdout:
        values["validation.holdout"] = VALIDATED
    rollouts = config.rollout_settings
    generations = min(GENERATIONS, rollouts.batch.generations) if rollouts else 1
    values |= {
        "batch.prompts": PROMPTS if generations > 1 else 2 * PROMPTS,
        "batch.optimizer_steps": min(2, config.batch.optimizer_steps),
        **small_layout(plan),
        **_data(config, stand_ins),
        **adapter_values(config, plan.facts),
    }
    if rollouts:
        values |= {
            "batch.generations": generations,
            "generation.max_new_tokens": min(NEW_TOKENS, rollouts.generation.max_new_tokens),
            "generation.mean_length": None,
            "generation.stop": (*rollouts.generation.stop, *([stand_ins.stop] if stand_ins.stop else [])),
            "filter.max_rounds": min(2, rollouts.filter.max_rounds),
        }
        if rollouts.validation.wanted:
            values["validation.samples"] = min(2, rollouts.validation.samples)
        if rollouts.plays:
            values["environment.turns"] = min(TURNS, rollouts.environment.turns)
    return values


def _teachers(config: RlctlConfig, stand_in: str) -> dict[str, Any]:
    """Return the values of teachers, with one stand-in for all. Each of several has all rows: generated rows may lack
    the sources and fields that divide them."""
    single_teacher = {"teacher.model": stand_in, "teacher.revision": None}
    if not (listed := config.listed_teachers) or config.teacher_section is None:
        return single_teacher
    with_tokenizer, mix = config.tokenizer_teachers, config.teacher_section.mix
    if len(listed) == 1:
        single = {"teacher.own_tokenizer": True} if with_tokenizer else {}
        return {**single_teacher, **single, "teacher.models": (), "teacher.mix": "probabilities", "teacher.field": None}
    models = [
        {"model": stand_in, "weight": entry.weight, **({"own_tokenizer": True} if number in with_tokenizer else {})}
        for number, entry in listed.items()
    ]
    return {"teacher.models": models, "teacher.mix": "divergences" if with_tokenizer else mix, "teacher.field": None}


def _data(config: RlctlConfig, stand_ins: StandIns) -> dict[str, Any]:
    """Return the values of data and rewards: generated rows for unavailable data, and a varying scorer per source."""
    values: dict[str, Any] = {}
    rollouts = config.rollout_settings
    if config.data.sources:
        settings = source_settings(config)
        values["data.sources"] = [
            {
                **source.model_dump(mode="json"),
                "name": stand_ins.data(source.name),
                **(
                    {"reward": _with_variation(source_values.environment, source_values.reward, stand_ins)}
                    if rollouts and (source.reward or source_values.environment.name)
                    else {}
                ),
                **(
                    {"environment": {**source.model_dump(mode="json")["environment"], "turns": turns}}
                    if source.environment and (turns := min(TURNS, source_values.environment.turns))
                    else {}
                ),
            }
            for source, source_values in zip(config.data.sources, settings, strict=True)
        ]
    elif stand_ins.data(config.data.name) != config.data.name:
        values |= {"data.name": stand_ins.data(config.data.name), "data.params": {}, "data.size": None}
    name = config.validation.data.name
    if stand_ins.data(name) != name:
        values |= {"validation.data.name": stand_ins.data(name), "validation.data.params": {}}
    if rollouts and rollouts.learns_from_rewards:
        reward, validation = rollouts.reward, rollouts.validation
        values["reward.terms"] = _with_variation(rollouts.environment, reward, stand_ins)["terms"]
        if validation.wanted and not validation.reward and reward.terms:
            values["validation.reward"] = _played(reward.terms, stand_ins)
        elif validation.reward:
            values["validation.reward"] = _played(validation.reward, stand_ins)
    return values


def _played(terms: Sequence[RewardTerm], stand_ins: StandIns) -> list[dict[str, Any]]:
    tiny = {"name": f"{MODEL}{stand_ins.teacher}"}
    return [term.model_dump() | (tiny if term.name.startswith(MODEL) else {}) for term in terms]


def _with_variation(environment: EnvironmentConfig, reward: SourceReward, stand_ins: StandIns) -> dict[str, Any]:
    """Return a reward with the varying scorer added. Without reward terms, the task's reward is the other term, unless
    an environment gives the rewards."""
    played = _played(reward.terms, stand_ins)
    terms = played or ([] if environment.name else [{"name": "task"}])
    return {"terms": [*terms, {"name": f"{stand_ins.scorer}:varies"}], "extract": reward.extract}


def adapter_values(config: RlctlConfig, facts: ModelFacts) -> dict[str, Any]:
    """Return targets of adapters that a model with fewer layers has: ends of names in place of numbered layers, and no
    adapter to start from."""
    lora = config.training.lora
    names = (lora.targets, lora.exclude, [*lora.rank_pattern], [*lora.alpha_pattern])
    numbered = any(re.search(r"\d", name) for each in names for name in ([each] if isinstance(each, str) else each))
    if not lora.rank or not (numbered or lora.adapter) or not (facts.listed or has_file(facts.family)):
        return {}
    adapted = [site.place for site in sites(facts, lora).all]
    without = any(place.is_expert for place in places(facts)) and not any(place.is_expert for place in adapted)
    return {
        "training.lora.adapter": None,
        "training.lora.targets": tuple(sorted({place.module.rpartition(".")[2] for place in adapted})),
        "training.lora.exclude": ("*.experts.*",) if without else (),
        "training.lora.rank_pattern": {},
        "training.lora.alpha_pattern": {},
    }


def small_layout(plan: Plan) -> dict[str, Any]:
    """Return the layout of a rehearsal: as many of the plan's parallel dimensions as four processes allow, and one
    engine."""
    training = training_of(plan)
    parallel = small_parallel(training.parallel, fsdp=plan.backend == "dtensor")
    values: dict[str, Any] = {
        "training.backend": plan.backend,
        "training.recompute": training.recompute,
        "training.optimizer_offload": training.optimizer_offload,
        "training.sequence_parallel": parallel.sequence_parallel,
        "training.threads": 1,
        **{
            f"training.{size}": getattr(parallel, size) for size in SIZES if plan.facts.moe or size not in ("ep", "etp")
        },
    }
    if plan.backend == "dtensor":
        values["training.replicate"] = parallel.replicate
    if plan.teacher is not None:
        values |= {f"{plan.teacher.role}.{size}": 1 for size in TEACHER_SIZES}
    if plan.generation is not None:
        values |= {f"generation.{key}": value for key, value in small_engine(plan.generation, plan.colocated).items()}
    return values


def small_engine(engine: GenerationChoice, colocated: bool) -> dict[str, Any]:
    """Return the layout of the engine of a rehearsal: up to two ranks, where separate cores leave the policy one."""
    cores = len(os.sched_getaffinity(0))
    most = 1 if not colocated and cores <= 2 else 2
    sizes = {size: min(most, getattr(engine, size)) for size in ("tp", "pp", "dp", "ep")}
    if sizes["tp"] * sizes["pp"] * sizes["dp"] > 2:  # rehearse one dimension, or experts over two ranks
        sizes |= {"tp": 1, "pp": 1} if sizes["ep"] > 1 and sizes["dp"] > 1 else {"pp": 1, "dp": 1}
    ranks = sizes["tp"] * sizes["pp"] * sizes["dp"]
    sizes["ep"] = min(sizes["ep"], sizes["tp"] * sizes["dp"])
    return {
        **sizes, "engines": 1, "threads": 1, "colocated": colocated, "devices": None if colocated else ranks
    }  # fmt: skip


def small_parallel(parallel: ParallelSpec, *, fsdp: bool = False) -> ParallelSpec:
    """Return parallel sizes of at most 2 with at most four ranks. Pipeline, context and expert parallelism stay; of the
    others, data parallelism is dropped first and tensor parallelism second."""
    size = Counter({key: min(2, getattr(parallel, key)) for key in SIZES})

    def ranks(*keys: str) -> int:
        product = 1
        for key in keys or ("tp", "pp", "cp", "dp"):
            product *= size[key]
        return product

    for key in ("dp", "tp"):
        if ranks() > MOST_PROCESSES:
            size[key] = 1
    shards = ("dp", "cp") if fsdp else ("dp", "cp", "tp")
    if size["ep"] > ranks(*shards):
        size["dp"] = 2
        if ranks() > MOST_PROCESSES:
            size["tp"] = 1
    fits = ranks("dp", "cp", "tp") % (size["ep"] * 2) == 0
    size["etp"] = size["tp"] if fsdp or (size["etp"] > 1 and size["tp"] > 1 and fits) else 1
    copies = min(2, parallel.replicate) if size["dp"] > 1 and size["ep"] == 1 else 1
    return replace(
        parallel, **size, replicate=copies, sequence_parallel=parallel.sequence_parallel and size["tp"] > 1,
        first_stage_layers=None, last_stage_layers=None,
    )  # fmt: skip


def usual_letter(tokens: Sequence[str]) -> str:
    """Return the letter that about one in ten tokens contains. As a stop text, it ends some completions of a random
    model."""
    shares = {letter: sum(letter in token for token in tokens) / max(1, len(tokens)) for letter in "etaoinshrdlu"}
    return min(shares, key=lambda letter: abs(shares[letter] - 0.1))
