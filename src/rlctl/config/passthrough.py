"""Sections that pass fields through to Megatron-Core and vLLM: the fields that exist, and those that rlctl sets itself.

A field is one of three kinds. Some are other names of rlctl's own keys (`megatron.tensor_model_parallel_size` is
`training.tp`) and are read as those. Some are set by rlctl, and are refused with the reason. All others are handed on
as they are and replace the value that rlctl would give.
"""

from __future__ import annotations

import difflib
import functools
import typing
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rlctl.config import installed
from rlctl.config.installed import Function, InstalledField, Open
from rlctl.config.schema import RlctlConfig, Section


@dataclass(frozen=True)
class Target:
    """A class of Megatron-Core or vLLM that takes a section's fields."""

    label: str
    module: str
    name: str

    def fields(self) -> dict[str, InstalledField] | None:
        """Return the installed version's fields by name; None if it is not installed."""
        return installed.fields_of(self.module, self.name)

    def words(self) -> str:
        """Return class and version for a message."""
        return f"{self.label} {installed.version(self.module.partition('.')[0])}'s {self.name.removeprefix('MLA')}"


TARGETS = {
    "megatron": Target("Megatron-Core", "megatron.core.transformer.transformer_config", "MLATransformerConfig"),
    "optimizer": Target("Megatron-Core", "megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    "ddp": Target(
        "Megatron-Core", "megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"
    ),
    "vllm": Target("vLLM", "vllm.engine.arg_utils", "EngineArgs"),
}

ALIASES = {
    "megatron.tensor_model_parallel_size": "training.tp",
    "megatron.pipeline_model_parallel_size": "training.pp",
    "megatron.virtual_pipeline_model_parallel_size": "training.vpp",
    "megatron.context_parallel_size": "training.cp",
    "megatron.expert_model_parallel_size": "training.ep",
    "megatron.expert_tensor_parallel_size": "training.etp",
    "megatron.num_layers_in_first_pipeline_stage": "training.first_stage_layers",
    "megatron.num_layers_in_last_pipeline_stage": "training.last_stage_layers",
    "megatron.sequence_parallel": "training.sequence_parallel",
    "megatron.recompute_granularity": "training.recompute",
    "optimizer.adam_beta1": "optimizer.beta1",
    "optimizer.adam_beta2": "optimizer.beta2",
    "optimizer.adam_eps": "optimizer.eps",
    "optimizer.min_lr": "scheduler.min_lr",
    "optimizer.optimizer_cpu_offload": "training.optimizer_offload",
    "optimizer.overlap_param_gather": "ddp.overlap_param_gather",
    "scheduler.max_lr": "optimizer.lr",
    "scheduler.lr_warmup_steps": "scheduler.warmup_steps",
    "scheduler.lr_decay_style": "scheduler.decay",
    "scheduler.lr_decay_steps": "scheduler.decay_steps",
    "scheduler.wsd_decay_steps": "scheduler.wsd_steps",
    "scheduler.lr_wsd_decay_style": "scheduler.wsd_decay",
    "scheduler.start_wd": "scheduler.start_weight_decay",
    "scheduler.end_wd": "scheduler.end_weight_decay",
    "scheduler.wd_incr_steps": "scheduler.weight_decay_steps",
    "scheduler.wd_incr_style": "scheduler.weight_decay_style",
    "vllm.tokenizer": "model.tokenizer",
    "vllm.revision": "model.revision",
    "vllm.trust_remote_code": "model.trust_remote_code",
    "vllm.max_model_len": "model.max_length",
    "vllm.seed": "run.seed",
    "vllm.tensor_parallel_size": "generation.tp",
    "vllm.pipeline_parallel_size": "generation.pp",
    "vllm.data_parallel_size": "generation.dp",
    "vllm.gpu_memory_utilization": "generation.memory_fraction",
    "vllm.kv_cache_memory_bytes": "generation.kv_cache_bytes",
    "vllm.max_num_seqs": "generation.max_concurrent",
    "vllm.max_num_batched_tokens": "generation.max_batched_tokens",
}
"""Names that Megatron-Core and vLLM have for keys of rlctl."""

OF_THE_MODEL = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels",
    "layernorm_epsilon", "normalization", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "qk_l2_norm", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "glu_linear_offset",
    "activation_func_clamp_value", "attention_output_gate", "softmax_scale", "softmax_type", "window_size",
    "window_attn_skip_freq", "no_rope_freq", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
    "moe_latent_size", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "rotary_interleaved", "rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "mrope_section",
    "experimental_attention_variant", "linear_attention_freq", "is_hybrid_model", "heterogeneous_block_specs",
)  # fmt: skip

