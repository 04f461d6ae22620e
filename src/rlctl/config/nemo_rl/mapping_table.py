"""The table of NeMo-RL keys, each with its rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.nemo_rl import mapping_rules as rules
from rlctl.config.nemo_rl.mapping_rules import (
    DDP,
    DTENSOR,
    MEGATRON,
    VLLM,
    Entry,
    Import,
    Rule,
    differs,
    only,
    passes,
    same,
    to,
    when_dtensor,
    with_adapters,
    with_float8,
    without,
)

RENAMED = {
    "policy.dtensor_config": DTENSOR,
    f"{DDP}.use_custom_fsdp": f"{DDP}.use_megatron_fsdp",
    "policy.megatron_config": MEGATRON,
}
"""Former and alternative names of keys and sections."""

NO_VALIDATION = without("rlctl has no validation pass; rewards of training are in metrics.jsonl")
LOGS = without("rlctl writes metrics, logs and report to the run directory")
KERNELS = without("rlctl chooses kernels by itself; results are the same")
UPDATES = without("training.optimizer_offload updates on the device, also where states are in host memory")
NOT_SYNC = "the loop is synchronous"

DECAYS = {name: name.lower() for name in ("constant", "linear", "cosine", "inverse-square-root", "WSD")}
WSD_DECAYS = {name: name.replace("_", "-") for name in ("linear", "cosine", "exponential", "minus_sqrt")}

_GRPO: dict[str, Rule] = {
    "grpo.num_prompts_per_step": to("batch.prompts"),
    "grpo.num_generations_per_prompt": to("batch.generations"),
    "grpo.max_num_steps": to("run.steps"),
    "grpo.max_num_epochs": without("run.steps ends the run; prompts come round again"),
    "grpo.max_rollout_turns": only(None, 1, why="rollouts have one turn"),
    "grpo.normalize_rewards": to("advantage.normalize_std"),
    "grpo.use_leave_one_out_baseline": to("advantage.baseline", {True: "leave-one-out", False: "mean"}),
    **dict.fromkeys((
        "grpo.val_period", "grpo.val_at_start", "grpo.val_at_end", "grpo.max_val_samples", "grpo.val_batch_size",
    ), NO_VALIDATION),
    "grpo.overlong_filtering": only(None, False, why="truncated rollouts count"),
    "grpo.seed": to("run.seed"),
    "grpo.async_grpo.enabled": only(None, False, why=NOT_SYNC),
    "grpo.async_grpo.*": without("grpo.async_grpo is off, or refused above"),
    "grpo.use_dynamic_sampling": only(None, False, why="there is no dynamic sampling (DAPO) yet"),
    "grpo.dynamic_sampling_max_gen_batches": without("for dynamic sampling"),
    "grpo.batch_multiplier": only(None, 1, 1.0, why="for dynamic sampling"),
    "grpo.reward_shaping.enabled": only(None, False, why="there is no reward shaping yet"),
    "grpo.reward_shaping.*": without("for reward shaping"),
    "grpo.reward_scaling.enabled": only(None, False, why="there is no reward scaling yet"),
    "grpo.reward_scaling.*": without("for reward scaling"),
    "grpo.calculate_advantages_on_gpu": KERNELS,
    "grpo.skip_reference_policy_logprobs_calculation": without("no reference is evaluated when the KL penalty is 0"),
    "grpo.seq_logprob_error_threshold": only(None, why="there is no such filter yet"),
    "grpo.adv_estimator.name": only(None, "grpo", why="advantages are those of GRPO"),
    "grpo.adv_estimator.normalize_rewards": to("advantage.normalize_std"),
    "grpo.adv_estimator.use_leave_one_out_baseline": to("advantage.baseline", {True: "leave-one-out", False: "mean"}),
    "grpo.adv_estimator.*": without("for other estimators"),
    "loss_fn.reference_policy_kl_penalty": to("loss.kl_coefficient"),
    "loss_fn.reference_policy_kl_type": to("loss.kl_estimator", {"k1": "k1", "k2": "k2", "k3": "k3", None: None}),
    "loss_fn.ratio_clip_min": to("loss.clip_low"),
    "loss_fn.ratio_clip_max": to("loss.clip_high"),
    "loss_fn.ratio_clip_c": to("loss.dual_clip"),
    "loss_fn.token_level_loss": to("loss.level", {True: "token", False: "sequence"}),
    "loss_fn.use_importance_sampling_correction": rules.correction,
    "loss_fn.truncated_importance_sampling_ratio": without("read with use_importance_sampling_correction"),
    "loss_fn.truncated_importance_sampling_type": only(None, "tis", why="weights are truncated"),
    "loss_fn.truncated_importance_sampling_ratio_min": only(None, why="weights are truncated from above"),
    "loss_fn.use_on_policy_kl_approximation": differs(None, False, why="the KL is the plain estimator"),
    "loss_fn.sequence_level_importance_ratios": only(None, False, why="ratios are those of tokens"),
    "loss_fn.kl_input_clamp_value": differs(None, why="the log-ratio is limited to 20"),
    "loss_fn.kl_output_clamp_value": differs(None, why="the KL is not clamped"),
    "loss_fn.disable_ppo_ratio": only(None, False, why="the loss is PPO's"),
    "loss_fn.force_on_policy_ratio": only(None, False, why="the ratio is 1 where it is by construction"),
    "loss_fn.use_kl_in_reward": only(None, False, why="the KL penalty is in the loss"),
    "loss_fn.positive_example_nll_loss_weight": only(None, 0, 0.0, why="the loss is PPO's alone"),
}  # fmt: skip

_POLICY: dict[str, Rule] = {
    "policy.model_name": to("model.name"),
    "policy.tokenizer.name": rules.tokenizer,
    "policy.tokenizer.chat_template": to("model.chat_template"),
    "policy.tokenizer.chat_template_kwargs": only(None, why="templates take no arguments yet"),
    "policy.tokenizer.chat_template_kwargs.*": only(why="templates take no arguments yet"),
    "policy.train_global_batch_size": rules.batches,
    "policy.train_micro_batch_size": without("rows are sized in tokens"),
    "policy.generation_batch_size": without("vLLM batches by itself"),
    "policy.logprob_batch_size": without("log-probs are computed on the rows of training"),
    "policy.max_total_sequence_length": to("model.max_length"),
    "policy.precision": to("model.dtype", {"bfloat16": "bfloat16", "float32": "float32"}),
    "policy.logprob_chunk_size": KERNELS,
    "policy.max_grad_norm": to("optimizer.clip_grad"),
    "policy.make_sequence_length_divisible_by": without("rows are padded as the parallelism needs"),
    "policy.refit_buffer_size_gb": without("a refit's buckets are sized by rlctl"),
    "policy.offload_optimizer_for_logprob": KERNELS,
    "policy.hf_config_overrides": only(None, why="the model's configuration is taken as it is"),
    "policy.hf_config_overrides.*": only(why="the model's configuration is taken as it is"),
    "policy.draft.*": without("speculative decoding is off"),
    "policy.dynamic_batching.enabled": rules.dynamic_batching,
    "policy.dynamic_batching.train_mb_tokens": rules.row_tokens("policy.dynamic_batching"),
    "policy.dynamic_batching.*": without("rows are those of training"),
    "policy.sequence_packing.enabled": to("training.packing"),
    "policy.sequence_packing.train_mb_tokens": rules.row_tokens("policy.sequence_packing"),
    "policy.sequence_packing.*": without("rows are those of training, filled by rlctl's own packing"),
    "policy.optimizer": without("the Megatron section's own is used"),
    "policy.optimizer.name": when_dtensor(only("torch.optim.AdamW", why="the optimizer is AdamW")),
    "policy.optimizer.kwargs.lr": when_dtensor(to("optimizer.lr")),
    "policy.optimizer.kwargs.weight_decay": when_dtensor(to("optimizer.weight_decay")),
    "policy.optimizer.kwargs.eps": when_dtensor(to("optimizer.eps")),
    "policy.optimizer.kwargs.betas": when_dtensor(rules.betas),
    "policy.optimizer.*": when_dtensor(without("how torch runs its optimizer")),
    "policy.scheduler": when_dtensor(differs(None, why="a list of torch schedulers: only the learning rate is taken")),
    "policy.scheduler.*": when_dtensor(without("a torch scheduler: only the learning rate is taken")),
    f"{DTENSOR}.enabled": when_dtensor(rules.by_dtensor),
    f"{DTENSOR}.tensor_parallel_size": when_dtensor(to("training.tp")),
    f"{DTENSOR}.context_parallel_size": when_dtensor(to("training.cp")),
    f"{DTENSOR}.expert_parallel_size": when_dtensor(to("training.ep")),
    f"{DTENSOR}.sequence_parallel": when_dtensor(without("decided by the planner")),
    f"{DTENSOR}.activation_checkpointing": when_dtensor(to("training.recompute", {True: "full", False: "none"})),
    f"{DTENSOR}.cpu_offload": when_dtensor(to("training.optimizer_offload")),
    f"{DTENSOR}.*": when_dtensor(without("belongs to the DTensor backend")),
}  # fmt: skip

_MEGATRON: dict[str, Rule] = {
    "enabled": rules.when_megatron(to("training.backend", {True: "megatron"})),
    "tensor_model_parallel_size": to("training.tp"),
    "pipeline_model_parallel_size": to("training.pp"),
    "virtual_pipeline_model_parallel_size": to("training.vpp"),
    "context_parallel_size": to("training.cp"),
    "expert_model_parallel_size": to("training.ep"),
    "expert_tensor_parallel_size": to("training.etp"),
    "sequence_parallel": rules.sequence_parallel,
    "activation_checkpointing": to("training.recompute", {True: "full", False: "none"}),
    "recompute_granularity": without("read with activation_checkpointing"),
    "num_layers_in_first_pipeline_stage": to("training.first_stage_layers"),
    "num_layers_in_last_pipeline_stage": to("training.last_stage_layers"),
    "pipeline_dtype": without("model.dtype"),
    "converter_type": without("conversion goes by the model's own architecture"),
    **dict.fromkeys((
        "empty_unused_memory_level", "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion",
        "defer_fp32_logits", "use_linear_ce_fusion_loss", "linear_ce_fusion_chunk_size",
    ), KERNELS),
    "force_overwrite_initial_ckpt": without("conversions are reused when they are of the same model"),
    "force_reconvert_from_hf": without("conversions are reused when they are of the same model"),
    "freeze_moe_router": to("training.freeze_router"),
    "track_moe_metrics": without("NeMo-RL's own logging"),
    "moe_per_layer_logging": without("NeMo-RL's own logging"),
    "moe_grouped_gemm": without("grouped products are used where TransformerEngine is installed"),
    "*": passes("megatron", MEGATRON),
    "mtp_num_layers": only(None, 0, why="multi-token prediction is not trained"),
    "mtp_loss_scaling_factor": without("multi-token prediction is not trained"),
    "mtp_use_repeated_layer": without("multi-token prediction is not trained"),
    "mtp_detach_heads": without("multi-token prediction is not trained"),
    "layernorm_epsilon": without("the model's own"),
    "fp8_cfg": only(None, why="float8 training needs at least `enabled` and `fp8`"),
    "fp8_cfg.enabled": rules.float8_on,
    "fp8_cfg.fp8": with_float8(to("megatron.fp8", same("hybrid", "e4m3"))),
    "fp8_cfg.fp8_recipe": with_float8(to("megatron.fp8_recipe", same("delayed", "tensorwise", "blockwise", "mxfp8"))),
    "fp8_cfg.fp8_param": with_float8(only(None, False, why="refits and checkpoints read weights in model.dtype")),
    "fp8_cfg.fp8_dot_product_attention": with_float8(only(None, False, why="attention is rlctl's own, in model.dtype")),
    "fp8_cfg.fp8_multi_head_attention": with_float8(only(None, False, why="attention is rlctl's own, in model.dtype")),
    "fp8_cfg.*": with_float8(passes("megatron", f"{MEGATRON}.fp8_cfg")),
    "env_vars": only(None, why="processes take the environment that rlctl gives them"),
    "env_vars.*": only(why="processes take the environment that rlctl gives them"),
    "peft": only(None, why="LoRA needs at least `dim`"),
    "peft.enabled": without("`dim` is the rank: training.lora.rank"),
    "peft.dim": with_adapters(to("training.lora.rank")),
    "peft.alpha": with_adapters(to("training.lora.alpha")),
    "peft.target_modules": with_adapters(rules.adapted_layers),
    "peft.exclude_modules": with_adapters(only(None, why="adapters are on every layer of their targets")),
    "peft.dropout": with_adapters(only(0, None, why="log-probs under dropout are not the sampling policy's")),
    "peft.dropout_position": without("there is no dropout"),
    "peft.lora_A_init_method": with_adapters(differs(why="A begins uniform (Kaiming), as the paper's code has it")),
    "peft.lora_B_init_method": with_adapters(only("zero", why="B begins as 0: the policy is its base at first")),
    "peft.lora_dtype": with_adapters(only(None, why="adapters are in model.dtype")),
    "peft.a2a_experimental": without("routed experts have no adapters"),
    "optimizer.optimizer": only("adam", why="the optimizer is Adam"),
    "optimizer.lr": to("optimizer.lr"),
    "optimizer.min_lr": to("scheduler.min_lr"),
    "optimizer.weight_decay": to("optimizer.weight_decay"),
    "optimizer.adam_beta1": to("optimizer.beta1"),
    "optimizer.adam_beta2": to("optimizer.beta2"),
    "optimizer.adam_eps": to("optimizer.eps"),
    "optimizer.clip_grad": to("optimizer.clip_grad"),
    "optimizer.fp16": only(None, False, why="training is float32 or bfloat16"),
    "optimizer.bf16": without("model.dtype"),
    "optimizer.params_dtype": without("master weights are float32"),
    "optimizer.sgd_momentum": without("the optimizer is Adam"),
    "optimizer.use_distributed_optimizer": without("the optimizer is always distributed"),
    "optimizer.use_precision_aware_optimizer": without("optimizer states are float32"),
    "optimizer.optimizer_cpu_offload": rules.states_on_host,
    "optimizer.optimizer_offload_fraction": rules.fraction_on_host,
    **dict.fromkeys((
        "optimizer.use_torch_optimizer_for_cpu_offload", "optimizer.overlap_cpu_optimizer_d2h_h2d",
        "optimizer.pin_cpu_grads", "optimizer.pin_cpu_params",
    ), UPDATES),
    "optimizer.*": passes("optimizer", f"{MEGATRON}.optimizer"),
    "scheduler.lr_decay_style": to("scheduler.decay", DECAYS),
    "scheduler.lr_decay_iters": rules.decay_steps,
    "scheduler.lr_warmup_iters": to("scheduler.warmup_steps"),
    "scheduler.lr_warmup_init": to("scheduler.init_lr"),
    "scheduler.lr_wsd_decay_iters": to("scheduler.wsd_steps"),
    "scheduler.lr_wsd_decay_style": to("scheduler.wsd_decay", WSD_DECAYS),
    "scheduler.start_weight_decay": rules.weight_decay_ends,
    "scheduler.end_weight_decay": rules.weight_decay_ends,
    "scheduler.weight_decay_incr_style": rules.weight_decay_style,
    "scheduler.*": only(None, why="rlctl's schedule has no such setting"),
    "distributed_data_parallel_config.average_in_collective": rules.average_in_collective,
    "distributed_data_parallel_config.use_megatron_fsdp": only(None, False, why="weights are not sharded"),
    "distributed_data_parallel_config.data_parallel_sharding_strategy": without("for Megatron-FSDP"),
    "distributed_data_parallel_config.use_distributed_optimizer": without("the optimizer is always distributed"),
    "distributed_data_parallel_config.*": passes("ddp", DDP),
}  # fmt: skip

_GENERATION: dict[str, Rule] = {
    "policy.generation.backend": only("vllm", why="generation is by vLLM"),
    "policy.generation.max_new_tokens": to("generation.max_new_tokens"),
    "policy.generation.temperature": to("generation.temperature"),
    "policy.generation.top_p": to("generation.top_p"),
    "policy.generation.top_k": to("generation.top_k"),
    "policy.generation.stop_token_ids": differs(None, why="rollouts end at the model's own end tokens"),
    "policy.generation.stop_strings": to("generation.stop"),
    "policy.generation.port_range_low": without("ports are chosen by Ray"),
    "policy.generation.port_range_high": without("ports are chosen by Ray"),
    "policy.generation.mcore_generation_config.*": without("generation is by vLLM"),
    "policy.generation.vllm_kwargs": only(None, why="it is a mapping of vLLM's arguments"),
    "policy.generation.vllm_kwargs.*": passes("vllm", "policy.generation.vllm_kwargs"),
    "policy.generation.colocated.enabled": to("generation.colocated"),
    "policy.generation.colocated.resources.*": only(None, why="both engines are on the same devices"),
    f"{VLLM}.tensor_parallel_size": to("generation.tp"),
    f"{VLLM}.pipeline_parallel_size": to("generation.pp"),
    f"{VLLM}.expert_parallel_size": rules.expert_engines,
    f"{VLLM}.gpu_memory_utilization": to("generation.memory_fraction"),
    f"{VLLM}.max_model_len": without("model.max_length"),
    f"{VLLM}.precision": only(None, "bfloat16", "float32", why="engines hold the weights in model.dtype"),
    f"{VLLM}.load_format": without("engines read the model's own weights; the first refit replaces them"),
    f"{VLLM}.skip_tokenizer_init": without("engines take and return token ids, and end texts by rlctl's stop rules"),
    f"{VLLM}.distributed_executor_backend": without("Ray places the engines"),
    f"{VLLM}.async_engine": differs(None, False, why="engines take a batch at a time"),
    # Off is what engines do by themselves where they can compile: it is no wish to compile on a CPU.
    f"{VLLM}.enforce_eager": to("vllm.enforce_eager", {True: True, False: None, None: None}),
    f"{VLLM}.*": passes("vllm", VLLM, without("NeMo-RL's own; rlctl's engine has no such choice")),
}  # fmt: skip

_REST: dict[str, Rule] = {
    "data.dataset_name": rules.dataset,
    "data.train.dataset_name": rules.dataset,
    "data.prompt_file": rules.prompt_file,
    "data.default.prompt_file": rules.prompt_file,
    "data.train.prompt_file": rules.prompt_file,
    "data.default.dataset_name": rules.dataset,
    "data.default.*": without("read with the dataset"),
    "data.train": only(None, why="there is one source of prompts, and this is a list of them"),
    "data.train.*": without("read with the dataset"),
    "data.validation": NO_VALIDATION,
    "data.validation.*": NO_VALIDATION,
    "data.system_prompt_file": only(None, why="write the text as data.system_prompt"),
    "data.default.system_prompt_file": only(None, why="write the text as data.system_prompt"),
    "data.train.system_prompt_file": only(None, why="write the text as data.system_prompt"),
    "data.train.split": to("data.split"),
    "data.shuffle": to("data.shuffle"),
    "data.train_data_path": without("read with dataset_name"),
    "data.input_key": without("read with dataset_name"),
    "data.output_key": without("read with dataset_name"),
    "data.train_split": to("data.split"),
    "data.val_data_path": NO_VALIDATION,
    "data.val_split": NO_VALIDATION,
    "data.max_input_seq_length": without("prompts that leave no room for a completion are refused"),
    "data.num_workers": without("prompts are read by the driver"),
    "data.use_multiple_dataloader": only(None, False, why="there is one source of prompts"),
    "env.math.num_workers": without("rewards are computed by the driver"),
    "env.math.math_verify_impl": only(None, "hf_math_verify", why="answers are compared by math-verify"),
    "env.math.*": without("answers are compared by math-verify"),
    "checkpointing.enabled": rules.checkpoints_on,
    "checkpointing.save_period": rules.checkpoint_period,
    "checkpointing.keep_top_k": rules.kept_checkpoints,
    "checkpointing.metric_name": without("read with keep_top_k"),
    "checkpointing.*": without("checkpoints are in the run directory; the last ones are kept"),
    "logger.tensorboard_enabled": to("run.tensorboard"),
    "logger.wandb_enabled": to("run.wandb"),
    "logger.*": LOGS,
    "cluster.gpus_per_node": to("cluster.gpus_per_node"),
    "cluster.num_nodes": to("cluster.nodes"),
    "cluster.*": without("Ray places the processes"),
    "sft.*": only(why="rlctl trains with GRPO"),
    "dpo.*": only(why="rlctl trains with GRPO"),
    "distillation.*": only(why="rlctl trains with GRPO"),
    "env.*": only(None, why="rewards are those of `rlctl config schema reward`"),
}  # fmt: skip

RULES: dict[str, Rule] = (
    _GRPO
    | _POLICY
    | {f"{MEGATRON}.{key}": rules.when_megatron(rule) for key, rule in _MEGATRON.items()}
    | _GENERATION
    | _REST
)


def finish(result: Import, leaves: Mapping[str, Any]) -> None:
    """Set what follows from several keys: rows without packing, the reward, and room for a prompt."""
    length = leaves.get("policy.max_total_sequence_length")
    if "training.micro_batch_tokens" not in result.values and length:
        rows = int(leaves.get("policy.train_micro_batch_size") or 1)
        result.set("training.micro_batch_tokens", rows * int(length), "policy.train_micro_batch_size")
    if any(key.startswith("env.math") for key in leaves):
        result.set("reward.terms", [{"name": "math-verify"}], "env.math")
        result.set("reward.extract", "boxed", "env.math")
    _leave_room_for_prompts(result, length, leaves.get("policy.generation.max_new_tokens"))
    if result.values.get("optimizer.clip_grad") is None:
        result.values.pop("optimizer.clip_grad", None)


def _leave_room_for_prompts(result: Import, length: Any, new: Any) -> None:
    """Lower max_new_tokens below the total length, at which both end a rollout: a prompt needs at least one token."""
    if not length or not new or int(new) < int(length):
        return
    result.set("generation.max_new_tokens", int(length) - 1, "policy.generation.max_new_tokens")
    note = (
        f"generation.max_new_tokens: {int(length) - 1}; a rollout ends at {int(length)} tokens, its prompt among them"
    )
    name = "policy.generation.max_new_tokens"
    result.entries[:] = [entry for entry in result.entries if entry.key != name]
    result.entries.append(Entry(name, new, "changed", note))
