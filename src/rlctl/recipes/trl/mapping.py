"""The tables of TRL's keys for each of its trainers, each key with its rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.recipes.rules import Leaf, Rule, differs, if_on, logs, only, to, when
from rlctl.settings.run import LOGGERS

METHODS = {"grpo": "grpo", "rloo": "rloo", "sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm"}
"""TRL's trainers by the name of their command, and rlctl's methods."""
LOSSES = {
    "grpo": {"loss.level": "sequence"},
    "bnpo": {"loss.level": "token"},
    "dapo": {"loss.level": "token"},
    "dr_grpo": {"loss.level": "constant"},
    "cispo": {"run.algorithm": "cispo"},
    "sapo": {"run.algorithm": "sapo"},
}
"""Losses of GRPO, and the keys that each sets."""
_COMMON: dict[str, Any] = {
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": _COMMON
    | {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 512,
        "loss_type": "dapo",
        "beta": 0.0,
        "vllm_importance_sampling_mode": "sequence_mask",
    },
    "rloo": _COMMON
    | {
        "learning_rate": 1e-6,
        "num_generations": 2,
        "max_completion_length": 512,
        "beta": 0.05,
        "vllm_importance_sampling_mode": "none",
    },
    "sft": _COMMON | {"learning_rate": 2e-5, "max_length": 1024, "packing": False},
    "dpo": _COMMON | {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "kto": _COMMON | {"learning_rate": 1e-6, "max_length": 1024, "train_sampling_strategy": "sequential"},
    "reward": _COMMON | {"learning_rate": 1e-4, "max_length": 1024},
}
"""TRL's defaults that differ from rlctl's, for keys that a file leaves out."""
OF_GRPO = (
    "num_generations",
    "max_completion_length",
    "reward_funcs",
    "epsilon",
    "use_vllm",
    "vllm_mode",
    "num_iterations",
)
OF_DPO = ("precompute_ref_log_probs", "ld_alpha", "discopop_tau", "use_weighting", "label_smoothing", "beta")
OF_RLOO, OF_KTO = ("normalize_advantages", "reward_clip_range"), ("desirable_weight", "undesirable_weight")
OF_REWARD = ("center_rewards_coefficient",)
"""Keys that only one trainer has, or in a file without the others', for files that do not say whose they are."""


def without(reason: str) -> Rule:
    return lambda leaf: leaf.skip(reason)


def each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def trainer_of(values: dict[str, Any], method: str | None) -> str:
    """Return a file's trainer, from the command or the keys."""
    by_method = {ours: theirs for theirs, ours in METHODS.items()}
    if method in by_method:
        return by_method[method]
    marks = (("rloo", OF_RLOO), ("kto", OF_KTO), ("reward", OF_REWARD), ("grpo", OF_GRPO), ("dpo", OF_DPO))
    named_trainer = next((trainer for trainer, keys in marks if any(key in values for key in keys)), "sft")
    return "grpo" if method is not None and named_trainer != "rloo" else named_trainer


def dataset(leaf: Leaf) -> None:
    part = leaf.get("dataset_config")
    leaf.map("data.name", f"{leaf.value}:{part}" if part else leaf.value)


def mixture(leaf: Leaf) -> None:
    """Map the data sets of a mixture, which TRL joins row after row."""
    sources = []
    for entry in leaf.value or ():
        if not entry.get("path"):
            leaf.say("not yet", "a data set of the mixture has no path", "data.sources")
            return
        name = f"{entry['path']}:{entry['name']}" if entry.get("name") else entry["path"]
        sources.append({"name": name} | ({"split": entry["split"]} if entry.get("split") else {}))
    if sources:
        leaf.map_all({"data.sources": sources})
    else:
        leaf.skip("there is none")


def batch(leaf: Leaf) -> None:
    """Map the rows of an optimizer step, which TRL has for each process."""
    rows = (leaf.value or 8) * (leaf.get("gradient_accumulation_steps") or 1)
    per = ""
    if "num_generations" in leaf.leaves:
        generations = leaf.get("num_generations") or 8
        if rows % generations:
            leaf.say("changed", f"{rows} rollouts are no whole number of groups of {generations}: set batch.prompts")
            return
        rows, per = rows // generations, f", in groups of {generations}"
    leaf.map_all({"batch.prompts": rows}, f"the batch of one process{per}: with N processes it is N times that")


