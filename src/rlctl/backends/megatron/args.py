"""Arguments of Megatron's configuration classes from a `PolicySpec`. Torch-free, for dry runs: `compat.make_config`
turns type and function names into objects. The user's `megatron`, `ddp` and `optimizer` sections override these
values."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rlctl.backends.base import PolicySpec
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Role

AUXILIARY = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
"""Coefficients of the auxiliary losses of routers."""


def auxiliary_losses(options: Mapping[str, Any]) -> tuple[float, float]:
    values = (options.get(key) for key in AUXILIARY)
    balance, z = (float(value[0] if isinstance(value, list | tuple) else value or 0.0) for value in values)
    return balance, z


def has_transformer_engine(spec: PolicySpec) -> bool:
    """Return whether a policy uses TransformerEngine's layers: on GPUs, if installed, without adapters, unless
    `megatron.transformer_impl` is `local`. A machine without a GPU plans for others; there float8 implies
    TransformerEngine."""
    if spec.device != "cuda" or spec.lora.rank or spec.megatron.get("transformer_impl") == "local":
        return False
    if find_spec("transformer_engine") is not None:
        return True
    return bool(spec.megatron.get("fp8")) and shutil.which("nvidia-smi") is None


def groups_experts(spec: PolicySpec, te: bool) -> bool:
    """Return whether a rank's experts are one grouped product, which needs TransformerEngine and experts without
    biases. `megatron.moe_grouped_gemm` = false turns it off."""
    facts = spec.facts
    able = te and facts.moe is not None and Role.EXPERT_DOWN_BIAS not in weights_of(facts).roles
    return able and spec.megatron.get("moe_grouped_gemm") is not False


def transformer_values(spec: PolicySpec, te: bool) -> dict[str, Any]:
    """TransformerConfig (MLATransformerConfig with latent attention); `te`: on TransformerEngine's layers."""
    facts = spec.facts
    values = _size_values(facts) | _attention_values(facts) | _parallel_values(spec) | _kernel_values(spec, te)
    if facts.moe is not None:
        values |= _moe_values(facts)
    return values | (_mla_values(facts) if facts.mla is not None else {})


def ddp_values(spec: PolicySpec) -> dict[str, Any]:
    return {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}


def optimizer_values(spec: PolicySpec) -> dict[str, Any]:
    """OptimizerConfig. The driver sets the learning rate of each step."""
    ours = spec.optimizer
    return {
        "optimizer": "adam",
        "lr": ours.lr,
        "min_lr": 0.0,
        "weight_decay": ours.weight_decay,
        "adam_beta1": ours.beta1,
        "adam_beta2": ours.beta2,
        "adam_eps": ours.eps,
        "clip_grad": ours.clip_grad,
        "use_distributed_optimizer": True,
        "overlap_param_gather": spec.ddp.get("overlap_param_gather", False),
        "bf16": spec.dtype == "bfloat16",
        "fp16": spec.dtype == "float16",
        # Like torch's GradScaler: Megatron's begins at 2^32, and would skip the first steps of every run.
        "initial_loss_scale": 2.0**16,
        "loss_scale_window": 2000,
        "hysteresis": 1,
        "params_dtype": spec.dtype,
    }


def _size_values(facts: ModelFacts) -> dict[str, Any]:
    weights = weights_of(facts)
    values = {
        "num_layers": facts.layers,
        "hidden_size": facts.hidden,
        "num_attention_heads": facts.heads,
        "ffn_hidden_size": facts.intermediate,
        "layernorm_epsilon": facts.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "layernorm_zero_centered_gamma": weights.zero_centered_norms,
        "activation_func": facts.activation,
        "activation_func_clamp_value": facts.glu_limit,
        "glu_linear_offset": facts.glu_offset,
        "add_bias_linear": Role.O_BIAS in weights.roles,
        "add_qkv_bias": facts.qkv_bias,
        "qk_layernorm": facts.qk_norm and not facts.wide_qk_norm,  # for these it would sum gradients of divided gains
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.02,
    }
    return values | ({} if facts.mla else {"num_query_groups": facts.kv_heads, "kv_channels": facts.head_dim})


