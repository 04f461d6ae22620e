"""The table of the keys of verl's SFT trainers (`sft_trainer`, and `fsdp_sft_trainer` before it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.config.recipes import Status
from rlctl.recipes.rules import Leaf, Rule, differs, logs, only, to, when
from rlctl.recipes.verl.mapping import (
    HOST_MEMORY,
    KERNELS,
    MEGATRON_KEYS,
    MODEL_KEYS,
    OPTIMIZER,
    ROWS,
    SHARED_DATA,
    TRAINER,
    backend,
    each,
    listed,
    named_optimizer,
    validation_files,
    without,
)

CHOICES = ("engine", "model", "optim", "profiler")
"""Sections that a command line may take from verl's files: `engine=megatron`."""
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "optim.weight_decay": 0.01,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
}
"""verl's defaults that differ from rlctl's, for keys that a command line leaves out."""
OF_FSDP_SFT_TRAINER: dict[str, Any] = {
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler": "cosine",
}
"""Such values of the trainer that was there until 2026."""


def field(flag: str, inner: str) -> Rule:
    """Return the rule of a column, or of a key in its mapping, that verl names separately."""

    def rule(leaf: Leaf) -> None:
        names = [*listed(leaf.value), *listed(leaf.get(inner) or [])]
        if leaf.get("data.multiturn.enable"):
            leaf.skip("the messages of a row are in `messages`")
        else:
            leaf.map(flag, ".".join(map(str, names)))

    return rule


def too_long(leaf: Leaf) -> None:
    if leaf.value in ("error", None):
        leaf.skip("what rlctl does")
    else:
        leaf.say("changed", "a text that is too long is refused; data.too_long=drop leaves it out")


def every(key: str, otherwise: Status) -> Rule:
    """Return the rule of an interval in steps, or of `after_each_epoch`."""

    def rule(leaf: Leaf) -> None:
        if isinstance(leaf.value, int):
            leaf.map(key, max(leaf.value, 0))
        else:
            leaf.say(otherwise, f"set {key} to the steps of an epoch")

    return rule


def validated(leaf: Leaf) -> None:
    """Map the texts of validation, which verl measures at the end too."""
    validation_files(leaf)
    leaf.set("validation.at_end", True)


def min_ratio(leaf: Leaf) -> None:
    leaf.map("scheduler.min_lr", (leaf.value or 0) * (leaf.get("optim.lr") or 0))


_DATA: dict[str, Rule] = SHARED_DATA | {
    "data.prompt_key": field("data.prompt_field", "data.prompt_dict_keys"),
    "data.response_key": field("data.answer_field", "data.response_dict_keys"),
    **each("data", "prompt_dict_keys response_dict_keys", without("read with prompt_key and response_key")),
    **each(
        "data",
        "messages_key multiturn.messages_key",
        only("messages", None, reason="the column of conversations is `messages`: rename it", settled_by="data.name"),
    ),
    **each(
        "data",
        "tools_key multiturn.tools_key",
        only("tools", None, reason="the column of tools is `tools`: rename it", settled_by="data.name"),
    ),
    "data.multiturn.enable": without("a row with `messages` is a conversation"),
    **each(
        "data",
        "enable_thinking_key multiturn.enable_thinking_key",
        only("enable_thinking", None, reason="the chat template reads columns by their own names"),
    ),
    "data.enable_thinking_default": when(
        lambda leaf: isinstance(leaf.value, bool),
        lambda leaf: leaf.map("model.chat_template_kwargs.enable_thinking", leaf.value),
        "the chat template decides",
    ),
    "data.max_length": to("model.max_length"),
    "data.truncation": too_long,
    **each(
        "data",
        "micro_batch_size micro_batch_size_per_gpu max_token_len_per_gpu use_dynamic_bsz pad_mode balance_dp_token "
        "num_workers",
        ROWS,
    ),
    "data.chat_template": to("model.chat_template"),
    "data.ignore_input_ids_mismatch": without("a conversation is rendered as a whole"),
}

_MODEL: dict[str, Rule] = MODEL_KEYS | {
    "partial_pretrain": to("model.name"),
    "strategy": backend,
    "fsdp_config.model_dtype": KERNELS,
    **each("", "fsdp_config.cpu_offload fsdp_config.offload_params", HOST_MEMORY),
    "fsdp_config.*": KERNELS,
    "*": without("the model's configuration is taken as it is"),
}

_OPTIMIZER: dict[str, Rule] = OPTIMIZER | {
    "lr_scheduler": OPTIMIZER["lr_scheduler_type"],
    "min_lr_ratio": min_ratio,
    "init_lr_ratio": lambda leaf: leaf.map("scheduler.init_lr", (leaf.value or 0) * (leaf.get("optim.lr") or 0)),
    "optimizer": named_optimizer,
    **each(
        "",
        "exp_avg_dtype exp_avg_sq_dtype master_weights store_param_remainders",
        differs("fp32", "float32", True, None, reason="states and master weights are float32"),
    ),
}

_ENGINE: dict[str, Rule] = MEGATRON_KEYS | {
    "strategy": backend,
    **each("", "ulysses_sequence_parallel_size cp_size", to("training.cp")),
    "tp_size": to("training.tp"),
    "pp_size": to("training.pp"),
    "ep_size": to("training.ep"),
    "fsdp_size": without("the planner decides over how many GPUs weights are sharded (training.replicate)"),
    **each("", "param_offload optimizer_offload offload_policy grad_offload", HOST_MEMORY),
    "*": KERNELS,
}

RULES: dict[str, Rule] = (
    _DATA
    | {f"model.{key}": rule for key, rule in _MODEL.items()}
    | {f"optim.{key}": rule for key, rule in _OPTIMIZER.items()}
    | {f"engine.{key}": rule for key, rule in _ENGINE.items()}
    | {f"trainer.{key}": rule for key, rule in TRAINER.items()}
    | {
        "data.val_files": when(lambda leaf: leaf.value, validated, "there is no validation"),
        "trainer.test_freq": every("validation.every", "logging"),
        "trainer.save_freq": every("run.checkpoint_every", "changed"),
        "trainer.max_ckpt_to_keep": to("run.keep_last"),
        "model_engine": backend,
        **each("", "model optim profiler", without("read with the engine")),
        "ulysses_sequence_parallel_size": to("training.cp"),
        "use_remove_padding": MODEL_KEYS["use_remove_padding"],
        **each(
            "",
            "checkpoint.* trainer.checkpoint.*",
            without("a checkpoint holds all that a run goes on from, and is published as Hugging Face files"),
        ),
        **each("", "profiler.* trainer.profile_interval", logs("rlctl has its own timers, which the report shows")),
    }
)


def left_out(leaves: Mapping[str, Any], module: str) -> dict[str, Any]:
    """Return the values that verl has for keys that are not given, where rlctl's defaults are others."""
    values = DEFAULTS | (OF_FSDP_SFT_TRAINER if module == "fsdp_sft_trainer" else {})
    if not any(key == "model_engine" or key.startswith("engine.") for key in leaves):
        values["model_engine"] = "fsdp"
    if "data.messages_key" in leaves or leaves.get("data.multiturn.enable"):
        values = {key: value for key, value in values.items() if key not in ("data.prompt_key", "data.response_key")}
    return {key: value for key, value in values.items() if key not in leaves}