def steps_of_batch(leaf: Leaf) -> None:
    accumulated = leaf.get("gradient_accumulation_steps") or 1
    if leaf.value in (None, accumulated):
        leaf.skip("a batch is one optimizer step")
    elif leaf.value % accumulated:
        leaf.say("not yet", "it is no multiple of gradient_accumulation_steps", "batch.optimizer_steps")
    else:
        leaf.map("batch.optimizer_steps", leaf.value // accumulated)


def unless_loss_is(names: str, rule: Rule) -> Rule:
    """Return a rule for a bound that the losses `names` do not have."""
    return when(lambda leaf: leaf.get("loss_type") not in names.split(), rule, "the loss has no such bound")


def loss_type(leaf: Leaf) -> None:
    if leaf.value not in LOSSES:
        leaf.say("not yet", f"rlctl knows {', '.join(LOSSES)}", "run.algorithm")
    else:
        leaf.map_all(LOSSES[leaf.value])


def kl_in_reward(leaf: Leaf) -> None:
    """Map the KL penalty that RLOO subtracts from the reward of a completion."""
    if leaf.value:
        values = {"loss.kl_in": "reward", "loss.kl_estimator": "k1", "loss.kl_coefficient": leaf.value}
        leaf.map_all(values, "each token has its own penalty, where TRL subtracts their sum before the baseline")
    else:
        leaf.map("loss.kl_coefficient", 0.0)


def scaled_rewards(leaf: Leaf) -> None:
    if leaf.value in (True, "group", False, "none", None):
        leaf.map("advantage.normalize_std", leaf.value not in (False, "none"))
    else:
        leaf.say(
            "not yet", "rewards are divided by the deviation of their group or not at all", "advantage.normalize_std"
        )


def reward_functions(leaf: Leaf) -> None:
    """Map reward functions: a file or module of the user's, or one of TRL's, whose form rlctl has."""
    names = [leaf.value] if isinstance(leaf.value, str) else list(leaf.value or ())
    weights = leaf.get("reward_weights") or [1.0] * len(names)
    rewards = {"accuracy_reward": "math-verify", "trl.rewards.accuracy_reward": "math-verify"}
    terms, others = [], []
    for name, weight in zip(names, weights, strict=True):
        if name in rewards or ":" in name or name.endswith(".py"):
            terms.append({"name": rewards.get(name, name), "weight": float(weight)})
        else:
            others.append(name)
    if others:
        reason = f"{', '.join(others)} of a package: name path/to/file.py:function, which is called as TRL calls it"
        leaf.say("not yet", reason, "reward.terms")
    if terms:
        leaf.set("reward.terms", terms)
        leaf.say("mapped", f"reward.terms: {', '.join(term['name'] for term in terms)}")


def corrected(leaf: Leaf) -> None:
    """Map the correction for what vLLM computes differently."""
    if leaf.get("vllm_importance_sampling_correction") is False or leaf.value == "none":
        leaf.map("loss.importance_correction", "off")
        return
    kinds = {
        "token_truncate": ("truncated", "token"),
        "sequence_truncate": ("truncated", "sequence"),
        "token_mask": ("masked", "token"),
        "sequence_mask": ("masked", "sequence"),
    }
    if leaf.value not in kinds:
        leaf.say("not yet", f"rlctl knows {', '.join(kinds)}", "loss.importance_correction")
        return
    kind, level = kinds[leaf.value]
    cap = leaf.get("vllm_importance_sampling_clip_max", "") or leaf.get("vllm_importance_sampling_cap") or 3.0
    leaf.map_all({"loss.importance_correction": kind, "loss.importance_level": level, "loss.importance_cap": cap})


def schedule(leaf: Leaf) -> None:
    """Map the decay of the learning rate, which ends with the run in both."""
    kinds = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    if leaf.value in kinds:
        leaf.map("scheduler.decay", kinds[leaf.value])
    else:
        leaf.say("not yet", f"rlctl knows {', '.join(kinds)}", "scheduler.decay")


def warmup(leaf: Leaf) -> None:
    steps, value = leaf.get("max_steps"), leaf.value or 0
    if value >= 1 or value == 0:
        leaf.map("scheduler.warmup_steps", int(value))
    elif isinstance(steps, int) and steps > 0:
        leaf.map("scheduler.warmup_steps", int(value * steps))
    else:
        leaf.say(
            "changed",
            f"a share of all steps, which follow from the data: set scheduler.warmup_steps to {value} x the steps",
        )


def precision(leaf: Leaf) -> None:
    names = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "auto": None, None: None}
    if leaf.value in names:
        leaf.map("model.dtype", names[leaf.value])
    else:
        leaf.say("not yet", f"rlctl knows {', '.join(map(str, names))}", "model.dtype")


