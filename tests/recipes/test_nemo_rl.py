"""NeMo-RL recipes: read as NeMo-RL reads them, and no key dropped in silence."""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jinja2 import Template
from math_verify.metric import math_metric
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from rlctl.backends.messages import Sampling
from rlctl.checkpoints.locations import converted_directory
from rlctl.config.load import Resolved, stored_values
from rlctl.config.recipes import Import
from rlctl.config.schema import nest
from rlctl.config.sources import Source
from rlctl.data.prompts import open_prompts
from rlctl.data.templates import PromptTemplate
from rlctl.errors import ConfigError, InputError
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import from_sources, registry, resolve
from rlctl.methods.rl.advantages import overlong_penalty
from rlctl.methods.rl.rollout_method import refuse_async
from rlctl.models.catalog import lookup
from rlctl.preparation.named import loggers_of
from rlctl.preparation.open_model import published_facts
from rlctl.recipes.hydra import Override
from rlctl.recipes.nemo_rl import NemoRl
from rlctl.recipes.nemo_rl.mapping_rules import MEGATRON
from rlctl.recipes.nemo_rl.mapping_table import RULES
from rlctl.recipes.nemo_rl.recipe import import_recipe, read_recipe
from rlctl.recipes.rules import Leaf
from rlctl.rewards.prepare_rewards import prepare_rewards
from support.plans import plan_of
from support.rows import every_row
from support.yaml_files import read_yaml

RECIPES = Path(__file__).parent / "nemo_rl"
SHAPED = {"enabled": True, "overlong_buffer_length": 64, "max_response_length": 256}
DDP = "policy.megatron_cfg.distributed_data_parallel_config"


def written(tmp_path: Path, values: dict[str, Any], base: str = "") -> Path:
    """A file with a recipe, which may build on one of those here."""
    path = tmp_path / "recipe.yaml"
    below = {"defaults": str(RECIPES / base)} if base else {}
    path.write_text(yaml.safe_dump(below | values, sort_keys=False))
    return path


def recipe(tmp_path: Path, base: Any = "llama_megatron.yaml", **changes: Any) -> Import:
    """The Megatron recipe, or another, with `changes` merged in by dotted key (`__` for a dot)."""
    values = nest({key.replace("__", "."): value for key, value in changes.items()})
    return import_recipe(written(tmp_path, values, base)).without_invalid(registry().config_class)


def status(result: Import, key: str) -> str:
    return next(entry.status for entry in result.entries if entry.key == key)


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
    return found


def test_every_key_is_accounted_for() -> None:
    result = import_recipe(RECIPES / "llama_megatron.yaml")
    told = {entry.key for entry in result.entries}
    assert set(leaves(read_recipe(RECIPES / "llama_megatron.yaml"))) <= told
    assert all(entry.note for entry in result.entries)


def test_a_colocated_synchronous_megatron_recipe_runs() -> None:
    resolved = resolve(files=[RECIPES / "llama_megatron.yaml"], environment={})
    resolved.require_supported()
    config = resolved.config
    assert (config.training.backend, config.training.tp, config.training.recompute) == ("megatron", 2, "full")
    assert (config.batch.prompts, config.batch.generations, config.batch.optimizer_steps) == (32, 16, 1)
    assert config.training.micro_batch_tokens == 4096
    assert config.optimizer.lr == 5e-6
    assert config.scheduler.warmup_steps == 13
    assert config.advantage.baseline == "leave-one-out"
    assert config.generation.memory_fraction == 0.6
    assert config.reward.terms[0].name == "math-verify"
    assert resolved.origin["training.tp"].endswith("policy.megatron_cfg.tensor_model_parallel_size")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${div:${a}, 4}", 2.0),
        ("${add:1, ${mul:2, ${a}}}", 17),
        ("${max:2, 5}", 5),
        ("${mul:${.b}, ${..a}}", 56),
        ("${oc.decode:${oc.env:RLCTL_NO_SUCH_NAME, 16}}", 16),
        ("${oc.select:policy.nothing, ${mul:${a}, 2}}", 16),
    ],
)
def test_references_have_nemo_rl_s_resolvers(tmp_path: Path, text: str, value: Any) -> None:
    path = written(tmp_path, {"a": 8, "policy": {"b": 7, "c": text}})
    assert read_recipe(path)["policy"]["c"] == value


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_name": "${policy.nothing}"}, "'policy.nothing' not found"),
        ({"model_name": "${pow:2, 3}"}, "Unsupported interpolation type pow"),
        ({"model_name": "${policy.precision}", "precision": "${policy.model_name}"}, "Recursive interpolation"),
        ({"model_name": "${oc.env:RLCTL_NO_SUCH_NAME}"}, "'RLCTL_NO_SUCH_NAME' not found"),
        ({"model_name": "${div:1, 0}"}, "division by zero"),
        ({"tokenizer": {"name": "${policy}"}}, "Interpolation to parent node"),
    ],
)
def test_a_value_that_leads_nowhere_is_an_entry_and_stops_a_run(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, {"grpo": {"max_num_steps": 7}, "policy": values})
    result = import_recipe(path)
    assert result.values["run.steps"] == 7
    assert "model.name" not in result.values
    assert any(said in line for line in result.unsupported), result.unsupported


ABSENT = object()
MULTI_REWARD = {
    "data__env_name": "math_multi_reward",
    "env": {"math_multi_reward": {"num_workers": 8, "math_verify_impl": "hf_math_verify"}},
}
WANDB = {"wandb_enabled": True, "wandb": {"project": "sums", "name": "first"}}
MLFLOW = {"mlflow_enabled": True, "mlflow": {"experiment_name": "e", "run_name": "r"}}
PEFT = {"enabled": True, "dim": 8, "alpha": 16, "target_modules": ["linear_qkv", "linear_proj"], "dropout": 0.0}
FP8 = {"enabled": True, "fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param": False, "fp8_amax_history_len": 4}
AIME = {"data__validation": {"dataset_name": "AIME2024"}}
KEPT = {"enabled": True, "save_period": 1, "keep_top_k": 2, "metric_name": "val_reward"}
RESPONSES = {"dataset_name": "ResponseDataset", "input_key": "q", "output_key": "a"}
SUBSET = {"dataset_name": "ResponseDataset", "data_path": "openai/gsm8k", "subset": "main", "split": "train"}
DEFAULTED = {"_override_": True, "default": RESPONSES | {"prompt_file": "think.txt"}}
CORRECTED = {"loss_fn__use_importance_sampling_correction": True}
CAPPED = "loss_fn__truncated_importance_sampling"
OPTIMIZER = "policy__megatron_cfg__optimizer__optimizer"
APART = {"enabled": False, "resources": {"gpus_per_node": 8, "num_nodes": 2}}
SPREAD = {"tensor_parallel_size": 1, "expert_parallel_size": 4}
EPOCHS = {"grpo__num_prompts_per_step": 16, "policy__train_global_batch_size": 128, "grpo__max_num_steps": 1000}


def sampler(**keys: object) -> dict[str, Any]:
    return {"async_rl": {"sampler": keys, "max_inflight_prompts": 4}, "grpo__async_grpo": None}


def quantized(name: str, **generation: object) -> dict[str, Any]:
    return {"policy__quant_cfg": name, "policy__generation": {"quant_cfg": name} | generation}


def order(mode: str, lag: object, in_flight: object, first: object) -> dict[str, object]:
    keys = ("rollouts.mode", "rollouts.max_staleness", "refit.in_flight", "rollouts.order")
    return dict(zip(keys, (mode, lag, in_flight, first), strict=True))


