"""The table of verl's keys, each with its rule."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.config.files import read_text
from rlctl.config.recipes import Import
from rlctl.config.yaml_values import read_mapping
from rlctl.recipes.rules import Leaf, Rule, differs, hand_on, if_on, logs, only, to, when
from rlctl.settings.run import LOGGERS

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
ALGORITHMS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
"""Estimators of advantages, and the algorithm that has each."""
LOSSES = {"gspo": "gspo", "sapo": "sapo", "cispo": "cispo"}
LEVELS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
BACKENDS = {"megatron": "megatron", "fsdp": "dtensor", "fsdp2": "dtensor", "dp": "dtensor"}
DEFAULTS: dict[str, Any] = {
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ROLLOUT}.n": 1,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
    "trainer.save_freq": -1,
    "algorithm.rollout_correction.rollout_is": None,
}
"""verl's defaults that differ from rlctl's, for keys that a command line leaves out."""
OF_CRITIC = {"critic.cliprange_value": 0.5, "algorithm.lam": 1.0, "critic.optim.weight_decay": 0.01}
"""Such values of runs with a critic."""


def without(reason: str) -> Rule:
    return lambda leaf: leaf.skip(reason)


def each(section: str, names: str, rule: Rule) -> dict[str, Rule]:
    return {f"{section}.{name}" if section else name: rule for name in names.split()}


def of_critic(rule: Rule) -> Rule:
    """Return the rule of a key that estimators without a critic do not read."""
    return when(lambda leaf: leaf.get("algorithm.adv_estimator") == "gae", rule, "there is no critic")


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def algorithm(leaf: Leaf) -> None:
    loss = leaf.get(f"{ACTOR}.policy_loss.loss_mode")
    if leaf.value not in ALGORITHMS:
        leaf.say("not yet", f"rlctl knows {', '.join(ALGORITHMS)}", "run.algorithm")
    elif loss in LOSSES:
        leaf.skip(f"{ACTOR}.policy_loss.loss_mode names the algorithm")
    else:
        leaf.map("run.algorithm", ALGORITHMS[leaf.value])


def loss_mode(leaf: Leaf) -> None:
    if leaf.value == "vanilla":
        leaf.skip("what rlctl does")
    elif leaf.value in LOSSES:
        leaf.map("run.algorithm", LOSSES[leaf.value])
    else:
        leaf.say("not yet", f"rlctl knows vanilla, {', '.join(LOSSES)}", "run.algorithm")


def train_files(leaf: Leaf) -> None:
    files = [str(path) for path in listed(leaf.value)]
    if len(files) == 1:
        leaf.map("data.name", files[0])
    else:
        leaf.map_all({"data.sources": [{"name": name} for name in files]})


def validation_files(leaf: Leaf) -> None:
    files = [str(path) for path in listed(leaf.value)]
    if len(files) == 1:
        leaf.map("validation.data.name", files[0])
    else:
        leaf.set("validation.data.name", files[0])
        others = ", ".join(files[1:])
        leaf.say("changed", f"validation has one source: {files[0]} is used and {others} is not; join them in one file")


def prompts_of_batch(leaf: Leaf) -> None:
    """Map the prompts of a batch; verl's asynchronous trainer says 0, and counts mini-batches between two syncs."""
    if leaf.value != 0:
        leaf.map("batch.prompts", leaf.value)
        return
    sections = "async_training."
    count = (leaf.get(f"{sections}require_batches") or 1) * (leaf.get(f"{sections}trigger_parameter_sync_step") or 1)
    prompts = (leaf.get(f"{ACTOR}.ppo_mini_batch_size") or 256) * count
    values = {"rollouts.mode": "async", "batch.prompts": prompts, "batch.optimizer_steps": count}
    leaf.map_all(values, "a batch is what verl trains on between two syncs of weights")


def lengths(leaf: Leaf) -> None:
    """Map the longest prompt, with the longest completion, to the length of both together."""
    new = leaf.get("data.max_response_length")
    if isinstance(new, int) and isinstance(leaf.value, int):
        leaf.map("model.max_length", leaf.value + new)
    else:
        leaf.say("not yet", "it is no number", "model.max_length")


def too_long(leaf: Leaf) -> None:
    """Map what becomes of prompts that are too long: they are left out, cut at their beginning, or refused."""
    if leaf.get("data.filter_overlong_prompts"):
        leaf.skip("data.filter_overlong_prompts leaves them out")
    elif leaf.value == "left":
        leaf.map("data.too_long", "cut")
    elif leaf.value in ("error", None):
        leaf.skip("what rlctl does")
    else:
        leaf.say("changed", "a prompt that is too long is refused (data.too_long): rlctl cuts beginnings alone")