def strategy(key: str, strategy_name: str) -> Rule:
    """Return the rule of how often something is done, in steps or by another measure."""

    def rule(leaf: Leaf) -> None:
        kind = leaf.get(strategy_name)
        if kind == "no":
            leaf.map(key, 0)
        elif isinstance(leaf.value, int):
            leaf.map(key, leaf.value)
        else:
            leaf.say("logging", f"set {key} to a number of steps")

    return rule


def loggers(leaf: Leaf) -> None:
    names = [leaf.value] if isinstance(leaf.value, str) else list(leaf.value or ())
    supported = [name for name in names if name in LOGGERS]
    if others := [name for name in names if name not in (*supported, "none", "all")]:
        leaf.say("logging", f"rlctl has no logger {', '.join(others)}; run.loggers lists those it has")
    leaf.map("run.loggers", supported)


def preference_loss(leaf: Leaf) -> None:
    names = list(leaf.value) if isinstance(leaf.value, Sequence) and not isinstance(leaf.value, str) else [leaf.value]
    kinds = {
        "sigmoid": {"preference.loss": "dpo"},
        "ipo": {"preference.loss": "ipo"},
        "sigmoid_norm": {"preference.loss": "dpo", "preference.average": True},
    }
    if len(names) == 1 and names[0] in kinds:
        leaf.map_all(kinds[names[0]])
    elif sorted(map(str, names)) == ["sft", "sigmoid"]:
        weights = dict(zip(names, leaf.get("loss_weights") or (1.0, 1.0), strict=False))
        leaf.map_all({"preference.loss": "dpo", "preference.sft_weight": weights["sft"]})
    else:
        leaf.say("not yet", f"rlctl knows {', '.join(kinds)}, and sigmoid with sft", "preference.loss")


def adapted_layers(leaf: Leaf) -> None:
    """Map the layers with adapters. If the recipe names none, TRL passes no names on, and PEFT adapts its default
    layers for the model's type."""
    modules, parameters = leaf.value, leaf.get("lora_target_parameters") or []
    if not parameters:
        leaf.map("training.lora.targets", "peft-default" if modules is None else modules)
    elif isinstance(modules, str):
        reason = "lora_target_modules is one pattern, beside lora_target_parameters: name all layers in a list"
        leaf.say("not yet", reason, "training.lora.targets")
    else:
        leaf.map("training.lora.targets", [*(["peft-default"] if modules is None else modules), *parameters])


OFF = "LoRA is off"
KERNELS = without("rlctl chooses kernels by itself; results are the same")
ENGINES = without("completions always come from vLLM, which the planner places")
OWN_LOGS = logs("rlctl writes metrics, logs and samples to the run directory")
FILES = without("checkpoints are in the run directory; `rlctl convert` publishes one")
HUB = without("`rlctl convert` makes files to upload")