MAPPED = [
    # Loggers: those that are on, under one name
    ({}, {"run.loggers": ["tensorboard"], "run.project": ABSENT}, {}),
    ({"logger": {"tensorboard_enabled": False} | WANDB | MLFLOW},
     {"run.loggers": ["wandb", "mlflow"], "run.project": "sums", "run.name": "first"},
     {"logger.mlflow.run_name": "logging", "logger.log_dir": "logging", "logger.monitor_gpus": "logging",
      "logger.gpu_monitoring.collection_interval": "logging"}),
    ({"logger": MLFLOW}, {"run.project": "e", "run.name": "r"}, {}),
    ({"logger__swanlab_enabled": True}, {}, {"logger.swanlab_enabled": "logging"}),
    ({"logger__wandb__name": "${data.no_such_key}"}, {}, {"logger.wandb.name": "logging"}),
    ({"run_name": "${oc.env:RLCTL_NO_SUCH_NAME}-first"}, {}, {"run_name": "not known"}),
    # Backends
    ({"policy__dtensor_cfg": {"enabled": True, "tensor_parallel_size": 8}}, {"training.tp": 2},
     {"policy.dtensor_cfg.tensor_parallel_size": "not applicable"}),
    ({"policy__megatron_cfg__enabled": False, "policy__dtensor_cfg__enabled": True},
     {"training.tp": 1, "optimizer.beta2": 0.999, "training.backend": "dtensor"}, {}),
    ({"policy__dtensor_config": {"enabled": True}}, {}, {"policy.dtensor_config.enabled": "mapped"}),
    ({}, {"ddp.average_in_collective": ABSENT}, {f"{DDP}.average_in_collective": "not applicable"}),
    ({"policy__megatron_cfg__peft": PEFT},
     {"training.lora.rank": 8, "training.lora.alpha": 16, "training.lora.targets": ["attention"]}, {}),
    ({"policy__megatron_cfg__peft": PEFT | {"target_modules": ["linear_qkv"]}},
     {"training.lora.rank": 8, "training.lora.targets": ["linear_qkv"]}, {}),
    ({"policy__megatron_cfg__peft": PEFT | {"enabled": False}}, {"training.lora.rank": ABSENT}, {}),
    ({"policy__megatron_cfg__peft": PEFT | {"exclude_modules": ["*out_proj*"]}},
     {"training.lora.exclude": ["*out_proj*"]}, {}),
    ({"policy__megatron_cfg__enabled": False, "policy__dtensor_cfg": {"enabled": True, "lora_cfg": {
        "enabled": True, "dim": 8, "match_all_linear": False, "exclude_modules": ["*out_proj*"]}}},
     {"training.lora.rank": 8, "training.lora.exclude": ["*out_proj*"]}, {}),
    ({"policy__megatron_cfg__fp8_cfg": FP8},
     {"megatron.fp8": "hybrid", "megatron.fp8_recipe": "blockwise", "megatron.fp8_amax_history_len": 4}, {}),
    ({"policy__megatron_cfg__fp8_cfg": FP8 | {"enabled": False, "fp8_param": True}}, {"megatron.fp8": ABSENT}, {}),
    *(({f"{OPTIMIZER}_cpu_offload": on, f"{OPTIMIZER}_offload_fraction": part},
       {"training.optimizer_offload": expected}, {f"{OPTIMIZER}_offload_fraction".replace("__", "."): told})
      for on, part, expected, told in [(True, 1.0, True, "not applicable"), (True, 0.0, False, "not applicable"),
                                       (True, 0.5, True, "changed"), (False, 0.5, False, "not applicable")]),
    ({"policy__megatron_cfg__expert_model_parallel_size": 8},
     {"training.ep": 8, "training.freeze_router": True}, {}),
    # Batches, rows and lengths
    ({}, {"generation.max_new_tokens": 1023, "model.max_length": 1024, "training.micro_batch_tokens": 4096}, {}),
    ({"policy__train_global_batch_size": 128}, {"batch.optimizer_steps": 4}, {}),
    *((EPOCHS | {"grpo__max_num_epochs": number}, {}, {"grpo.max_num_epochs": told})
      for number, told in [(1, "changed"), (10, "changed"), (1000, "not applicable"), (None, "not applicable")]),
    ({"policy__dynamic_batching__enabled": True, "policy__sequence_packing__enabled": False},
     {"training.dynamic_batching": True, "training.packing": False, "training.micro_batch_tokens": 4096}, {}),
    ({"policy__dynamic_batching__enabled": True}, {"training.packing": True, "training.dynamic_batching": ABSENT},
     {"policy.dynamic_batching.enabled": "changed"}),
    # Importance weights between engine and trainer
    (CORRECTED | {f"{CAPPED}_type": "tis", f"{CAPPED}_ratio": 2.0},
     {"loss.importance_correction": "truncated", "loss.importance_cap": 2.0, "loss.importance_floor": ABSENT}, {}),
    (CORRECTED | {f"{CAPPED}_type": "tis", f"{CAPPED}_ratio": 2.0, f"{CAPPED}_ratio_min": 0.5},
     {"loss.importance_correction": "truncated", "loss.importance_floor": 0.5}, {}),
    (CORRECTED, {"loss.importance_correction": "truncated", "loss.importance_cap": 1e9}, {}),
    (CORRECTED | {f"{CAPPED}_type": "icepop", f"{CAPPED}_ratio": 5.0, f"{CAPPED}_ratio_min": 0.5},
     {"loss.importance_correction": "masked", "loss.importance_cap": 5.0, "loss.importance_floor": 0.5}, {}),
    (CORRECTED | {f"{CAPPED}_type": "seq-mask-tis", f"{CAPPED}_ratio": 1.002, f"{CAPPED}_ratio_min": 0.999},
     {"loss.importance_correction": "untruncated", "loss.sequence_mask": [0.999, 1.002]}, {}),
    (CORRECTED | {f"{CAPPED}_type": "icepop", f"{CAPPED}_ratio": 5.0, f"{CAPPED}_ratio_min": 0.0},
     {"loss.importance_correction": "masked", "loss.importance_cap": 5.0, "loss.importance_floor": 0.0}, {}),
    *((CORRECTED | {f"{CAPPED}_type": "tis", f"{CAPPED}_ratio": cap}, {"loss.importance_cap": cap}, {})
      for cap in (1.0, 0.5)),
    (CORRECTED | {f"{CAPPED}_type": "icepop", f"{CAPPED}_ratio": 1.0, f"{CAPPED}_ratio_min": 0.5},
     {"loss.importance_cap": 1.0, "loss.importance_floor": 0.5}, {}),
    (CORRECTED | {f"{CAPPED}_type": "seq-mask-tis", f"{CAPPED}_ratio": 1.002, f"{CAPPED}_ratio_min": 0},
     {"loss.sequence_mask": [0, 1.002]}, {}),
    ({"loss_fn__positive_example_nll_weight": 0.1}, {"loss.positive_nll_weight": ABSENT},
     {"loss_fn.positive_example_nll_weight": "not applicable"}),
    # Data, which take what they do not say from the defaults of all
    ({"data": RESPONSES | {"train_data_path": "x.jsonl"}},
     {"data.name": "x.jsonl", "data.prompt_field": "q", "data.answer_field": "a"}, {}),
    ({"data": DEFAULTED | {"train": {"data_path": "x.jsonl", "input_key": "question"}}},
     {"data.name": "x.jsonl", "data.prompt_field": "question", "data.answer_field": "a"},
     {"data.default.prompt_file": "not yet"}),
    ({"data": DEFAULTED | {"train": {"dataset_name": "DeepScaler", "prompt_file": None}}},
     {"data.name": "agentica-org/DeepScaleR-Preview-Dataset", "data.prompt_template": ABSENT}, {}),
    ({"data": {"_override_": True, "train": [{"dataset_name": "DeepScaler"}, {"dataset_name": "DAPOMath17K"}]}}, {},
     {"data.train": "not yet"}),
    ({"data": {"train": SUBSET, "validation": SUBSET | {"split": "test"}}},
     {"data.name": "openai/gsm8k:main", "validation.data.name": "openai/gsm8k:main"}, {}),
    ({"data__max_input_seq_length": 512}, {"model.max_length": 1024}, {"data.max_input_seq_length": "changed"}),
    # Validation, and checkpoints that are kept for it
    (AIME | {"grpo__val_period": 5, "grpo__val_at_start": True, "grpo__max_val_samples": 64,
             "policy__generation__temperature": 0.8, "checkpointing": {"enabled": True}},
     {"validation.every": 5, "validation.at_start": True, "validation.max_prompts": 64,
      "validation.temperature": 0.8, "validation.data.name": "HuggingFaceH4/aime_2024",
      "validation.data.prompt_field": "problem", "validation.data.answer_field": "answer",
      "validation.data.split": "train", "run.keep_best_by": "validation/reward_mean"}, {}),
    (AIME | {"grpo__val_period": -1}, {"validation.every": 0}, {}),
    ({"data__validation": RESPONSES | {"data_path": "val.jsonl"}},
     {"validation.data.name": "val.jsonl", "validation.data.prompt_field": "q",
      "validation.data.answer_field": "a"}, {}),
    ({"grpo__val_period": 10}, {"validation.every": ABSENT, "run.keep_best_by": ABSENT},
     {"grpo.val_period": "logging"}),
    (AIME | {"grpo__val_period": 3, "checkpointing": {"enabled": True, "save_period": 10}},
     {"run.keep_best_by": ABSENT}, {"checkpointing.keep_top_k": "changed"}),
    *((AIME | {"grpo__val_period": 1, "checkpointing": KEPT | more}, {}, {"checkpointing.keep_top_k": told})
      for more, told in [({}, "mapped"), ({"metric_name": "val:val_loss"}, "changed"),
                         ({"higher_is_better": False}, "changed")]),
    ({"checkpointing": {"enabled": True}}, {"run.keep_best": 3}, {}),
    ({"checkpointing": {"enabled": True, "metric_name": None}}, {"run.keep_last": 3}, {}),
    ({"checkpointing": {"enabled": False}}, {"run.keep_best": ABSENT}, {}),
    # Engines with devices of their own, and the samplers of asynchronous rollouts
    ({"policy__generation__colocated": APART, "cluster__num_nodes": 4},
     {"generation.colocated": False, "generation.engines": 8, "generation.devices": 16}, {}),
    ({"policy__generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 8, "num_nodes": 1}},
                             "vllm_cfg": SPREAD}},
     {"generation.engines": 2, "generation.dp": 4, "generation.ep": 4, "generation.devices": 8}, {}),
    *((sampler(**keys), values, {"async_rl.sampler.name": told, "async_rl.max_inflight_prompts": "not applicable"})
      for keys, values, told in [
          ({"name": "in_order", "max_lookahead_versions": 2}, order("async", 2, "keep", "position"), "mapped"),
          ({"name": "in_order", "max_staleness_versions": 2}, order("async", 1, "keep", "position"), "mapped"),
          ({"name": "windowed", "max_staleness_versions": 3}, order("async", 3, "keep", "arrival"), "changed"),
          ({"name": "in_order", "max_lookahead_versions": 0}, order("sync", ABSENT, ABSENT, ABSENT), "mapped"),
      ]),
    (sampler(name="custom", target="mine:Sampler"), {"rollouts.mode": ABSENT},
     {"async_rl.sampler.name": "not yet"}),
    # The factor of cut completions replaces DAPO's penalty
    ({"grpo__reward_shaping": SHAPED | {"stop_properly_penalty_coef": 0.25}},
     {"reward.overlong_buffer": ABSENT, "reward.truncated_factor": 0.25}, {}),
    ({"grpo__advantage_clip_low": -50, "grpo__advantage_clip_high": 50, "grpo__seq_logprob_error_threshold": 2},
     {"advantage.clip_low": -50, "advantage.clip_high": 50, "loss.error_mask": 2}, {}),
    *(({"grpo": {"zero_variance_prompt_filtering": True, "use_dynamic_sampling": dynamic}},
       {"filter.groups": groups}, {}) for dynamic, groups in ((False, "drop"), (True, "replace"))),
    ({"policy__tokenizer__chat_template_kwargs": {"enable_thinking": False}},
     {"model.chat_template_kwargs.enable_thinking": False}, {}),
    # Engines: another program means the same, and float8 is quantized at each refit
    *(({"policy__generation__backend": name}, {"generation.backend": ABSENT},
       {"policy.generation.backend": "changed"}) for name in ("sglang", "trtllm", "megatron", "dynamo")),
    ({"policy__generation__vllm_cfg__precision": "fp8"}, {"vllm.quantization": "fp8_per_block"}, {}),
    ({"policy__generation__vllm_cfg": {"precision": "fp8", "is_mx": True, "num_last_layers_in_bf16": 2}},
     {"vllm.quantization": "mxfp8"}, {"policy.generation.vllm_cfg.num_last_layers_in_bf16": "changed"}),
    # Weights on a grid, which policy and engines compute with
    (quantized("NVFP4_MLP_WEIGHT_ONLY_CFG"),
     {"training.quantization.format": "nvfp4", "training.quantization.block": 32,
      "training.quantization.tensors": ["*mlp*", "*block_sparse_moe*"]},
     {"policy.quant_cfg": "changed", "policy.generation.quant_cfg": "not applicable"}),
    (quantized("quantized_experts.yaml", real_quant=True, real_quant_ignore=["lm_head"]),
     {"training.quantization.block": 16, "training.quantization.tensors": ["*.experts.*"],
      "training.quantization.exclude": ["*router*", "*.layers.1.*"]},
     {"policy.generation.real_quant": "changed", "policy.generation.real_quant_ignore": "changed"}),
    # Rollouts of older weights, which the recipe does not correct for
    *((keys | {"loss_fn__use_importance_sampling_correction": False},
       {"loss.importance_correction": "off", "rollouts.uncorrected": given},
       {"loss_fn.use_importance_sampling_correction": told})
      for keys, given, told in [
          ({"grpo__async_grpo": {"enabled": True}}, True, "changed"), ({}, ABSENT, "mapped"),
      ]),
    # A reward model scores
    ({"data__env_name": "reward_model",
      "env": {"reward_model": {"model_name": "org/reward", "precision": "bfloat16"}}},
     {"reward.terms": [{"name": "model:org/reward"}]},
     {"env.reward_model.model_name": "changed", "env.reward_model.precision": "not applicable"}),
    # GDPO: advantages of each of three rewards, whitened over the rollouts of the batch
    ({**MULTI_REWARD, "grpo__adv_estimator": {"name": "gdpo", "use_leave_one_out_baseline": False,
                                              "normalize_rewards": True, "reward_weights": [1.0, 0.5, 2.0]}},
     {"advantage.per_term": True, "advantage.whiten": True, "advantage.whiten_over": "rollouts",
      "advantage.baseline": "mean", "advantage.normalize_std": True, "reward.extract": "answer-tag",
      "reward.terms": [{"name": "tagged-answer", "weight": 1.0}, {"name": "tagged-format", "weight": 0.5},
                       {"name": "tagged-integer", "weight": 2.0}]},
     {"grpo.adv_estimator.name": "mapped", "env.math_multi_reward.num_workers": "mapped"}),
    ({"grpo__adv_estimator": {"name": "gdpo"}}, {}, {"grpo.adv_estimator.name": "not yet"}),
    ({**MULTI_REWARD, "grpo__adv_estimator": {"name": "gdpo", "reward_weights": [1.0]}}, {},
     {"env.math_multi_reward.num_workers": "not yet", "env.math_multi_reward.math_verify_impl": "not yet"}),
    # NeMo-RL takes the deviation of the others as well
    ({"grpo__use_leave_one_out_baseline": True},
     {"advantage.baseline": "leave-one-out", "advantage.std_of": "others"}, {}),
    # DAPO's own comparison of answers
    ({"env__math__math_verify_impl": "dapo_math_verify"}, {"reward.terms": [{"name": "dapo-math"}]}, {}),
    ({"env__math__math_verify_impl": "dapo_math_verify",
      "grpo__reward_scaling": {"enabled": True, "target_min": -1.0}},
     {"reward.terms": [{"name": "dapo-math", "weight": 2.0}], "reward.shift": -1.0},
     {"grpo.reward_scaling.enabled": "mapped"}),
    *(({"grpo__reward_scaling": {"enabled": True, **ends}},
       {"reward.shift": shift, "reward.terms": [{"name": "math-verify"} | weight]},
       {"grpo.reward_scaling.enabled": told})
      for ends, shift, weight, told in [
          ({}, ABSENT, {}, "mapped"),
          ({"target_min": -0.5, "target_max": 0.5}, -0.5, {}, "mapped"),
          ({"source_max": 0.5, "target_max": 3.0}, ABSENT, {"weight": 3.0}, "mapped"),  # 1 is clamped to 0.5
          ({"source_max": 0.0}, ABSENT, {}, "not yet"),
          ({"target_min": 1.0, "target_max": 0.0}, ABSENT, {}, "not yet"),
      ]),
]  # fmt: skip
"""Changes of a recipe, the values of rlctl's keys, and the status of keys in the report."""
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_keys_become_rlctls_with_these_values(tmp_path: Path, part: int) -> None:
    """What the recipe says is in the configuration, and nothing but what is expected to stops a run."""

    def check(changes: dict[str, Any], values: dict[str, Any], statuses: dict[str, str]) -> None:
        result = recipe(tmp_path, **changes)
        assert {key: result.values.get(key, ABSENT) for key in values} == values
        assert {key: status(result, key) for key in statuses} == statuses
        assert bool(result.unsupported) == ("not yet" in statuses.values())

    every_row(MAPPED[part::PARTS], check)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_recipes_of_these_keys_are_configurations(tmp_path: Path, part: int) -> None:
    every_row([changes for changes, *_ in MAPPED[part::PARTS]], lambda changes: resolved(recipe(tmp_path, **changes)))


def resolved(result: Any) -> None:
    resolve(files=[result.path], environment={})


def test_an_epoch_that_ends_sooner_names_the_steps(tmp_path: Path) -> None:
    said = [
        line for line in recipe(tmp_path, **EPOCHS, grpo__max_num_epochs=1).lines("changed") if "max_num_epochs" in line
    ]
    assert "set it to 1 x rows of the data / 16 prompts" in said[0]