def mini_batches(leaf: Leaf) -> None:
    """Map the prompts of an optimizer step to the steps that a batch is taken in."""
    prompts = leaf.get("data.train_batch_size")
    if not prompts or not leaf.value or leaf.value > prompts:
        leaf.skip("a batch is one optimizer step")
    elif prompts % leaf.value:
        leaf.say("not yet", f"it does not divide the {prompts} prompts of a batch", "batch.optimizer_steps")
    else:
        leaf.map("batch.optimizer_steps", prompts // leaf.value)


def row_tokens(leaf: Leaf) -> None:
    longest = sum(leaf.get(f"data.max_{part}_length") or 0 for part in ("prompt", "response"))
    if not leaf.get(f"{ACTOR}.use_dynamic_bsz"):
        leaf.skip("read with use_dynamic_bsz")
    elif isinstance(leaf.value, int) and leaf.value >= longest:
        leaf.map("training.micro_batch_tokens", leaf.value)
    else:
        leaf.skip("a row has room for the longest rollout; the planner sizes rows")


def kl_loss(leaf: Leaf) -> None:
    if not leaf.value:
        leaf.skip("there is no KL penalty in the loss")
        return
    leaf.map("loss.kl_coefficient", leaf.get(f"{ACTOR}.kl_loss_coef") or 0.001)


def kl_type(leaf: Leaf) -> None:
    if not leaf.get(f"{ACTOR}.use_kl_loss"):
        leaf.skip("there is no KL penalty in the loss")
        return
    name = str(leaf.value).removesuffix("+")
    if name not in ESTIMATORS:
        leaf.say("not yet", f"rlctl knows {', '.join(ESTIMATORS)}", "loss.kl_estimator")
        return
    values: dict[str, Any] = {"loss.kl_estimator": ESTIMATORS[name]}
    if ESTIMATORS[name] == "k3":
        values["loss.kl_cap"] = 10.0
    leaf.map_all(values)


def kl_in_reward(leaf: Leaf) -> None:
    if not leaf.value:
        leaf.skip("there is no KL penalty in the reward")
        return
    name = str(leaf.get("algorithm.kl_penalty") or "kl")
    if name not in ESTIMATORS:
        leaf.say("not yet", f"algorithm.kl_penalty is {name}, and rlctl knows {', '.join(ESTIMATORS)}", "loss.kl_in")
        return
    weight = leaf.get("algorithm.kl_ctrl.kl_coef")
    weight = 0.001 if weight is None else weight
    leaf.map_all({"loss.kl_in": "reward", "loss.kl_coefficient": weight, "loss.kl_estimator": ESTIMATORS[name]})


def clip_ratio(leaf: Leaf) -> None:
    """Map the common bound of both sides, unless a side has its own."""
    for side in ("low", "high"):
        if leaf.get(f"{ACTOR}.clip_ratio_{side}") is None:
            leaf.set(f"loss.clip_{side}", leaf.value)
    leaf.say("mapped", "loss.clip_low and loss.clip_high")


def unless_loss_is(names: str, rule: Rule) -> Rule:
    """Return a rule for a bound that the losses `names` do not have."""
    return when(
        lambda leaf: leaf.get(f"{ACTOR}.policy_loss.loss_mode") not in names.split(),
        rule,
        "the loss has no such bound",
    )


def share_of_steps(key: str) -> Rule:
    def rule(leaf: Leaf) -> None:
        steps = leaf.get("trainer.total_training_steps")
        if not leaf.value:
            leaf.skip("there is no warm-up")
        elif isinstance(steps, int):
            leaf.map(key, int(leaf.value * steps))
        else:
            leaf.say("changed", f"the number of steps follows from the data: set {key} to {leaf.value} x the steps")

    return rule


def warmup(key: str) -> Rule:
    return when(lambda leaf: (leaf.value or 0) >= 0, to(key), "read with lr_warmup_steps_ratio")


def recompute(leaf: Leaf) -> None:
    leaf.map("training.recompute", "full" if leaf.value else "none")


def backend(leaf: Leaf) -> None:
    if leaf.value in BACKENDS:
        leaf.map("training.backend", BACKENDS[leaf.value])
    else:
        leaf.say("not yet", f"rlctl trains on Megatron-Core and FSDP2, not on {leaf.value}", "training.backend")


def lora_targets(leaf: Leaf) -> None:
    """Map PEFT's names; on models without experts all-linear is what rlctl adapts by default."""
    if leaf.value in (None, "all-linear"):
        leaf.skip("what rlctl does")
    else:
        leaf.map("training.lora.targets", leaf.value)


def transformer(leaf: Leaf) -> None:
    """Hand a field of Megatron's TransformerConfig on."""
    hand_on(leaf, f"megatron.{leaf.name.rpartition('.')[2]}", without("the installed Megatron-Core has no such field"))


def named_optimizer(leaf: Leaf) -> None:
    """Map the optimizer's name, in Megatron's or torch's spelling."""
    name = str(leaf.value or "adam").lower()
    if name in ("adam", "adamw", "fusedadam"):
        leaf.skip("what rlctl does")
    elif name in ("muon", "dist_muon"):
        leaf.map("optimizer.optimizer", "muon")
    else:
        leaf.say("not yet", "the optimizer is AdamW or Muon", "optimizer.optimizer")


def optimizer_field(leaf: Leaf) -> None:
    hand_on(leaf, f"optimizer.{leaf.name.rpartition('.')[2]}", without("the installed Megatron-Core has no such field"))


def engine_field(leaf: Leaf) -> None:
    """Hand a field of vLLM's EngineArgs on."""
    name = leaf.name.partition("engine_kwargs.vllm.")[2] or leaf.name.rpartition(".")[2]
    hand_on(leaf, f"vllm.{name}", without("the installed vLLM has no such field"))


def bypassed(leaf: Leaf) -> bool:
    """Return whether the engine's log-probs replace the old ones in the clipped ratio."""
    section = "algorithm.rollout_correction."
    return bool(leaf.get(f"{section}bypass_mode")) and leaf.get(f"{section}loss_type") in (None, "ppo_clip")


def bypass(leaf: Leaf) -> None:
    corrected = leaf.get("algorithm.rollout_correction.rollout_is") not in (None, "null")
    if not leaf.value:
        leaf.skip("what rlctl does")
    elif bypassed(leaf) and not corrected:
        leaf.map("loss.importance_correction", "ratio")
    else:
        reason = "loss.importance_correction=ratio takes the engine's log-probs for the old ones, without other weights"
        leaf.say("not yet", reason, "loss.importance_correction")


def correction(leaf: Leaf) -> None:
    """Map the correction for the engine's numerical differences; verl's default is none."""
    cap = leaf.get("algorithm.rollout_correction.rollout_is_threshold")
    if leaf.value in (None, "null") and bypassed(leaf):
        leaf.skip("read with bypass_mode")
    elif leaf.value in (None, "null"):
        leaf.map("loss.importance_correction", "off")
    elif leaf.value in ("token", "sequence") and not isinstance(cap, str):
        values = {"loss.importance_correction": "truncated", "loss.importance_level": leaf.value}
        leaf.map_all(values | {"loss.importance_cap": float(cap or 2.0)})
    else:
        reason = "rlctl truncates weights of tokens or sequences at one bound"
        leaf.say("not yet", reason, "loss.importance_correction")


def custom_reward(leaf: Leaf) -> None:
    """Map a reward function: rlctl calls it like verl, by argument name."""
    name = leaf.get("name", f"{leaf.name.rpartition('.')[0]}.") or "compute_score"
    if leaf.value:
        leaf.map("reward.terms", [{"name": f"{leaf.value}:{name}"}])
    else:
        leaf.skip("there is none")


def scored_by_model(leaf: Leaf) -> None:
    model = leaf.get("path", "reward_model.model.") or leaf.get("model_path", "reward.reward_model.")
    if not leaf.value:
        leaf.skip("there is no reward model")
    elif not model:
        leaf.say("not yet", "it names no model", "reward.terms")
    else:
        leaf.map_all(
            {"reward.terms": [{"name": f"model:{model}"}]},
            "the model reads the chat in the policy's tokens, not in its tokenizer's",
        )


def overlong(leaf: Leaf) -> None:
    """Map DAPO's cost of long completions: it begins `len` tokens before the longest one."""
    section = leaf.name.rpartition(".")[0]
    length, limit = leaf.get(f"{section}.len"), leaf.get("data.max_response_length")
    if not leaf.value:
        leaf.skip("it is off")
    elif not (length and limit) or length >= limit:
        leaf.say("not yet", "it needs `len`, below data.max_response_length", "reward.overlong_buffer")
    else:
        factor = leaf.get(f"{section}.penalty_factor") or 1.0
        leaf.map_all({"reward.overlong_buffer": length / limit, "reward.overlong_factor": float(factor)})


def period(key: str) -> Rule:
    return lambda leaf: leaf.map(key, max(leaf.value or 0, 0))


def epochs(leaf: Leaf) -> None:
    if leaf.get("trainer.total_training_steps"):
        leaf.skip("trainer.total_training_steps ends the run")
    else:
        leaf.map("run.epochs", leaf.value)


def loggers(leaf: Leaf) -> None:
    names = [str(name) for name in listed(leaf.value)]
    supported = [name for name in names if name in LOGGERS]
    leaf.map("run.loggers", supported)
    if others := [name for name in names if name not in (*LOGGERS, "console")]:
        leaf.say("logging", f"rlctl has no logger {', '.join(others)}; run.loggers lists those it has")


def turns(leaf: Leaf) -> None:
    """Skip the switch of several turns where another key names what answers them."""
    paths = [leaf.get(f"{ROLLOUT}.multi_turn.{name}") for name in ("tool_config_path", "function_tool_path")]
    if not leaf.value:
        leaf.skip("there is one turn")
    elif any(paths) or leaf.get(f"{ROLLOUT}.multi_turn.interaction_config_path") or leaf.get("data.tool_config_path"):
        leaf.skip("read with the tools or the interaction")
    else:
        leaf.say("not yet", "nothing is named that answers: give --tool or --env", "environment.tools")


def tool_classes(leaf: Leaf) -> None:
    """Name the tools of a file of tool classes, each with its class: they are derived from a class of verl's."""
    if not leaf.value:
        leaf.skip("there are no tools")
        return
    path, tools = Path(leaf.value), []
    if path.is_file():
        listing = read_mapping(path, "verl's file of tools").get("tools")
        for tool in listing if isinstance(listing, list) else ():
            name = tool.get("tool_schema", {}).get("function", {}).get("name")
            tools.append(f"{name} ({tool.get('class_name')})" if name else str(tool.get("class_name")))
    derived = f"{', '.join(tools)}: derived" if tools else "its classes are derived"
    reason = (
        f"{derived} from verl's BaseTool; write each `execute` as a function, and name it with --tool file.py:function"
    )
    leaf.say("not yet", reason, "environment.tools")


def tool_functions(leaf: Leaf) -> None:
    """Map a file of functions with verl's decorator; rlctl's tools have the same form."""
    if not leaf.value:
        leaf.skip("there are no tools")
    elif not Path(leaf.value).is_file():
        leaf.say("not yet", "the file is not there; name functions with --tool file.py:function", "environment.tools")
    else:
        tree = ast.parse(read_text(Path(leaf.value), "verl's file of tools"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = [
            function.name
            for function in functions
            if any("function_tool" in ast.unparse(d) for d in function.decorator_list)
        ]
        but = "a tool has its function's name, and the file needs verl installed, or goes without its decorator"
        leaf.map_all({"environment.tools": [f"{leaf.value}:{name}" for name in names]}, but)


def critic_model(leaf: Leaf) -> None:
    if leaf.value in (None, leaf.get(f"{MODEL}.path")):
        leaf.skip("the critic is of the policy's model")
    else:
        leaf.say("changed", "the critic is of the policy's model (model.name)")


def distilled(leaf: Leaf) -> None:
    """Map distillation on the policy's rollouts from one teacher, or from teachers by a field of the rows."""
    place, end = "distillation.teacher_models.", ".model_path"
    models = {key: value for key, value in leaf.leaves.items() if key.startswith(place) and key.endswith(end)}
    if len(models) > 1:  # verl leaves its default out where others are listed
        models.pop(f"{place}teacher_model{end}", None)
    keys = [leaf.leaves.get(key.removesuffix(end) + ".key") for key in models]
    if not leaf.value:
        leaf.skip("there is no teacher")
    elif not models or (len(models) > 1 and None in keys):
        leaf.say("not yet", "each of several teachers has a model_path and a key", "teacher.models")
    else:
        values = {"run.algorithm": "distillation", "teacher.model": next(iter(models.values()))}
        if len(models) > 1:
            listed = [{"model": path, "sources": [key]} for path, key in zip(models.values(), keys, strict=True)]
            field = leaf.get("distillation.teacher_key") or "data_source"
            values = {"run.algorithm": "distillation", "teacher.field": field, "teacher.models": listed}
        if leaf.get("distillation.distillation_loss.loss_mode") == "forward_kl_topk":
            top = leaf.get("distillation.distillation_loss.topk") or 64
            values |= {"distillation.loss": "top-k", "distillation.top_k": top, "distillation.forward_share": 1.0}
        leaf.map_all(values, "the bounds of its loss are rlctl's own")


KERNELS = without("rlctl chooses kernels by itself; results are the same")
HOST_MEMORY = without("the planner decides what waits in host memory (training.offload, training.optimizer_offload)")
ROWS = without("rows are sized in tokens (training.micro_batch_tokens), which the planner decides")
ENGINE_CALLS = without("results do not depend on how an engine is called")
LOADING = without("published files are read as they are, and converted once")
TIMERS = logs("rlctl has its own timers, which the report shows")
OWN_LOGS = logs("rlctl writes metrics, logs and samples to the run directory")
REPLAY = to("training.router_replay", {"R3": True, True: True, "disabled": False, False: False, None: None})
ADAPTERS = {"lora_rank": "rank", "lora.rank": "rank", "lora_alpha": "alpha", "lora.alpha": "alpha"}

SHARED_DATA: dict[str, Rule] = {
    "data.train_files": train_files,
    "data.val_files": validation_files,
    "data.train_batch_size": prompts_of_batch,
    "data.shuffle": to("data.shuffle"),
    "data.tokenizer": to("model.tokenizer"),
    "data.train_max_samples": when(lambda leaf: (leaf.value or -1) > 0, to("data.size"), "all rows are read"),
    "data.val_max_samples": when(
        lambda leaf: (leaf.value or -1) > 0, to("validation.max_prompts"), "at most validation.max_prompts"
    ),
    "data.trust_remote_code": if_on(to("model.trust_remote_code")),
    "data.apply_chat_template_kwargs.*": lambda leaf: leaf.map(
        f"model.chat_template_kwargs.{leaf.name.rpartition('.')[2]}", leaf.value
    ),
    **each(
        "data",
        "custom_cls.* sampler.* datagen.*",
        only(None, reason="rlctl reads rows itself: write them to a data file", settled_by="data.name"),
    ),
    **each("data", "image_key video_key image_patch_size", without("the fields of images have these names")),
    **each("data", "validation_shuffle seed use_shm cache_dir", without("the driver reads rows; run.seed orders them")),
}
"""Keys of data that prompts and texts have."""

_DATA: dict[str, Rule] = SHARED_DATA | {
    "data.gen_batch_size": differs(None, reason="each round samples as many prompts as are missing"),
    "data.max_prompt_length": lengths,
    "data.max_response_length": to("generation.max_new_tokens"),
    "data.prompt_key": to("data.prompt_field"),
    "data.reward_fn_key": only("data_source", None, reason="reward functions get the column `data_source`"),
    "data.filter_overlong_prompts": if_on(to("data.too_long", {True: "drop"})),
    "data.truncation": too_long,
    "data.tool_config_path": tool_classes,
    "data.val_batch_size": logs("validation samples all prompts at once"),
    **each(
        "data",
        "return_raw_chat return_raw_input_ids return_full_prompt return_multi_modal_inputs",
        without("prompts stay messages until a template renders them"),
    ),
    **each(
        "data",
        "filter_overlong_prompts_workers dataloader_num_workers need_tools_kwargs",
        without("the driver reads rows; run.seed orders them"),
    ),
}

MODEL_KEYS: dict[str, Rule] = {
    "path": to("model.name"),
    "tokenizer_path": to("model.tokenizer"),
    "custom_chat_template": to("model.chat_template"),
    "trust_remote_code": if_on(to("model.trust_remote_code")),
    **{
        name: when(lambda leaf: leaf.value, to(f"training.lora.{ours}"), "LoRA is off")
        for name, ours in ADAPTERS.items()
    },
    "target_modules": lora_targets,
    "lora.target_modules": lora_targets,
    "exclude_modules": without("rlctl has no adapters in the part of images"),
    "lora_adapter_path": when(
        lambda leaf: leaf.value, to("training.lora.adapter"), without("adapters begin as new ones")
    ),
    **each("", "lora.merge lora.lora_A_init_method lora.type", without("adapters begin as in their paper")),
    "lora.dropout": when(
        lambda leaf: leaf.result.values.get("run.algorithm") == "sft",
        to("training.lora.dropout"),
        only(0, None, reason="log-probs under dropout are not the sampling policy's"),
    ),
    "enable_gradient_checkpointing": recompute,
    "use_remove_padding": to("training.packing", {True: True, False: False, None: None}),
    **each(
        "",
        "override_config.max_position_embeddings override_config.model_config.max_position_embeddings",
        to("model.max_position_embeddings"),
    ),
    "override_config.attn_implementation": KERNELS,
    "override_config.*": only(None, reason="the model's configuration is taken as it is"),
    **each("", "use_liger use_fused_kernels fused_kernel_options.* use_shm torch_dtype tiled_mlp.*", KERNELS),
    "enable_activation_offload": HOST_MEMORY,
    "external_lib": only(None, reason="no module is imported: a reward, loss or environment may be a file"),
    "mtp.enable": only(None, False, reason="layers that predict several tokens are not trained"),
    "mtp.*": without("read with mtp.enable"),
}

OPTIMIZER: dict[str, Rule] = {
    "lr": to("optimizer.lr"),
    "weight_decay": to("optimizer.weight_decay"),
    "betas": lambda leaf: leaf.map_all({"optimizer.adam_beta1": leaf.value[0], "optimizer.adam_beta2": leaf.value[1]}),
    "clip_grad": to("optimizer.clip_grad"),
    "lr_warmup_steps": warmup("scheduler.warmup_steps"),
    "lr_warmup_steps_ratio": share_of_steps("scheduler.warmup_steps"),
    "lr_warmup_init": to("scheduler.init_lr"),
    **each(
        "",
        "lr_scheduler_type warmup_style lr_decay_style",
        to(
            "scheduler.decay",
            {
                "constant": "constant",
                "cosine": "cosine",
                "linear": "linear",
                None: None,
            },
        ),
    ),
    "lr_decay_steps": to("scheduler.decay_steps"),
    "min_lr": to("scheduler.min_lr"),
    "min_lr_ratio": lambda leaf: leaf.map("scheduler.min_lr", (leaf.value or 0) * (leaf.get(f"{ACTOR}.optim.lr") or 0)),
    "min_lr_factor": lambda leaf: leaf.map(
        "scheduler.min_lr", (leaf.value or 0) * (leaf.get(f"{ACTOR}.optim.lr") or 0)
    ),
    "total_training_steps": without("run.steps"),
    "optimizer": named_optimizer,
    **each("override_optimizer_config", "optimizer_cpu_offload", if_on(to("training.optimizer_offload"))),
    **each(
        "override_optimizer_config",
        "optimizer_offload_fraction offload_fraction overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer",
        without("read with optimizer_cpu_offload"),
    ),
    "override_optimizer_config.*": optimizer_field,
    **each("", "optimizer_impl num_cycles zero_indexed_step override_optimizer_config", KERNELS),
}

MEGATRON_KEYS: dict[str, Rule] = {
    "tensor_model_parallel_size": to("training.tp"),
    "pipeline_model_parallel_size": to("training.pp"),
    "virtual_pipeline_model_parallel_size": to("training.vpp"),
    "context_parallel_size": to("training.cp"),
    "expert_model_parallel_size": to("training.ep"),
    "expert_tensor_parallel_size": to("training.etp"),
    "sequence_parallel": to("training.sequence_parallel"),
    "use_remove_padding": to("training.packing", {True: True, False: False, None: None}),
    "use_megatron_fsdp": only(None, False, reason="refits need whole parameters; training.backend=dtensor shards them"),
    "router_replay.mode": REPLAY,
    "seed": without("run.seed"),
    **each("", "param_offload grad_offload optimizer_offload", HOST_MEMORY),
    **each(
        "",
        "use_mbridge vanilla_mbridge use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix",
        LOADING,
    ),
    "dtype": to("model.dtype", {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}),
    "override_transformer_config.recompute_granularity": to(
        "training.recompute",
        {
            "full": "full",
            "selective": "selective",
            None: None,
        },
    ),
    **each(
        "override_transformer_config",
        "recompute_method recompute_num_layers recompute_modules",
        without("read with recompute_granularity"),
    ),
    "override_transformer_config.num_layers_in_first_pipeline_stage": to("training.first_stage_layers"),
    "override_transformer_config.num_layers_in_last_pipeline_stage": to("training.last_stage_layers"),
    **each(
        "override_transformer_config",
        "attention_backend use_flash_attn apply_rope_fusion masked_softmax_fusion "
        "bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion persist_layer_norm "
        "deallocate_pipeline_outputs moe_permute_fusion moe_grouped_gemm use_naive_l2norm use_fused_mhc "
        "apply_dsa_kernel_fusion",
        KERNELS,
    ),
    **each(
        "override_transformer_config",
        "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        without("the planner spreads layers over stages (training.first_stage_layers, training.last_stage_layers)"),
    ),
    "override_transformer_config.*": transformer,
    **each("", "override_ddp_config.* override_mcore_model_config.* forward_only load_weight extra.*", KERNELS),
}

_ACTOR: dict[str, Rule] = {
    "ppo_mini_batch_size": mini_batches,
    "ppo_epochs": to("batch.epochs"),
    "ppo_max_token_len_per_gpu": row_tokens,
    **each("", "ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz max_token_len_per_gpu", ROWS),
    "grad_clip": to("optimizer.clip_grad"),
    "clip_ratio": unless_loss_is("sapo", clip_ratio),
    "clip_ratio_low": unless_loss_is(
        "sapo", lambda leaf: leaf.map("loss.clip_low", None if leaf.value is None else min(leaf.value, 1))
    ),
    "clip_ratio_high": unless_loss_is("sapo", to("loss.clip_high")),
    "clip_ratio_c": unless_loss_is("sapo cispo", to("loss.dual_clip")),
    "loss_agg_mode": to("loss.level", LEVELS),
    "loss_scale_factor": to("loss.length_divisor"),
    "entropy_coeff": to("loss.entropy_coefficient"),
    "use_kl_loss": kl_loss,
    "kl_loss_coef": without("read with use_kl_loss"),
    "kl_loss_type": kl_type,
    "policy_loss.loss_mode": loss_mode,
    **each(
        "",
        "tau_pos policy_loss.tau_pos",
        when(
            lambda leaf: leaf.get(f"{ACTOR}.policy_loss.loss_mode") == "sapo",
            to("loss.sapo_temperature_positive"),
            "the loss has no gate",
        ),
    ),
    **each(
        "",
        "tau_neg policy_loss.tau_neg",
        when(
            lambda leaf: leaf.get(f"{ACTOR}.policy_loss.loss_mode") == "sapo",
            to("loss.sapo_temperature_negative"),
            "the loss has no gate",
        ),
    ),
    "policy_loss.*": without("read with policy_loss.loss_mode"),
    "calculate_sum_pi_squared": without("read with the estimators that need it"),
    "strategy": backend,
    "model_engine": backend,
    **each("", "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size", to("training.cp")),
    **each("fsdp_config", "param_offload optimizer_offload offload_policy grad_offload", HOST_MEMORY),
    "fsdp_config.fsdp_size": without("the planner decides over how many GPUs weights are sharded (training.replicate)"),
    "fsdp_config.turbo_config.*": without("read with strategy"),
    **each(
        "fsdp_config",
        "model_dtype dtype",
        to(
            "model.dtype",
            {
                "bf16": "bfloat16",
                "bfloat16": "bfloat16",
                "fp16": "float16",
                "float16": "float16",
                "fp32": None,
                "float32": None,
                None: None,
            },
        ),
    ),
    "fsdp_config.strategy": backend,
    "fsdp_config.*": KERNELS,
    **each(
        "",
        "use_torch_compile entropy_from_logits_with_chunking entropy_checkpointing use_fused_kernels "
        "use_remove_padding use_prefix_grouper freeze_vision_tower pad_to_length pad_to_length_bucket",
        KERNELS,
    ),
    "use_rollout_log_probs": without("read with rollout_correction.bypass_mode"),
    **each("", "shuffle data_loader_seed", without("a batch is divided in the order of its prompts")),
    "router_replay.mode": REPLAY,
    "checkpoint.*": without("a checkpoint holds all that a run goes on from, and is published as Hugging Face files"),
    "profiler.*": TIMERS,
    "profile.*": TIMERS,
    **each("", "engine.* veomni.* torchtitan.* automodel.*", without("read with model_engine")),
}

_ROLLOUT: dict[str, Rule] = {
    "name": only("vllm", None, reason="completions come from vLLM", otherwise="changed"),
    "n": to("batch.generations"),
    "temperature": to("generation.temperature"),
    "top_p": to("generation.top_p"),
    "top_k": to("generation.top_k"),
    "tensor_model_parallel_size": to("generation.tp"),
    "pipeline_model_parallel_size": to("generation.pp"),
    "data_parallel_size": to("generation.dp"),
    "expert_parallel_size": to("generation.ep"),
    "moe_tensor_parallel_size": without("experts are divided as generation.tp and generation.ep say"),
    "gpu_memory_utilization": to("generation.memory_fraction"),
    "max_num_seqs": to("generation.max_concurrent"),
    "max_num_batched_tokens": to("generation.max_batched_tokens"),
    "max_model_len": without("model.max_length"),
    **each("", "prompt_length response_length", without("data.max_prompt_length and data.max_response_length")),
    "dtype": to("model.dtype", {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}),
    "enforce_eager": to("vllm.enforce_eager", {True: True, False: None, None: None}),
    **each("", "enable_chunked_prefill enable_prefix_caching quantization", engine_field),
    "engine_kwargs.vllm.*": engine_field,
    "engine_kwargs.*": without("generation is by vLLM"),
    "ignore_eos": only(False, None, reason="end tokens end a completion"),
    **each("", "enable_rollout_routing_replay", to("training.router_replay")),
    **each(
        "",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu",
        without("log-probs are computed on the rows of training"),
    ),
    "calculate_log_probs": without("log-probs of the engines are always recorded"),
    "val_kwargs.temperature": when(
        lambda leaf: leaf.get(f"{ROLLOUT}.val_kwargs.do_sample") is not False,
        to("validation.temperature"),
        "validation takes the most likely tokens",
    ),
    "val_kwargs.n": to("validation.samples"),
    **each("val_kwargs", "top_p top_k", logs("validation has generation.top_p and top_k")),
    "val_kwargs.do_sample": without("read with val_kwargs.temperature"),
    "multi_turn.enable": turns,
    "multi_turn.tool_config_path": tool_classes,
    "multi_turn.function_tool_path": tool_functions,
    "multi_turn.interaction_config_path": only(
        None, reason="interactions are classes of verl's: name an environment with --env", settled_by="environment.name"
    ),
    "multi_turn.max_assistant_turns": to("environment.turns"),
    "multi_turn.max_user_turns": without("environment.turns limits the turns of the model"),
    "multi_turn.format": without("environment.tool_format is detected from the chat template"),
    "multi_turn.max_tool_response_length": differs(None, reason="answers of tools have any length"),
    "multi_turn.*": without("read with the tools or the interaction"),
    "agent.agent_loop_config_path": only(
        None, reason="agent loops are classes of verl's: name an environment with --env", settled_by="environment.name"
    ),
    **each(
        "",
        "agent.* free_cache_engine load_format layered_summon mode skip_tokenizer_init multi_stage_wake_up "
        "checkpoint_engine.* update_weights_bucket_megabytes cudagraph_capture_sizes disable_log_stats "
        "over_sample_rate enable_sleep_mode standalone_gpu_memory_utilization single_turn_response_length "
        "disable_mm_preprocessor_cache nnodes n_gpus_per_node skip_rollout",
        ENGINE_CALLS,
    ),
    **each("", "profiler.* trace.* prometheus.* server.*", TIMERS),
}

_ALGORITHM: dict[str, Rule] = {
    "adv_estimator": algorithm,
    "gamma": when(
        lambda leaf: leaf.get("algorithm.adv_estimator") == "gae",
        to("critic.gamma"),
        only(1, 1.0, None, reason="rewards are not discounted without a critic"),
    ),
    "lam": of_critic(to("critic.gae_lambda")),
    "norm_adv_by_std_in_grpo": to("advantage.normalize_std"),
    "use_kl_in_reward": kl_in_reward,
    "kl_penalty": without("read with use_kl_in_reward"),
    "kl_ctrl.type": only("fixed", None, reason="the weight of the KL penalty stays"),
    "kl_ctrl.*": without("read with use_kl_in_reward"),
    "filter_groups.enable": if_on(to("filter.groups", {True: "replace"})),
    "filter_groups.max_num_gen_batches": when(
        lambda leaf: (leaf.value or 0) > 0, to("filter.max_rounds"), "read with filter_groups.enable"
    ),
    "filter_groups.*": without("groups of one reward are replaced"),
    "use_pf_ppo": only(False, None, reason="rollouts are not weighed by their rewards (PF-PPO)"),
    "pf_ppo.*": without("read with use_pf_ppo"),
    "rollout_correction.rollout_is": correction,
    "rollout_correction.rollout_rs": only(
        None, "null", reason="whole sequences are masked by loss.sequence_mask alone", settled_by="loss.sequence_mask"
    ),
    "rollout_correction.rollout_is_batch_normalize": only(
        None, False, reason="weights are not normalized over a batch"
    ),
    "rollout_correction.bypass_mode": bypass,
    "rollout_correction.*": without("read with rollout_correction.rollout_is"),
    "gdpo_reward_keys": only(
        None, reason="advantage.per_term compares the terms of reward.terms", settled_by="advantage.per_term"
    ),
    "gdpo_reward_weights": without("read with gdpo_reward_keys"),
}

_CRITIC: dict[str, Rule] = {
    "optim.lr": to("critic.lr"),
    "optim.weight_decay": to("critic.weight_decay"),
    "optim.lr_warmup_steps": warmup("critic.scheduler.warmup_steps"),
    "optim.lr_warmup_steps_ratio": share_of_steps("critic.scheduler.warmup_steps"),
    "grad_clip": to("critic.clip_grad"),
    "cliprange_value": to("critic.value_clip"),
    "model.path": critic_model,
    "profiler.*": TIMERS,
    "*": without("the critic has the policy's layout, rows and precision"),
}

_REWARD: dict[str, Rule] = {
    **{f"{place}custom_reward_function.path": custom_reward for place in ("", "reward.")},
    **{f"{place}custom_reward_function.name": without("read with its path") for place in ("", "reward.")},
    **{
        f"{place}custom_reward_function.reward_kwargs.*": only(
            None, reason="a reward function has no other arguments than columns of the row", settled_by="reward.terms"
        )
        for place in ("", "reward.")
    },
    **{f"{place}.enable": scored_by_model for place in ("reward_model", "reward.reward_model")},
    **{
        f"{place}.overlong_buffer_cfg.enable": overlong
        for place in ("reward_model.reward_kwargs", "reward.reward_kwargs")
    },
    **{
        f"{place}.{name}": without("read with overlong_buffer_cfg.enable")
        for place in ("reward_model.reward_kwargs", "reward.reward_kwargs")
        for name in ("overlong_buffer_cfg.*", "max_resp_len")
    },
    **{
        f"{place}sandbox_fusion.{name}": rule
        for place in ("reward_model.", "reward.")
        for name, rule in {
            "url": only(None, reason="programs are run by a reward function of yours", settled_by="reward.terms"),
            "*": without("read with sandbox_fusion.url"),
        }.items()
    },
    "reward_model.*": without("rewards are computed in one process, and reward models by the training engine"),
    "reward.*": without("rewards are computed in one process, and reward models by the training engine"),
}

TRAINER: dict[str, Rule] = {
    "total_epochs": epochs,
    "total_training_steps": to("run.steps"),
    "save_freq": period("run.checkpoint_every"),
    "test_freq": period("validation.every"),
    "val_before_train": when(
        lambda leaf: leaf.get("data.val_files"), to("validation.at_start"), "no prompts are named"
    ),
    "logger": loggers,
    "project_name": to("run.project"),
    "experiment_name": to("run.name"),
    "n_gpus_per_node": to("cluster.gpus_per_node"),
    "nnodes": to("cluster.nodes"),
    "default_local_dir": to("run.dir"),
    "max_actor_ckpt_to_keep": to("run.keep_last"),
    "max_critic_ckpt_to_keep": without("run.keep_last"),
    "critic_warmup": of_critic(to("critic.warmup_steps")),
    "resume_mode": without("--resume goes on with the run directory"),
    "resume_from_path": when(
        lambda leaf: leaf.get("trainer.resume_mode") == "resume_path",
        only(None, reason="--resume --run-dir DIR goes on with a run of rlctl's", settled_by="run.dir"),
        "read with resume_mode=resume_path",
    ),
    "val_only": only(None, False, reason="`rlctl eval` measures a model"),
    "device": only("cuda", None, reason="rlctl trains on NVIDIA GPUs and on CPUs"),
    "balance_batch": without("rows are balanced over ranks"),
    "v1.trainer_mode": when(
        lambda leaf: leaf.value in ("colocate_async", "separate_async"),
        lambda leaf: leaf.map_all(
            {"rollouts.mode": "async"}, "rollouts.max_staleness bounds the lag, and the planner divides the GPUs"
        ),
        "what rlctl does",
    ),
    "v1.*": without("read with v1.trainer_mode; rollouts.max_staleness bounds the lag"),
    "seed": to("run.seed"),
    **each("", "log_val_generations rollout_data_dir validation_data_dir", OWN_LOGS),
    **each(
        "",
        "use_legacy_worker_impl ray_wait_register_center_timeout default_hdfs_dir del_local_ckpt_after_load "
        "esi_redundant_time use_v1",
        without("Ray's workers are rlctl's own"),
    ),
}

RULES: dict[str, Rule] = (
    _DATA
    | {f"{MODEL}.{key}": rule for key, rule in MODEL_KEYS.items()}
    | {f"{ACTOR}.{key}": rule for key, rule in _ACTOR.items()}
    | {f"{ACTOR}.optim.{key}": rule for key, rule in OPTIMIZER.items()}
    | {f"{MEGATRON}.{key}": rule for key, rule in MEGATRON_KEYS.items()}
    | {f"{ROLLOUT}.{key}": rule for key, rule in _ROLLOUT.items()}
    | {"actor_rollout_ref.ref.*": without("the reference has the policy's layout and rows")}
    | each("actor_rollout_ref", "hybrid_engine nccl_timeout", without("cluster.step_timeout_s bounds each step"))
    | {f"algorithm.{key}": rule for key, rule in _ALGORITHM.items()}
    | {f"critic.{key}": of_critic(rule) for key, rule in _CRITIC.items()}
    | _REWARD
    | {f"trainer.{key}": rule for key, rule in TRAINER.items()}
    | {"distillation.enabled": distilled, "distillation.*": without("read with distillation.enabled")}
    | {"model_engine": backend, "global_profiler.*": TIMERS, "hydra.*": without("Hydra's own")}
    | each("", "rollout.nnodes rollout.n_gpus_per_node", without("the planner divides the GPUs (generation.colocated)"))
    | {
        "rollout.total_rollout_steps": differs(None, reason="it counts prompts: set run.steps to it / batch.prompts"),
        "rollout.n": to("batch.generations"),
        "async_training.staleness_threshold": differs(
            None, 0, reason="rollouts.max_staleness counts versions of weights"
        ),
        "async_training.partial_rollout": to("refit.in_flight", {True: "keep", False: "wait"}),
        "trainer.worker_env.*": without("training.env and generation.env set variables"),
        "async_training.*": without("read with data.train_batch_size; the planner divides the GPUs"),
        "skip.rollout.enable": only(False, None, reason="rollouts are always sampled"),
        "skip.*": without("read with skip.rollout.enable"),
    }
    | each("", "ray_kwargs.* ray_init.* transfer_queue.* hydra defaults", without("rlctl starts Ray by itself"))
)


def left_out(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that verl has for keys that are not given, where rlctl's defaults are others."""
    values = DEFAULTS | (OF_CRITIC if leaves.get("algorithm.adv_estimator", "gae") == "gae" else {})
    if "algorithm.adv_estimator" not in leaves:
        values["algorithm.adv_estimator"] = "gae"
    engines = ("model_engine", f"{ACTOR}.model_engine", f"{ACTOR}.fsdp_config.strategy")
    if not any(key in engines or key.startswith(f"{MEGATRON}.") for key in leaves):
        values[f"{ACTOR}.strategy"] = "fsdp"
    if leaves.get(f"{ACTOR}.use_kl_loss") and f"{ACTOR}.kl_loss_type" not in leaves:
        values[f"{ACTOR}.kl_loss_type"] = "low_var_kl"
    return {key: value for key, value in values.items() if key not in leaves}


def finish(result: Import) -> None:
    """Set the default reward: verl scores by the column `data_source`. verl has no baseline for groups of one."""
    if result.values.get("batch.generations") == 1 and result.values.get("run.algorithm") not in (None, "ppo"):
        for key, value in {"advantage.baseline": "none", "advantage.normalize_std": False}.items():
            result.set(key, value, f"{ROLLOUT}.n")
    if "reward.terms" not in result.values:
        result.set("reward.terms", [{"name": "math-verify"}], "custom_reward_function.path")
        result.notes.append(
            "verl scores completions by a rule for each data_source; here math-verify compares them with "
            "reward_model.ground_truth (custom_reward_function.path or --reward names another)"
        )