_ALL: dict[str, Rule] = {
    "model_name_or_path": to("model.name"),
    "model_revision": when(lambda leaf: leaf.value not in (None, "main"), to("model.revision"), "main is the default"),
    **each("dtype torch_dtype", precision),
    "trust_remote_code": if_on(to("model.trust_remote_code")),
    "bf16": if_on(to("model.dtype", {True: "bfloat16"})),
    "fp16": if_on(to("model.dtype", {True: "float16"})),
    **each(
        "attn_implementation tf32 use_liger_kernel torch_compile padding_free pad_to_multiple_of "
        "torch_empty_cache_steps optim_args group_by_length",
        KERNELS,
    ),
    "use_peft": without("read with lora_r"),
    "lora_r": when("use_peft", to("training.lora.rank"), OFF),
    "lora_alpha": when("use_peft", to("training.lora.alpha"), OFF),
    "lora_dropout": when("use_peft", to("training.lora.dropout"), OFF),
    "lora_target_modules": when("use_peft", adapted_layers, OFF),
    "lora_target_parameters": without("read with lora_target_modules"),
    "use_rslora": when("use_rslora", to("training.lora.rslora"), without("what rlctl does")),
    "lora_modules_to_save": when(
        "lora_modules_to_save", to("training.lora.modules_to_save"), without("what rlctl does")
    ),
    **each(
        "use_dora load_in_8bit load_in_4bit",
        only(None, False, reason="adapters are plain LoRA in the model's precision", settled_by="training.lora.rank"),
    ),
    **each(
        "bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant lora_task_type",
        without("read with load_in_4bit"),
    ),
    "dataset_name": dataset,
    "dataset_config": without("read with dataset_name"),
    "dataset_train_split": to("data.split"),
    "dataset_test_split": logs("validation.data.name and .split, or validation.holdout, name its prompts"),
    **each(
        "dataset_streaming dataset_num_proc dataset_kwargs remove_unused_columns dataloader_num_workers "
        "dataloader_prefetch_factor dataloader_drop_last dataloader_pin_memory streaming",
        without("rlctl reads the data"),
    ),
    "datasets": mixture,
    "shuffle_dataset": to("data.shuffle"),
    "train_sampling_strategy": to("data.shuffle", {"random": True, "sequential": False, None: None}),
    "learning_rate": to("optimizer.lr"),
    "weight_decay": to("optimizer.weight_decay"),
    "max_grad_norm": to("optimizer.clip_grad", null=0),
    "adam_epsilon": to("optimizer.eps"),
    "adam_beta1": lambda leaf: leaf.map("optimizer.adam_beta1", leaf.value),
    "adam_beta2": lambda leaf: leaf.map("optimizer.adam_beta2", leaf.value),
    "optim": only(
        None,
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        reason="the optimizer is AdamW with float32 states",
        otherwise="changed",
    ),
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs": only(
        None, reason="set min_lr and others of the section scheduler", settled_by="scheduler.min_lr"
    ),
    **each("warmup_steps warmup_ratio", warmup),
    "per_device_train_batch_size": batch,
    "gradient_accumulation_steps": without("read with per_device_train_batch_size"),
    "max_steps": when(
        lambda leaf: isinstance(leaf.value, int) and leaf.value > 0, to("run.steps"), "num_train_epochs ends the run"
    ),
    "num_train_epochs": when(
        lambda leaf: (leaf.get("max_steps") or 0) > 0, without("max_steps ends the run"), to("run.epochs")
    ),
    "seed": to("run.seed"),
    "data_seed": without("run.seed"),
    "output_dir": to("run.dir"),
    "run_name": to("run.name"),
    "project": to("run.project"),
    "report_to": loggers,
    "save_steps": strategy("run.checkpoint_every", "save_strategy"),
    "save_strategy": when(
        lambda leaf: leaf.value == "no",
        lambda leaf: leaf.map("run.checkpoint_every", 0),
        "run.checkpoint_every and run.checkpoint_minutes",
    ),
    "save_total_limit": to("run.keep_last"),
    "eval_steps": strategy("validation.every", "eval_strategy"),
    **each("eval_strategy do_eval do_train", without("read with eval_steps")),
    "eval_on_start": if_on(to("validation.at_start")),
    "per_device_eval_batch_size": logs("validation samples all prompts at once"),
    "gradient_checkpointing": to("training.recompute", {True: "full", False: "none", None: None}),
    **each("gradient_checkpointing_kwargs activation_offloading", without("training.recompute")),
    **each(
        "logging_steps logging_first_step logging_strategy logging_dir log_level log_completions "
        "num_completions_to_print log_unique_prompts log_multimodal disable_tqdm trackio_space_id "
        "log_completions_hub_repo logging_nan_inf_filter",
        OWN_LOGS,
    ),
    **each("push_to_hub hub_model_id hub_strategy hub_private_repo hub_token hub_revision", HUB),
    **each(
        "overwrite_output_dir save_only_model save_safetensors resume_from_checkpoint load_best_model_at_end "
        "metric_for_best_model greater_is_better",
        FILES,
    ),
    **each(
        "ddp_timeout ddp_find_unused_parameters deepspeed fsdp fsdp_config accelerator_config accelerate_config "
        "num_processes num_machines ds3_gather_for_generation average_tokens_across_devices",
        without("the planner spreads the model over the GPUs (cluster.gpus_per_node)"),
    ),
    "neftune_noise_alpha": only(None, reason="embeddings get no noise"),
    "disable_dropout": without("models are trained without dropout"),
    "model_init_kwargs": only(None, reason="the model's configuration is taken as it is"),
    "chat_template_kwargs": to("model.chat_template_kwargs"),
    "chat_template_path": to("model.chat_template"),
    "router_aux_loss_coef": without("megatron.moe_aux_loss_coeff"),
    "ignore_bias_buffers": KERNELS,
}