def test_a_logger_of_a_recipe_stops_no_run_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.telemetry.loggers.find_spec", lambda name: None)
    path = recipe(tmp_path, logger__wandb_enabled=True, logger__tensorboard_enabled=False).path
    told: list[str] = []
    asked = resolve(files=[path], environment={})
    assert loggers_of(asked, told.append) == ()
    assert "wandb" in told[0]
    stored = asked.to_json()["run.loggers"]
    assert stored["optional"] is True  # a resume asks again
    for mine in (
        resolve(files=[path], environment={}, overrides=["++logger.wandb_enabled=true"]),
        resolve(files=[path], environment={}, flags={"run.loggers": ["wandb"]}),
    ):
        with pytest.raises(InputError, match=r"run\.loggers names wandb"):
            loggers_of(mine)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"defaults": "absent.yaml"}, "absent.yaml"),
        ({"defaults": "recipe.yaml"}, "comes back to itself"),
        ({"defaults": "x" * 300}, "there is no file"),
        ({"policy": {"model_name": "${mul:2"}}, "cannot be read: missing BRACE_CLOSE"),
    ],
)
def test_what_cannot_be_resolved_is_named(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    path = written(tmp_path, values)
    with pytest.raises(ConfigError, match=said.replace("`", ".")):
        read_recipe(path)


def test_an_override_replaces_a_section_instead_of_merging_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"policy": {"a": 1, "x": {"b": 2}}, "data": {"d": 1}}))
    own = {"policy": {"x": {"_override_": True, "c": 3}}, "data": {"_override_": True, "e": 2}}
    path = written(tmp_path, {"defaults": "base.yaml"} | own)
    found = read_recipe(path)
    assert found["data"] == {"e": 2}
    assert found["policy"] == {"a": 1, "x": {"b": 2, "_override_": True, "c": 3}}  # NeMo-RL heeds it at the top alone


def test_a_text_in_place_of_a_boolean_stops_a_run(tmp_path: Path) -> None:
    result = recipe(tmp_path, policy__megatron_cfg__enabled="true", policy__megatron_cfg__env_vars={"FLAG": "true"})
    assert status(result, "policy.megatron_cfg.enabled") == "not yet"
    assert status(recipe(tmp_path, logger={"wandb": {"name": "on"}}), "logger.wandb.name") != "not yet"


def test_deprecated_names_go_through_the_table(tmp_path: Path) -> None:
    result = recipe(tmp_path, **{f"{DDP}.use_custom_fsdp".replace(".", "__"): True})
    assert any("use_megatron_fsdp" in line for line in result.unsupported)
    assert status(result, f"{DDP}.use_custom_fsdp") == "mapped"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grpo__max_rollout_turns", 5),
        ("policy__generation__backend", "llamacpp"),
        ("policy__generation__vllm_cfg__precision", "int4"),
        ("policy__generation__vllm_kwargs__worker_extension_cls", "a.B"),
        ("policy__megatron_cfg__distributed_data_parallel_config__bucket_size", "many"),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True}),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True, "fp8": "e5m2"}),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True, "fp8": "e4m3", "fp8_param": True}),
        ("policy__megatron_cfg__fp8_cfg", {"enabled": True, "fp8": "e4m3", "fp8_multi_head_attention": True}),
        ("policy__megatron_cfg__peft", {"enabled": True, "dim": 8, "dropout": 0.1}),
        ("data__dataset_name", "clevr"),
        ("env__sliding_puzzle_game__cfg", {"size": 4}),
        ("env__llm_judge__num_workers", 2),
        ("grpo__adv_estimator__name", "gdpo"),
        ("policy__train_global_batch_size", 500),
        ("policy__hf_config_overrides__num_hidden_layers", 4),
        ("loss_fn__ratio_clip_min", 1.5),
        ("data__prompt_file", "absent.txt"),
        ("policy__generation__max_new_tokens", "many"),
        ("policy__generation__backend", ["vllm"]),
        ("data__dataset_name", ["gsm8k"]),
        ("policy__megatron_cfg__scheduler__start_weight_decay", "none"),
        ("grpo__reward_shaping", SHAPED | {"overlong_buffer_penalty": None}),
        ("grpo__reward_shaping", SHAPED | {"overlong_buffer_penalty": "much"}),
        ("policy__megatron_cfg__peft", {"enabled": True, "dim": 8, "target_modules": 1}),
        ("async_rl__sampler__name", ["in_order"]),
        ("policy__quant_cfg", "NVFP4_MLP_WEIGHT_ONLY_CFG"),
        ("policy__generation__quant_cfg", "NVFP4_MLP_WEIGHT_ONLY_CFG"),
    ],
)
def test_what_cannot_run_is_imported_and_named(tmp_path: Path, key: str, value: Any) -> None:
    result = recipe(tmp_path, **{key: value})
    assert any(line.startswith(key.replace("__", ".")) for line in result.unsupported), result.unsupported


EXPERTS = read_yaml(RECIPES / "quantized_experts.yaml")["quantize"]
OFF, ON = EXPERTS["quant_cfg"][:2]
FORMAT = ON["cfg"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("NVFP4_DEFAULT_CFG", "rounds activations too"),
        ("INT4_AWQ_CFG", "rlctl knows W4A16_NVFP4_CFG, NVFP4_MLP_WEIGHT_ONLY_CFG, and files"),
        ([OFF, ON, {"quantizer_name": "*input_quantizer", "cfg": FORMAT}], "rounds activations too"),
        ([OFF, ON | {"cfg": FORMAT | {"num_bits": 8}}], "*.experts.*weight_quantizer is not of NVFP4"),
        ([OFF, {"quantizer_name": "*k_bmm_quantizer", "cfg": FORMAT}], "*k_bmm_quantizer is on"),
        ([{"$import": "base_disable_all"}], "builds on rules of ModelOpt's"),
        ([ON, OFF], "no weights are rounded"),
        ({"algorithm": "awq_lite", "quant_cfg": [OFF, ON]}, "its algorithm is awq_lite"),
    ],
)
def test_another_quantization_is_refused_with_the_reason(tmp_path: Path, settings: Any, said: str) -> None:
    name = settings
    if not isinstance(settings, str):
        name = "rules.yaml"
        rules = settings if isinstance(settings, dict) else {"quant_cfg": settings}
        (tmp_path / name).write_text(yaml.safe_dump({"quantize": rules}))
    (line,) = recipe(tmp_path, **quantized(name)).unsupported
    assert line.startswith("policy.quant_cfg")
    assert said in line


ODD = (None, [], {}, "x", -1, True, [{"name": None}], [["x"]])


@pytest.mark.parametrize(("value", "backend"), list(zip(ODD, cycle(["megatron_cfg", "dtensor_cfg"]), strict=False)))
def test_no_value_of_any_key_is_a_traceback(value: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = {"grpo.reward_shaping.enabled": True, "grpo.reward_scaling.enabled": True, f"policy.{backend}.enabled": True,
          "policy.megatron_cfg.peft.enabled": True, "policy.dtensor_cfg.lora_cfg.enabled": True,
          "policy.generation.colocated.enabled": False,
          "data.validation.dataset_name": "AIME2024"}  # fmt: skip
    # To read thousands of recipes, and to look for what unknown keys may mean, takes long.
    given: dict[str, Any] = {}
    monkeypatch.setattr("rlctl.recipes.nemo_rl.recipe.read_recipe", lambda *_: given)
    monkeypatch.setattr("rlctl.recipes.nemo_rl.recipe.closest", lambda *_: None)
    for key in RULES:
        if not key.endswith("*"):
            around = {name: on[name] for name in on if not name.startswith(f"{key}.")}
            given = nest(around | {key: value})
            result = import_recipe(None)
            assert all(isinstance(line, str) for line in result.unsupported), key


def test_a_rule_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halfway(leaf: Leaf) -> None:
        leaf.map("run.seed", 5)
        raise TypeError("no such value")

    monkeypatch.setitem(RULES, "grpo.seed", halfway)
    result = recipe(tmp_path, grpo__seed=[3])
    assert "run.seed" not in result.values
    (line,) = result.unsupported
    assert line.startswith("grpo.seed = [3]: rlctl cannot read")


@pytest.mark.parametrize("value", [{"gpus": 1, "nodes": 2}, "${cluster}"])
@pytest.mark.parametrize("key", ["grpo.max_num_steps", "policy.megatron_cfg.optimizer.lr", "env.math.num_workers"])
def test_a_section_in_place_of_a_value_is_refused_once(tmp_path: Path, key: str, value: Any) -> None:
    result = recipe(tmp_path, **{key.replace(".", "__"): value})
    (line,) = result.unsupported
    assert line.startswith(f"{key} = {{'gpus")
    assert line.endswith("it is a section, and NeMo-RL has one value there")
    assert not result.of("not known")
    assert key not in result.source.values()


def test_fields_of_the_engines_are_passed_through(tmp_path: Path) -> None:
    result = recipe(
        tmp_path,
        policy__megatron_cfg__moe_z_loss_coeff=0.001,
        policy__megatron_cfg__optimizer__decoupled_weight_decay=False,
        policy__generation__vllm_cfg__kv_cache_dtype="fp8",
        policy__generation__vllm_kwargs={"speculative_config": {"method": "ngram"}, "max_num_seqs": 64},
    )
    values = result.values
    assert (values["megatron.moe_router_dtype"], values["megatron.moe_z_loss_coeff"]) == ("fp64", 0.001)
    assert (values["ddp.grad_reduce_in_fp32"], values["ddp.overlap_grad_reduce"]) == (False, True)
    assert values["optimizer.decoupled_weight_decay"] is False
    assert values["vllm.kv_cache_dtype"] == "fp8"
    assert values["vllm.speculative_config.method"] == "ngram"
    assert values["generation.max_concurrent"] == 64
    config = resolve(files=[result.path], environment={}).config
    assert config.vllm.passed["speculative_config"] == {"method": "ngram"}
    assert config.megatron.passed["moe_router_dtype"] == "fp64"


def test_a_recipes_fields_may_have_no_effect_also_when_it_is_resumed() -> None:
    asked = resolve(files=[RECIPES / "megatron_form.yaml"], sets=["megatron.moe_z_loss_coeff=0.1"], environment={})
    planned = asked.with_values({"training.pp": 1})
    again = from_sources([Source(stored_values(planned.to_json()))])
    for resolved in (asked, planned, again):
        assert "megatron.moe_router_dtype" in resolved.optional
        assert "megatron.moe_z_loss_coeff" not in resolved.optional
    assert all(line.startswith("runs differently: ") for line in planned.notes)
    assert planned.notes == asked.notes != ()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("policy__megatron_cfg__moe_router_dtyp", "nor is it a field of Megatron-Core"),
        ("policy__megatron_cfg__tensor_model_paralel_size", "mean policy.megatron_cfg.tensor_model_parallel_size?"),
        ("grpo__num_prompt_per_step", "did you mean grpo.num_prompts_per_step"),
        ("a_section_of_tomorrow__key", "rlctl does not know this key"),
    ],
)
def test_an_unknown_key_is_an_entry_and_stops_nothing(tmp_path: Path, key: str, said: str) -> None:
    result = recipe(tmp_path, **{key: "fp32"})
    name = key.replace("__", ".")
    assert [entry.note for entry in result.entries if entry.key == name and said in entry.note]
    assert status(result, name) == "not known"
    resolved = resolve(files=[result.path], environment={})
    resolved.require_supported()
    assert [line for line in resolved.notes if line.startswith(f"left out: {name} = fp32") and said in line]


def test_a_recipe_that_names_the_guide_of_deepseek_trains_the_published_model(tmp_path: Path) -> None:
    guide = "Follow instructions in https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/deepseek.md"
    result = recipe(tmp_path, policy__model_name=guide)
    assert result.values["model.name"] == "deepseek-ai/DeepSeek-V3"
    assert "model.tokenizer" not in result.values
    assert lookup(result.values["model.name"]) is not None


PPO: dict[str, Any] = {
    "ppo": {
        "num_prompts_per_step": 16, "num_generations_per_prompt": 2, "max_num_steps": 50, "ppo_epochs": 4,
        "policy_training_start_step": 3,
        "adv_estimator": {"name": "gae", "gae_lambda": 0.9, "gae_gamma": 0.99, "normalize_advantages": True},
    },
    "value_loss_fn": {"scale": 0.4, "cliprange": None},
    "value": {
        "model_name": "${policy.model_name}",
        "megatron_cfg": {
            "enabled": True, "tensor_model_parallel_size": 2,
            "optimizer": {"lr": 2.0e-5, "weight_decay": 0.1, "clip_grad": 0.5},
            "scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 6, "lr_warmup_init": 0.0},
        },
    },
    "policy": {"train_global_batch_size": 16},
    "loss_fn": {"use_kl_in_reward": False, "reference_policy_kl_penalty": 0.0, "positive_example_nll_weight": 0.1},
}  # fmt: skip


def test_a_recipe_of_ppo_trains_with_a_critic_of_its_own(tmp_path: Path) -> None:
    """Schedules count the passes over a batch in NeMo-RL, and the steps here."""
    path = written(tmp_path, PPO, "llama_megatron.yaml")
    resolved = resolve(files=[path], environment={})
    resolved.require_supported()
    config = resolved.config
    assert (config.run.algorithm, config.run.steps, config.has_critic) == ("ppo", 50, True)
    assert (config.batch.rollouts, config.batch.optimizer_steps, config.batch.epochs) == (32, 2, 4)
    assert method_from_config(config, tries_loss=False).needs == {"old_logprobs"}
    critic = config.critic
    assert (critic.gae_lambda, critic.gamma, critic.value_clip, critic.loss_weight) == (0.9, 0.99, None, 0.4)
    assert (critic.lr, critic.weight_decay, critic.clip_grad, critic.warmup_steps) == (2e-5, 0.1, 0.5, 3)
    assert critic.scheduler.warmup_steps == 2  # 6 passes, 4 a step
    assert (config.loss.kl_in, config.advantage.whiten) == ("loss", True)
    assert config.loss.positive_nll_weight == 0.1
    assert any("critic.scheduler.warmup_steps is 2" in note for note in resolved.notes)
    assert status(import_recipe(path), "ppo.ppo_epochs") == "mapped"


