"""Adapters on linear layers of transformers' modules under FSDP2 and tensor parallelism. Layers that Megatron fuses
share one A. Adapters are parameters of the layer, so they are sharded with its weight.

Shapes: r rank, I inputs of a layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rlctl.backends.dtensor.packed_linear import PackedLinear
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.lora_adapter import Adapted, Adapter, first_a, is_excluded, require_kind, takes_adapter
from rlctl.checkpoints.hf.transformers_model import layers_path
from rlctl.errors import ConfigError
from rlctl.models.matrices import Role
from rlctl.settings.training import LoraConfig
from rlctl.weights.dtensor import DTensorWorld
from rlctl.weights.megatron_names import slot

MLP = re.compile(r"mlp|feed_?forward|ffn|ff_layer|(?<![a-z])fc_?\d", re.IGNORECASE)
"""Names and classes of MLPs in transformers. Other linear layers count as attention, for `training.lora.targets`."""
EXPERT = ".experts."


class AdaptedLinear(Adapted, nn.Linear):
    """A linear layer with adapters."""

    shared: str
    """Megatron's name of the layer that this one is a part of, whose parts share A."""
    called: bool = False
    """Whether the model has computed through it."""

    def forward(self, input: Tensor) -> Tensor:
        self.called = True
        out = super().forward(input)
        if not torch.is_grad_enabled():
            return out
        return self.with_gradients(out, F.linear(input.detach(), self.lora_a))


class AdaptedPackedLinear(PackedLinear, AdaptedLinear):
    """A packed layer with adapters."""

    def forward(self, input: Tensor) -> Tensor:
        self.called = True
        out = PackedLinear.forward(self, input)
        if self.bare:
            return out
        return out + self.scale * F.linear(F.linear(input, self.lora_a), self.lora_b)


def adapt(inner: Any, world: DTensorWorld, lora: LoraConfig) -> None:
    """Freeze a model without memory and add adapters to the targets. Raises ConfigError for unsupported or missing
    targets."""
    inner.requires_grad_(False)
    adapted: dict[type, type] = {nn.Linear: AdaptedLinear, PackedLinear: AdaptedPackedLinear}
    adapters = dict[str, nn.Parameter]()
    for name, shared in _targets(inner, world, lora):
        module = inner.get_submodule(name)
        require_kind(name, module, adapted)
        module.__class__ = adapted[type(module)]
        a = nn.Parameter(torch.empty(lora.rank, module.in_features, device="meta"))
        module.lora_a = adapters.setdefault(shared, a)
        module.lora_b = nn.Parameter(torch.empty(module.out_features, lora.rank, device="meta"))
        module.scale, module.shared = lora.alpha / lora.rank, shared
    if not adapters:
        raise ConfigError(
            f"training.lora: the model has none of the layers of training.lora.targets ({', '.join(lora.targets)}) "
            "as torch linear layers.",
            "Name others, or train all weights.",
        )


def _targets(inner: Any, world: DTensorWorld, lora: LoraConfig) -> Iterator[tuple[str, str]]:
    """Return (module, Megatron's name of its layer). Raises ConfigError if adapters would not match a published
    tensor."""
    together = _published_together(world) if world.facts.listed else set[str]()
    facts, layers = world.facts, re.compile(rf"{re.escape(layers_path(inner))}\.(\d+)\.(.+)\.weight")
    for name, role in world.roles.items():
        match = layers.fullmatch(name)
        if match is None or world.is_expert(name):
            continue
        module = name.removesuffix(".weight")
        if is_excluded(module, lora):
            continue
        if facts.listed:
            unknown = role is Role.OTHER or facts.vision is not None
            if unknown and EXPERT not in name and _is_wanted(inner, module, lora):
                if name in together:
                    raise ConfigError(
                        f"training.lora: {name} is published in one tensor with other weights, so that adapters on it "
                        "could not be exported.",
                        "Leave its group out of training.lora.targets, or train all weights.",
                    )
                yield module, module
            continue
        moe_layer = facts.is_moe_layer(int(match[1]))
        module_name = slot(role, "local", "sequential", mla=facts.mla is not None, moe_layer=moe_layer).name
        shared = module_name.removesuffix(".weight")
        if takes_adapter(shared.rpartition(".")[2], lora):
            yield module, f"decoder.layers.{match[1]}.{shared}"