_GRPO: dict[str, Rule] = {
    "lora_dropout": when("use_peft", differs(None, 0, 0.0, reason="log-probs are the engines', without dropout"), OFF),
    "num_generations": to("batch.generations"),
    "num_generations_eval": to("validation.samples"),
    "max_completion_length": to("generation.max_new_tokens"),
    "max_prompt_length": when(
        lambda leaf: leaf.value,
        lambda leaf: leaf.map("model.max_length", leaf.value + (leaf.get("max_completion_length") or 512)),
        "prompts have any length",
    ),
    "temperature": to("generation.temperature"),
    "top_p": to("generation.top_p"),
    "top_k": when(lambda leaf: (leaf.value or 0) > 0, to("generation.top_k"), "all tokens"),
    "min_p": to("generation.min_p"),
    "repetition_penalty": only(None, 1, 1.0, reason="engines sample from the policy's own distribution"),
    "generation_kwargs": only(None, reason="set keys of the section generation", settled_by="generation.stop"),
    "generation_batch_size": differs(None, reason="batch.prompts x batch.generations are sampled for a step"),
    "steps_per_generation": steps_of_batch,
    "num_iterations": to("batch.epochs"),
    "beta": to("loss.kl_coefficient"),
    "epsilon": unless_loss_is(
        "sapo",
        lambda leaf: leaf.map_all(
            {"loss.clip_low": leaf.value} | ({} if leaf.get("epsilon_high") else {"loss.clip_high": leaf.value})
        ),
    ),
    "epsilon_high": unless_loss_is("sapo", to("loss.clip_high")),
    "delta": unless_loss_is("sapo cispo", to("loss.dual_clip")),
    "loss_type": loss_type,
    "importance_sampling_level": when(
        lambda leaf: leaf.value == "sequence", lambda leaf: leaf.map("run.algorithm", "gspo"), "what rlctl does"
    ),
    "scale_rewards": scaled_rewards,
    "multi_objective_aggregation": to("advantage.per_term", {"sum_then_normalize": False, "normalize_then_sum": True}),
    "reward_funcs": reward_functions,
    "reward_weights": without("read with reward_funcs"),
    "reward_model_name_or_path": lambda leaf: leaf.map("reward.terms", [{"name": f"model:{leaf.value}"}]),
    "mask_truncated_completions": to("filter.truncated", {True: "mask", False: "keep", None: None}),
    "entropy_coef": to("loss.entropy_coefficient"),
    "top_entropy_quantile": only(None, 1, 1.0, reason="all tokens are learned from"),
    **each(
        "sync_ref_model use_adaptive_entropy",
        only(
            None,
            False,
            reason="the reference is the model that the run began with, and the weight of the entropy stays",
        ),
    ),
    **each(
        "ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min entropy_coef_max entropy_coef_delta "
        "entropy_target",
        without("read with sync_ref_model and use_adaptive_entropy"),
    ),
    "sapo_temperature_pos": when(
        lambda leaf: leaf.get("loss_type") == "sapo", to("loss.sapo_temperature_positive"), "the loss has no gate"
    ),
    "sapo_temperature_neg": when(
        lambda leaf: leaf.get("loss_type") == "sapo", to("loss.sapo_temperature_negative"), "the loss has no gate"
    ),
    **each("vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg", without("read with loss_type")),
    "off_policy_mask_threshold": to("loss.off_policy_mask"),
    "use_bias_correction_kl": if_on(to("loss.kl_weight", {True: "importance"})),
    "vllm_importance_sampling_mode": corrected,
    **each(
        "vllm_importance_sampling_correction vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min",
        without("read with vllm_importance_sampling_mode"),
    ),
    "vllm_gpu_memory_utilization": to("generation.memory_fraction"),
    "vllm_tensor_parallel_size": to("generation.tp"),
    "vllm_max_model_length": to("model.max_length"),
    "vllm_mode": to("generation.colocated", {"colocate": True, "server": None, None: None}),
    "vllm_structured_outputs_regex": only(None, reason="completions are free texts"),
    **each(
        "use_vllm vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port "
        "vllm_server_timeout vllm_group_port cache_implementation use_transformers_paged "
        "use_transformers_continuous_batching transformers_continuous_batching_config",
        ENGINES,
    ),
    "max_tool_calling_iterations": to("environment.turns"),
}