@pytest.mark.parametrize(("key", "value"), [
    ("ppo.adv_estimator.gae_lambda", {"gae_lambda_value": 1.0}),
    ("ppo.adv_estimator.gae_lambda", {"length_adaptive_alpha": 0.05}),
    ("value.model_name", "Qwen/Qwen3-0.6B"),
])  # fmt: skip
def test_what_a_critic_cannot_do_is_refused_by_the_recipes_own_key(tmp_path: Path, key: str, value: Any) -> None:
    name, _, _ = key.rpartition(".")
    changed = nest({f"{name}.{one}": two for one, two in value.items()} if isinstance(value, dict) else {key: value})
    base = tmp_path / "ppo.yaml"
    base.write_text(yaml.safe_dump({"defaults": str(RECIPES / "llama_megatron.yaml")} | PPO))
    result = import_recipe(written(tmp_path, {"defaults": str(base)} | changed))
    assert any(line.startswith(key) for line in result.unsupported), result.unsupported


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"eval": {"metric": "pass@k"}, "generation": {"temperature": 0.0}}, "evaluates"),
        (
            {
                "eval": {"num_tests_per_prompt": 16},
                "generation": {"model_name": "a/b"},
                "data": {"dataset_name": "AIME2024"},
            },
            "`rlctl eval --model a/b --task aime24 -n 16` measures one",
        ),
        ({"eval": {"metric": "pass@k"}, "data": {"env_name": "vlm"}}, "evaluates"),
        ({"grpo": {}, "policy": {"model_name": "Qwen/Qwen2.5-Omni-3B"}}, "policy.model_name = Qwen/Qwen2.5-Omni-3B"),
        (
            {"grpo": {}, "data": {"train": [{"dataset_name": "gsm8k"}, {"dataset_name": "avqa"}]}},
            "sound (data.train.1.dataset_name = avqa)",
        ),
        (
            {"sft": {}, "policy": {"tokenizer": {"video": {"num_frames": 16}}, "is_vlm": True}},
            "video (policy.tokenizer.video.num_frames = 16)",
        ),
    ],
)
def test_a_recipe_of_another_kind_is_told_so_in_one_sentence(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    values = {"data": {"dataset_name": "other", "prompt_file": "x"}, "cluster": {"num_nodes": 2}} | sections
    values["policy"] = {"train_global_batch_size": 32, "precision": "bfloat16"} | values.get("policy", {})
    values["loss_fn"] = {"kl_type": "mixed"}
    path = written(tmp_path, values)
    result = import_recipe(path)
    (line,) = result.unsupported
    assert said in line
    assert not result.of("not known")
    resolved = resolve(files=[path], environment={})
    assert resolved.config.cluster.nodes == 2
    assert resolved.config.run.algorithm == "grpo"
    for refused in (resolved, resolved.allowing_differences(), resolved.allowing_differences().with_values({})):
        with pytest.raises(ConfigError, match=re.escape(said)) as caught:
            refused.require_supported()
        assert "--allow-differences" not in f"{caught.value.message} {caught.value.hint}"
    assert not [line for line in resolved.allowing_differences().notes if line.startswith("left out: This recipe")]


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-3B-Instruct", "google/gemma-3-27b-it"])
def test_a_model_that_takes_images_is_for_text_where_the_data_are(model: str, tmp_path: Path) -> None:
    result = recipe(tmp_path, policy__model_name=model, data__dataset_name="gsm8k")
    assert result.foreign is None
    assert result.values["model.name"] == model


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_prompt_in_place_of_its_file_stops_a_run(key: str) -> None:
    result = import_recipe(None, [Override(f"data.{key}", "Think step by step. " * 20)])
    assert any(line.startswith(f"data.{key} = Think") for line in result.unsupported)


def test_what_stops_a_run_can_be_settled_by_rlctl_s_own_key(tmp_path: Path) -> None:
    changes = {"data__dataset_name": "clevr", "data__prompt_file": "absent.txt", "env__game__cfg": {"size": 4}}
    path = recipe(tmp_path, **changes).path
    asked = resolve(files=[path], environment={})
    assert len(asked.refusals) == 3
    sets = ["data.name=x.jsonl", "data.prompt_template={prompt}"]
    settled = resolve(files=[path], sets=sets, flags={"reward.terms": [{"name": "exact-match"}]}, environment={})
    settled.require_supported()
    allowed = asked.allowing_differences()
    allowed.require_supported()
    assert sum(line.startswith("left out: ") for line in allowed.notes) == 3


@pytest.mark.parametrize(
    ("schedulers", "expected"),
    [
        ([("LinearLR", {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50}), ("ConstantLR", {"factor": 1.0})],
         {"warmup_steps": 50, "init_lr": 5e-7}),
        ([("LinearLR", {"start_factor": 0.1, "total_iters": 10}),
          ("CosineAnnealingLR", {"T_max": 90, "eta_min": 1e-7})],
         {"warmup_steps": 10, "decay": "cosine", "decay_steps": 100, "min_lr": 1e-7}),
        ([("LinearLR", {"total_iters": 10}),
          ("LinearLR", {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 90})],
         {"warmup_steps": 10, "decay": "linear", "decay_steps": 100, "min_lr": 5e-7}),
        ([("ConstantLR", {"factor": 1.0, "total_iters": 10_000_000_000})], {"warmup_steps": 0}),
        ([("LinearLR", {"total_iters": 6})], {"warmup_steps": 6, "init_lr": 5e-6 / 3}),
    ],
)  # fmt: skip
def test_torch_schedulers_are_the_schedule(tmp_path: Path, schedulers: list[Any], expected: dict[str, Any]) -> None:
    listed = [{"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for name, kwargs in schedulers]
    policy = {"scheduler": [*listed, {"milestones": [schedulers[0][1].get("total_iters")]}]}
    path = written(tmp_path, {"policy": policy}, "base.yaml")
    values = import_recipe(path).values
    assert {name: values[f"scheduler.{name}"] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedulers", "milestones"),
    [
        ([("StepLR", {"step_size": 3})], None),
        ([("ConstantLR", {})], None),  # torch's own factor is a third
        ([("LinearLR", {"total_iters": 50}), ("ConstantLR", {"factor": 1.0})], [10]),
        ([("LinearLR", {"total_iters": 10}), ("CosineAnnealingLR", {"T_max": 90})], [50]),
    ],
)
def test_other_torch_schedulers_stop_a_run(tmp_path: Path, schedulers: list[Any], milestones: list[int] | None) -> None:
    listed = [{"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for name, kwargs in schedulers]
    policy = {"scheduler": [*listed, {"milestones": milestones}]}
    path = written(tmp_path, {"policy": policy}, "base.yaml")
    assert any(line.startswith("policy.scheduler") for line in import_recipe(path).unsupported)


@pytest.mark.parametrize(("steps", "start", "expected"), [(3, 0.1, "changed"), (3, 1.0, "mapped"), (0, 0.1, "mapped")])
def test_a_warm_up_that_begins_one_step_later_is_a_difference(
    tmp_path: Path, steps: int, start: float, expected: str
) -> None:
    result = recipe(
        tmp_path, policy__megatron_cfg__scheduler={"lr_warmup_iters": steps, "lr_warmup_init": start * 5e-6}
    )
    assert status(result, "policy.megatron_cfg.scheduler.lr_warmup_iters") == expected
    if steps:
        linear = {"start_factor": start, "total_iters": steps}
        listed = [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": linear}]
        path = written(tmp_path, {"policy": {"scheduler": listed}}, "base.yaml")
        assert status(import_recipe(path), "policy.scheduler") == expected


def test_a_learning_rate_in_quotes_is_named() -> None:
    result = import_recipe(RECIPES / "base.yaml", [Override("policy.optimizer.kwargs.lr", "1e-6")])
    assert any("policy.optimizer.kwargs.lr is '1e-6', which is not a number" in line for line in result.unsupported)


TORCH: dict[str, Any] = {
    "max_grad_norm": 0.5,
    "optimizer": {"name": "torch.optim.AdamW",
                  "kwargs": {"lr": 3e-7, "weight_decay": 0.02, "betas": [0.91, 0.98], "eps": 1e-7}},
    "scheduler": [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 50}},
                  {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 350, "eta_min": 3e-8}},
                  {"milestones": [50]}],
}  # fmt: skip
ADAM = {"optimizer": "adam", "lr": 3e-7, "min_lr": 3e-8, "weight_decay": 0.02, "adam_beta1": 0.91, "adam_beta2": 0.98,
        "adam_eps": 1e-7, "clip_grad": 0.5}  # fmt: skip
DECAY = {"start_weight_decay": 0.02, "end_weight_decay": 0.02, "weight_decay_incr_style": "constant",
         "lr_decay_style": "cosine", "lr_decay_iters": 400, "lr_warmup_iters": 50, "lr_warmup_init": 3e-8}  # fmt: skip
MEGATRON_BLOCK = {"optimizer": ADAM, "scheduler": DECAY}
LEARNING = {"optimizer.lr": 3e-7, "optimizer.weight_decay": 0.02, "optimizer.beta1": 0.91, "optimizer.beta2": 0.98,
            "optimizer.eps": 1e-7, "optimizer.clip_grad": 0.5, "scheduler.warmup_steps": 50, "scheduler.init_lr": 3e-8,
            "scheduler.decay": "cosine", "scheduler.decay_steps": 400, "scheduler.min_lr": 3e-8}  # fmt: skip


def learning(result: Import) -> dict[str, Any]:
    return {key: value for key, value in result.values.items() if key.startswith(("optimizer.", "scheduler."))}


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize(
    "policy",
    [TORCH | {"megatron_cfg": {"optimizer": None, "scheduler": None}}, TORCH,
     {"megatron_cfg": MEGATRON_BLOCK, "optimizer": None, "scheduler": None}, {"megatron_cfg": MEGATRON_BLOCK}],
)  # fmt: skip
def test_optimizer_and_schedule_hold_for_either_backend(policy: dict[str, Any], megatron: bool, tmp_path: Path) -> None:
    path = written(tmp_path, {"grpo": {"max_num_steps": 500}, "policy": policy})
    result = import_recipe(path, [Override("policy.megatron_cfg.enabled", megatron)])
    assert learning(result) == LEARNING
    assert not result.notes
    block = {"policy": policy | {"megatron_cfg": (policy.get("megatron_cfg") or {}) | {"enabled": megatron}}}
    assert learning(import_recipe(written(tmp_path, {"grpo": {"max_num_steps": 500}} | block))) == LEARNING


@pytest.mark.parametrize("megatron", [False, True])
def test_the_block_of_the_backend_that_trains_wins_and_the_dry_run_says_so(megatron: bool, tmp_path: Path) -> None:
    other = {"optimizer": ADAM | {"lr": 1e-5, "adam_eps": 1e-6}, "scheduler": {"lr_warmup_iters": 0}}
    policy = TORCH | {"megatron_cfg": {"enabled": megatron} | other}
    path = written(tmp_path, {"grpo": {}, "policy": policy})
    config = resolve(files=[path], environment={})
    assert config.config.optimizer.lr == (1e-5 if megatron else 3e-7)
    assert config.config.scheduler.warmup_steps == (0 if megatron else 50)
    (line,) = [line for line in config.notes if line.startswith("note: ")]
    blocks = ["policy.optimizer.kwargs.lr", "policy.megatron_cfg.optimizer.lr"]
    assert f"optimizer.lr is {config.config.optimizer.lr} ({blocks[megatron]})" in line
    assert f"({blocks[not megatron]})" in line
    assert "sets the schedule" in line


def test_what_one_block_leaves_out_is_that_of_the_other(tmp_path: Path) -> None:
    policy = TORCH | {"megatron_cfg": {"enabled": True, "optimizer": {"lr": 1e-6}}}
    path = written(tmp_path, {"grpo": {}, "policy": policy})
    assert learning(import_recipe(path)) == LEARNING | {"optimizer.lr": 1e-6, "scheduler.init_lr": 1e-7}


def test_variables_and_stop_tokens_reach_the_configuration(tmp_path: Path) -> None:
    variables = {"NCCL_ALGO": "Ring", "NVTE_FLAG": 1, "NRL_REFIT_NUM_BUFFERS": 1}
    path = recipe(
        tmp_path, policy__megatron_cfg__env_vars=variables, policy__generation__vllm_cfg__env_vars=variables
    ).path
    config = resolve(files=[path], environment={}).config
    assert config.training.env == config.generation.env == {"NCCL_ALGO": "Ring", "NVTE_FLAG": "1"}
    assert config.generation.stop_token_ids == (128009,)
    assert Sampling.from_config(config.generation, stop_token_ids=(2,)).stop_token_ids == (2, 128009)


@pytest.mark.parametrize("backend", ["megatron_cfg", "dtensor_cfg"])
@pytest.mark.parametrize("megatrons_first", [True, False])
@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [(0.5, 2.0, (0.5, 2.0)), (None, 2.0, (0, 2.0)), (0.5, None, (0.5, 0)), ("", 2.0, (2.0, 2.0))],
)
def test_gradients_are_clipped_by_the_backend_s_own_key(
    backend: str, megatrons_first: bool, own: Any, given: float | None, expected: tuple[float, float], tmp_path: Path
) -> None:
    optimizer = {} if own == "" else {"optimizer": {"clip_grad": own}}
    parts: list[dict[str, Any]] = [{"megatron_cfg": {"enabled": backend == "megatron_cfg"} | optimizer},
                                   {"max_grad_norm": given}]  # fmt: skip
    first, second = parts if megatrons_first else parts[::-1]
    path = written(tmp_path, {"grpo": {}, "policy": first | second})
    assert import_recipe(path).values["optimizer.clip_grad"] == expected[backend == "dtensor_cfg"]


@pytest.mark.parametrize(
    ("template", "expected"), [("default", None), ("{{ messages }}", "{{ messages }}"), (None, "joined")]
)
def test_no_chat_template_joins_the_messages(tmp_path: Path, template: str | None, expected: str | None) -> None:
    given = resolve(files=[recipe(tmp_path, policy__tokenizer__chat_template=template).path], environment={})
    found = given.config.model.chat_template
    if expected == "joined":
        messages = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "2 + 3?"}]
        assert found is not None
        found, expected = Template(found).render(messages=messages, add_generation_prompt=True), "Be brief. 2 + 3?"
    assert found == expected


