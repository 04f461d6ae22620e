"""Rules for the keys of a NeMo-RL recipe, which the table of keys is made of.

A rule sees the whole recipe, so that a key can depend on another (Megatron wins over DTensor when both are on).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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

ADAPTED = {"linear_qkv": "attention", "linear_proj": "attention", "linear_fc1": "mlp", "linear_fc2": "mlp"}
"""Layers that Megatron-Bridge's adapters are named after, and the group of `training.lora.targets` they are in."""

Status = Literal["mapped", "not applicable", "changed", "not yet"]
"""`changed` runs, but not exactly as written; `not yet` is what rlctl cannot run."""


@dataclass(frozen=True)
class Entry:
    """The outcome of one key of the recipe."""

    key: str
    value: Any
    status: Status
    note: str
    """The rlctl key, or the reason."""


@dataclass
class Import:
    """A recipe in rlctl's words."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    """Values by rlctl's dotted keys."""
    entries: list[Entry] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    """The recipe's key of each value."""

    @property
    def unsupported(self) -> list[str]:
        """Lines on what rlctl cannot run yet."""
        return self._lines("not yet")

    @property
    def changed(self) -> list[str]:
        """Lines on what runs, but not exactly as written."""
        return self._lines("changed")

    def _lines(self, status: Status) -> list[str]:
        return [f"{entry.key} = {entry.value}: {entry.note}" for entry in self.entries if entry.status == status]

    def set(self, key: str, value: Any, source: str) -> None:
        self.values[key], self.source[key] = value, source


@dataclass(frozen=True)
class Found:
    """A key of the recipe that is being mapped, with all leaves of the recipe and what has been imported so far."""

    result: Import
    name: str
    value: Any
    leaves: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """Return the value of another key of the recipe."""
        return self.leaves.get(name)

    def set(self, key: str, value: Any) -> None:
        """Give rlctl's `key` a value that this key is the source of."""
        self.result.set(key, value, self.name)

    def say(self, status: Status, note: str) -> None:
        """Record the outcome of this key."""
        self.result.entries.append(Entry(self.name, self.value, status, note))

    def skip(self, reason: str) -> None:
        """Record why this key becomes nothing."""
        self.say("not applicable", reason)

    def map(self, key: str, value: Any) -> None:
        """Give rlctl's `key` the value and record it; None leaves the key at its default."""
        if value is None:
            self.skip(f"{key} stays at its default")
        else:
            self.set(key, value)
            self.say("mapped", f"{key}: {value}")


Rule = Callable[[Found], None]


def to(key: str, convert: Mapping[Any, Any] | None = None) -> Rule:
    """Return the rule that gives `key` the value, which must be in `convert` where that is given."""

    def rule(found: Found) -> None:
        if convert is None:
            found.map(key, found.value)
        elif found.value in convert:
            found.map(key, convert[found.value])
        else:
            found.say("not yet", f"rlctl knows {', '.join(map(str, convert))}")

    return rule


def same(*values: Any) -> dict[Any, Any]:
    """Return the `convert` of `to` that accepts only these values and keeps them."""
    return {value: value for value in values}


def without(reason: str) -> Rule:
    """Return the rule of a key that has no counterpart, for `reason`."""
    return lambda found: found.skip(reason)


def only(*accepted: Any, why: str) -> Rule:
    """Return the rule of a key that runs with one of `accepted` and cannot run otherwise yet."""
    return _unless(accepted, "not yet", why, empty=None in accepted)


def differs(*same: Any, why: str) -> Rule:
    """Return the rule of a key that runs in any case, but exactly as written only with one of `same`."""
    return _unless(same, "changed", why)


def _unless(accepted: Iterable[Any], status: Status, why: str, empty: bool = False) -> Rule:
    def rule(found: Found) -> None:
        if found.value in accepted or (empty and found.value in ({}, [])):
            found.skip("what rlctl does")
        else:
            found.say(status, why)

    return rule


def when(on: Callable[[Found], bool], rule: Rule, otherwise: str) -> Rule:
    """Return a rule that applies `rule` to recipes for which `on` is true; others skip the key for `otherwise`."""
    return lambda found: rule(found) if on(found) else found.skip(otherwise)


def megatron_on(found: Found) -> bool:
    """Return whether Megatron trains; it does even when DTensor is also on."""
    return found.get(f"{MEGATRON}.enabled") is True


def when_megatron(rule: Rule) -> Rule:
    return when(megatron_on, rule, "policy.megatron_cfg is off")


def when_dtensor(rule: Rule) -> Rule:
    return when(lambda found: not megatron_on(found), rule, "Megatron trains: it wins when both are on")


def with_adapters(rule: Rule) -> Rule:
    return when(lambda found: found.get(f"{MEGATRON}.peft.enabled") is True, rule, "LoRA is off")


def with_float8(rule: Rule) -> Rule:
    return when(lambda found: found.get(f"{MEGATRON}.fp8_cfg.enabled") is True, rule, "float8 training is off")


