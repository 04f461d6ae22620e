"""The table of NeMo-RL keys, each with its rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.recipes import Import
from rlctl.recipes.nemo_rl import mapping_rules as rules
from rlctl.recipes.nemo_rl.images import forbidden_words, freezes, keeps_template, media_limit
from rlctl.recipes.nemo_rl.mapping_rules import (
    DDP,
    DTENSOR,
    MEGATRON,
    VLLM,
    passes,
    validated,
    without,
)
from rlctl.recipes.nemo_rl.quant_cfg import quantized_engines, quantized_training
from rlctl.recipes.rules import Leaf, Rule, differs, if_on, logs, only, to, when

RENAMED = {
    "policy.dtensor_config": DTENSOR,
    f"{DDP}.use_custom_fsdp": f"{DDP}.use_megatron_fsdp",
    "policy.megatron_config": MEGATRON,
    "policy.generation.async_engine": f"{VLLM}.async_engine",
}
"""Former and alternative names of keys and sections."""

NO_VALIDATION = logs("validation samples all prompts at once, with generation.top_p and top_k")


def each(section: str, names: str, rule: Rule) -> dict[str, Rule]:
    return {f"{section}.{name}": rule for name in names.split()}


def penalized(rule: Rule) -> Rule:
    """Return the rule of a key of the KL penalty, which is off where its weight is 0."""
    return when("loss_fn.reference_policy_kl_penalty", rule, "there is no KL penalty")


def of_gae(rule: Rule) -> Rule:
    """Return the rule of a key of generalized advantage estimation, which other estimators do not read."""
    return when(lambda leaf: leaf.get("grpo.adv_estimator.name") == "gae", rule, "for other estimators")


READ_WITH_PERIOD = validated(without("read with grpo.val_period"))
LOGS = logs("rlctl writes metrics, logs and a report to the run directory, under its own names")
KERNELS = without("rlctl chooses kernels by itself; results are the same")
ENGINE_CALLS = without("results do not depend on how an engine is called")
UPDATES = without("training.optimizer_offload updates on the device, also where states are in host memory")
ADAMW = ("torch.optim.AdamW", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam")
WHOLE_WEIGHTS = "refit and checkpoints need the whole parameters of each tensor-parallel rank"
NO_BALANCING = only(None, 0, 0.0, reason="routers have an auxiliary loss on Megatron alone (moe_aux_loss_coeff)")
REPLACED = without("an engine that fails is replaced, and its rollouts are begun again")
BOUNDED = without("rollouts.max_staleness bounds the rollouts in flight")
KV_CACHE = differs(None, True, reason="caches that older weights have filled are always computed again")

FREEZING: dict[str, Rule] = {
    **dict.fromkeys(("freeze_vision_tower", "freeze_vision_model"), freezes("vision")),
    **dict.fromkeys(("freeze_vision_projection", "freeze_vision_projector"), freezes("projector")),
    "freeze_language_model": freezes("language"),
    **dict.fromkeys(("freeze_audio_tower", "freeze_audio_model", "freeze_sound_encoder", "freeze_sound_projection"),
                    without("no part of a model that reads sound is trained")),
}  # fmt: skip
"""Switches that freeze parts of a model, of Automodel and of Megatron."""
DECAYS = {name: name.lower() for name in ("constant", "linear", "cosine", "inverse-square-root", "WSD")}
WSD_DECAYS = {name: name.replace("_", "-") for name in ("linear", "cosine", "exponential", "minus_sqrt")}

_STEPS: dict[str, Rule] = {
    "num_prompts_per_step": to("batch.prompts"),
    "num_generations_per_prompt": to("batch.generations"),
    "max_num_steps": rules.steps_of_run,
    "max_num_epochs": rules.epochs,
    "max_rollout_turns": rules.with_turns(
        to("environment.turns"),
        only(
            None, 1, reason="the recipe has no environment with turns that rlctl knows", settled_by="environment.turns"
        ),
    ),
    "val_period": validated(rules.validation_period),
    "val_at_start": validated(to("validation.at_start")),
    "val_at_end": validated(to("validation.at_end")),
    "max_val_samples": validated(to("validation.max_prompts")),
    "val_batch_size": NO_VALIDATION,
    "seed": to("run.seed"),
}
"""Keys that the sections `grpo` and `distillation` both have."""

_OF_TEXTS: dict[str, Rule] = {
    "max_num_steps": rules.steps_of_run,
    "max_num_epochs": rules.epochs,
    "seed": to("run.seed"),
    "val_period": validated(rules.validation_period),
    "val_at_start": validated(to("validation.at_start")),
    "val_at_end": validated(to("validation.at_end")),
    "val_batches": validated(rules.validation_batches),
    **dict.fromkeys(["val_global_batch_size", "val_micro_batch_size"], without("read with val_batches")),
}
"""Keys that the sections `sft`, `dpo` and `rm` have."""

_SFT_AND_DPO: dict[str, Rule] = {
    **{f"{section}.{key}": rule for section in rules.OF_TEXTS for key, rule in _OF_TEXTS.items()},
    "sft.only_unmask_final": to("data.train_on", {True: "last", False: "assistant", None: None}),
    "dpo.reference_policy_kl_penalty": to("preference.beta"),
    "dpo.preference_average_log_probs": to("preference.average"),
    "dpo.sft_average_log_probs": rules.average_of_texts,
    "dpo.sft_loss_weight": to("preference.sft_weight"),
    "dpo.preference_loss_weight": only(None, 1, 1.0, reason="the preferences have the weight 1"),
}

GOLD = only(None, False, reason="the gold loss, which compares sorted probabilities of tokens without a counterpart, "
            "is not computed")  # fmt: skip


_OF_EACH: dict[str, Rule] = {
    "projection_matrix_path": differs(None, reason="the projection is computed from the two tokenizers"),
    **dict.fromkeys(["gold_loss", "xtoken_loss"], GOLD),
    "quant_cfg": only(None, reason="the teacher is computed in model.dtype"),
}
"""Keys of each of several teachers."""


def _further_teacher(leaf: Leaf) -> None:
    _OF_EACH.get(rules.FURTHER.sub("", leaf.name), rules.further_teacher)(leaf)


def of_several(rule: Rule) -> Rule:
    return when(rules.several_teachers, rule, "there is one teacher")


_DISTILLATION: dict[str, Rule] = {
    **{f"distillation.{key}": rule for key, rule in _STEPS.items()},
    "distillation.topk_logits_k": to("distillation.top_k"),
    "loss_fn.kl_type": when(
        "teacher.model_name",
        rules.across_tokenizers(without("read from loss_fn.reverse_kl"), rules.kl_type),
        "the recipe has no teacher",
    ),
    **{
        f"loss_fn.{key}": rules.across_tokenizers(rule)
        for key, rule in {
            "vocab_topk": to("distillation.top_k"),
            "reverse_kl": to("distillation.forward_share", {True: 0.0, False: 1.0, None: 1.0}),
            "dynamic_loss_scaling": rules.loss_scaling,
            "temperature": only(None, 1, 1.0, reason="distributions are compared at the temperature 1"),
            "exact_token_match_only": without("a chunk has the same characters in both"),
            **dict.fromkeys(["kl_loss_weight", "ce_loss_scale"], without("read with loss_fn.dynamic_loss_scaling")),
            **dict.fromkeys(["gold_loss", "xtoken_loss"], GOLD),
            "uncommon_topk": without("read with loss_fn.gold_loss"),
            "kd_loss_mode": of_several(only(None, "sum", reason="the weighted sum of the divergences is computed")),
            "sum_weights_metric": of_several(only(None, reason="teachers have fixed weights")),
            "normalize_teacher_by_vocab": of_several(only(None, False, reason="teachers have fixed weights")),
            "alpha": of_several(without("read with loss_fn.sum_weights_metric")),
        }.items()
    },
    **{f"teacher.{key}": rule for key, rule in _OF_EACH.items()},
    "teachers.*": _further_teacher,
    "teacher.weight": when(
        rules.several_teachers,
        without("read with teachers.0.model_name"),
        only(None, 1, 1.0, reason="distillation.weight is the weight of the only teacher"),
    ),
    "loss_fn.mixed_kl_weight": without("read with loss_fn.kl_type"),
    "loss_fn.zero_outside_topk": when(
        "teacher.model_name",
        only(None, False, reason="tokens outside of the top k are left out, or one event (distillation.outside)",
             settled_by="distillation.outside"),
        "the recipe has no teacher",
    ),
    "teacher.model_name": rules.teachers_of_texts,
    "teacher.precision": when(
        lambda leaf: leaf.value in (None, leaf.get("policy.precision")),
        without("the teacher is in model.dtype, as the policy is"),
        differs(reason="the teacher is computed in model.dtype, as the policy is"),
    ),
    "teacher.tokenizer.*": rules.across_tokenizers(
        without("the teacher has its own"), without("the teacher must have the policy's tokenizer, which is checked")
    ),
    "teacher.max_total_sequence_length": without("model.max_length"),
    "teacher.hf_config_overrides.*": only(reason="the model's configuration is taken as it is"),
    **{
        f"teacher.megatron_cfg.{theirs}": to(f"teacher.{ours}")
        for theirs, ours in {
            "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
            "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp",
        }.items()
    },
    "teacher.megatron_cfg.fp8_cfg.enabled": differs(None, False, reason="the teacher is computed in model.dtype"),
    "teacher.dtensor_cfg.tensor_parallel_size": to("teacher.tp"),
    "teacher.dtensor_cfg.context_parallel_size": to("teacher.cp"),
    "teacher.*": without("the teacher computes log-probs alone, on the rows of training"),
}  # fmt: skip

_TEACHERS = "on_policy_distillation.non_colocated_teachers"
_OPD: dict[str, Rule] = {
    "on_policy_distillation.enabled": rules.distills(without("read with grpo.adv_estimator.name")),
    f"{rules.AGENTS}*": rules.distills(rules.agents_teacher),
    "on_policy_distillation.default_teacher_alias": rules.distills(without("read with teacher_model_by_agent_name")),
    "on_policy_distillation.strict_agent_name_match": rules.distills(
        when(
            lambda leaf: len(rules.agents_teachers(leaf.leaves)) > 1,
            without("read with teacher_model_by_agent_name"),
            differs(None, False, reason="rows of every agent have the teacher"),
        )
    ),
    "on_policy_distillation.deduplicate_shared_teacher_checkpoints": rules.distills(
        without("agents of one checkpoint have one teacher")
    ),
    "on_policy_distillation.orm_advantage_weight": rules.distills(to("distillation.reward_weight")),
    "on_policy_distillation.use_orm_advantage": rules.distills(without("read with orm_advantage_weight")),
    f"{_TEACHERS}.enabled": rules.distills(
        differs(None, False, reason="the teacher takes turns with the policy on its devices")
    ),
    **{
        f"{_TEACHERS}.default_teacher_cfg.{theirs}": rules.distills(to(f"teacher.{ours}"))
        for theirs, ours in {
            "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
            "expert_model_parallel_size": "ep",
        }.items()
    },
    f"{_TEACHERS}.default_teacher_cfg.precision": rules.distills(
        differs(None, "bf16", "bfloat16", reason="the teacher is computed in model.dtype, as the policy is")
    ),
    f"{_TEACHERS}.default_teacher_cfg.*": rules.distills(without("the teacher has the policy's devices and rows")),
    f"{_TEACHERS}.teacher_overrides.*": rules.distills(
        differs(None, reason="all teachers have the layout of `teacher`")
    ),
}  # fmt: skip

_GRPO: dict[str, Rule] = {
    **{f"grpo.{key}": rule for key, rule in _STEPS.items()},
    **each("grpo", "normalize_rewards adv_estimator.normalize_rewards", rules.of_groups(to("advantage.normalize_std"))),
    **each("grpo", "use_leave_one_out_baseline adv_estimator.use_leave_one_out_baseline",
           rules.of_groups(rules.baseline)),
    **each("grpo", "val_num_generations_per_prompt num_val_generations_per_prompt",
           validated(to("validation.samples"))),
    "grpo.val_start_at": validated(differs(None, 0, reason="the first validation is after validation.every steps")),
    "grpo.stop_at_validation_metric": NO_VALIDATION,
    "grpo.stop_at_validation_threshold": only(None, reason="a plateau can end a run (validation.stop_after), no value"),
    "grpo.debug_payload_metrics": LOGS,
    "grpo.deduplicate_multimodal_data": without("the images of a group are stored and sent once"),
    "grpo.invalid_tool_call_advantage": rules.of_turns("advantage.invalid_tool_call"),
    "grpo.malformed_thinking_advantage": rules.of_turns("advantage.malformed_thinking"),
    "grpo.advantage_clip_low": to("advantage.clip_low"),
    "grpo.advantage_clip_high": to("advantage.clip_high"),
    "grpo.zero_variance_prompt_filtering": when(
        "grpo.use_dynamic_sampling",
        without("dynamic sampling replaces such groups"),
        if_on(to("filter.groups", {True: "drop"})),
    ),
    "grpo.async_grpo.enabled": to("rollouts.mode", {True: "async", False: "sync", None: "sync"}),
    "grpo.async_grpo.max_trajectory_age_steps": to("rollouts.max_staleness"),
    "grpo.async_grpo.in_flight_weight_updates": to("refit.in_flight", {True: "keep", False: "wait"}),
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": KV_CACHE,
    "grpo.async_grpo.*": REPLACED,
    "grpo.overlong_filtering": to("filter.truncated", {True: "mask", False: "keep", None: None}),
    "grpo.use_dynamic_sampling": when(
        lambda leaf: leaf.value or not leaf.get("grpo.zero_variance_prompt_filtering"),
        to("filter.groups", {True: "replace", False: "keep", None: None}),
        "grpo.zero_variance_prompt_filtering drops groups of one reward",
    ),
    "grpo.dynamic_sampling_max_gen_batches": when(
        "grpo.use_dynamic_sampling", to("filter.max_rounds"), "there is no dynamic sampling"
    ),
    "grpo.batch_multiplier": when(
        "grpo.use_dynamic_sampling",
        differs(None, 1, reason="each round samples as many prompts as are missing, not a multiple of the batch"),
        "each round samples as many prompts as are missing",
    ),
    "grpo.reward_shaping.enabled": if_on(rules.reward_shaping),
    "grpo.reward_shaping.*": without("read with grpo.reward_shaping.enabled"),
    "grpo.reward_scaling.enabled": if_on(rules.reward_scaling),
    "grpo.reward_scaling.*": without("read with grpo.reward_scaling.enabled"),
    "grpo.calculate_advantages_on_gpu": KERNELS,
    "grpo.skip_reference_policy_logprobs_calculation": without("no reference is evaluated when the KL penalty is 0"),
    "grpo.seq_logprob_error_threshold": rules.error_mask,
    "grpo.adv_estimator.name": rules.estimator,
    "grpo.adv_estimator.gae_lambda": of_gae(rules.gae_lambda),
    "grpo.adv_estimator.gae_gamma": of_gae(to("critic.gamma")),
    "grpo.adv_estimator.normalize_advantages": of_gae(to("advantage.whiten")),
    **each("grpo.adv_estimator", "gae_lambda_value gae_lambda_policy length_adaptive_alpha",
           of_gae(without("read with gae_lambda"))),
    "grpo.adv_estimator.reward_weights": without("read with the environment's rewards"),
    "grpo.adv_estimator.*": without("for other estimators"),
    "grpo.ppo_epochs": to("batch.epochs"),
    "grpo.policy_training_start_step": to("critic.warmup_steps"),
    "value_loss_fn.scale": to("critic.loss_weight"),
    "value_loss_fn.cliprange": rules.value_clip,
    "value.model_name": rules.of_the_policy,
    "value.*": without("the critic has the policy's layout, rows and precision; its learning rate is its own"),
    "loss_fn.reference_policy_kl_penalty": to("loss.kl_coefficient"),
    "loss_fn.reference_policy_kl_type": to("loss.kl_estimator", {"k1": "k1", "k2": "k2", "k3": "k3", None: None}),
    "loss_fn.ratio_clip_min": to("loss.clip_low"),
    "loss_fn.ratio_clip_max": to("loss.clip_high"),
    "loss_fn.ratio_clip_c": when(
        lambda leaf: not leaf.get("loss_fn.use_cispo"), to("loss.dual_clip"), "the loss has no such bound"
    ),
    "loss_fn.token_level_loss": to("loss.level", {True: "token", False: "sequence"}),
    "loss_fn.use_importance_sampling_correction": rules.correction,
    **{
        f"loss_fn.truncated_importance_sampling_{name}": without("read with use_importance_sampling_correction")
        for name in ("ratio", "type", "ratio_min")
    },
    "loss_fn.use_on_policy_kl_approximation": penalized(rules.kl_weight),
    "loss_fn.use_cispo": if_on(to("run.algorithm", {True: "cispo"})),
    **each("loss_fn", "positive_example_nll_weight positive_example_nll_loss_weight", rules.positive_nll),
    "loss_fn.sequence_level_importance_ratios": if_on(rules.sequence_ratios),
    "loss_fn.kl_input_clamp_value": penalized(only(None, 20, 20.0, reason="the log-ratio is limited to 20")),
    "loss_fn.kl_output_clamp_value": penalized(to("loss.kl_cap")),
    "loss_fn.disable_ppo_ratio": rules.no_ratio,
    "loss_fn.force_on_policy_ratio": rules.on_policy_ratio,
    "loss_fn.sum_weights_metric": LOGS,
    "loss_fn.use_kl_in_reward": rules.kl_in_reward,
}  # fmt: skip

_POLICY: dict[str, Rule] = {
    "policy.model_name": rules.model_name,
    "policy.tokenizer.name": when(
        lambda leaf: leaf.value not in (None, leaf.get("policy.model_name")),
        to("model.tokenizer"),
        "the model's own",
    ),
    "policy.tokenizer.chat_template": when(
        keeps_template,
        without("the processor of a model that reads images has its own, which NeMo-RL keeps"),
        when(
            lambda leaf: leaf.value != "default",
            to("model.chat_template", null=rules.JOINED_MESSAGES),
            "model.chat_template stays at its default",
        ),
    ),
    "policy.tokenizer.chat_template_kwargs.*": rules.template_variables,
    "policy.train_global_batch_size": rules.batches,
    "policy.train_micro_batch_size": without("rows are sized in tokens"),
    "policy.generation_batch_size": without("vLLM batches by itself"),
    "policy.logprob_batch_size": without("log-probs are computed on the rows of training"),
    "policy.max_total_sequence_length": rules.longest_text,
    "policy.precision": to("model.dtype", {"bfloat16": "bfloat16", "float32": "float32", "float16": "float16"}),
    **each("policy", "logprob_chunk_size offload_optimizer_for_logprob", KERNELS),
    "policy.max_grad_norm": to("optimizer.clip_grad", null=0),
    "policy.make_sequence_length_divisible_by": without("rows are padded as the parallelism needs"),
    "policy.refit_buffer_size_gb": without("a refit's buckets are sized by rlctl"),
    "policy.hf_config_overrides.max_position_embeddings": to("model.max_position_embeddings"),
    "policy.hf_config_overrides.rope_scaling.*": rules.rope_scaling,
    **each("policy.hf_config_overrides", "router_aux_loss_coef text_config.router_aux_loss_coef", NO_BALANCING),
    "policy.hf_config_overrides.*": only(reason="the model's configuration is taken as it is"),
    "policy.draft.enabled": differs(
        None, False, reason="no draft model is trained along; the policy is not in its loss"
    ),
    "policy.draft.*": without("read with policy.draft.enabled"),
    "policy.router_replay.enabled": to("training.router_replay"),
    "policy.quant_cfg": quantized_training,
    "policy.dequantize_base_checkpoint": without("weights are read in the format that they are published in"),
    "policy.fsdp_offload_enabled": only(None, False, reason="it belongs to a backend that NeMo-RL no longer has"),
    "policy.activation_checkpointing_enabled": to("training.recompute", {True: "full", False: None, None: None}),
    "policy.disable_modelopt_layer_spec": without("weights are rounded whatever the layers are"),
    **each("policy", "quant_calib_data quant_calib_size quant_batch_size quant_sequence_length",
           without("scales are computed from the weights themselves")),
    "policy.is_vlm": without("read with the model"),
    "policy.reward_model_cfg.enabled": only(None, True, reason="a reward model ends in a score"),
    "policy.reward_model_cfg.reward_model_type": only(None, "bradley_terry", reason="the loss is Bradley and Terry's"),
    "policy.tokenizer.video.*": without("prompts are texts and images"),
    "policy.tokenizer.use_fastokens": without("the tokenizer is the model's own, of transformers"),
    "policy.dynamic_batching.enabled": rules.dynamic_batching,
    "policy.dynamic_batching.train_mb_tokens": when(
        "policy.dynamic_batching.enabled", to("training.micro_batch_tokens"), "policy.dynamic_batching is off"
    ),
    "policy.dynamic_batching.*": without("training rows are used"),
    "policy.sequence_packing.enabled": to("training.packing"),
    "policy.sequence_packing.train_mb_tokens": when(
        "policy.sequence_packing.enabled", to("training.micro_batch_tokens"), "policy.sequence_packing is off"
    ),
    "policy.sequence_packing.*": without("training rows are used, filled by rlctl's packing"),
    "policy.optimizer.name": only(*ADAMW, reason="the optimizer is AdamW"),
    "policy.optimizer.kwargs.lr": to("optimizer.lr"),
    "policy.optimizer.kwargs.weight_decay": to("optimizer.weight_decay"),
    "policy.optimizer.kwargs.eps": to("optimizer.eps"),
    "policy.optimizer.kwargs.betas": rules.betas,
    **each("policy.optimizer.kwargs", "amsgrad maximize",
           only(None, False, reason="the optimizer is the published AdamW")),
    "policy.optimizer.*": without("how torch runs its optimizer"),
    "policy.scheduler": rules.torch_schedulers,
    "policy.scheduler.*": only(reason="rlctl reads a list of schedulers", settled_by="scheduler.decay"),
    f"{DTENSOR}.enabled": to("training.backend", {True: "dtensor", False: None, None: None}),
    f"{DTENSOR}.tensor_parallel_size": to("training.tp"),
    f"{DTENSOR}.context_parallel_size": to("training.cp"),
    f"{DTENSOR}.expert_parallel_size": to("training.ep"),
    f"{DTENSOR}.dp_replicate_size": when(
        lambda leaf: leaf.value != 1, to("training.replicate"), "training.replicate stays at its default"
    ),
    f"{DTENSOR}.sequence_parallel": without("tensor parallel ranks always share tokens out as well"),
    f"{DTENSOR}.activation_checkpointing": to("training.recompute", {True: "full", False: "none"}),
    f"{DTENSOR}.cpu_offload": rules.sharded_states_on_host,
    f"{DTENSOR}.custom_parallel_plan": differs(None, reason="each family is divided by rlctl's own plan"),
    f"{DTENSOR}._v2": without("both of NeMo-RL's workers are this one backend"),
    **each(DTENSOR, "clear_cache_every_n_steps moe_parallelizer.* automodel_kwargs.* lora_cfg.use_triton", KERNELS),
    f"{DTENSOR}.automodel_kwargs.backend.gate_precision": differs(None, "float32", reason="routers compute in float32"),
    **{f"{DTENSOR}.automodel_kwargs.freeze_config.{key}": rule for key, rule in FREEZING.items()},
    f"{DTENSOR}.lora_cfg.enabled": without("`dim` is the rank: training.lora.rank"),
    f"{DTENSOR}.lora_cfg.dim": rules.dtensor_adapters,
    f"{DTENSOR}.lora_cfg.exclude_modules": to("training.lora.exclude"),
    f"{DTENSOR}.lora_cfg.alpha": to("training.lora.alpha"),
    f"{DTENSOR}.lora_cfg.dropout": rules.adapter_dropout,
    f"{DTENSOR}.lora_cfg.dropout_position": rules.dropout_position,
    f"{DTENSOR}.lora_cfg.lora_A_init": differs(reason="A begins uniform (Kaiming), as the paper's code has it"),
    **each(DTENSOR, "lora_cfg.target_modules lora_cfg.match_all_linear", without("read with lora_cfg.dim")),
    f"{DTENSOR}.lora_cfg.restore_from": rules.first_adapters,
    f"{DTENSOR}.lora_cfg.use_dora": only(None, False, reason="there is no DoRA"),
    f"{DTENSOR}.lora_cfg.lora_dtype": only(None, "None", reason="adapters are in model.dtype"),
    f"{DTENSOR}.env_vars.*": rules.variables("training.env"),
}  # fmt: skip

_MEGATRON: dict[str, Rule] = {
    "enabled": to("training.backend", {True: "megatron"}),
    "sequence_parallel": when(
        lambda leaf: (leaf.get(f"{MEGATRON}.tensor_model_parallel_size") or 1) > 1,
        to("training.sequence_parallel"),
        "there is no tensor parallelism",
    ),
    "activation_checkpointing": rules.recompute,
    "recompute_granularity": when(
        rules.granularity_holds, to("training.recompute"), "read with activation_checkpointing"
    ),
    "pipeline_dtype": without("model.dtype"),
    "converter_type": without("conversion goes by the model's own architecture"),
    **dict.fromkeys((
        "empty_unused_memory_level", "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion",
        "defer_fp32_logits", "use_linear_ce_fusion_loss", "linear_ce_fusion_chunk_size", "use_fused_linear_logprobs",
        "fused_linear_logprobs_chunk_size", "use_gloo_process_groups", "clear_memory_caches_before_refit",
        "cuda_graph_modules", "offload_modules", "use_fused_weighted_squared_relu",
    ), KERNELS),
    **dict.fromkeys(
        ("calculate_per_token_loss", "scale_loss_by_dp_cp_size", "do_not_average_loss", "cp_normalize"),
        without("the loss carries its own normalization, and gradients are summed"),
    ),
    **{f"{place}{key}": rule for place in ("freeze_config.", "") for key, rule in FREEZING.items()},
    "radio_force_cpe_eval_mode": KERNELS,
    "checkpoint.*": without("checkpoints are written by rlctl"),
    "model_overrides.*": passes(only(reason="it is not a field of Megatron-Core's configuration")),
    "recompute_modules": when(
        lambda leaf: leaf.value and leaf.get(f"{MEGATRON}.recompute_granularity") == "selective",
        to("megatron.recompute_modules"),
        "whole layers are computed again, if anything is",
    ),
    "force_overwrite_initial_ckpt": without("conversions are reused when they are of the same model"),
    "force_reconvert_from_hf": without("conversions are reused when they are of the same model"),
    "freeze_moe_router": to("training.freeze_router"),
    "track_moe_metrics": without("NeMo-RL's own logging"),
    "moe_per_layer_logging": without("NeMo-RL's own logging"),
    "moe_grouped_gemm": without("grouped products are used where TransformerEngine is installed"),
    "*": passes(),
    "mtp_num_layers": rules.prediction_heads,
    "mtp_loss_scaling_factor": without("multi-token prediction is not trained"),
    "mtp_use_repeated_layer": without("multi-token prediction is not trained"),
    "mtp_detach_heads": without("multi-token prediction is not trained"),
    "layernorm_epsilon": without("the model's own"),
    "fp8_cfg.enabled": if_on(when(
        f"{MEGATRON}.fp8_cfg.fp8", without("fp8_cfg.fp8 is the format: megatron.fp8"),
        only(reason="fp8_cfg.fp8 names no format (hybrid or e4m3)"),
    )),
    "fp8_cfg.fp8": to("megatron.fp8", {name: name for name in ("hybrid", "e4m3")}),
    "fp8_cfg.fp8_recipe": to(
        "megatron.fp8_recipe", {name: name for name in ("delayed", "tensorwise", "blockwise", "mxfp8")}
    ),
    "fp8_cfg.fp8_param": only(None, False, reason="refits and checkpoints read weights in model.dtype"),
    "fp8_cfg.fp8_dot_product_attention": only(None, False, reason="attention is rlctl's own, in model.dtype"),
    "fp8_cfg.fp8_multi_head_attention": only(None, False, reason="attention is rlctl's own, in model.dtype"),
    "fp8_cfg.*": passes(),
    "env_vars.*": rules.variables("training.env"),
    "peft.enabled": without("`dim` is the rank: training.lora.rank"),
    "peft.dim": to("training.lora.rank"),
    "peft.alpha": to("training.lora.alpha"),
    "peft.target_modules": rules.adapted_layers,
    "peft.exclude_modules": to("training.lora.exclude"),
    "peft.dropout": rules.adapter_dropout,
    "peft.dropout_position": rules.dropout_position,
    "peft.lora_A_init_method": differs(reason="A begins uniform (Kaiming), as the paper's code has it"),
    "peft.lora_B_init_method": only("zero", reason="B begins as 0: the policy is its base at first"),
    "peft.lora_dtype": only(None, "None", reason="adapters are in model.dtype"),
    "peft.restore_from": only(None, reason="training.lora.adapter takes a directory of PEFT, no Megatron checkpoint"),
    "peft.a2a_experimental": without("routed experts have no adapters"),
    "optimizer.optimizer": rules.optimizer,
    "optimizer.muon_momentum": rules.of_muon(to("optimizer.muon_momentum")),
    **dict.fromkeys(("optimizer.muon_use_nesterov", "optimizer.muon_nesterov"),
                    rules.of_muon(to("optimizer.muon_nesterov"))),
    "optimizer.muon_num_ns_steps": rules.of_muon(to("optimizer.muon_steps")),
    "optimizer.muon_extra_scale_factor": rules.of_muon(to("optimizer.muon_scale")),
    "optimizer.muon_scale_mode": rules.of_muon(
        only("spectral", None, reason="updates grow by sqrt(max(rows, columns))", settled_by="optimizer.optimizer")
    ),
    "optimizer.muon_scalar_optimizer": rules.of_muon(
        only("adam", None, reason="AdamW updates the other parameters", settled_by="optimizer.optimizer")
    ),
    "optimizer.muon_*": rules.of_muon(without("each published matrix is orthogonalized whole, as published")),
    "optimizer.lr": to("optimizer.lr"),
    "optimizer.weight_decay": to("optimizer.weight_decay"),
    "optimizer.clip_grad": to("optimizer.clip_grad", null=0),
    "optimizer.fp16": without("model.dtype"),
    "optimizer.bf16": without("model.dtype"),
    "optimizer.params_dtype": without("master weights are float32"),
    "optimizer.sgd_momentum": without("the optimizer is not SGD"),
    "optimizer.use_distributed_optimizer": without("the optimizer is always distributed"),
    "optimizer.use_precision_aware_optimizer": without("optimizer states are float32"),
    "optimizer.optimizer_cpu_offload": rules.states_on_host,
    "optimizer.optimizer_offload_fraction": when(
        f"{MEGATRON}.optimizer.optimizer_cpu_offload",
        differs(None, 0, 1, reason="training.optimizer_offload has all states in host memory, or none"),
        "read with optimizer_cpu_offload",
    ),
    **dict.fromkeys((
        "optimizer.use_torch_optimizer_for_cpu_offload", "optimizer.overlap_cpu_optimizer_d2h_h2d",
        "optimizer.pin_cpu_grads", "optimizer.pin_cpu_params",
    ), UPDATES),
    "optimizer.*": passes(),
    "scheduler.lr_decay_style": to("scheduler.decay", DECAYS),
    "scheduler.lr_decay_iters": rules.decay_steps,
    "scheduler.lr_warmup_iters": rules.warm_up,
    "scheduler.lr_warmup_init": to("scheduler.init_lr"),
    "scheduler.lr_wsd_decay_iters": to("scheduler.wsd_steps"),
    "scheduler.lr_wsd_decay_style": to("scheduler.wsd_decay", WSD_DECAYS),
    "scheduler.start_weight_decay": rules.weight_decay_ends,
    "scheduler.end_weight_decay": rules.weight_decay_ends,
    "scheduler.weight_decay_incr_style": when(
        lambda leaf: leaf.value not in (None, "constant"),
        to("scheduler.weight_decay_style"),
        "weight decay is constant",
    ),
    "scheduler.override_opt_param_scheduler": without("a resumed run continues the schedule in its manifest"),
    "scheduler.use_checkpoint_opt_param_scheduler": without("a resumed run continues the schedule in its manifest"),
    "scheduler.*": only(None, reason="rlctl's schedule has no such setting"),
    "distributed_data_parallel_config.average_in_collective": without(
        "gradients are summed, since the loss carries its normalization; Megatron refuses both together"
    ),
    "distributed_data_parallel_config.use_megatron_fsdp": only(
        None, False, reason=f"{WHOLE_WEIGHTS}; the DTensor backend shards weights (FSDP2)"
    ),
    "distributed_data_parallel_config.data_parallel_sharding_strategy": when(
        lambda leaf: leaf.value in (None, "optim_grads_params", "optim"),
        without("read with use_megatron_fsdp; the optimizer's states are sharded in any case"),
        only(reason=f"it belongs to Megatron-FSDP, which rlctl does not run: {WHOLE_WEIGHTS}"),
    ),
    "distributed_data_parallel_config.use_distributed_optimizer": without("the optimizer is always distributed"),
    "distributed_data_parallel_config.*": passes(),
}  # fmt: skip

_GENERATION: dict[str, Rule] = {
    "policy.generation.backend": rules.engine,
    "policy.generation.max_new_tokens": rules.completion_length,
    "policy.generation.temperature": to("generation.temperature"),
    "policy.generation.top_p": to("generation.top_p"),
    "policy.generation.top_k": to("generation.top_k"),
    "policy.generation.stop_token_ids": to("generation.stop_token_ids"),
    "policy.generation.bad_words": forbidden_words,
    "policy.generation.val_temperature": READ_WITH_PERIOD,
    **each("policy.generation", "val_top_p val_top_k", NO_VALIDATION),
    "policy.generation.use_async_rollouts": ENGINE_CALLS,
    **each("policy.generation", "sglang_cfg.* sglang_kwargs.* trtllm_cfg.* trtllm_kwargs.* dynamo_cfg.* "
           "mcore_generation_config.*", without("generation is by vLLM")),
    "policy.generation.quant_cfg": quantized_engines,
    "policy.generation.real_quant": when(
        "policy.generation.quant_cfg",
        differs(None, False, reason="engines hold the rounded weights in bfloat16: the values of packed ones, in more "
                "memory and through other kernels"),
        "read with policy.generation.quant_cfg",
    ),
    "policy.generation.real_quant_ignore": when(
        "policy.generation.real_quant",
        differs(None, reason="engines compute with the policy's weights, which policy.quant_cfg rounds"),
        "read with policy.generation.real_quant",
    ),
    "policy.generation.real_quant_export_cpu_offload": without("read with policy.generation.real_quant"),
    **each("policy.generation", "refit_transport refit_cfg.*", without("refit.mover: a refit is rlctl's own")),
    f"{VLLM}.env_vars.*": rules.variables("generation.env"),
    f"{VLLM}.logprobs_mode": only(
        None,
        "raw_logprobs",
        "processed_logprobs",
        reason="log-probs are of the distribution that was sampled from"
    ),
    **each(VLLM, "is_mx use_deep_gemm", without("read with vllm_cfg.precision")),
    **each(VLLM, "quantization_ignored_layer_kws num_first_layers_in_bf16 num_last_layers_in_bf16", when(
        lambda leaf: leaf.get(f"{VLLM}.precision") == "fp8",
        differs(
            None, 0, reason="all layers of the engines are in float8 (vllm.quantization_config can leave some out)"
        ),
        "read with vllm_cfg.precision",
    )),
    **each(VLLM, "expose_http_server http_server_serving_chat_kwargs http_server_serving_chat_kwargs.* "
           "reasoning_parser_plugin http_refit_server_port http_refit_api_key_env_var zmq_refit_server_port",
           without("engines take and return token ids, and have no server")),
    f"{VLLM}.video.*": without("prompts are texts and images"),
    f"{VLLM}.enable_expert_parallel": without("read with expert_parallel_size"),
    "policy.generation.stop_strings": to("generation.stop"),
    **each("policy.generation", "port_range_low port_range_high", without("ports are chosen by Ray")),
    "policy.generation.vllm_kwargs.*": passes(),
    **each("policy.generation", "vllm_kwargs.limit_mm_per_prompt.* vllm_cfg.limit_mm_per_prompt.*", media_limit),
    "policy.generation.vllm_kwargs.allowed_local_media_path": without("engines are sent the images"),
    "policy.generation.vllm_kwargs.speculative_config.*": rules.drafting,
    "policy.generation.colocated.enabled": to("generation.colocated"),
    **each("policy.generation.colocated.resources", "gpus_per_node num_nodes", rules.engine_devices),
    f"{VLLM}.expert_parallel_size": rules.expert_engines,
    f"{VLLM}.max_model_len": without("model.max_length"),
    f"{VLLM}.precision": rules.engine_precision,
    f"{VLLM}.load_format": without("engines start without weights, and the first refit fills them"),
    f"{VLLM}.skip_tokenizer_init": without("engines take and return token ids, and end texts by rlctl's stop rules"),
    f"{VLLM}.distributed_executor_backend": without("Ray places the engines"),
    f"{VLLM}.async_engine": ENGINE_CALLS,
    # Off is the engines' default where they can compile: it does not request compilation on a CPU.
    f"{VLLM}.enforce_eager": to("vllm.enforce_eager", {True: True, False: None, None: None}),
    f"{VLLM}.*": passes(without("NeMo-RL's own; rlctl's engine has no such choice")),
}  # fmt: skip

PUZZLE = f"env.{rules.PUZZLE}"
_REST: dict[str, Rule] = {
    **{
        f"{place}.{key}": rule
        for place in ("data", "data.default", "data.train")
        for key, rule in {
            "dataset_name": rules.dataset,
            "prompt_file": rules.across_tokenizers(without("texts have no prompt"), rules.prompt_file),
            "system_prompt_file": rules.system_prompt_file, "split": rules.split, "max_samples": to("data.size"),
            "env_name": without("read with the environment"), "processor": without("rlctl reads the fields by name"),
            "split_validation_size": when(
                rules.holds_out,
                to("validation.holdout"),
                logs("validation.holdout is a number of prompts, which are not known here"),
            ),
            "repeat": only(None, 1, reason="prompts come round again by themselves"),
            "seed": without("run.seed"),
        }.items()
    },
    "data.train.characters_per_sample": differs(None, 0, reason="each row is a separate text"),
    "data.train.text_key": only(None, "text", reason="the field of a plain text is `text`", settled_by="data.name"),
    **each("data", "default.* train.*", without("read with the dataset")),
    "data.train": only(
        None, reason="lists of datasets are not read from recipes: set data.sources", settled_by="data.name"
    ),
    **each("data.validation", "dataset_name data_path split input_key output_key subset", READ_WITH_PERIOD),
    **each("data", "val_data_path val_split", READ_WITH_PERIOD),
    "data.validation.*": logs("validation reads its prompts as training does"),
    "data.shuffle": to("data.shuffle"),
    **each("data", "train_data_path input_key output_key subset data_paths file_format problem_key solution_key "
           "chat_key tool_key system_key use_preserving_dataset", without("read with dataset_name")),
    "data.train_split": rules.split,
    "data.max_input_seq_length": when(
        lambda leaf: 0 < (leaf.value or 0) < (leaf.get("policy.max_total_sequence_length") or 0),
        differs(reason="longer rows are trained on as well, up to model.max_length"),
        "prompts that leave no room for a completion are refused",
    ),
    "data.num_workers": without("prompts are read by the driver"),
    "data.use_multiple_dataloader": only(None, False, reason="sources are mixed in every batch (data.sources)"),
    "data.num_prompts_per_dataloader": without("read with data.use_multiple_dataloader"),
    "data.custom_dataloader": only(None, reason="prompts are read by rlctl"),
    **each("data", "add_eos add_generation_prompt add_system_prompt", without("the chat template decides")),
    "data.add_bos": when(
        rules.without_begin,
        differs(None, False, reason="the recipe's chat template writes no first token, and rlctl adds none"),
        "the chat template decides",
    ),
    "env.math.num_workers": without("rewards are computed in one process"),
    "env.math.math_verify_impl": rules.when_math(
        only(None, *rules.MATH_SCORERS, reason="rlctl knows hf_math_verify and dapo_math_verify",
             settled_by="reward.terms")
    ),
    "env.math.verifier_type": rules.when_math(
        only(None, "math", reason="answers are compared by math-verify", settled_by="reward.terms")
    ),
    "env.math.*": rules.when_math(without("answers are compared by math-verify")),
    f"{PUZZLE}.cfg.game_config.size": to("environment.params.size"),
    f"{PUZZLE}.cfg.game_config.shuffle_moves": to("environment.params.shuffle_moves"),
    f"{PUZZLE}.cfg.max_moves": to("environment.params.max_moves"),
    f"{PUZZLE}.*": only(
        None, reason="the puzzle has the keys game_config.size, game_config.shuffle_moves and max_moves"
    ),
    f"env.{rules.MULTI_REWARD}.*": rules.multi_reward,
    "env.reward_model.model_name": rules.scored_by_model,
    "env.reward_model.*": rules.of_reward_model,
    "env.should_use_nemo_gym": without("read with the environment"),
    f"env.{rules.GYM}.*": rules.gym,
    "env.should_log_nemo_gym_responses": LOGS,
    "checkpointing.enabled": rules.checkpoints_on,
    "checkpointing.save_period": when(
        lambda leaf: leaf.get("checkpointing.enabled") is not False, to("run.checkpoint_every"), "checkpoints are off"
    ),
    "checkpointing.keep_top_k": when(
        lambda leaf: rules.of_texts(leaf.result),
        logs("the last checkpoints are kept; run.keep_best with run.keep_best_by=validation/loss keeps the best"),
        rules.kept_checkpoints,
    ),
    **each("checkpointing", "metric_name higher_is_better", without("read with keep_top_k")),
    "checkpointing.*": without("checkpoints are in the run directory; the last ones are kept"),
    **dict.fromkeys(rules.LOGGERS, rules.loggers),
    "logger.wandb.project": rules.logged_as("run.project", "wandb"),
    "logger.wandb.name": rules.logged_as("run.name", "wandb"),
    "logger.mlflow.experiment_name": rules.logged_as("run.project", "mlflow"),
    "logger.mlflow.run_name": rules.logged_as("run.name", "mlflow"),
    "logger.mlflow.tracking_uri": logs("MLFLOW_TRACKING_URI names the server"),
    **each("logger", "swanlab_enabled swanlab.*",
           logs("rlctl has no logger for SwanLab; run.loggers lists those it has")),
    "logger.log_dir": logs("logs are in the run directory (run.dir)"),
    "logger.tensorboard.log_dir": logs("TensorBoard's events are in the run directory (run.dir)"),
    **each("logger", "monitor_gpus gpu_monitoring.*",
           logs("GPUs, processors and memory are always in the metrics, under `system`")),
    "logger.*": LOGS,
    "cluster.gpus_per_node": to("cluster.gpus_per_node"),
    "cluster.num_nodes": to("cluster.nodes"),
    "cluster.*": without("Ray places the processes"),
    "data_plane.*": without("tokens travel through Ray's object store"),
    "async_rl.sampler.name": rules.sampler,
    **each("async_rl.sampler", "max_lookahead_versions max_staleness_versions",
           when("async_rl.sampler.name", without("read with async_rl.sampler.name"), rules.sampler)),
    "async_rl.sampler.evict_stale_samples": differs(None, False, reason="nothing that was sampled is thrown away"),
    "async_rl.sampler.*": differs(None, False, reason="rollouts.order alone says which groups make a batch"),
    "async_rl.recompute_kv_cache_after_weight_updates": KV_CACHE,
    **each("async_rl", "max_inflight_prompts max_buffered_rollouts", BOUNDED),
    "async_rl.min_groups_for_streaming_train": without("a batch is trained on when all of it is there"),
    "async_rl.rollout_failure.native.generation_timeout_s": differs(
        None, reason="rollouts.timeout_s ends a rollout that takes too long, with what it has"
    ),
    "async_rl.rollout_failure.*": without("no prompt is dropped: what fails is begun again, or ends the run"),
    "async_rl.generation_fleet_health.*": REPLACED,
    "async_rl.generation_router.*": ENGINE_CALLS,
    **each("async_rl", "stall_watchdog.* watchdog.*",
           logs("each quiet minute says who waits for whom; cluster.step_timeout_s ends a run")),
    "async_rl.diagnostics": LOGS,
    "reward_penalties.token_ids.*": without("read with the penalties"),
    "reward_penalties.thinking_tags": rules.marks,
    "reward_penalties.*": rules.penalty,
    **dict.fromkeys(
        ("on_policy_distillation.*", "teachers", "eval.*", "generation.*",
         "tokenizer.*", *(f"{name}.*" for name in rules.ALGORITHMS)),
        without("it belongs to what rlctl does not run yet"),
    ),
    "env.*": rules.environment,
}  # fmt: skip

RULES: dict[str, Rule] = (
    _GRPO
    | _DISTILLATION
    | _OPD
    | _SFT_AND_DPO
    | _POLICY
    | {f"{MEGATRON}.{key}": rule for key, rule in _MEGATRON.items()}
    | _GENERATION
    | _REST
)


def finish(result: Import, leaves: Mapping[str, Any]) -> None:
    """Set values that follow from several keys: unpacked rows, the reward, and default weight decay of torch's AdamW
    and Megatron."""

    def default(key: str, value: Any, source: str) -> None:
        if key not in result.values:
            result.set(key, value, source)

    if "optimizer.lr" in result.values:
        default("optimizer.weight_decay", 0.01, result.source["optimizer.lr"])
    length, rows = leaves.get("policy.max_total_sequence_length"), leaves.get("policy.train_micro_batch_size")
    if isinstance(length, int) and length > 1:
        pair = (
            2 if result.values.get("run.algorithm") in rules.OF_PAIRS else 1
        )  # both of its texts are in one micro-batch
        tokens = pair * length * (rows if isinstance(rows, int) else 1)
        if pair == 2 and (micro_batch := result.values.get("training.micro_batch_tokens")):
            result.values["training.micro_batch_tokens"] = max(micro_batch, pair * length)
        default("training.micro_batch_tokens", tokens, "policy.train_micro_batch_size")
    if rules.of_texts(result):
        cut = "cut" if result.values["run.algorithm"] == "distill" else "drop"
        default("data.too_long", cut, "policy.max_total_sequence_length")
        template = str(result.values.get("model.chat_template", ""))
        if "{%" in template and "eos_token" not in template and leaves.get("data.add_eos") is not False:
            result.set("model.chat_template", template + rules.END_OF_TEXT, result.source["model.chat_template"])
    elif result.foreign is None and rules.environment_used(leaves) == rules.PUZZLE:
        default("environment.name", "sliding-puzzle", PUZZLE)
        default("environment.append", "raw", PUZZLE)
    elif result.foreign is None and rules.environment_used(leaves) == rules.GYM:
        default("environment.name", "nemo-gym", "env.should_use_nemo_gym")
    elif result.foreign is None and rules.environment_used(leaves) == "math":
        default("reward.terms", [{"name": rules.math_scorer(leaves)}], "env.math")