_RLOO: dict[str, Rule] = _GRPO | {
    "beta": kl_in_reward,
    "normalize_advantages": if_on(
        lambda leaf: leaf.map_all({"advantage.whiten": True, "advantage.whiten_over": "rollouts"})
    ),
    "reward_clip_range": only(
        None, reason="advantage.clip_low and advantage.clip_high bound advantages", settled_by="advantage.clip_low"
    ),
}

_TEXTS: dict[str, Rule] = {
    "max_length": to("model.max_length"),
    "truncation_mode": only(None, "keep_start", reason="texts lose their end", otherwise="changed"),
    "pad_token": without("rows are packed"),
}

_SFT: dict[str, Rule] = _TEXTS | {
    "shuffle_dataset": without("data.shuffle shuffles each epoch, as the sampler of TRL's trainer does"),
    "packing": to("training.packing", {True: True, False: True, None: None}),
    **each("packing_strategy eval_packing", without("rows of a batch are packed, each text on its own")),
    "assistant_only_loss": without("a loss is on the assistant's tokens (data.train_on)"),
    "completion_only_loss": when(
        lambda leaf: leaf.value is False, to("data.train_on", {False: "all"}), "what rlctl does"
    ),
    "dataset_text_field": only("text", None, reason="the field of a plain text is `text`", settled_by="data.name"),
    "eos_token": only(None, reason="the chat template ends a text", otherwise="changed"),
    "loss_type": only(None, "nll", reason="the loss is the negative log-likelihood"),
}

_DPO: dict[str, Rule] = _TEXTS | {
    "beta": to("preference.beta"),
    "loss_type": preference_loss,
    "loss_weights": without("read with loss_type"),
    "label_smoothing": to("preference.label_smoothing"),
    "precompute_ref_log_probs": to("preference.precompute"),
    "precompute_ref_batch_size": without("rows are sized in tokens"),
    "f_divergence_type": only(None, "reverse_kl", reason="the divergence from the reference is reverse KL"),
    **each("f_alpha_divergence_coef discopop_tau", without("read with f_divergence_type and loss_type")),
    "ld_alpha": only(None, 1, 1.0, reason="all tokens of a completion have the same weight"),
    **each(
        "use_weighting sync_ref_model", only(None, False, reason="pairs have the same weight, and the reference stays")
    ),
    **each("ref_model_mixup_alpha ref_model_sync_steps", without("read with sync_ref_model")),
    "max_prompt_length": without("model.max_length"),
    "max_completion_length": without("model.max_length"),
}

_OF_REFERENCE: dict[str, Rule] = {
    "sync_ref_model": only(None, False, reason="the reference stays"),
    **each("ref_model_mixup_alpha ref_model_sync_steps", without("read with sync_ref_model")),
}

_KTO: dict[str, Rule] = _TEXTS | {
    "beta": to("preference.beta"),
    "desirable_weight": to("preference.good_weight"),
    "undesirable_weight": to("preference.bad_weight"),
    "loss_type": only("kto", None, reason="the loss is KTO's", settled_by="run.algorithm"),
    **each("precompute_ref_log_probs precompute_ref_batch_size", without("each step computes the reference")),
    **_OF_REFERENCE,
}

_REWARD: dict[str, Rule] = _TEXTS | {
    "center_rewards_coefficient": only(None, 0, 0.0, reason="the loss has no term that centers rewards"),
    "eos_token": only(None, reason="the chat template ends a text", otherwise="changed"),
}

TABLES: dict[str, dict[str, Rule]] = {
    "grpo": _ALL | _GRPO,
    "rloo": _ALL | _RLOO,
    "sft": _ALL | _SFT,
    "dpo": _ALL | _DPO,
    "kto": _ALL | _KTO,
    "reward": _ALL | _REWARD,
}
