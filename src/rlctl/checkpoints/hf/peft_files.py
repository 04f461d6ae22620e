"""PEFT directories: adapter_config.json and adapter_model.safetensors, read as PEFT 0.21 applies them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hf_files import ADAPTERS, read_object
from rlctl.checkpoints.hf.safetensors_files import StoredTensor, read_header
from rlctl.errors import InputError
from rlctl.weights.adapter_sites import Place, by_pattern
from rlctl.weights.layout import Shape

if TYPE_CHECKING:
    import torch

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's name of a module of the model that it wraps."""
SUPPORTED = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_dropout", "loftq_config", "megatron_config", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "target_parameters", "task_type", "use_rslora",
})  # fmt: skip
"""Keys of adapter_config.json that rlctl reads, or that say nothing of what PEFT computes with saved tensors."""
REASONS = {
    "use_dora": "DoRA scales each row of the merged weights by a trained magnitude, and rlctl trains plain LoRA",
    "lora_bias": "it trains a bias beside each B",
    "trainable_token_indices": "it trains rows of the embedding",
    "alora_invocation_tokens": "activated LoRA applies to tokens after an invocation alone",
    "layer_replication": "it repeats layers of the base model",
}
MERGE_FIRST = "Merge the adapters with PEFT (merge_and_unload), and name the merged model as --model."
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` with which PEFT leaves the base weights of a loaded adapter as they are."""
LORA_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
SKIPPED = ".base_layer.weight"
"""PEFT saves the base matrix of an adapted embedding or head too."""


INNER = ".base_layer"
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Parameters of transformers' fused experts, in the order in which PEFT wraps them: the first is the innermost."""


@dataclass(frozen=True)
class LoraPair:
    """Adapters of one matrix: adds scale * B A to it."""

    a: torch.Tensor  # [r, inputs]
    b: torch.Tensor  # [outputs, r]
    scale: float


@dataclass(frozen=True)
class PeftConfig:
    """adapter_config.json: what rlctl's `training.lora` has keys for."""

    directory: Path
    label: str
    values: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        return self.values.get("base_model_name_or_path")

    @property
    def rank(self) -> int:
        return int(self.values["r"])

    @property
    def alpha(self) -> float:
        return float(self.values.get("lora_alpha", 8))

    def rank_of(self, name: str) -> int:
        """Return the rank of a module or parameter."""
        return int(by_pattern(self.values.get("rank_pattern") or {}, (name,), self.rank))

    def scale_of(self, name: str) -> float:
        """Return what B A of a module or parameter is multiplied by."""
        rank = self.rank_of(name)
        alpha = float(by_pattern(self.values.get("alpha_pattern") or {}, (name,), self.alpha))
        return alpha / (math.sqrt(rank) if self.values.get("use_rslora") else rank)


def target_of(module: str, stored: Collection[str], config: PeftConfig) -> str:
    """Return what PEFT's module adapts, by the name that its patterns match: a layer, or a parameter of one."""
    first, second = EXPERT_PARAMETERS
    if module.endswith(f".experts{INNER}"):
        return f"{module.removesuffix(INNER)}.{first}"
    parameters = config.values.get("target_parameters") or ()
    if module.endswith(".experts"):
        alone = first if any(name.endswith(first) for name in parameters) else second
        return f"{module}.{second if module + INNER in stored else alone}"
    weight = f"{module}.weight"
    return weight if any(weight == name or weight.endswith(f".{name}") for name in parameters) else module


def targets_in(config: PeftConfig) -> dict[str, str]:
    """Return the layers with adapters by transformers' name of the module or stacked parameter, with the name that
    PEFT's patterns match. Raises like `modules_in`."""
    stored = modules_in(config, whole_modules=True)
    targets = (target_of(module, stored, config) for module in stored)
    return {target.removesuffix(".weight"): target for target in targets}


def read_peft_config(directory: Path, label: str | None = None) -> PeftConfig:
    """Read adapter_config.json. Raises InputError for another method than LoRA, and for settings that change what is
    computed in ways that rlctl does not have."""
    label = label or str(directory)
    hint = "Name a directory that PEFT's save_pretrained, or `convert megatron-to-hf --adapter-only`, has written."
    values = read_object(directory, ADAPTERS, hint)
    if (kind := values.get("peft_type")) != "LORA":
        raise InputError(f"{label}: {ADAPTERS} says peft_type = {kind}, and rlctl reads LORA alone.", hint)
    for key, value in values.items():
        if key not in SUPPORTED and value:
            reason = REASONS.get(key, "rlctl does not have it")
            raise InputError(f"{label}: {key} = {value} in {ADAPTERS}: {reason}.", MERGE_FIRST)
    if (bias := values.get("bias", "none")) != "none":
        raise InputError(
            f"{label}: bias = {bias} in {ADAPTERS} trains biases of the base, and rlctl does not.", MERGE_FIRST
        )
    first = values.get("init_lora_weights")
    if isinstance(first, str) and first.lower() not in PLAIN_STARTS:
        raise InputError(
            f"{label}: init_lora_weights = {first} in {ADAPTERS}: PEFT changes the base weights of such adapters.",
            "Convert them to plain LoRA: PEFT's save_pretrained does it with path_initial_model_for_weight_conversion.",
        )
    if not isinstance(values.get("r"), int) or values["r"] < 1:
        raise InputError(f"{label}: {ADAPTERS} has no rank r of at least 1.", hint)
    return PeftConfig(directory, label, values)


def modules_in(config: PeftConfig, *, whole_modules: bool = False) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors `A` and `B` by PEFT's module, from the file's header. Raises InputError for a missing or
    damaged file, and for tensors that are no adapters of linear layers or experts (`whole_modules`: but modules trained
    whole)."""
    path = config.directory / WEIGHTS
    if not path.is_file():
        old = (config.directory / "adapter_model.bin").is_file()
        hint = "Load it with PEFT and save it again, which writes safetensors." if old else "Download it again."
        raise InputError(f"{config.label} has no {WEIGHTS}.", hint)
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for key, tensor in read_header(path).items():
        match = LORA_TENSOR.fullmatch(key)
        if match is None and whole_modules and _is_whole(config, key):
            continue
        if match is None:
            raise _unsupported(config, key.removeprefix(PREFIX))
        modules[match[1]][match[2]] = tensor
    for module, pair in modules.items():
        if pair.keys() != {"A", "B"}:
            raise InputError(f"{config.label}: {module} has lora_{min(pair)} alone in {WEIGHTS}.", "Download it again.")
    return dict(modules)


def read_pairs(config: PeftConfig, *, whole_modules: bool = False) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read A and B by PEFT's module. Raises like `modules_in`."""
    from safetensors.torch import load_file

    modules, tensors = modules_in(config, whole_modules=whole_modules), load_file(config.directory / WEIGHTS)
    return {module: (tensors[pair["A"].name], tensors[pair["B"].name]) for module, pair in modules.items()}


def whole_in(config: PeftConfig) -> dict[str, StoredTensor]:
    """Return the tensors of modules that were trained whole (`modules_to_save`) by module, from the file's header."""
    header = read_header(config.directory / WEIGHTS)
    return {key.removeprefix(PREFIX).removesuffix(".weight"): header[key] for key in header if _is_whole(config, key)}


def read_whole(config: PeftConfig) -> dict[str, torch.Tensor]:
    """Read the tensors of modules that were trained whole (`modules_to_save`) by module."""
    from safetensors.torch import load_file

    tensors = load_file(config.directory / WEIGHTS)
    return {module: tensors[tensor.name] for module, tensor in whole_in(config).items()}


def peft_shapes(place: Place, rank: int) -> tuple[Shape, Shape]:
    """Return the shapes of A and B in PEFT's files: [r, I] and [O, r], and of E experts [E r, I] and [O, r E]."""
    experts = place.shape[0] if place.is_expert else 1
    outputs = place.shape[-1] if place.transposed else prod(place.shape[1 if place.is_expert else 0 : -1])
    return (experts * rank, place.inputs), (outputs, experts * rank)


def _is_whole(config: PeftConfig, key: str) -> bool:
    module = key.removeprefix(PREFIX).removesuffix(".weight")
    names = [*(config.values.get("modules_to_save") or ())]
    names += ["lm_head"] if names and config.values.get("ensure_weight_tying") else []  # saved under both names
    return key.endswith(".weight") and any(module.endswith(name) for name in names)


def dtype_in(config: PeftConfig) -> str:
    """Return the precision of the first tensor."""
    return next(iter(modules_in(config).values()))["A"].dtype


def _unsupported(config: PeftConfig, name: str) -> InputError:
    subject = f"{config.label}: {name} in {WEIGHTS}"
    if "lora_magnitude_vector" in name:
        return InputError(f"{subject} is a magnitude of DoRA, which rlctl does not train.", MERGE_FIRST)
    if name.endswith("lora_B.bias"):
        return InputError(f"{subject} is a trained bias beside B (lora_bias), which rlctl does not train.", MERGE_FIRST)
    if "trainable_tokens" in name:
        return InputError(f"{subject} has trained rows of the embedding (trainable_token_indices).", MERGE_FIRST)
    if "lora_embedding" in name or name.endswith(SKIPPED):
        return InputError(f"{subject} belongs to an adapter of an embedding or of the output layer.", MERGE_FIRST)
    if ".lora_" in name:
        return InputError(
            f"{subject} is not named as PEFT saves adapters of linear layers ({PREFIX}MODULE.lora_A.weight).",
            "Load it with PEFT and save it again, or rename its tensors.",
        )
    return InputError(f"{subject} is a whole tensor (modules_to_save), and no adapter.", MERGE_FIRST)