def _attention_values(facts: ModelFacts) -> dict[str, Any]:
    windowed = [int(facts.is_windowed(layer)) for layer in range(facts.layers)]
    without_rotary = [int(layer in facts.no_rope_layers) for layer in range(facts.layers)]
    return {
        "softmax_scale": facts.attention_scale,
        "rotary_interleaved": facts.rope.interleaved and facts.mla is None,  # latent attention takes pairs apart itself
        "softmax_type": "learnable" if Role.SINKS in weights_of(facts).roles else "vanilla",
        # Megatron counts the tokens before the query, published models the query as well
        "window_size": (facts.sliding_window - 1, 0) if facts.sliding_window and any(windowed) else None,
        "window_attn_skip_freq": windowed if any(windowed) else None,
    } | ({"no_rope_freq": without_rotary} if any(without_rotary) else {})


def _parallel_values(spec: PolicySpec) -> dict[str, Any]:
    parallel = spec.parallel
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    if (first, last) == (None, None) and spec.facts.layers % parallel.pp:  # Megatron takes uneven stages by name only
        stages = parallel.stage_layers(spec.facts.layers)
        first, last = (stages[0], stages[-1]) if stages else (None, None)
    values = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sequence_parallel,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        # Rows differ in length. Megatron wants the alltoall dispatcher with it, for dense models too.
        "variable_seq_lengths": parallel.pp > 1,
        "moe_token_dispatcher_type": "alltoall",
    }
    if parallel.vpp > 1:
        # Exchanged one by one, NCCL makes a communicator for each two stages on the way, and with four stages that
        # hangs (Megatron-LM 5240): there they are batched. Two stages have the same peer before and behind them, and
        # a batch with lengths that vary mixes up the two (Megatron-LM 5100, 5271). Over gloo a batch gives wrong
        # gradients.
        batched = spec.device == "cuda" and parallel.pp > 2
        values |= {
            "virtual_pipeline_model_parallel_size": parallel.vpp,
            "overlap_p2p_comm": not batched,
            "batch_p2p_comm": batched,
        }
    return values


def _kernel_values(spec: PolicySpec, te: bool) -> dict[str, Any]:
    cuda = spec.device == "cuda"
    values = {
        "params_dtype": spec.dtype,
        "pipeline_dtype": spec.dtype,
        "bf16": spec.dtype == "bfloat16",
        "fp16": spec.dtype == "float16",
        "calculate_per_token_loss": True,  # gradients are summed over ranks, not averaged
        "use_cpu_initialization": not cuda,
        "transformer_impl": "transformer_engine" if te else "local",
        "gradient_accumulation_fusion": not cuda,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": spec.facts.activation == "silu",
        "bias_dropout_fusion": cuda,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "moe_grouped_gemm": groups_experts(spec, te),
        "deallocate_pipeline_outputs": False,
        "batch_p2p_sync": cuda,
    }
    if spec.recompute == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif spec.recompute == "selective":
        # Cheap to compute, large to keep; `megatron.recompute_modules` names others (also mlp, moe, shared_experts).
        delayed = spec.megatron.get("fp8") and spec.megatron.get("fp8_recipe", "delayed") == "delayed"
        norms = [] if delayed else ["layernorm"]  # Megatron refuses to compute norms again under delayed scaling
        values |= {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", *norms, *(["mla_up_proj"] if spec.facts.mla is not None else [])],
        }
    return values


def _moe_values(facts: ModelFacts) -> dict[str, Any]:
    moe = facts.moe
    assert moe is not None
    limited = moe.topk_groups < moe.groups  # experts of some groups alone are chosen
    return {
        "num_moe_experts": moe.experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.expert_intermediate,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate or None,
        # With a list, checkpoints name each layer separately, even if all are alike
        "moe_layer_freq": [int(facts.is_moe_layer(i)) for i in range(facts.layers)] if moe.dense_layers else 1,
        "moe_router_score_function": moe.score,
        # Megatron takes a single expert in no other way; `weigh_as_published` corrects its weight
        "moe_router_pre_softmax": moe.score == "softmax" and (not moe.normalize_topk or moe.experts_per_token == 1),
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": 0.0,  # balancing by bias is for pre-training
        "moe_router_num_groups": moe.groups if limited else None,
        "moe_router_group_topk": moe.topk_groups if limited else None,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1.0 else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def _mla_values(facts: ModelFacts) -> dict[str, Any]:
    mla = facts.mla
    assert mla is not None
    yarn = facts.rope.scaling if facts.rope.kind == "yarn" else {}
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
        "rotary_base": int(facts.rope.theta),
        # YaRN's part in the scale of query-key products; frequencies are RowRotary's
        "rotary_scaling_factor": yarn.get("factor", 1.0),
        "mscale_all_dim": yarn.get("mscale_all_dim", 0.0),
    }
