"""What can become of a key of a NeMo-RL recipe: rules that the table of keys is made of.

A rule sees the whole recipe, so that a key can depend on another (Megatron wins over DTensor when both are on).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.config.nemo_rl_import import Entry, Import, Rule
from rlctl.config.passthrough import TARGETS, canonical, checked, installed_field, target_of
from rlctl.errors import ConfigError

MEGATRON, DTENSOR, VLLM = "policy.megatron_cfg", "policy.dtensor_cfg", "policy.generation.vllm_cfg"
DDP = f"{MEGATRON}.distributed_data_parallel_config"

DATASETS = {
    "OpenMathInstruct-2": ("nvidia/OpenMathInstruct-2", "problem", "expected_answer"),
    "DeepScaler": ("agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer"),
    "DAPOMath17K": ("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth"),
}
BOXED = "\n\nReason step by step and put the final answer in \\boxed{}."


def megatron_on(leaves: Mapping[str, Any]) -> bool:
    """Megatron trains, also when DTensor is on too."""
    return leaves.get(f"{MEGATRON}.enabled") is True


def to(key: str, convert: Mapping[Any, Any] | None = None) -> Rule:
    """Becomes `key`, through `convert` where given; None leaves the key unset."""

    def rule(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        if convert is not None:
            if value not in convert:
                result.entries.append(Entry(name, value, "not yet", f"rlctl knows {', '.join(map(str, convert))}"))
                return
            value_ = convert[value]
        else:
            value_ = value
        if value_ is None:
            result.entries.append(Entry(name, value, "not applicable", f"{key} stays at its default"))
            return
        result.set(key, value_, name)
        result.entries.append(Entry(name, value, "mapped", f"{key}: {value_}"))

    return rule


def same(*values: Any) -> dict[Any, Any]:
    """What `to` converts where these values, and no others, are known."""
    return {value: value for value in values}


def without(reason: str) -> Rule:
    """Has no counterpart, for `reason`."""

    def rule(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        result.entries.append(Entry(name, value, "not applicable", reason))

    return rule


def only(*accepted: Any, why: str) -> Rule:
    """Runs with one of `accepted`; anything else cannot be run yet."""

    def rule(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        fine = value in accepted or (value in ({}, []) and None in accepted)
        note = "what rlctl does" if fine else why
        result.entries.append(Entry(name, value, "not applicable" if fine else "not yet", note))

    return rule


def differs(*same: Any, why: str) -> Rule:
    """Runs in any case; unless the value is one of `same`, not exactly as written."""

    def rule(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        fine = value in same
        note = "what rlctl does" if fine else why
        result.entries.append(Entry(name, value, "not applicable" if fine else "changed", note))

    return rule


def by_dtensor(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """The other backend: planned as it is, and not run yet."""
    if value is True:
        result.set("training.backend", "dtensor", name)
    only(None, False, why="training.backend: dtensor, which is planned and not run yet")(result, name, value, leaves)


def when_megatron(rule: Rule) -> Rule:
    """Applies where Megatron trains."""

    def chosen(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        if megatron_on(leaves):
            rule(result, name, value, leaves)
        else:
            without("policy.megatron_cfg is off")(result, name, value, leaves)

    return chosen


def when_dtensor(rule: Rule) -> Rule:
    """Applies where DTensor trains: on, and Megatron off."""

    def chosen(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        if megatron_on(leaves):
            without("Megatron trains: it wins when both are on")(result, name, value, leaves)
        else:
            rule(result, name, value, leaves)

    return chosen


def with_adapters(rule: Rule) -> Rule:
    """`rule` where the recipe trains adapters."""

    def chosen(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        on = leaves.get(f"{MEGATRON}.peft.enabled") is True
        (rule if on else without("LoRA is off"))(result, name, value, leaves)

    return chosen


def with_float8(rule: Rule) -> Rule:
    """`rule` where the recipe trains in float8."""

    def chosen(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        on = leaves.get(f"{MEGATRON}.fp8_cfg.enabled") is True
        (rule if on else without("float8 training is off"))(result, name, value, leaves)

    return chosen


def float8_on(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """`enabled` needs a format beside it, which is what turns float8 on."""
    if value is True and not leaves.get(f"{MEGATRON}.fp8_cfg.fp8"):
        result.entries.append(Entry(name, value, "not yet", "fp8_cfg.fp8 names no format (hybrid or e4m3)"))
        return
    without("fp8_cfg.fp8 is the format: megatron.fp8" if value else "float8 training is off")(
        result, name, value, leaves
    )


def states_on_host(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """Optimizer states in host memory: all of them, where a recipe may name a fraction; with a fraction of 0 none."""
    on = value is True and leaves.get(f"{MEGATRON}.optimizer.optimizer_offload_fraction") != 0
    to("training.optimizer_offload", {True: on, False: False})(result, name, value, leaves)


def fraction_on_host(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """Of the optimizer's states: read by `states_on_host`, and said where it is neither all nor none of them."""
    if leaves.get(f"{MEGATRON}.optimizer.optimizer_cpu_offload") is True and value not in (None, 0, 1):
        why = "training.optimizer_offload has all states in host memory, or none"
        result.entries.append(Entry(name, value, "changed", why))
    else:
        without("read with optimizer_cpu_offload")(result, name, value, leaves)


