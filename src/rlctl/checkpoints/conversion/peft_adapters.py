"""Adapters of a run (`training.lora`) as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlctl.checkpoints.conversion.hf_megatron import Options, Report, require_undamaged
from rlctl.checkpoints.conversion.peft_tensors import module_of
from rlctl.checkpoints.conversion.run_tokenizer import take_tokenizer_of_run
from rlctl.checkpoints.hf.hf_files import ADAPTERS as CONFIG
from rlctl.checkpoints.hf.hf_model import without_absent_mtp
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.peft_files import PREFIX, WEIGHTS
from rlctl.checkpoints.hf.text_config import has_text_part
from rlctl.checkpoints.hf.transformers_model import body_path, meta_model, text_path
from rlctl.checkpoints.megatron.lora_weights import Pairs, adapter_keys, of_site, read_adapters, settings_of
from rlctl.checkpoints.megatron.megatron_directory import Base, base_of, find
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader
from rlctl.checkpoints.model_files import ModelFiles, as_files
from rlctl.checkpoints.staging import locked, require_replaceable, staged
from rlctl.config.files import user_path
from rlctl.errors import InputError, VerificationError
from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import Role
from rlctl.settings.training import LoraConfig
from rlctl.weights.adapter_sites import HEAD_NAME, Site, sites
from rlctl.weights.dtensor import module_layout, param_names
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
    lora = settings_of(base)
    adapters = read_adapters(reader, without_absent_mtp(facts, reader.shapes), lora)
    others: Collection[str] = param_names(facts).values()
    adapted = {site.module: (pair, site) for site, pair in _by_site(adapters.pairs, facts, lora)}
    if (whole := whole_model(base)) is not None:
        options.tell(f"the adapters are named for {base_name(base)}, whose text part the run trained")
        if adapters.whole:
            raise InputError(
                "--adapter-only: modules_to_save of a multimodal model's text part are not named for the whole model.",
                "Leave --adapter-only out: the adapters are then merged, and --into writes the whole model.",
            )
        adapted, others = in_whole(adapted, base.directory, whole)
    places = {name: site.place for name, (_, site) in adapted.items()}
    linear = [name for name, place in places.items() if not place.is_expert and place.role is not Role.ROUTER]
    modules, parameters = targets(linear, others, experts=facts.moe is not None)
    parameters += [f"{name}.weight" for name, place in places.items() if place.role is Role.ROUTER]  # no linear layers
    stacks = [name for name, place in places.items() if place.is_expert]
    config = adapter_config(base, modules, [*parameters, *stacks])
    for key, usual in (("rank", lora.rank), ("alpha", lora.alpha)):
        numbers = {_target(name, parameters): getattr(site, key) for name, (_, site) in adapted.items()}
        config[f"{key}_pattern"] = patterns(numbers, usual)
    pairs = {module_of(name, stacks): pair for name, (pair, _) in adapted.items()}
    tensors = named_for_peft(pairs, dtype) | _named_whole(adapters.whole, facts, dtype)
    if adapters.whole:
        config |= {"modules_to_save": [_module(key) for key in tensors if ".lora_" not in key]}
        config |= {"ensure_weight_tying": facts.tied_embeddings}
    sources = (megatron.root, megatron.shards, base.directory)
    finish = partial(take_tokenizer_of_run, megatron, tell=options.tell)
    return write_adapter(destination, tensors, config, sources, options, finish)


def _named_whole(whole: Mapping[str, Any], facts: ModelFacts, dtype: str) -> dict[str, Any]:
    """Return modules that were trained whole as PEFT names them; a tied embedding is also the head."""
    params = param_names(facts)
    named = {f"{PREFIX}{params[tensor]}": value.to(dtype_of(dtype)) for tensor, value in whole.items()}
    tied = {f"{PREFIX}{HEAD_NAME}.weight": value.clone() for value in named.values()} if facts.tied_embeddings else {}
    return named | tied


def _module(key: str) -> str:
    """Return the last part of the name of a module that PEFT saves whole."""
    return key.removesuffix(".weight").rpartition(".")[2]


def _by_site(pairs: Pairs, facts: ModelFacts, lora: LoraConfig) -> Iterator[tuple[Site, tuple[Any, Any]]]:
    """Yield A and B of each site in PEFT's shapes: of E experts A [E r, I] and B [O, r E]."""
    layout = module_layout(facts, "float32")
    for site in sites(facts, lora).all:
        a, b = of_site(site, pairs, layout)
        if site.place.is_expert:
            a, b = a.flatten(0, 1), b.flatten(1, -2).permute(1, 2, 0).flatten(1)
        yield site, (a, b)


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


def _target(module: str, parameters: Collection[str]) -> str:
    """Return the name that PEFT's patterns match: a parameter's, if it is one of `target_parameters`."""
    return f"{module}.weight" if f"{module}.weight" in parameters else module


def patterns(values: Mapping[str, float], usual: float) -> dict[str, float]:
    """Return PEFT's rank_pattern or alpha_pattern: numbers other than the `usual` one, by last name parts where all
    targets of that name have the number, else by whole names. PEFT matches a parameter's name, and vLLM (0.32) its
    module's."""
    by_end: dict[str, set[float]] = {}
    for name, value in values.items():
        by_end.setdefault(_end(name), set()).add(value)
    return {
        _pattern(_end(name) if len(by_end[_end(name)]) == 1 else name): value
        for name, value in values.items()
        if value != usual
    }


def _pattern(name: str) -> str:
    module = name.removesuffix(".weight")
    return re.escape(module) + (r"(\.weight)?" if module != name else "")


def _end(name: str) -> str:
    """Return the last part of a module's name, or the last parts of a parameter's with its module's parent: other
    modules have the same last part."""
    return ".".join(name.split(".")[-3 if name.endswith(".weight") else -1 :])


def adapter_config(base: Base, modules: list[str], parameters: Collection[str] = ()) -> dict[str, Any]:
    def value(key: str) -> Any:
        return base.config.get(key, {}).get("value")

    name, lora = base_name(base), settings_of(base)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": value("model.revision") if name == value("model.name") else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        **({"target_parameters": [*parameters]} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "inference_mode": True,
    }
