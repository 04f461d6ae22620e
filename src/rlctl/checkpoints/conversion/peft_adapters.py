"""Adapters of a run (`training.lora`) as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlctl.checkpoints.conversion.hf_megatron import Options, Report, require_undamaged
from rlctl.checkpoints.conversion.run_tokenizer import take_tokenizer_of_run
from rlctl.checkpoints.hf.hf_files import ADAPTERS as CONFIG
from rlctl.checkpoints.hf.hf_model import without_absent_mtp
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.peft_files import PREFIX, WEIGHTS
from rlctl.checkpoints.hf.text_config import has_text_part
from rlctl.checkpoints.hf.transformers_model import body_path, meta_model, text_path
from rlctl.checkpoints.megatron.lora_weights import adapter_keys, read_adapters, scale_of
from rlctl.checkpoints.megatron.megatron_directory import Base, base_of, find
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader
from rlctl.checkpoints.model_files import ModelFiles, as_files
from rlctl.checkpoints.staging import locked, require_replaceable, staged
from rlctl.config.files import user_path
from rlctl.errors import InputError, VerificationError
from rlctl.weights.dtensor import param_names
from rlctl.weights.plan_execution import dtype_of

_T = TypeVar("_T")
EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Last parts of names of linear layers that PEFT (0.19 to 0.21, on transformers 5) takes for routed experts anywhere in
a mixture-of-experts model: it would drop adapters of shared experts and dense layers. PEFT leaves `target_parameters`
unchanged, and vLLM and PEFT find the tensors under the same names (PEFT 0.17 and later)."""


def megatron_to_peft(
    source: Path, destination: Path, config_from: Path | ModelFiles | None = None, options: Options | None = None
) -> Report:
    """Write the adapters of a run's checkpoint for PEFT. `config_from`: the base model, if it moved. Raises InputError
    without adapters, else like `hf_to_megatron`."""
    options = options or Options()
    megatron = find(source)
    if megatron is None:
        raise InputError(f"{source} is not a Megatron checkpoint.", "Name a run, or a checkpoint inside of it.")
    reader = TorchDistReader.open(megatron.shards)
    if not (stored := adapter_keys(reader.shapes)):
        raise InputError(
            f"--adapter-only: {megatron.shards} holds no adapters; the run trained all weights.", "Leave it out."
        )
    if options.verify:
        require_undamaged(megatron)
    dtype = options.dtype or reader.shapes[stored[0]].dtype
    base = base_of(megatron, as_files(config_from))
    facts = facts_in(base.directory)
    adapters = read_adapters(reader, without_absent_mtp(facts, reader.shapes), scale_of(base))
    params = param_names(facts)
    pairs = {params[name].removesuffix(".weight"): pair for name, pair in adapters.pairs.items()}
    others: Collection[str] = params.values()
    if (whole := whole_model(base)) is not None:
        options.tell(f"the adapters are named for {base_name(base)}, whose text part the run trained")
        pairs, others = in_whole(pairs, base.directory, whole)
    modules, parameters = targets(pairs, others, experts=facts.moe is not None)
    config = adapter_config(base, modules, parameters)
    sources = (megatron.root, megatron.shards, base.directory)
    finish = partial(take_tokenizer_of_run, megatron, tell=options.tell)
    return write_adapter(destination, named_for_peft(pairs, dtype), config, sources, options, finish)


def write_adapter(
    destination: Path,
    tensors: dict[str, Any],
    config: Mapping[str, Any],
    sources: tuple[Path, ...],
    options: Options,
    finish: Callable[[Path], None] = lambda aside: None,
) -> Report:
    """Write a PEFT directory, and read it back with `options.verify`. `finish` receives the directory. Raises like
    `hf_to_megatron`."""
    from safetensors.torch import load_file, save_file

    begun, size = time.perf_counter(), sum(tensor.nbytes for tensor in tensors.values())
    require_replaceable(destination, sources)
    destination = destination.resolve()
    with locked(destination, options.tell), staged(destination, size, options.force) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        finish(aside)
        if options.verify:
            written = load_file(aside / WEIGHTS)
            if odd := [name for name, tensor in tensors.items() if not written[name].equal(tensor)]:
                raise VerificationError(f"{destination / WEIGHTS}: {odd[0]} is not what was written.")
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    return Report(len(tensors), size, time.perf_counter() - begun, options.verify, str(destination), dtype)


def whole_model(base: Base) -> Path | None:
    """Return the multimodal model whose text part is the `base`; None: the base is no text part, or it is gone."""
    origin = base.origin
    return origin if origin is not None and (origin / "config.json").is_file() and has_text_part(origin) else None


def base_name(base: Base) -> str:
    """Return the name under which PEFT loads the base: the user's, unless it names a run, a Megatron checkpoint, or a
    multimodal model that is gone."""
    name = base.config.get("model.name", {}).get("value")
    local = user_path(name) if name else None
    is_base = base.origin is not None and whole_model(base) is None
    unread = local is not None and local.is_dir() and not (local / "config.json").is_file()
    return str(base.directory) if is_base or unread or not name else name


def in_whole(pairs: Mapping[str, _T], text: Path, whole: Path) -> tuple[dict[str, _T], list[str]]:
    """Return `pairs` by the linear layers of the `whole` model instead of its `text` part, and the whole model's
    tensors. Raises InputError for a layer that the whole model does not have."""
    from torch import nn

    path_in_body, (path, inner) = body_path(meta_model(text, None)), text_path(whole)
    modules = {f"{path}.{module.removeprefix(f'{path_in_body}.')}": pair for module, pair in pairs.items()}
    linear = {name for name, module in inner.named_modules() if isinstance(module, nn.Linear)}
    if lost := sorted(modules.keys() - linear):
        raise InputError(
            f"--adapter-only: transformers' {type(inner).__name__} has no linear layer {lost[0]}, so PEFT cannot put "
            f"the adapters onto {whole}.",
            "Leave --adapter-only out: the adapters are then merged, and --into writes the whole model.",
        )
    return modules, [name for name, _ in inner.named_parameters()]


def named_for_peft(pairs: Mapping[str, tuple[Any, Any]], dtype: str) -> dict[str, Any]:
    return {
        f"{PREFIX}{module}.lora_{which}.weight": value.to(dtype_of(dtype)).contiguous()
        for module, pair in pairs.items()
        for which, value in zip("AB", pair, strict=True)
    }


def targets(
    modules: Collection[str], tensors: Collection[str], *, experts: bool = False
) -> tuple[list[str], list[str]]:
    """Return PEFT's `target_modules` (last name parts if unambiguous, else whole names) and `target_parameters`, which
    hold the modules whose names PEFT gives to routed `experts`."""
    taken = [module for module in modules if experts and module.rpartition(".")[2] in EXPERT_NAMES]
    linear = set(modules) - {*taken}
    ends = {module.rpartition(".")[2] for module in linear}
    others = {name.removesuffix(".weight") for name in tensors} - linear
    clear = not any(other.rpartition(".")[2] in ends for other in others)
    return sorted(ends if clear else linear), sorted(f"{module}.weight" for module in taken)


def adapter_config(base: Base, modules: list[str], parameters: Collection[str] = ()) -> dict[str, Any]:
    def value(key: str) -> Any:
        return base.config.get(key, {}).get("value")

    name = base_name(base)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": value("model.revision") if name == value("model.name") else None,
        "r": value("training.lora.rank"),
        "lora_alpha": value("training.lora.alpha"),
        "lora_dropout": 0.0,
        "target_modules": modules,
        **({"target_parameters": [*parameters]} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