def test_a_list_of_sources_settles_what_a_recipe_s_data_set_stands_for(tmp_path: Path) -> None:
    path = recipe(tmp_path, data__dataset_name="clevr").path
    assert resolve(files=[path], environment={}).refusals
    mixed = resolve(files=[path], sets=["data.sources=[{name: a.jsonl}, {name: b.jsonl}]"], environment={})
    mixed.require_supported()
    assert [source.name for source in mixed.config.data.sources] == ["a.jsonl", "b.jsonl"]


def test_an_asynchronous_recipe_on_devices_of_its_own_has_a_plan_that_runs(tmp_path: Path) -> None:
    lag = {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}
    apart = {"enabled": False, "resources": {"gpus_per_node": 8, "num_nodes": 1}}
    changes = {
        "grpo": {"async_grpo": lag},
        "loss_fn": {"use_importance_sampling_correction": True},
        "policy": {"generation": {"colocated": apart}},
    }
    path = written(tmp_path, changes, "llama_megatron.yaml")
    resolved = resolve(files=[path], sets=["cluster.nodes=2", "cluster.gpus_per_node=8"], environment={})
    resolved.require_supported()
    config = resolved.config
    assert (config.rollouts.mode, config.rollouts.max_staleness, config.refit.in_flight) == ("async", 2, "keep")
    refuse_async(config)
    facts = lookup(config.model.name or "")
    assert facts is not None
    made = plan_of(config, facts, assume="h100")
    assert made.runnable
    assert made.training is not None
    assert (made.engine_devices, made.training.parallel.world_size, made.mover) == (8, 8, "collective")
    assert recipe(tmp_path, grpo__async_grpo={"max_trajectory_age_steps": 2}).values.get("rollouts.mode") != "async"


def test_positions_that_a_recipe_gives_its_model_are_the_model_s(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1000000, "factor": 2.0, "original_max_position_embeddings": 32768}
    path = written(tmp_path, {
        "policy": {"hf_config_overrides": {"rope_scaling": yarn}, "max_total_sequence_length": 65536,
                   "model_name": "Qwen/Qwen3-0.6B"},
    })  # fmt: skip
    config = resolve(files=[path], environment={}).config
    assert config.model.rope_scaling == yarn
    facts = published_facts(config.model)
    assert (facts.max_length, facts.rope.kind, facts.rope.theta) == (65536, "yarn", 1e6)
    assert facts.rope.scaling == {"factor": 2.0, "original_max_position_embeddings": 32768.0}
    most = recipe(tmp_path, policy__hf_config_overrides={"max_position_embeddings": 16384})
    assert most.values["model.max_position_embeddings"] == 16384
    texts = written(tmp_path, {"sft": {}, "policy": {"model_name": "Qwen/Qwen2.5-Math-7B",
                                                     "max_total_sequence_length": 16384}})  # fmt: skip
    assert published_facts(resolve(files=[texts], environment={}).config.model).max_length == 16384


@pytest.mark.parametrize("section", ["dtensor_cfg.lora_cfg", "megatron_cfg.peft"])
def test_adapters_of_texts_keep_their_dropout(tmp_path: Path, section: str) -> None:
    backend, adapters = section.split(".")
    of_backend = {"enabled": True, adapters: {"enabled": True, "dim": 8, "alpha": 16, "dropout": 0.1}}
    path = written(tmp_path, {"sft": {}, "policy": {"model_name": "Qwen/Qwen2.5-0.5B", backend: of_backend}})
    lora = resolve(files=[path], environment={}).config.training.lora
    assert (lora.rank, lora.dropout) == (8, 0.1)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("policy.generation.vllm_kwargs.speculative_config.method=ngram", "vllm.speculative_config.method"),
        ("policy.generation.vllm_kwargs.compilation_config.mode=0", "vllm.compilation_config.mode"),
        ("policy.generation.vllm_kwargs.kernel_config.moe_backend=triton", "vllm.kernel_config.moe_backend"),
        ("policy.generation.vllm_cfg.attention_config.use_trtllm_attention=false",
         "vllm.attention_config.use_trtllm_attention"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_keys_inside_of_a_field_of_vllm_can_be_overridden(prefix: str, key: str, ours: str) -> None:
    assert ours in import_recipe(None, [Override.parse(f"{prefix}{key}")]).values


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("use_custom_fsdp", True, "refit and checkpoints need the whole parameters"),
        ("use_megatron_fsdp", True, "the DTensor backend shards weights"),
        ("data_parallel_sharding_strategy", "optim_grads", "it belongs to Megatron-FSDP"),
        ("data_parallel_sharding_strategy", "no_shard", "it belongs to Megatron-FSDP"),
        ("data_parallel_sharding_strategy", "optim_grads_params", None),
        ("use_custom_fsdp", False, None),
    ],
)
def test_megatrons_own_sharding_is_refused_with_the_reason(tmp_path: Path, key: str, value: Any, said: str) -> None:
    ddp = {key: value}
    result = recipe(tmp_path, policy__megatron_cfg__distributed_data_parallel_config=ddp)
    assert (said or "") in " ".join(result.unsupported)
    assert bool(result.unsupported) == bool(said)


def test_losses_of_routers_are_read_from_recipes(tmp_path: Path) -> None:
    given = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 1e-3, "moe_router_load_balancing_type": "aux_loss"}
    result = recipe(tmp_path, policy__megatron_cfg=given)
    assert {key: result.values[f"megatron.{key}"] for key in given} == given


def test_drafts_with_weights_are_refused_where_the_command_line_asks_for_them(tmp_path: Path) -> None:
    section = "policy.generation.vllm_kwargs.speculative_config"
    asked = [Override.parse(f"++{section}.{one}") for one in ("method=eagle3", "model=a/b", "num_speculative_tokens=3")]
    assert "the draft needs weights" in " ".join(import_recipe(None, asked).unsupported)
    (off,) = [Override.parse(f"++{section}={{method: eagle3, num_speculative_tokens: 0}}")]
    assert not import_recipe(None, [off]).unsupported


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_async_engine_may_stand_where_the_announcement_of_version_0_3_has_it(tmp_path: Path, prefix: str) -> None:
    short, long = (import_recipe(None, [Override.parse(f"{prefix}policy.generation.{key}=True")])
                   for key in ("async_engine", "vllm_cfg.async_engine"))  # fmt: skip
    assert (short.values, short.unsupported) == (long.values, [])
    assert {entry.note for entry in long.entries} < {entry.note for entry in short.entries}
    assert not recipe(tmp_path, policy__generation__async_engine=True).of("not known")


def test_what_drafts_tokens_is_left_out_where_the_policy_does_not_depend_on_it(tmp_path: Path) -> None:
    speculative = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 5}}
    heads = {"mtp_num_layers": 5, "mtp_loss_scaling_factor": 0.3}
    own = {"policy__generation__vllm_kwargs": speculative, "policy__draft": {"enabled": True, "model_name": "a/b"}}
    result = recipe(tmp_path, **own, policy__megatron_cfg=heads | {"mtp_detach_heads": True})
    told = ("policy.draft.enabled", "policy.megatron_cfg.mtp_num_layers",
            "policy.generation.vllm_kwargs.speculative_config.method")  # fmt: skip
    assert [status(result, key) for key in told] == ["changed"] * 3
    assert not any(key.startswith("vllm.speculative") for key in result.values)
    assert not result.unsupported
    attached = recipe(tmp_path, policy__megatron_cfg=heads | {"mtp_detach_heads": False})
    assert status(attached, "policy.megatron_cfg.mtp_num_layers") == "not yet"
    assert status(recipe(tmp_path, policy__megatron_cfg=heads | {"mtp_loss_scaling_factor": 0}),
                  "policy.megatron_cfg.mtp_num_layers") == "changed"  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        ({"use_on_policy_kl_approximation": False}, None),  # recipes of before NeMo-RL 0.5
        ({"use_on_policy_kl_approximation": False, "reference_policy_kl_type": "k3"}, None),  # and of before 0.7
        ({"use_on_policy_kl_approximation": False, "positive_example_nll_weight": 0.0}, "policy"),
        ({"use_on_policy_kl_approximation": True, "reference_policy_kl_type": "k3"}, "importance"),
        ({"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0}, None),
    ],
)
def test_the_weight_of_the_kl_penalty_is_that_of_the_recipe_s_time(
    tmp_path: Path, loss: dict[str, Any], weight: str | None
) -> None:
    result = recipe(tmp_path, loss_fn={"reference_policy_kl_penalty": 0.01} | loss)
    assert result.values.get("loss.kl_weight") == weight


@pytest.mark.parametrize(
    ("sections", "values"),
    [
        ({"grpo": {}}, {"batch.prompts": 32, "batch.generations": 16, "run.epochs": 1, "run.steps": ABSENT,
                        "advantage.baseline": "leave-one-out", "loss.kl_coefficient": 0.01, "loss.kl_cap": 10.0,
                        "loss.kl_weight": "policy", "loss.importance_correction": "off", "data.shuffle": False}),
        ({"grpo": {"use_leave_one_out_baseline": False}, "data": {"dataset_name": "OpenMathInstruct-2"}},
         {"advantage.baseline": "mean", "data.shuffle": ABSENT}),
        ({"grpo": {}, "loss_fn": {"use_on_policy_kl_approximation": False}}, {"loss.kl_cap": ABSENT}),
        ({"ppo": {"max_num_steps": 9}}, {"batch.epochs": 4, "critic.value_clip": None, "advantage.baseline": ABSENT}),
        ({"distillation": {}, "teacher": {"model_name": "org/teacher"}},
         {"batch.prompts": 128, "batch.generations": 1, "distillation.loss": "top-k",
          "distillation.forward_share": 0.5}),
        ({"dpo": {}}, {"preference.beta": 0.05, "run.steps": 150}),
    ],
)  # fmt: skip
def test_keys_that_a_recipe_leaves_out_have_nemo_rl_s_values(
    tmp_path: Path, sections: dict[str, Any], values: dict[str, Any]
) -> None:
    """Those of the configuration classes of its versions 0.7 and later; before, the keys could not be left out."""
    result = import_recipe(written(tmp_path, sections | {"policy": {"model_name": "org/model"}}))
    assert {key: result.values.get(key, ABSENT) for key in values} == values
    assert not result.unsupported
    assert {entry.key for entry in result.entries} <= {*leaves(sections), "policy.model_name"}


def test_the_reward_of_math_is_nemo_rl_s(tmp_path: Path) -> None:
    """Its verifier looks in the whole completion for an expression, or for LaTeX, and a box is only one form of it. It
    joins boxes side by side into one answer, though, and with rlctl the last one decides."""
    theirs = math_metric((LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig()))
    (tmp_path / "rows.jsonl").write_text('{"problem": "What is 6 x 7?", "answer": "42"}\n')
    config = resolve(files=[RECIPES / "megatron_form.yaml"], environment={}).config
    data = config.data.model_copy(update={"name": str(tmp_path / "rows.jsonl")})
    source = open_prompts(data)
    [ours] = prepare_rewards(config.reward, source, None).build()
    completions = [
        r"So \boxed{42}.", "The answer is 42.", "We get $x = 42$ here", "42", r"First \boxed{7}, but it is 42",
        r"\boxed{42} or \boxed{7}", "no number",
    ]  # fmt: skip
    expected = {completion: theirs([r"\boxed{42}"], [completion])[0] for completion in completions}
    assert callable(ours)
    assert {completion: ours(completion, source[0]) for completion in completions} == expected