ADAPTED = {"linear_qkv": "attention", "linear_proj": "attention", "linear_fc1": "mlp", "linear_fc2": "mlp"}
"""Layers that Megatron-Bridge's adapters are named after, and the group of `training.lora.targets` they are in."""


def adapted_layers(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """Groups of layers; none named means all of them."""
    groups = sorted({ADAPTED[layer] for layer in value or ADAPTED if layer in ADAPTED})
    if set(value or ADAPTED) != {layer for layer, group in ADAPTED.items() if group in groups}:
        why = "adapters are on both layers of attention (linear_qkv, linear_proj), of the MLP (linear_fc1, linear_fc2)"
        result.entries.append(Entry(name, value, "not yet", f"{why}, or of both"))
        return
    result.set("training.lora.targets", groups, name)
    result.entries.append(Entry(name, value, "mapped", f"training.lora.targets: {groups}"))


def passes(section: str, prefix: str, otherwise: Rule | None = None) -> Rule:
    """Becomes the field of the same name that `section` passes through; `otherwise` applies where the installed
    version has none (None: the key is unknown)."""

    def rule(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        key = f"{section}.{name.removeprefix(prefix).lstrip('.')}"
        if value is None or value == {}:
            without("unset")(result, name, value, leaves)
            return
        known = target_of(key) is None or installed_field(key) is not None or TARGETS[section].fields() is None
        if not known:
            if otherwise is None:
                raise ConfigError(f"unknown key `{name}`: neither NeMo-RL's nor a field of {TARGETS[section].words()}.")
            otherwise(result, name, value, leaves)
            return
        ours, translated = canonical(key, value)
        why = checked(key, value)[1] if ours == key else None
        if why:
            result.entries.append(Entry(name, value, "not yet", f"{key}: {why}"))
        else:
            to(ours)(result, name, translated, leaves)

    return rule


def batches(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """`train_global_batch_size` rollouts an optimizer step."""
    rollouts = int(leaves.get("grpo.num_prompts_per_step", 1)) * int(leaves.get("grpo.num_generations_per_prompt", 1))
    if not value or rollouts % int(value):
        raise ConfigError(f"`{name}` = {value} does not divide the {rollouts} rollouts of a step.")
    result.set("grpo.optimizer_steps", rollouts // int(value), name)
    result.entries.append(
        Entry(name, value, "mapped", f"grpo.optimizer_steps: {rollouts // int(value)} of {rollouts} rollouts")
    )


def correction(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    cap = leaves.get("loss_fn.truncated_importance_sampling_ratio")
    result.set("grpo.importance_correction", "truncated" if value else "off", name)
    if not value:
        result.entries.append(Entry(name, value, "mapped", "grpo.importance_correction: off"))
    elif cap is not None:
        result.set("grpo.importance_cap", cap, name)
        result.entries.append(Entry(name, value, "mapped", f"grpo.importance_correction: truncated at {cap}"))
    else:
        result.entries.append(
            Entry(name, value, "changed", "grpo.importance_correction: truncated at 2; NeMo-RL does not truncate here")
        )


def average_in_collective(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """Megatron refuses it together with a loss normalised by tokens; rlctl's weights carry the normalisation."""
    status = "changed" if value else "not applicable"
    note = "off: gradients are summed, and the loss carries its normalisation; Megatron refuses both together"
    result.entries.append(Entry(name, value, status, note if value else "what rlctl does"))


def sequence_parallel(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    if int(leaves.get(f"{MEGATRON}.tensor_model_parallel_size") or 1) == 1:
        without("there is no tensor parallelism")(result, name, value, leaves)
    else:
        to("training.sequence_parallel")(result, name, value, leaves)


def decay_steps(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    constant = leaves.get(f"{MEGATRON}.scheduler.lr_decay_style", "constant") == "constant"
    if constant or value in (None, leaves.get("grpo.max_num_steps")):
        without("the learning rate decays over grpo.steps, if at all")(result, name, value, leaves)
    else:
        to("scheduler.decay_steps")(result, name, value, leaves)


def weight_decay_ends(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    ends = [leaves.get(f"{MEGATRON}.scheduler.{end}_weight_decay") for end in ("start", "end")]
    if None in ends or ends == 2 * [leaves.get(f"{MEGATRON}.optimizer.weight_decay")]:
        without("optimizer.weight_decay")(result, name, value, leaves)
    else:
        to(f"scheduler.{name.rpartition('.')[2]}")(result, name, value, leaves)


def weight_decay_style(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    if value in (None, "constant"):
        without("weight decay is constant")(result, name, value, leaves)
    else:
        to("scheduler.weight_decay_style", {"linear": "linear", "cosine": "cosine"})(result, name, value, leaves)


def betas(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    result.set("optimizer.beta1", value[0], name)
    result.set("optimizer.beta2", value[1], name)
    result.entries.append(Entry(name, value, "mapped", "optimizer.beta1 and optimizer.beta2"))


def tokenizer(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    if value in (None, leaves.get("policy.model_name")):
        without("the model's own")(result, name, value, leaves)
    else:
        to("model.tokenizer")(result, name, value, leaves)


def row_tokens(section: str) -> Rule:
    def rule(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
        if leaves.get(f"{section}.enabled") is True:
            to("training.micro_batch_tokens")(result, name, value, leaves)
        else:
            without(f"{section} is off")(result, name, value, leaves)

    return rule


def expert_engines(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    tp = int(leaves.get(f"{VLLM}.tensor_parallel_size") or 1)
    if value in (None, 1):
        to("generation.ep")(result, name, value, leaves)
        return
    result.set("generation.ep", int(value), name)
    result.set("generation.dp", max(1, int(value) // tp), name)
    result.entries.append(
        Entry(name, value, "mapped", f"generation.ep: {value}, generation.dp: {max(1, int(value) // tp)}")
    )


def data_value(leaves: Mapping[str, Any], key: str) -> Any:
    """What the recipe says of its training data: `data.train`, else the defaults of all datasets, else `data` itself
    (how older recipes have it)."""
    return next((v for p in ("data.train.", "data.default.", "data.") if (v := leaves.get(p + key)) is not None), None)


def dataset(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    if value != data_value(leaves, "dataset_name"):
        without("data.train has its own")(result, name, value, leaves)
        return
    if value == "ResponseDataset":
        path = data_value(leaves, "data_path") or data_value(leaves, "train_data_path")
        found = (path, data_value(leaves, "input_key") or "input", data_value(leaves, "output_key") or "output")
    else:
        found = DATASETS.get(value)
    if not found or not found[0]:
        why = f"rlctl knows {', '.join(DATASETS)}, and ResponseDataset with its data_path"
        result.entries.append(Entry(name, value, "not yet", why))
        return
    for key, item in zip(("data.name", "data.prompt_field", "data.answer_field"), found, strict=True):
        result.set(key, item, name)
    result.entries.append(Entry(name, value, "mapped", f"data.name: {found[0]}, fields {found[1]} and {found[2]}"))


def prompt_file(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """A template around the question; rlctl puts one text behind it."""
    if name == "data.default.prompt_file" and "data.train.prompt_file" in leaves:
        without("data.train has its own")(result, name, value, leaves)
        return
    if value is None:
        without("no template")(result, name, value, leaves)
        return
    path = next((p for p in (Path(value), *(up / value for up in result.path.resolve().parents)) if p.is_file()), None)
    if path is None:
        result.set("data.prompt_suffix", BOXED, name)
        note = "the file is not here: data.prompt_suffix asks for the final answer in \\boxed{}"
        result.entries.append(Entry(name, value, "changed", note))
        return
    before, *rest = re.split(r"(?<!\{)\{\}(?!\})", path.read_text(), maxsplit=1)
    after = "".join(rest)
    text = " ".join(part.strip() for part in (before, after) if part.strip()).replace("{{", "{").replace("}}", "}")
    result.set("data.prompt_suffix", f"\n\n{text}", name)
    result.entries.append(
        Entry(name, value, "changed", "data.prompt_suffix: the template's text stands behind the question")
    )


def dynamic_batching(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """Padded rows instead of packed ones. NeMo-RL refuses both together; here packing wins."""
    if value is not True:
        without("rows of training.micro_batch_tokens")(result, name, value, leaves)
    elif leaves.get("policy.sequence_packing.enabled") is True:
        note = "rows are packed; NeMo-RL refuses to start with policy.sequence_packing and this both on"
        result.entries.append(Entry(name, value, "changed", note))
    else:
        result.set("training.packing", False, name)
        to("training.dynamic_batching")(result, name, value, leaves)


def kept_checkpoints(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    """The newest where no metric is named; else the best, by the one measure there is without validation."""
    metric = leaves.get("checkpointing.metric_name")
    if value is None or metric is None:
        to("run.keep_last")(result, name, value, leaves)
        return
    result.set("run.keep_best", value, name)
    note = f"run.keep_best: {value}, by the mean reward of training instead of {metric}; and the newest"
    result.entries.append(Entry(name, value, "changed", note))


def checkpoint_period(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    on = leaves.get("checkpointing.enabled") is not False
    to("run.checkpoint_every")(result, name, value if on else 0, leaves)


def checkpoints_on(result: Import, name: str, value: Any, leaves: Mapping[str, Any]) -> None:
    to("run.save_final")(result, name, bool(value), leaves)
    if not value:
        result.set("run.checkpoint_every", 0, name)
