"""Several PEFT adapters as one, and adapters merged into their base model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import copysign, sqrt
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlctl.checkpoints.conversion.exported import exported_base
from rlctl.checkpoints.conversion.hf_megatron import Options, Report, write_exported
from rlctl.checkpoints.conversion.peft_adapters import write_adapter
from rlctl.checkpoints.conversion.peft_tensors import adapters_of_tensors, module_of, target_of
from rlctl.checkpoints.conversion.stream import Beside
from rlctl.checkpoints.hf.hf_files import ADAPTERS
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.hf.peft_files import PREFIX, WEIGHTS, PeftConfig, dtype_in, read_pairs
from rlctl.checkpoints.identity import file_digest
from rlctl.checkpoints.megatron.lora_weights import SavedAdapters
from rlctl.checkpoints.megatron.megatron_directory import Base
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.errors import InputError
from rlctl.weights.adapter_sites import places
from rlctl.weights.plan_execution import dtype_of
from rlctl.weights.transfer_plan import SingleWorld

Combination = Literal["cat", "linear"]


@dataclass(frozen=True)
class Weighted:
    """An adapter and its weight in a combination."""

    adapter: PeftConfig
    weight: float = 1.0

    def digest(self) -> list[Any]:
        """Return the content of the files, and the weight."""
        files = (self.adapter.directory / name for name in (ADAPTERS, WEIGHTS))
        return [*map(file_digest, files), self.weight]


def merge_into_base(
    parts: Sequence[Weighted], base: ModelFiles, destination: Path, options: Options | None = None
) -> Report:
    """Write the base model with sum of weight * scale * B A added to its matrices, in float32, rounded once to the
    base's precision. Raises InputError for adapters of another model, else like `hf_to_megatron`."""
    options = options or Options()
    if base.megatron is not None:
        raise InputError(f"{base.label} is a Megatron checkpoint.", "Name a Hugging Face directory or a hub name.")
    under = exported_base(
        Base(base.directory, base.directory, {}), options.dtype or open_hf_model(base.directory).dtype
    )
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for part in parts:
        adapters = adapters_of_tensors(part.adapter, under.facts, base.directory, base.origin)
        for tensor, pair in adapters.items():
            pairs[tensor].append((pair.a.float(), pair.b.float() * (pair.scale * part.weight)))
    summed = {
        tensor: (torch.cat([a for a, _ in each], -2), torch.cat([b for _, b in each], -1))
        for tensor, each in pairs.items()
    }
    merges = SavedAdapters(
        summed,
        dict.fromkeys(summed, 1.0),
        transposed=frozenset(tensor for place in places(under.facts) if place.transposed for tensor in place.tensors),
    )
    made = replace(
        under,
        world=SingleWorld(merges.onto(under.world.layout(0))),
        source=Beside(under.source, merges, merges.params),
        rounding="nearest",
    )
    conversion = {"base": base.fingerprint(), "adapters": [part.digest() for part in parts], "dtype": options.dtype}
    sources = (base.directory, *(part.adapter.directory for part in parts))
    published = open_hf_model(base.directory).published(made.dtype)
    return write_exported(made, destination, options, conversion, sources, published)


def combine(
    parts: Sequence[Weighted], destination: Path, combination: Combination = "cat", options: Options | None = None
) -> Report:
    """Write one adapter of several, with alpha = rank (scale 1). `cat` stacks ranks, and adds weight * scale * B A
    exactly; `linear` adds A and B at the rank of the parts, as PEFT's `add_weighted_adapter` does. Raises InputError
    for different bases or, with `linear`, ranks."""
    options = options or Options()
    first = parts[0].adapter
    if other := next((part.adapter for part in parts if part.adapter.base != first.base), None):
        raise InputError(
            f"{first.label} is an adapter of {first.base}, and {other.label} of {other.base}.",
            "Adapters of one model have one base; if both names mean it, change base_model_name_or_path of one.",
        )
    if combination == "linear" and len(ranks := {part.adapter.rank for part in parts}) > 1:
        raise InputError(
            f"--combine linear adds adapters of one rank, and these have {', '.join(map(str, sorted(ranks)))}.",
            "Use --combine cat, whose rank is the sum.",
        )
    factors: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for part in parts:
        for target, pair in _scaled(part, combination):
            factors[target].append(pair)
    summed = {target: _combined(each, combination) for target, each in factors.items()}
    rank = max(a.shape[1] for a, _ in summed.values())
    dtype = dtype_of(options.dtype or dtype_in(first))
    tensors = {
        f"{PREFIX}{module_of(target, summed)}.lora_{which}.weight": value.to(dtype).contiguous()
        for target, pair in summed.items()
        for which, value in zip("AB", _padded(*pair, rank), strict=True)
    }
    parameters = {target for target in summed if module_of(target, summed) != target}
    config = {
        **first.values,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(summed.keys() - parameters),
        "target_parameters": sorted(parameters) or None,
        **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern")),
        **{"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "lora_dropout": 0.0, "inference_mode": True},
    }
    return write_adapter(destination, tensors, config, tuple(part.adapter.directory for part in parts), options)


def _scaled(part: Weighted, combination: Combination) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield by target A [E, r, I] and B [O, r, E], which contain the part's weight and scale: A alone, or with
    `linear` each half of them (PEFT 0.21.2)."""
    stored = read_pairs(part.adapter)
    for module, (a, b) in stored.items():
        target = target_of(module, stored, part.adapter)
        weight, experts = part.weight * part.adapter.scale_of(target), a.shape[0] // part.adapter.rank_of(target)
        root = sqrt(abs(weight))
        of_a, of_b = (weight, 1.0) if combination == "cat" else (copysign(root, weight), root)
        yield target, (of_a * a.float().unflatten(0, (experts, -1)), of_b * b.float().unflatten(1, (-1, experts)))


def _combined(each: Sequence[tuple[Tensor, Tensor]], combination: Combination) -> tuple[Tensor, Tensor]:
    """Return A [E, r, I] and B [O, r, E]."""
    if combination == "cat":
        return torch.cat([a for a, _ in each], 1), torch.cat([b for _, b in each], 1)
    return torch.stack([a for a, _ in each]).sum(0), torch.stack([b for _, b in each]).sum(0)


def _padded(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A [E * rank, I] and B [O, rank * E] with zeros up to the rank, so that all modules have one."""
    missing = rank - a.shape[1]
    return pad(a, (0, 0, 0, missing)).flatten(0, 1), pad(b, (0, 0, 0, missing)).flatten(1)