MEGATRON_FORM = {
    "model.name": "Qwen/Qwen2.5-7B-Instruct",
    "model.tokenizer": None,
    "model.dtype": "bfloat16",
    "model.max_length": 4096,
    "data.name": "agentica-org/DeepScaleR-Preview-Dataset",
    "data.prompt_field": "problem",
    "data.answer_field": "answer",
    "data.prompt_template": "Solve this, and write the answer inside \\boxed{}.\n{prompt}\n\nBegin now.",
    "data.system_prompt": None,
    "reward.extract": "auto",
    "batch.prompts": 64,
    "batch.generations": 8,
    "batch.optimizer_steps": 2,
    "advantage.baseline": "leave-one-out",
    "advantage.normalize_std": True,
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "loss.dual_clip": None,
    "loss.kl_coefficient": 0.01,
    "loss.kl_estimator": "k3",
    "loss.kl_cap": None,
    "loss.level": "token",
    "loss.importance_correction": "off",
    "training.backend": "megatron",
    "training.tp": 4,
    "training.pp": 2,
    "training.cp": 1,
    "training.ep": 1,
    "training.etp": 1,
    "training.sequence_parallel": True,
    "training.recompute": "full",
    "training.micro_batch_tokens": 4096,
    "training.packing": True,
    "training.freeze_router": True,
    "training.env": {"NCCL_ALGO": "Ring"},
    "generation.tp": 2,
    "generation.pp": 1,
    "generation.colocated": True,
    "generation.max_new_tokens": 3072,
    "generation.temperature": 0.9,
    "generation.top_p": 0.95,
    "generation.top_k": 40,
    "generation.stop": ("</answer>",),
    "generation.stop_token_ids": (151645,),
    "generation.memory_fraction": 0.7,
    "optimizer.lr": 3e-7,
    "optimizer.beta1": 0.91,
    "optimizer.beta2": 0.98,
    "optimizer.eps": 1e-7,
    "optimizer.weight_decay": 0.02,
    "optimizer.clip_grad": 0.5,
    "scheduler.warmup_steps": 50,
    "scheduler.init_lr": 3e-8,
    "scheduler.decay": "cosine",
    "scheduler.decay_steps": 400,
    "scheduler.min_lr": 3e-8,
    "scheduler.start_weight_decay": None,
    "ddp.passed": {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, "overlap_param_gather": False},
    "megatron.passed": {"moe_router_dtype": "fp64"},
    "vllm.passed": {"enforce_eager": True},
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "run.algorithm": "grpo",
    "run.steps": 500,
    "run.checkpoint_every": 25,
    "run.keep_best": 2,
    "run.save_final": True,
    "run.loggers": ("wandb",),
    "run.project": "grpo-dev",
    "run.name": "megatron",
}


def test_the_form_of_a_megatron_recipe_has_these_values() -> None:
    resolved = resolve(files=[RECIPES / "megatron_form.yaml"], environment={})
    resolved.require_supported()
    config = resolved.config
    found = {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in MEGATRON_FORM}
    assert found == MEGATRON_FORM
    assert [term.name for term in config.reward.terms] == ["math-verify"]