def _published_together(world: DTensorWorld) -> set[str]:
    layout, counts = world.modules, Counter(piece.param for piece in world.modules.pieces)
    return {p.param for p in layout.pieces if counts[p.param] > 1 or len(layout.by_tensor[p.tensor]) > 1}


def _is_wanted(inner: Any, path: str, lora: LoraConfig) -> bool:
    """Whether a module of a family without a file is a target. Single-output layers are gates of shared experts."""
    module = inner.get_submodule(path)
    if type(module) is not nn.Linear or module.out_features == 1:
        return False
    below = path.removeprefix(layers_path(inner)).split(".")[2:]
    around = (".".join(path.split(".")[:-count]) for count in range(1, len(below)))
    words = [*below, *(type(inner.get_submodule(parent)).__name__ for parent in around)]
    return ("mlp" if any(map(MLP.search, words)) else "attention") in lora.targets


def require_called(inner: nn.Module) -> None:
    """Raise ConfigError for an adapter that a forward pass did not use, because a fused kernel bypasses its layer."""
    if missed := [name for name, layer in adapted_layers(inner).items() if not layer.called]:
        raise ConfigError(
            f"training.lora: transformers computes {missed[0]} without its linear layer, so that adapters on it would "
            "have no effect.",
            "Leave its group out of training.lora.targets, or train all weights.",
        )


def adapted_layers(inner: nn.Module) -> dict[str, AdaptedLinear]:
    return {name: module for name, module in inner.named_modules() if isinstance(module, AdaptedLinear)}


@torch.no_grad()
def begin(inner: nn.Module, world: DTensorWorld, rank: int, seed: int) -> None:
    """Give adapters their first values, A uniform and B 0."""
    shared = dict[str, nn.Parameter]()
    for name, layer in adapted_layers(inner).items():
        layer.lora_a = shared.setdefault(layer.shared, layer.lora_a)  # `to_empty` may have made several of one
        whole_rI = first_a(layer.lora_a.shape[0], layer.in_features, seed, layer.shared)
        set_part(world, rank, f"{name}.lora_a", layer.lora_a, whole_rI)
        local_part(layer.lora_b).zero_()


@torch.no_grad()
def set_part(world: DTensorWorld, rank: int, name: str, shard: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole adapter, or of one of its moments, into it."""
    box = world.adapter_box(name, tuple(whole.shape), rank)
    part = whole[tuple(slice(span.start, span.start + span.count) for span in box)]
    local_part(shard).copy_(part.to(shard.dtype))


def adapter_parameters(inner: nn.Module) -> dict[str, Tensor]:
    """Return A and B of each adapted layer; a shared A appears for each layer, so checkpoints can be read by layer."""
    return {
        f"{name}.{which}": getattr(layer, which)
        for name, layer in adapted_layers(inner).items()
        for which in ("lora_a", "lora_b")
    }


def adapters(inner: nn.Module, narrow: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Adapter]]:
    """Return adapted weights by name, merged as the model computes them (`narrow`); packed layers merge nothing.
    Collective: gathers A over FSDP2's shards."""
    gathered = dict[str, Tensor]()
    for name, layer in adapted_layers(inner).items():
        if "weight" not in layer._parameters:
            continue
        if layer.shared not in gathered:
            gathered[layer.shared] = narrow(_all_rows(layer.lora_a.detach()))
        weight, b = local_part(layer.weight.detach()), narrow(local_part(layer.lora_b.detach()))
        yield f"{name}.weight", Adapter(weight, gathered[layer.shared], b, layer.scale)


def _all_rows(a: Tensor) -> Tensor:
    if not isinstance(a, DTensor):
        return a
    mesh = a.device_mesh
    assert mesh.mesh_dim_names is not None
    places = [
        placement if axis == "tp" else Replicate()
        for axis, placement in zip(mesh.mesh_dim_names, a.placements, strict=True)
    ]
    return a.redistribute(placements=places).to_local()