_ON_DEVICE = "training.optimizer_offload keeps all states in host memory and updates on the device"
MANAGED = {f"megatron.{name}": "it comes from the model" for name in OF_THE_MODEL} | {
    "megatron.params_dtype": "set model.dtype",
    "megatron.pipeline_dtype": "set model.dtype",
    "megatron.bf16": "set model.dtype",
    "megatron.fp16": "set model.dtype",
    "megatron.calculate_per_token_loss": "rlctl's loss is already normalized, and gradients are summed over ranks",
    "megatron.variable_seq_lengths": "rlctl turns it on where pipeline stages exchange rows, which differ in length",
    "megatron.cross_entropy_loss_fusion": "rlctl computes log-probs from parts of the vocabulary itself",
    "megatron.cross_entropy_fusion_impl": "rlctl computes log-probs from parts of the vocabulary itself",
    "megatron.account_for_embedding_in_pipeline_split": "set training.first_stage_layers and last_stage_layers",
    "megatron.account_for_loss_in_pipeline_split": "set training.first_stage_layers and last_stage_layers",
    "megatron.pipeline_model_parallel_layout": "set training.first_stage_layers and last_stage_layers",
    "megatron.moe_use_legacy_grouped_gemm": "refit and checkpoints need one tensor for each expert",
    "megatron.fp8_dot_product_attention": "attention is rlctl's own, in model.dtype",
    "megatron.fp8_multi_head_attention": "attention is rlctl's own, in model.dtype",
    "vllm.load_format": "engines start without weights, and the first refit fills them",
    "megatron.mtp_num_layers": "multi-token prediction is not trained",
    "optimizer.params_dtype": "set model.dtype",
    "optimizer.bf16": "set model.dtype",
    "optimizer.fp16": "set model.dtype",
    "optimizer.use_distributed_optimizer": "the optimizer is always distributed",
    "optimizer.optimizer_offload_fraction": _ON_DEVICE,
    "optimizer.use_torch_optimizer_for_cpu_offload": _ON_DEVICE,
    "optimizer.overlap_cpu_optimizer_d2h_h2d": _ON_DEVICE,
    "optimizer.pin_cpu_grads": _ON_DEVICE,
    "optimizer.pin_cpu_params": _ON_DEVICE,
    "ddp.use_distributed_optimizer": "the optimizer is always distributed",
    "ddp.average_in_collective": "gradients are summed, because rlctl's loss is already normalized",
    "ddp.use_megatron_fsdp": "refit and checkpoints need the whole parameters of each tensor parallel rank",
    "ddp.use_custom_fsdp": "refit and checkpoints need the whole parameters of each tensor parallel rank",
    "ddp.data_parallel_sharding_strategy": "it belongs to Megatron-FSDP, which rlctl does not run",
    "scheduler.optimizer": "rlctl builds the optimizer",
    "scheduler.use_checkpoint_opt_param_scheduler": "a resumed run continues the schedule in its manifest",
    "scheduler.override_opt_param_scheduler": "a resumed run continues the schedule in its manifest",
    "vllm.model": "set model.name",
    "vllm.dtype": "engines hold the weights in model.dtype",
    "vllm.runner": "engines generate",
    "vllm.convert": "engines generate",
    "vllm.stream_interval": "each token carries its version, so none may be given out late",
    "vllm.logprobs_mode": "log-probs must be those of the distribution that was sampled from",
    "vllm.enable_expert_parallel": "set generation.ep",
    "vllm.enable_sleep_mode": "set generation.colocated",
    "vllm.worker_extension_cls": "a refit reaches the engine's weights through it",
    "vllm.weight_transfer_config": "weights come by rlctl's own movers (refit.mover)",
}
"""Fields that rlctl sets itself, each with its source or the reason."""


ABSENT_PARTS = ("dsa_", "linear_", "mamba_", "use_mamba")
"""Beginnings of the names of TransformerConfig's fields for parts that no model of rlctl has."""


def without_effect(name: str, *, experts: bool, latent_attention: bool) -> str | None:
    """Return why a field of Megatron's TransformerConfig does nothing in a model with these parts; None if it may."""
    if name.startswith(ABSENT_PARTS):
        return "no model that rlctl trains has the parts it is for"
    if not experts and (name.startswith("moe_") or "_moe_" in name):
        return "the model has no experts"
    if not latent_attention and "mla" in name.split("_"):
        return "the model has no latent attention"
    return None


