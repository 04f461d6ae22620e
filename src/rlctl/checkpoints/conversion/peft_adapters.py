"""Adapters of a run (`training.lora`) as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlctl.checkpoints.conversion.hf_megatron import Options, Report, require_undamaged
from rlctl.checkpoints.conversion.run_tokenizer import take_tokenizer_of_run
from rlctl.checkpoints.hf.hf_model import without_absent_mtp
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.megatron.lora_weights import adapter_keys, read_adapters, scale_of
from rlctl.checkpoints.megatron.megatron_directory import Base, base_of, find
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader
from rlctl.checkpoints.staging import locked, require_replaceable, staged
from rlctl.errors import InputError, VerificationError
from rlctl.weights.dtensor import param_names
from rlctl.weights.plan_execution import dtype_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's name of a module of the model that it wraps."""


def megatron_to_peft(
    source: Path, destination: Path, config_from: Path | None = None, options: Options | None = None
) -> Report:
    """Write the adapters of a run's checkpoint for PEFT. `config_from`: the base model's directory, if it moved. Raises
    InputError without adapters, else like `hf_to_megatron`."""
    from safetensors.torch import load_file, save_file

    options = options or Options()
    found = find(source)
    if found is None:
        raise InputError(f"{source} is not a Megatron checkpoint.", "Name a run, or a checkpoint inside of it.")
    reader = TorchDistReader.open(found.shards)
    if not (own := adapter_keys(reader.shapes)):
        raise InputError(
            f"--adapter-only: {found.shards} holds no adapters; the run trained all weights.", "Leave it out."
        )
    if options.verify:
        require_undamaged(found)
    begun, dtype = time.perf_counter(), options.dtype or reader.shapes[own[0]].dtype
    base = base_of(found, config_from)
    facts = facts_in(base.directory)
    adapters = read_adapters(reader, without_absent_mtp(facts, reader.shapes), scale_of(base))
    params = param_names(facts)
    pairs = {params[name].removesuffix(".weight"): pair for name, pair in adapters.pairs.items()}
    tensors = named_for_peft(pairs, dtype)
    size = sum(tensor.nbytes for tensor in tensors.values())
    modules = targets(pairs, params.values())
    require_replaceable(destination, (found.root, found.shards, base.directory))
    destination = destination.resolve()
    with locked(destination, options.tell), staged(destination, size, options.force) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(adapter_config(base, modules), indent=2) + "\n")
        take_tokenizer_of_run(found, aside, options.tell)
        if options.verify:
            written = load_file(aside / WEIGHTS)
            if odd := [name for name, tensor in tensors.items() if not written[name].equal(tensor)]:
                raise VerificationError(f"{destination / WEIGHTS}: {odd[0]} is not what was written.")
    return Report(len(tensors), size, time.perf_counter() - begun, options.verify, str(destination), dtype)


def named_for_peft(pairs: Mapping[str, tuple[Any, Any]], dtype: str) -> dict[str, Any]:
    return {
        f"{PREFIX}{module}.lora_{which}.weight": value.to(dtype_of(dtype)).contiguous()
        for module, pair in pairs.items()
        for which, value in zip("AB", pair, strict=True)
    }


def targets(modules: Collection[str], tensors: Collection[str]) -> list[str]:
    """Return PEFT's `target_modules`: last name parts if unambiguous, else whole names."""
    ends = {module.rpartition(".")[2] for module in modules}
    others = {name.removesuffix(".weight") for name in tensors} - set(modules)
    clear = not any(other.rpartition(".")[2] in ends for other in others)
    return sorted(ends if clear else modules)


def adapter_config(base: Base, modules: list[str]) -> dict[str, Any]:
    def value(key: str) -> Any:
        return base.config.get(key, {}).get("value")

    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": value("model.name") or str(base.directory),
        "revision": value("model.revision"),
        "r": value("training.lora.rank"),
        "lora_alpha": value("training.lora.alpha"),
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