def test_the_form_of_a_megatron_recipe_converts_into_nemo_rl_s_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's converter goes by the model; its directory is the one that NeMo-RL's variable names."""
    monkeypatch.delenv("RLCTL_MEGATRON_CHECKPOINT_DIR", raising=False)
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path))
    result = import_recipe(RECIPES / "megatron_form.yaml")
    assert status(result, "policy.megatron_cfg.converter_type") == "not applicable"
    assert converted_directory().is_relative_to(tmp_path)


FORM = RECIPES / "megatron_form.yaml"


def overridden(*texts: str, **more: Any) -> Resolved:
    return resolve(files=[FORM], overrides=texts, environment={}, **more)


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["policy.max_total_sequence_length=2048", "policy.generation.max_new_tokens=1024"],
         {"training.micro_batch_tokens": 2048, "generation.max_new_tokens": 1024}),  # a reference is their product
        (["~policy.generation.stop_token_ids"], {"generation.stop_token_ids": []}),
        (["+policy.generation.vllm_kwargs.max_num_seqs=64"], {"generation.max_concurrent": 64}),
        (["+policy.generation.vllm_kwargs={max_num_seqs: 64}"], {"generation.max_concurrent": 64}),
        (["policy.megatron_cfg={tensor_model_parallel_size: 2}"],
         {"training.backend": "megatron", "training.tp": 2, "training.pp": 2}),
        (["training.tp=2", "+run.seed=7", "data.shuffle=false"],
         {"training.tp": 2, "run.seed": 7, "data.shuffle": False}),
        (["grpo.max_num_steps=3"], {"run.steps": 3}),  # stronger than flags and the environment
        (["policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true"], {"training.backend": "dtensor"}),
        (["policy.megatron_cfg.apply_rope_fusion=false"], {"megatron.apply_rope_fusion": False}),
        (["++policy.megatron_cfg.recompute_num_layers=2"], {"megatron.recompute_num_layers": 2}),
        (["++policy.megatron_cfg.model_overrides.masked_softmax_fusion=false"],
         {"megatron.masked_softmax_fusion": False}),
    ],
)  # fmt: skip
def test_overrides_of_a_recipe_hold(texts: list[str], values: dict[str, Any]) -> None:
    resolved = overridden(*texts, flags={"run.steps": 4} if "run.steps" in values else {})
    found = dict(resolved.leaves())
    assert {key: found[key] for key in values} == values
    if "generation.max_new_tokens" in values:
        assert resolved.origin["generation.max_new_tokens"] == "override policy.generation.max_new_tokens"
        assert resolved.origin["training.micro_batch_tokens"].startswith("file ")


def test_overrides_and_sets_win_over_a_recipe_and_need_none() -> None:
    resolved = resolve(files=[RECIPES / "llama_megatron.yaml"], sets=["training.tp=1", "run.steps=2"], environment={})
    assert (resolved.config.training.tp, resolved.config.run.steps) == (1, 2)
    assert resolve(overrides=["run.steps=9", "policy.model_name=x/y"], environment={}).config.model.name == "x/y"
    base = resolve(files=[RECIPES / "base.yaml"], flags={"training.backend": "megatron"}, environment={})
    base.require_supported()
    assert (base.config.training.backend, base.config.optimizer.lr) == ("megatron", 5e-6)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("run: {steps: 3}\n", {"run.steps": 3}),  # no recipe
        ("x: &x {seed: 1, max_num_steps: 7}\ngrpo: {<<: *x, seed: 2}\n", {"run.seed": 2, "run.steps": 7}),
        *((f"defaults: {RECIPES / 'base.yaml'}\npolicy: {{megatron_cfg: {{enabled: {word}}}}}\n",
           {"training.backend": "megatron"}) for word in ("yes", "On", "TRUE")),  # booleans are those of YAML 1.1
    ],
)  # fmt: skip
def test_a_file_is_read_as_nemo_rl_reads_it(text: str, values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    found = dict(resolve(files=[path], environment={}).leaves())
    assert {key: found[key] for key in values} == values
    assert NemoRl().recognizes(tmp_path, yaml.safe_load(text)) == ("run:" not in text)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("prompt_file", "Think, and answer inside \\boxed{{}}.\n{}\n\nGo on.",
         "Think, and answer inside \\boxed{}.\n2 + 3?\n\nGo on."),
        ("prompt_file", "Write <answer>{{answer}}</answer>.\n{}", "Write <answer>{answer}</answer>.\n2 + 3?"),
        ("prompt_file", "No place for the question.", None),
        ("prompt_file", "{} and {}", None),
        ("system_prompt_file", "Be brief.", "Be brief."),
    ],
)  # fmt: skip
def test_files_of_prompts_are_the_prompts(key: str, text: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "think.txt").write_text(text)
    result = recipe(tmp_path, **{f"data__{key}": "think.txt"})
    if expected is None:
        assert any(line.startswith(f"data.{key}") for line in result.unsupported)
    elif key == "system_prompt_file":
        assert result.values["data.system_prompt"] == expected
    else:
        template = PromptTemplate(result.values["data.prompt_template"])
        assert template.render({"prompt": "2 + 3?"}, "row 0") == expected


def test_an_override_names_rlctl_s_key_once() -> None:
    resolved = overridden("policy.model_name=x/y", "++grpo.num_prompts_per_step=32")
    assert (resolved.config.model.name, resolved.config.batch.prompts) == ("x/y", 32)
    lines = [line for line in resolved.notes if "rlctl's" in line]
    assert lines == [
        "note: grpo.num_prompts_per_step is rlctl's batch.prompts; policy.model_name is rlctl's model.name"
    ]


def test_an_override_reaches_into_a_list(tmp_path: Path) -> None:
    schedules = [{"name": "LinearLR", "kwargs": {"total_iters": 4}}, {"name": "ConstantLR", "kwargs": {"factor": 1}}]
    path = written(tmp_path, {"policy": {"scheduler": schedules}}, "base.yaml")
    longer = Override.parse("policy.scheduler.0.kwargs.total_iters=9")
    assert import_recipe(path, [longer]).values["scheduler.warmup_steps"] == 9
    with pytest.raises(ConfigError, match=r"scheduler\.2\.kwargs\.factor` cannot be applied: list index"):
        import_recipe(path, [Override.parse("policy.scheduler.2.kwargs.factor=1")])


def test_an_override_under_a_name_that_both_have_is_followed_by_references(tmp_path: Path) -> None:
    own = {"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": "${cluster.gpus_per_node}"}}
    path = written(tmp_path, {"defaults": str(FORM), "policy": {"generation": {"colocated": own}}})
    resolved = resolve(files=[path], overrides=["cluster.gpus_per_node=4"], environment={})
    assert (resolved.config.cluster.gpus_per_node, resolved.config.generation.devices) == (4, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policy.model_nam=x", "policy.model_name"),
        ("training.tpp=2", "training.tp"),
        ("policy.model_name", "no value"),
        ("policy.model_name=a,b", "cannot be several values"),
        ("policy.tokenizer.chat_template={{ messages }}", "in quotes within quotes"),
        ("grpo.num_prompts_per_step=0", "not yet"),
    ],
)
def test_a_wrong_override_is_named(text: str, said: str) -> None:
    if said == "not yet":  # the value is an entry of the report and stops the run
        with pytest.raises(ConfigError, match=r"batch\.prompts cannot be 0"):
            overridden(text).require_supported()
        return
    with pytest.raises(ConfigError) as caught:
        overridden(text)
    assert said in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("backend", [[], ["policy.megatron_cfg.enabled=false"]])
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("policy.megatron_cfg.tensor_model_paralel_size=4", "policy.megatron_cfg.tensor_model_parallel_size"),
        ("++policy.megatron_cfg.recompute_granulrity=full", "policy.megatron_cfg.recompute_granularity"),
        ("policy.megatron_cfg.moe_token_dispatcher_tipe=flex", "policy.megatron_cfg.moe_token_dispatcher_type"),
        ("policy.megatron_cfg.optimizer.lrr=1e-6", "policy.megatron_cfg.optimizer.lr"),
        ("policy.megatron_cfg.scheduler.lr_warmup_iter=3", "policy.megatron_cfg.scheduler.lr_warmup_iters"),
        ("policy.megatron_cfg={tensor_model_paralel_size: 4}", "policy.megatron_cfg.tensor_model_parallel_size"),
        ("policy.optimizer.kwargs.weight_deca=0.1", "policy.optimizer.kwargs.weight_decay"),
        ("policy.generation.vllm_cfg.gpu_memory_utilisation=0.5", "policy.generation.vllm_cfg.gpu_memory_utilization"),
        ("policy.sequence_packing.algoritm=x", "policy.sequence_packing.algorithm"),
        ("checkpointing.save_perod=5", "checkpointing.save_period"),
        ("logger.wandb_enabld=true", "logger.wandb_enabled"),
        ("cluster.gpu_per_nodes=4", "cluster.gpus_per_node"),
        ("env.math.num_worker=4", "env.math.num_workers"),
        ("cluster.num_node=4", "cluster.num_nodes"),
        ("data.max_sample=4", "data.max_samples"),
        ("data.train.dataset_nam=x", "data.train.dataset_name"),
        ("data.default.env_nam=x", "data.default.env_name"),
        ("on_policy_distillation.enable=true", "on_policy_distillation.enabled"),
        ("teacher.megatron_cfg.peft.dropoutt=0", "teacher.megatron_cfg.peft.dropout"),
        ("policy.generation.vllm_kwags.seed=3", "policy.generation.vllm_kwargs.seed"),
        ("policy.scheduler.0.kwargs.T_mx=3", "policy.scheduler.0.kwargs.T_max"),
        ("policy.scheduler.kwargs.gama=3", "policy.scheduler.kwargs.gamma"),
        ("policy.megatron_cfg.lr=1e-5", "policy.megatron_cfg.optimizer.lr"),
    ],
)
def test_a_misspelt_override_is_refused_with_the_nearest_name(text: str, meant: str, backend: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(*backend, text)
    assert caught.value.exit_code == 2
    assert "unknown key" in caught.value.message
    assert f"`{meant}`" in f"{caught.value.hint}"


@pytest.mark.parametrize(
    "text",
    ["policy.sequence_packing.algorithm=concatenative", "logger.num_val_samples_to_print=3", "env.math.num_workers=2",
     "++grpo.reward_scaling.source_max=2", "policy.generation.vllm_cfg.env_vars.NCCL_DEBUG=INFO",
     "teacher.max_total_sequence_length=64", "policy.dtensor_cfg.automodel_kwargs.backend.attn=te"],
)  # fmt: skip
def test_keys_that_nemo_rl_knows_are_taken(text: str) -> None:
    asked = overridden(text)
    asked.require_supported()
    key = text.lstrip("+").partition("=")[0]
    assert [line for line in asked.notes if line.startswith(f"note: {key} = ")] or "env_vars" in key


def test_an_override_that_changes_nothing_says_so() -> None:
    off = overridden("policy.megatron_cfg.enabled=false", "policy.megatron_cfg.tensor_model_parallel_size=8")
    (line,) = [line for line in off.notes if "tensor_model_parallel_size" in line]
    assert line.endswith("sets nothing by itself: policy.megatron_cfg is off")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([f"{MEGATRON}.recompute_granularity=full"], "full"),
        ([f"{MEGATRON}.recompute_granularity=selective"], "selective"),
        ([f"{MEGATRON}.recompute_granularity=full", f"{MEGATRON}.activation_checkpointing=false"], "none"),
        ([f"{MEGATRON}.recompute_granularity=selective", f"{MEGATRON}.activation_checkpointing=true"], "selective"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("switch", [{"activation_checkpointing": False}, {}])
def test_what_is_computed_again_is_what_the_command_line_asks_for(
    texts: list[str], expected: str, switch: dict[str, bool], tmp_path: Path
) -> None:
    path = written(tmp_path, {"grpo": {}, "policy": {"megatron_cfg": {"enabled": True} | switch}})
    assert resolve(files=[path], overrides=texts, environment={}).config.training.recompute == expected
    in_file = {"recompute_granularity": "full"} | switch
    path.write_text(yaml.safe_dump({"grpo": {}, "policy": {"megatron_cfg": {"enabled": True} | in_file}}))
    assert resolve(files=[path], environment={}).config.training.recompute == ("none" if switch else "full")


@pytest.mark.parametrize(
    "text",
    ["policy.megatron_cfg.pipeline_dtype=float32", "++policy.megatron_cfg.layernorm_epsilon=1e-6",
     "policy.megatron_cfg.optimizer.use_distributed_optimizer=false", "++policy.megatron_cfg.num_layers=2",
     "++policy.megatron_cfg.model_overrides.hidden_size=8", "++policy.optimizer.kwargs.amsgrad=true"],
)  # fmt: skip
def test_what_rlctl_sets_itself_is_refused_by_name(text: str) -> None:
    backend = "false" if "kwargs" in text else "true"
    with pytest.raises(ConfigError, match=re.escape(text.lstrip("+").replace("=", " = ").split(" = ")[0])):
        overridden(f"policy.megatron_cfg.enabled={backend}", text).require_supported()


def test_a_misspelt_argument_of_a_scheduler_stops_a_run(tmp_path: Path) -> None:
    schedules = [{"name": "LinearLR", "kwargs": {"total_iters": 4}}]
    path = written(tmp_path, {"policy": {"scheduler": schedules}}, "base.yaml")
    wrong = Override.parse("policy.scheduler.0.kwargs.total_itrs=9")
    with pytest.raises(ConfigError, match=r"Did you mean `policy.scheduler.0.kwargs.total_iters`"):
        import_recipe(path, [wrong])


def test_lines_with_one_reason_are_one_line(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    lines = recipe(tmp_path, policy__hf_config_overrides=shape).unsupported
    assert [line.partition(":")[0] for line in lines] == ["policy.hf_config_overrides.num_hidden_layers and 2 more"]


def test_dapo_of_a_recipe_is_dynamic_sampling_and_its_penalty(tmp_path: Path) -> None:
    """The penalty begins at the same length and rises as fast, and weighs as much against the stretched reward."""
    grpo = {
        "use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 7, "batch_multiplier": 3,
        "overlong_filtering": True,
        "reward_scaling": {"enabled": True, "target_min": -1.0},
        "reward_shaping": {"enabled": True, "overlong_buffer_length": 128, "overlong_buffer_penalty": 0.5,
                           "max_response_length": 768},
    }  # fmt: skip
    result = recipe(tmp_path, grpo=grpo, policy__generation__max_new_tokens=896)
    resolved = resolve(files=[result.path], environment={})
    resolved.require_supported()
    config = resolved.config
    assert (config.filter.groups, config.filter.max_rounds, config.filter.truncated) == ("replace", 7, "mask")
    assert status(result, "grpo.batch_multiplier") == "changed"
    assert status(result, "grpo.reward_scaling.enabled") == "mapped"
    assert config.reward.shift == -1.0
    assert [(term.name, term.weight) for term in config.reward.terms] == [("math-verify", 2.0)]
    lengths = np.array([600, 640, 641, 700, 768, 896])
    ours = overlong_penalty(lengths, 896, config.reward.overlong_buffer, config.reward.overlong_factor)
    theirs = np.minimum(0.0, -(lengths - (768 - 128)) / 128 * 0.5)
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"loss_fn__use_cispo": True, "loss_fn__ratio_clip_min": 1.0, "loss_fn__ratio_clip_max": 5.0},
            {"run.algorithm": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 5.0},
        ),
        (
            {"loss_fn__sequence_level_importance_ratios": True, "loss_fn__token_level_loss": False,
             "loss_fn__use_importance_sampling_correction": True},
            {"run.algorithm": "gspo", "loss.level": "sequence", "loss.importance_level": "sequence",
             "loss.clip_low": 0.2},
        ),
        (
            {"grpo__adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": True, "normalize_rewards": True}},
            {"run.algorithm": "reinforce++-baseline", "advantage.normalize_std": False, "advantage.whiten": True},
        ),
        (
            {"grpo__adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}},
            {"run.algorithm": "reinforce++", "advantage.baseline": "none"},
        ),
        ({"loss_fn__use_cispo": False}, {"run.algorithm": "grpo", "filter.groups": "keep"}),
    ],
)  # fmt: skip
def test_algorithms_of_a_recipe_are_rlctls(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    resolved = resolve(files=[recipe(tmp_path, **changes).path], environment={})
    resolved.require_supported()
    assert {key: value for key, value in resolved.leaves() if key in expected} == expected
    method_from_config(resolved.config)


def distillation(tmp_path: Path, **changes: Any) -> Import:
    return recipe(tmp_path, "distillation_megatron.yaml", **changes)


def test_a_recipe_of_distillation_runs(tmp_path: Path) -> None:
    result = distillation(tmp_path)
    assert (result.foreign, result.unsupported, result.of("not known")) == (None, [], [])
    resolved = resolve(files=[result.path], environment={})
    resolved.require_supported()
    config = resolved.config
    assert config.run.algorithm == "distillation"
    assert (config.model.name, config.teacher.model) == ("Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-4B")
    teacher = config.teacher
    assert (teacher.tp, teacher.pp, teacher.cp, teacher.ep, teacher.etp, teacher.dp) == (4, 1, 1, 1, 1, None)
    assert (config.batch.prompts, config.batch.generations, config.batch.optimizer_steps) == (128, 1, 2)
    found = config.distillation
    assert (found.loss, found.top_k, found.forward_share, found.outside) == ("top-k", 64, 0.5, "renormalize")
    assert config.validation.every == 20
    assert config.reward.terms[0].name == "math-verify"
    assert method_from_config(config).teacher_top == 64


def test_a_recipe_of_one_teacher_of_nemo_gym_s_agents_runs() -> None:
    """Agents of one checkpoint have one teacher. What rlctl does otherwise is named."""
    result = import_recipe(RECIPES / "agents_teachers.yaml")
    assert (result.foreign, result.unsupported, result.of("not known")) == (None, [], [])
    changed = {entry.key for entry in result.of("changed")}
    assert "on_policy_distillation.non_colocated_teachers.enabled" in changed
    resolved = resolve(files=[result.path], environment={})
    resolved.require_supported()
    config = resolved.config
    assert (config.run.algorithm, config.teacher.model, config.teacher.tp) == ("distillation", "Qwen/Qwen3-4B", 2)
    assert (config.distillation.loss, config.distillation.weight, config.distillation.reward_weight) == (
        "sampled",
        1,
        0,
    )
    assert (config.rollouts.mode, config.batch.optimizer_steps, config.environment.name) == ("async", 1, "nemo-gym")
    loss = config.loss
    assert (loss.importance_correction, loss.importance_cap, loss.importance_floor) == ("masked", 5.0, 0.2)
    assert (loss.kl_coefficient, loss.error_mask, config.filter.truncated) == (0, 2.0, "mask")
    assert method_from_config(config).needs == {"teacher_logprobs"}


def test_teachers_of_nemo_gym_s_agents_are_those_of_rows_that_name_them(tmp_path: Path) -> None:
    """The default one has the rows of other agents, unless each agent must be named."""
    agents = {"math": "org/one", "code": "org/two", "tools": "org/one"}
    for strict in (False, True):
        opd = {"enabled": True, "teacher_model_by_agent_name": agents, "default_teacher_alias": "code",
               "strict_agent_name_match": strict}  # fmt: skip
        path = written(tmp_path, {"grpo": {"adv_estimator": {"name": "opd"}}, "on_policy_distillation": opd})
        assert (found := import_recipe(path)).unsupported == []
        assert found.of("not known") == []
        teacher = resolve(files=[path], environment={}).config.teacher
        assert teacher.field == "agent_ref.name"
        rest = () if strict else ("*",)
        assert [(str(entry.model), entry.sources) for entry in teacher.models] == [
            ("org/one", ("math", "tools")), ("org/two", ("code", *rest)),
        ]  # fmt: skip


def test_a_loss_without_ppo_s_ratio_needs_one_optimizer_step_a_batch(tmp_path: Path) -> None:
    for size, status_of in ((32, "skipped"), (16, "not yet")):
        sections = {"grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
                    "loss_fn": {"disable_ppo_ratio": True}, "policy": {"train_global_batch_size": size}}  # fmt: skip
        found = import_recipe(written(tmp_path, sections))
        named = [entry.key for entry in found.of("not yet")]
        assert ("loss_fn.disable_ppo_ratio" in named) == (status_of == "not yet")


@pytest.mark.parametrize(("kind", "share"), [("forward", 1.0), ("reverse", 0.0), ("mixed", 0.5)])
def test_the_divergence_is_that_of_the_recipe(tmp_path: Path, kind: str, share: float) -> None:
    assert distillation(tmp_path, loss_fn__kl_type=kind).values["distillation.forward_share"] == share


def test_what_of_distillation_cannot_run_is_named(tmp_path: Path) -> None:
    result = distillation(tmp_path, loss_fn__zero_outside_topk=True, loss_fn__kl_type="both", policy__quant_cfg="fp4")
    names = ("loss_fn.kl_type", "loss_fn.zero_outside_topk", "policy.quant_cfg")
    assert [entry.key for entry in result.of("not yet")] == list(names)
    changed = distillation(tmp_path, teacher__precision="float32")
    assert status(changed, "teacher.precision") == "changed"


def test_a_teacher_of_dtensor_keeps_its_sizes(tmp_path: Path) -> None:
    sizes = {"enabled": True, "tensor_parallel_size": 8, "context_parallel_size": 2}
    result = distillation(tmp_path, teacher__megatron_cfg={"enabled": False}, teacher__dtensor_cfg=sizes)
    assert (result.values["teacher.tp"], result.values["teacher.cp"]) == (8, 2)


def across_tokenizers(
    tmp_path: Path, loss: dict[str, Any] | None = None, *further: dict[str, Any], **of_teacher: Any
) -> Import:
    data = {
        "dataset_name": "arrow_text",
        "data_files": "hf://datasets/nvidia/Texts-v1/Formal-Logic/*.parquet",
        "text_key": "text",
        "characters_per_sample": 16384,
        "split_validation_size": 64,
    }
    teacher = {
        "model_name": "Qwen/Qwen3-4B", "projection_matrix_path": None, "weight": 1.0, "precision": "bfloat16",
        "tokenizer": {"name": "Qwen/Qwen3-4B"}, "max_total_sequence_length": 1024,
        "dtensor_cfg": {"enabled": True, "_v2": True, "tensor_parallel_size": 2, "context_parallel_size": 2},
    } | of_teacher  # fmt: skip
    dtensor = {"enabled": True, "_v2": True, "tensor_parallel_size": 4, "context_parallel_size": 2}
    values = {
        "distillation": {"num_prompts_per_step": 8, "max_num_steps": 20, "seed": 42, "val_period": 10},
        "loss_fn": {
            "gold_loss": False, "xtoken_loss": False, "temperature": 1.0, "vocab_topk": 8192, "uncommon_topk": 8192,
            "reverse_kl": False, "exact_token_match_only": False, "kl_loss_weight": 1.0, "ce_loss_scale": 0.1,
            "dynamic_loss_scaling": True, "kd_loss_mode": "sum", "sum_weights_metric": None, "alpha": 1.0,
            "normalize_teacher_by_vocab": False, "kl_type": "mixed", "mixed_kl_weight": 0.5,
        } | (loss or {}),
        "policy": {"model_name": "meta-llama/Llama-3.2-1B", "tokenizer": {"name": "meta-llama/Llama-3.2-1B"},
                   "precision": "bfloat16", "train_global_batch_size": 8, "train_micro_batch_size": 1,
                   "max_total_sequence_length": 1024, "dtensor_cfg": dtensor},
        "teacher": None, "teachers": [teacher, *further],
        "data": {"train": data, "default": {"prompt_file": "cot.txt"}},
    }  # fmt: skip
    return import_recipe(written(tmp_path, values))


def test_a_recipe_across_tokenizers_with_one_teacher_runs(tmp_path: Path) -> None:
    result = across_tokenizers(tmp_path)
    assert (result.foreign, result.unsupported, result.of("not known")) == (None, [], [])
    assert [entry.key for entry in result.of("changed")] == ["data.train.characters_per_sample"]
    assert status(result, "teachers.0.model_name") == "mapped"
    resolved = resolve(files=[result.path], environment={})
    resolved.require_supported()
    config = resolved.config
    teacher, found = config.teacher, config.distillation
    assert (config.run.algorithm, config.data.too_long, config.model.max_length) == ("distill", "cut", 1024)
    assert config.data.name == "nvidia/Texts-v1:Formal-Logic"
    assert (teacher.model, teacher.own_tokenizer, teacher.tp, teacher.cp) == ("Qwen/Qwen3-4B", True, 2, 2)
    assert (found.top_k, found.forward_share, found.balanced, found.sft_weight) == (8192, 1.0, True, 1.0)
    assert method_from_config(config).teacher_top == 8192
    assert (config.validation.every, config.validation.holdout) == (10, 64)


def test_a_recipe_across_tokenizers_with_several_teachers_runs(tmp_path: Path) -> None:
    """`total_kd` of NeMo-RL is the sum of weight times divergence; rlctl's weights are divided by their sum."""
    second = {"model_name": "meta-llama/Llama-3.2-3B", "weight": 3.0, "tokenizer": {"name": "meta-llama/Llama-3.2-3B"}}
    loss = {"kd_loss_mode": "sum", "dynamic_loss_scaling": False, "kl_loss_weight": 0.5, "ce_loss_scale": 0.1}
    result = across_tokenizers(tmp_path, loss, second)
    assert (result.foreign, result.unsupported, result.of("not known")) == (None, [], [])
    resolved = resolve(files=[result.path], environment={})
    resolved.require_supported()
    config = resolved.config
    assert (config.run.algorithm, config.teacher.model, config.teacher.mix) == ("distill", None, "divergences")
    assert (config.distillation.weight, config.distillation.sft_weight) == (2.0, 0.1)
    assert [(str(entry.model), entry.weight, entry.own_tokenizer) for entry in config.teacher.models] == [
        ("Qwen/Qwen3-4B", 1.0, True), ("meta-llama/Llama-3.2-3B", 3.0, True),
    ]  # fmt: skip
    result = across_tokenizers(
        tmp_path, {"kd_loss_mode": "select_teacher", "sum_weights_metric": "ce"}, second | {"gold_loss": True}
    )
    names = {"loss_fn.kd_loss_mode", "loss_fn.sum_weights_metric", "teachers.1.gold_loss"}
    assert {entry.key for entry in result.of("not yet")} == names