def row_tokens(section: str) -> Rule:
    on = f"{section}.enabled"
    return when(lambda found: found.get(on) is True, to("training.micro_batch_tokens"), f"{section} is off")


def by_dtensor(found: Found) -> None:
    """Plan with the other backend, which is not run yet."""
    if found.value is True:
        found.set("training.backend", "dtensor")
    only(None, False, why="training.backend: dtensor, which is planned and not run yet")(found)


def float8_on(found: Found) -> None:
    """Turn float8 on by its format, which `enabled` needs next to it."""
    if found.value is True and not found.get(f"{MEGATRON}.fp8_cfg.fp8"):
        found.say("not yet", "fp8_cfg.fp8 names no format (hybrid or e4m3)")
    else:
        found.skip("fp8_cfg.fp8 is the format: megatron.fp8" if found.value else "float8 training is off")


def states_on_host(found: Found) -> None:
    """Keep all optimizer states in host memory, where a recipe may name a fraction; none with a fraction of 0."""
    on = found.value is True and found.get(f"{MEGATRON}.optimizer.optimizer_offload_fraction") != 0
    to("training.optimizer_offload", {True: on, False: False})(found)


def fraction_on_host(found: Found) -> None:
    """Say where the fraction that `states_on_host` has read is neither all nor none of the states."""
    if found.get(f"{MEGATRON}.optimizer.optimizer_cpu_offload") is True and found.value not in (None, 0, 1):
        found.say("changed", "training.optimizer_offload has all states in host memory, or none")
    else:
        found.skip("read with optimizer_cpu_offload")


def adapted_layers(found: Found) -> None:
    """Map layers to groups of layers; none named means all of them."""
    groups = sorted({ADAPTED[layer] for layer in found.value or ADAPTED if layer in ADAPTED})
    if set(found.value or ADAPTED) == {layer for layer, group in ADAPTED.items() if group in groups}:
        found.map("training.lora.targets", groups)
        return
    why = "adapters are on both layers of attention (linear_qkv, linear_proj), of the MLP (linear_fc1, linear_fc2)"
    found.say("not yet", f"{why}, or of both")


def passes(section: str, prefix: str, otherwise: Rule | None = None) -> Rule:
    """Return the rule that hands the key on to `section`; `otherwise` applies where the installed version has no such
    field (None: the key is unknown)."""

    def rule(found: Found) -> None:
        key = f"{section}.{found.name.removeprefix(prefix).lstrip('.')}"
        if found.value is None or found.value == {}:
            found.skip("unset")
        elif target_of(key) is None or installed_field(key) is not None or TARGETS[section].fields() is None:
            ours, translated = canonical(key, found.value)
            why = checked(key, found.value)[1] if ours == key else None
            if why:
                found.say("not yet", f"{key}: {why}")
            else:
                found.map(ours, translated)
        elif otherwise is not None:
            otherwise(found)
        else:
            raise ConfigError(
                f"unknown key `{found.name}`: neither NeMo-RL's nor a field of {TARGETS[section].words()}."
            )

    return rule


def batches(found: Found) -> None:
    """Map `train_global_batch_size`, the rollouts of an optimizer step."""
    prompts, generations = found.get("grpo.num_prompts_per_step"), found.get("grpo.num_generations_per_prompt")
    rollouts = int(prompts or 1) * int(generations or 1)
    if not found.value or rollouts % int(found.value):
        raise ConfigError(f"`{found.name}` = {found.value} does not divide the {rollouts} rollouts of a step.")
    steps = rollouts // int(found.value)
    found.set("batch.optimizer_steps", steps)
    found.say("mapped", f"batch.optimizer_steps: {steps} of {rollouts} rollouts")


def correction(found: Found) -> None:
    cap = found.get("loss_fn.truncated_importance_sampling_ratio")
    found.set("loss.importance_correction", "truncated" if found.value else "off")
    if not found.value:
        found.say("mapped", "loss.importance_correction: off")
    elif cap is not None:
        found.set("loss.importance_cap", cap)
        found.say("mapped", f"loss.importance_correction: truncated at {cap}")
    else:
        found.say("changed", "loss.importance_correction: truncated at 2; NeMo-RL does not truncate here")


def average_in_collective(found: Found) -> None:
    """Leave it off: Megatron refuses it together with a loss normalised by tokens, as rlctl's is."""
    note = "off: gradients are summed, and the loss carries its normalisation; Megatron refuses both together"
    differs(None, False, why=note)(found)


def sequence_parallel(found: Found) -> None:
    if int(found.get(f"{MEGATRON}.tensor_model_parallel_size") or 1) == 1:
        found.skip("there is no tensor parallelism")
    else:
        found.map("training.sequence_parallel", found.value)


