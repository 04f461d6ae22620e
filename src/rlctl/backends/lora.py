"""LoRA (arXiv 2106.09685), as far as it is the same whatever backend trains: where adapters are, how they begin, merged
weights for refits, and the model without them.

W' = W + alpha / rank * B A. Parts of a layer that Megatron fuses (q, k and v; gate and up) share one A in every
backend, so that a run can go on under another.

Shapes: r rank, O outputs, I inputs of a layer.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from rlctl.config.schema import LoraConfig
from rlctl.errors import ConfigError

LAYERS = {
    "attention": ("linear_qkv", "linear_q_up_proj", "linear_kv_up_proj", "linear_q_proj", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2"),
}
"""Layers behind each of `training.lora.targets`, by Megatron's names. MLA's down-projections and routed experts keep
their base weights."""


class Adapted:
    """The common part of adapted layers. With `adapting` off the base layer is computed."""

    lora_a: nn.Parameter  # [r, I], or this rank's part
    lora_b: nn.Parameter  # [O, r], or this rank's part
    scale: float
    adapting: bool = True


def takes_adapter(layer: str, lora: LoraConfig) -> bool:
    """Whether a layer has adapters, by the last word of Megatron's name."""
    return any(layer in LAYERS[target] for target in lora.targets)


def require_kind(name: str, module: nn.Module, known: Iterable[type]) -> None:
    """Raise ConfigError where a layer is of a class that adapters do not cover."""
    if type(module) not in known:
        raise ConfigError(
            f"training.lora: {name} is a {type(module).__name__}, which adapters do not cover.",
            "Leave its group out of training.lora.targets, or train all weights.",
        )


def first_a(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """[r, I]: the A that a layer begins with, uniform, the whole of it on every rank, so that no layout changes it.
    `name` is Megatron's, with layers counted over the whole model."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


@contextlib.contextmanager
def base_weights(models: Iterable[nn.Module]) -> Iterator[None]:
    """Compute without adapters: the model that training began with."""
    adapted = [module for model in models for module in model.modules() if isinstance(module, Adapted)]
    try:
        for module in adapted:
            module.adapting = False
        yield
    finally:
        for module in adapted:
            module.adapting = True


class MergedParameters(Mapping[str, Tensor]):
    """A rank's parameters as a model without adapters has them; an adapted weight is merged when it is asked for, and
    only the last one is kept."""

    def __init__(self, plain: Mapping[str, Tensor], adapted: Mapping[str, Callable[[], Tensor]]) -> None:
        """`adapted` has for each adapted weight what merges it."""
        self._plain, self._adapted = plain, adapted
        self.computed = frozenset(adapted)
        """Names whose tensors are made anew each time, and are no live memory."""
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapted:
            return self._plain[name]
        if self._last is None or self._last[0] != name:
            self._last = name, self._adapted[name]()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)