def test_what_of_distillation_across_tokenizers_is_other_is_named(tmp_path: Path) -> None:
    result = across_tokenizers(tmp_path, {"gold_loss": True, "temperature": 2.0}, xtoken_loss=True)
    names = {"loss_fn.gold_loss", "loss_fn.temperature", "teachers.0.xtoken_loss"}
    assert {entry.key for entry in result.of("not yet")} == names
    result = across_tokenizers(
        tmp_path, {"dynamic_loss_scaling": False, "reverse_kl": True}, projection_matrix_path="p"
    )
    changed = {entry.key for entry in result.of("changed")}
    assert {"loss_fn.dynamic_loss_scaling", "teachers.0.projection_matrix_path"} <= changed
    values = {"weight": 1.0, "sft_weight": 0.1, "forward_share": 0.0}
    assert {key: result.values[f"distillation.{key}"] for key in values} == values


def texts_recipe(tmp_path: Path, **sections: Any) -> Import:
    values = {"policy": {"train_global_batch_size": 32, "max_total_sequence_length": 1024}} | sections
    return import_recipe(written(tmp_path, values))


@pytest.mark.parametrize(
    ("data", "name", "prompt", "answer"),
    [
        ({"train": {"dataset_name": "OpenMathInstruct-2", "output_key": "generated_solution"}},
         "nvidia/OpenMathInstruct-2", "problem", "generated_solution"),
        ({"dataset_name": "openmathinstruct2"}, "nvidia/OpenMathInstruct-2", "problem", "expected_answer"),
        ({"dataset_name": "squad"}, "rajpurkar/squad", None, None),
        ({"train": {"dataset_name": "ResponseDataset", "data_path": "x.jsonl", "input_key": "q"}},
         "x.jsonl", "q", "output"),
        ({"dataset_name": "openai_format", "train_data_path": "x.jsonl", "chat_key": "messages", "tool_key": "tools",
          "system_key": None, "use_preserving_dataset": True}, "x.jsonl", None, None),
    ],
)  # fmt: skip
def test_recipes_of_texts_run(tmp_path: Path, data: dict[str, Any], name: str, prompt: Any, answer: Any) -> None:
    result = texts_recipe(tmp_path, sft={"max_num_steps": 10, "only_unmask_final": True}, data=data)
    assert result.unsupported == []
    config = resolve(files=[result.path], environment={}).config
    assert (config.run.algorithm, config.run.steps, config.batch.prompts) == ("sft", 10, 32)
    assert (config.data.train_on, config.data.too_long) == ("last", "drop")
    assert config.data.name == name
    assert (result.values.get("data.prompt_field"), result.values.get("data.answer_field")) == (prompt, answer)


def test_recipes_of_preferences_run(tmp_path: Path) -> None:
    dpo = {"max_num_steps": 5, "reference_policy_kl_penalty": 0.05, "preference_average_log_probs": True,
           "sft_average_log_probs": True, "sft_loss_weight": 0.01, "preference_loss_weight": 1,
           "val_period": 16, "val_at_start": True, "val_batches": 2, "val_global_batch_size": 32}  # fmt: skip
    kept = {"dataset_name": "HelpSteer3", "split": "validation"}
    result = texts_recipe(tmp_path, dpo=dpo, data={"dataset_name": "HelpSteer3", "validation": kept})
    assert result.unsupported == []
    config = resolve(files=[result.path], environment={}).config
    options = config.preference
    assert (options.beta, options.average, options.sft_weight) == (0.05, True, 0.01)
    assert (config.data.name, config.data.prompt_field) == ("nvidia/HelpSteer3:preference", "context")
    assert config.training.micro_batch_tokens == 2 * 1024
    assert (config.validation.data.name, config.validation.data.split) == ("nvidia/HelpSteer3:preference", "validation")
    assert (config.validation.every, config.validation.at_start, config.validation.max_prompts) == (16, True, 64)
    dpo |= {"sft_average_log_probs": False, "preference_loss_weight": 2}
    refused = texts_recipe(tmp_path, dpo=dpo, data={"dataset_name": "clevr"})
    assert len(refused.unsupported) == 3


@pytest.mark.parametrize(
    ("data", "name", "prompt"),
    [
        ({"dataset_name": "Tulu3Preference"}, "allenai/llama-3.1-tulu-3-8b-preference-mixture", "prompt"),
        ({"train": {"data_path": "x.jsonl"}, "default": {"dataset_name": "PreferenceDataset"}}, "x.jsonl", "context"),
        ({"dataset_name": "BinaryPreferenceDataset", "data_path": "x.jsonl", "prompt_key": "q"}, "x.jsonl", "q"),
    ],
)
def test_recipes_of_reward_models_run(tmp_path: Path, data: dict[str, Any], name: str, prompt: str) -> None:
    values = {
        "policy": {
            "train_global_batch_size": 32,
            "reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"},
        },
        "rm": {"max_num_epochs": 1, "max_num_steps": -1, "val_batches": -1, "val_period": 16},
        "data": data,
    }  # fmt: skip
    result = import_recipe(written(tmp_path, values))
    assert result.unsupported == []
    config = resolve(files=[result.path], environment={}).config
    assert config.run.algorithm == "rm"
    assert (config.run.epochs, config.batch.prompts, config.validation.wanted) == (1, 32, False)
    assert (config.data.name, config.data.prompt_field) == (name, prompt)


def test_a_template_of_a_recipe_of_texts_ends_answers(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    policy = {"tokenizer": {"chat_template": template}}
    for data, ends in (({"dataset_name": "squad"}, True), ({"dataset_name": "squad", "add_eos": False}, False)):
        written_one = texts_recipe(tmp_path, sft={"max_num_steps": 1}, data=data, policy=policy)
        assert ("eos_token" in written_one.values["model.chat_template"]) is ends


def test_rows_of_nemo_gym_are_played_by_its_agents(tmp_path: Path) -> None:
    data = {"train": {"data_path": "rows.jsonl"}, "default": {"dataset_name": "NemoGymDataset", "env_name": "nemo_gym"}}
    gym = {"should_use_nemo_gym": True, "nemo_gym": {"config_paths": ["mcqa.yaml"], "port_range_low": 5000}}
    result = recipe(tmp_path, data=data, env=gym)
    config = resolve(files=[result.path], environment={}).config
    assert (config.environment.name, config.data.name, config.reward.terms) == ("nemo-gym", "rows.jsonl", ())
    said = [entry for entry in result.entries if entry.key.startswith("env.nemo_gym.")]
    assert [entry.status for entry in said].count("changed") == 1
    assert "environment.params.head=http://HOST:PORT" in next(one.note for one in said if one.status == "changed")
    assert not result.unsupported
    marks = {"thinking_tags": ["<think>", "</think>"], "uv_venv_dir": "${oc.env:RLCTL_NO_SUCH_NAME}/venvs"}
    judged = {"grpo__malformed_thinking_advantage": -5.0, "grpo__invalid_tool_call_advantage": -4.0}
    result = recipe(tmp_path, data=data, env={**gym, "nemo_gym": {**gym["nemo_gym"], **marks}}, **judged)
    advantage = resolve(files=[result.path], environment={}).config.advantage
    assert (advantage.malformed_thinking, advantage.invalid_tool_call) == (-5.0, -4.0)
    assert not result.unsupported
    penalties = {f"penalize_{name}": True for name in ("empty_final_answer", "malformed_think_tag", "unwanted_tokens")}
    penalties |= {"penalize_duplicated_reasoning": False, "token_ids": {"unwanted": [2], "think_open": 12}}
    rows_to_come = {**data, "train": {"data_path": None}}
    result = recipe(tmp_path, data=rows_to_come, env=gym, reward_penalties=penalties)
    environment = resolve(files=[result.path], environment={}).config.environment
    assert (set(environment.no_reward), environment.unwanted_tokens) == ({"empty-answer", "malformed-thinking"}, (2,))
    assert status(result, "data.default.dataset_name") == "changed"
    assert not result.unsupported
    assert recipe(tmp_path, reward_penalties=penalties).unsupported
    for weights, said in ((None, []), ([2.0, 1.0], ["the weight 1"])):
        estimator = {"name": "gdpo", "reward_weights": weights}
        told = recipe(tmp_path, data=data, env=gym, grpo__adv_estimator=estimator).unsupported
        assert [words in line for words, line in zip(said, told, strict=True)] == [True] * len(said)
    other = {**gym, "nemo_gym": {"thinking_tags": ["[THINK]", "[/THINK]"]}}
    assert "known by <think>, </think>" in recipe(tmp_path, data=data, env=other).unsupported[0]
    assert "in NeMo Gym alone" in recipe(tmp_path, **judged).unsupported[0]


def test_the_sliding_puzzle_is_an_environment_with_turns(tmp_path: Path) -> None:
    cfg = {"game_config": {"size": 5, "shuffle_moves": 10}, "max_moves": 30}
    turns = {"env__sliding_puzzle_game__cfg": cfg, "grpo__max_rollout_turns": 50}
    result = recipe(tmp_path, **turns, data__validation__dataset_name="AIME2024")
    environment = resolve(files=[result.path], environment={}).config.environment
    assert (environment.name, environment.append, environment.turns) == ("sliding-puzzle", "raw", 50)
    assert environment.params == {"size": 5, "shuffle_moves": 10, "max_moves": 30}
    assert not result.unsupported
    # Its script reads neither prompts nor rewards of the recipe, whatever the files below it name.
    assert not [key for key in result.values if key.startswith(("data.", "reward.", "validation.data"))]


def test_muon_of_a_recipe_has_its_fields_or_megatrons_defaults(tmp_path: Path) -> None:
    block = {"optimizer": "dist_muon", "lr": 1e-5, "muon_momentum": 0.9, "muon_scale_mode": "spectral"}
    policy = {"megatron_cfg": {"enabled": True, "optimizer": block}}
    found = learning(import_recipe(written(tmp_path, {"grpo": {}, "policy": policy})))
    expected = {"optimizer": "muon", "muon_momentum": 0.9, "muon_nesterov": False, "muon_scale": 1.0}
    assert {key.partition(".")[2]: value for key, value in found.items()}.items() >= expected.items()