def passed_fields(section: str) -> dict[str, InstalledField] | None:
    """Return the installed version's fields that a section hands on: rlctl neither sets them nor has its own key."""
    fields = TARGETS[section].fields()
    if fields is None:
        return None
    return {
        name: field
        for name, field in fields.items()
        if f"{section}.{name}" not in MANAGED.keys() | ALIASES.keys()
        and name not in own_keys(section)
        and field.type is not Function
    }


def json_properties(section: str) -> dict[str, Any]:
    """Return the fields that a section hands on as properties of a JSON Schema."""
    found = {}
    for name, field in (passed_fields(section) or {}).items():
        schema = _adapter(annotation(field)).json_schema()
        found[name] = schema | ({"description": field.description} if field.description else {})
    return found


def target_of(key: str) -> tuple[Target, str] | None:
    """Return the class that a key goes to and its field's name; None for a key of rlctl's own."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    return (TARGETS[section], name) if section in TARGETS and name and name not in own_keys(section) else None


@functools.cache
def own_keys(section: str) -> frozenset[str]:
    """Return the keys that the schema itself has in a section."""
    return frozenset(section_class(section).model_fields)


def section_class(name: str) -> type[Section]:
    """Return the class of a section of the schema."""
    found = RlctlConfig.model_fields[name].annotation
    assert isinstance(found, type)
    assert issubclass(found, Section)  # the schema holds nothing else
    return found


def canonical(key: str, value: Any) -> tuple[str, Any]:
    """Return rlctl's own key and value where `key` is one of `ALIASES`, else both as they are."""
    if key not in ALIASES:
        return key, value
    if key == "megatron.recompute_granularity" and value is None:
        value = "none"
    if key.endswith("_style") and isinstance(value, str):
        value = value.lower().replace("_", "-")
    return ALIASES[key], value


def installed_field(key: str) -> InstalledField | None:
    """Return the field of the installed version that a key names; None if there is none or it cannot be looked up."""
    found = target_of(key)
    fields = found[0].fields() if found else None
    return fields.get(found[1]) if found and fields else None


def annotation(field: InstalledField) -> Any:
    """Return the type of a field for pydantic; a field whose default is None takes None whatever its annotation is."""
    return field.type | None if field.default == "None" and field.type is not Open else field.type


def checked(key: str, value: Any) -> tuple[Any, str | None]:
    """Return the value as the field takes it, and what is wrong with it (None if nothing is known to be)."""
    if key in MANAGED:
        return value, f"rlctl sets this itself: {MANAGED[key]}."
    found = target_of(key)
    fields = found[0].fields() if found else None
    if found is None or fields is None:
        return value, None
    target, name = found
    if name not in fields:
        close = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
        meant = f"; did you mean `{key.partition('.')[0]}.{close[0]}`?" if close else "."
        return value, f"it is not a field of {target.words()}{meant}"
    kind = annotation(fields[name])
    if kind in (Function, Function | None):
        return value, "it takes a Python function, which a configuration cannot hold."
    if key.count(".") > 1:
        takes = kind is Open or dict in {typing.get_origin(k) or k for k in (typing.get_args(kind) or (kind,))}
        return value, None if takes else f"{key.split('.')[0]}.{name} takes {type_words(kind)}, and no keys of its own."
    try:
        return _adapter(kind).validate_python(value), None
    except ValidationError:
        return value, f"it takes {type_words(kind)}."


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config={"arbitrary_types_allowed": True})


def section_with(name: str) -> str | None:
    """Return the section whose class has a field of this name, for a key that was given in the wrong section."""
    return next((section for section, target in TARGETS.items() if name in (target.fields() or {})), None)


def not_checked(keys: list[str]) -> list[str]:
    """Return a line for each section whose keys could not be checked because their engine is not installed."""
    sections = dict.fromkeys(key.partition(".")[0] for key in keys if target_of(key))
    return [
        f"{section}.*: {TARGETS[section].label} is not installed, so its fields were not checked"
        for section in sections
        if TARGETS[section].fields() is None
    ]


def type_words(kind: Any) -> str:
    """Return a type in the words of the configuration: `Literal['a', 'b'] | None` is `a | b | unset`."""
    import types

    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_words(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " | ".join(type_words(argument) for argument in arguments if argument is not Function)
    if origin in (tuple, list, set) and arguments:
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {
        str: "text", int: "integer", float: "number", bool: "true | false", type(None): "unset", Any: "any",
        Open: "any", dict: "mapping", list: "list", tuple: "list", set: "list", Function: "a Python function",
    }  # fmt: skip
    return names.get(kind, getattr(kind, "__name__", str(kind)))