def decay_steps(found: Found) -> None:
    style = found.leaves.get(f"{MEGATRON}.scheduler.lr_decay_style", "constant")
    if style == "constant" or found.value in (None, found.get("grpo.max_num_steps")):
        found.skip("the learning rate decays over run.steps, if at all")
    else:
        found.map("scheduler.decay_steps", found.value)


def weight_decay_ends(found: Found) -> None:
    ends = [found.get(f"{MEGATRON}.scheduler.{end}_weight_decay") for end in ("start", "end")]
    if None in ends or ends == 2 * [found.get(f"{MEGATRON}.optimizer.weight_decay")]:
        found.skip("optimizer.weight_decay")
    else:
        found.map(f"scheduler.{found.name.rpartition('.')[2]}", found.value)


def weight_decay_style(found: Found) -> None:
    if found.value in (None, "constant"):
        found.skip("weight decay is constant")
    else:
        to("scheduler.weight_decay_style", same("linear", "cosine"))(found)


def betas(found: Found) -> None:
    found.set("optimizer.beta1", found.value[0])
    found.set("optimizer.beta2", found.value[1])
    found.say("mapped", "optimizer.beta1 and optimizer.beta2")


def tokenizer(found: Found) -> None:
    if found.value in (None, found.get("policy.model_name")):
        found.skip("the model's own")
    else:
        found.map("model.tokenizer", found.value)


def expert_engines(found: Found) -> None:
    if found.value in (None, 1):
        found.map("generation.ep", found.value)
        return
    ep = int(found.value)
    dp = max(1, ep // int(found.get(f"{VLLM}.tensor_parallel_size") or 1))
    found.set("generation.ep", ep)
    found.set("generation.dp", dp)
    found.say("mapped", f"generation.ep: {ep}, generation.dp: {dp}")


def data_value(found: Found, key: str) -> Any:
    """Return what the recipe says of its training data: `data.train`, else the defaults of all datasets, else `data`
    itself (how older recipes have it)."""
    places = ("data.train.", "data.default.", "data.")
    return next((value for place in places if (value := found.get(place + key)) is not None), None)


def dataset(found: Found) -> None:
    if found.value != data_value(found, "dataset_name"):
        found.skip("data.train has its own")
        return
    if found.value == "ResponseDataset":
        path = data_value(found, "data_path") or data_value(found, "train_data_path")
        fields = (path, data_value(found, "input_key") or "input", data_value(found, "output_key") or "output")
    else:
        fields = DATASETS.get(found.value, (None, "", ""))
    if not fields[0]:
        found.say("not yet", f"rlctl knows {', '.join(DATASETS)}, and ResponseDataset with its data_path")
        return
    for key, item in zip(("data.name", "data.prompt_field", "data.answer_field"), fields, strict=True):
        found.set(key, item)
    found.say("mapped", f"data.name: {fields[0]}, fields {fields[1]} and {fields[2]}")


def prompt_file(found: Found) -> None:
    """Put a template's text behind the question; the template has it around the question."""
    if found.name == "data.default.prompt_file" and "data.train.prompt_file" in found.leaves:
        found.skip("data.train has its own")
        return
    if found.value is None:
        found.skip("no template")
        return
    places = (Path(found.value), *(up / found.value for up in found.result.path.resolve().parents))
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        found.set("data.prompt_suffix", BOXED)
        found.say("changed", "the file is not here: data.prompt_suffix asks for the final answer in \\boxed{}")
        return
    parts = re.split(r"(?<!\{)\{\}(?!\})", path.read_text(), maxsplit=1)
    text = " ".join(part.strip() for part in parts if part.strip()).replace("{{", "{").replace("}}", "}")
    found.set("data.prompt_suffix", f"\n\n{text}")
    found.say("changed", "data.prompt_suffix: the template's text stands behind the question")


def dynamic_batching(found: Found) -> None:
    """Pad rows instead of packing them. NeMo-RL refuses both together; here packing wins."""
    if found.value is not True:
        found.skip("rows of training.micro_batch_tokens")
    elif found.get("policy.sequence_packing.enabled") is True:
        found.say("changed", "rows are packed; NeMo-RL refuses to start with policy.sequence_packing and this both on")
    else:
        found.set("training.packing", False)
        found.map("training.dynamic_batching", True)


def kept_checkpoints(found: Found) -> None:
    """Keep the newest where no metric is named, else the best by the mean reward of training."""
    metric = found.get("checkpointing.metric_name")
    if found.value is None or metric is None:
        found.map("run.keep_last", found.value)
        return
    found.set("run.keep_best", found.value)
    note = f"run.keep_best: {found.value}, by the mean reward of training instead of {metric}; and the newest"
    found.say("changed", note)


def checkpoint_period(found: Found) -> None:
    on = found.get("checkpointing.enabled") is not False
    found.map("run.checkpoint_every", found.value if on else 0)


def checkpoints_on(found: Found) -> None:
    found.map("run.save_final", bool(found.value))
    if not found.value:
        found.set("run.checkpoint_every", 0)
