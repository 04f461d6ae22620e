"""LoRA (arXiv 2106.09685): low-rank adapters on frozen linear layers, under tensor, sequence and pipeline parallelism.

W' = W + alpha / rank * B A. In a column-parallel layer B is split with its rows and A is whole on every rank; in a
row-parallel layer A is split with its columns and B is whole. Only [tokens, rank] crosses ranks for an adapter.

Shapes: r rank, O outputs, I inputs of a layer, T tokens.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as tp
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from rlctl.backends.megatron.modules import normed_output
from rlctl.config.schema import LoraConfig
from rlctl.errors import ConfigError

MODULES = {
    "attention": ("linear_qkv", "linear_q_up_proj", "linear_kv_up_proj", "linear_q_proj", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2"),
}
"""Layers behind each of `training.lora.targets`. MLA's down-projections and routed experts keep their base weights."""


class Adapted:
    """The common part of both kinds of adapted layer. With `adapting` off the base layer is computed."""

    lora_a: nn.Parameter  # [r, I], or its columns on this rank
    lora_b: nn.Parameter  # [O, r], or its rows on this rank
    scale: float
    adapting: bool = True
    split: ClassVar[dict[str, int]]
    """Parameter -> the dimension that is split over tensor-parallel ranks."""

    def merged(self) -> Tensor:
        """This rank's part of W'."""
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        return torch.addmm(weight.detach(), self.lora_b.detach(), self.lora_a.detach(), alpha=self.scale)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """As the base layer's, with the adapters split as they are."""
        found = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),  # type: ignore[attr-defined]
            prefix,
            self.split,
            sharded_offsets,
            tp_group=self.tp_group,  # type: ignore[attr-defined]
            dp_cp_group=metadata["dp_cp_group"],
        )
        key = f"{prefix}lora_b"
        if prefix.endswith("linear_fc1."):  # gate and up are split each, as Megatron does it for the weight
            found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets)
        return found


class AdaptedColumn(Adapted, ColumnParallelLinear):
    """Splits its outputs; its input is whole, or a part of the sequence."""

    split: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0, "lora_b": 0}

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_, *args, **kwargs)
        if not self.adapting:
            return out, bias
        inner_Tr = F.linear(input_, self.lora_a)
        if self.sequence_parallel:
            inner_Tr = tp.gather_from_sequence_parallel_region(inner_Tr, group=self.tp_group)
        else:
            inner_Tr = tp.copy_to_tensor_model_parallel_region(inner_Tr, group=self.tp_group)
        return out + self.scale * F.linear(inner_Tr, self.lora_b), bias


class AdaptedRow(Adapted, RowParallelLinear):
    """Splits its inputs; its output is whole, or a part of the sequence."""

    split: ClassVar[dict[str, int]] = {"weight": 1, "lora_a": 1}

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        out, bias = super().forward(input_)
        if not self.adapting:
            return out, bias
        inner_Tr = F.linear(input_, self.lora_a)
        if self.sequence_parallel:
            inner_Tr = tp.reduce_scatter_to_sequence_parallel_region(inner_Tr, group=self.tp_group)
        else:
            inner_Tr = tp.reduce_from_tensor_model_parallel_region(inner_Tr, group=self.tp_group)
        return out + self.scale * F.linear(inner_Tr, self.lora_b), bias


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    normed_output(RowParallelLinear): normed_output(AdaptedRow),  # the norm is of the sum of both
}
"""Layers that take adapters, and what they become."""


def adapt(model: Any, lora: LoraConfig, seed: int) -> None:
    """Freeze a model chunk and put adapters on the targets, A uniform and B 0. Raises ConfigError where a
    target is a layer of another kind."""
    model.requires_grad_(False)
    names = {name for target in lora.targets for name in MODULES[target]}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in names or getattr(module, "is_expert", False):
            continue
        if type(module) not in ADAPTED:
            raise ConfigError(
                f"training.lora: {name} is a {type(module).__name__}, which adapters do not cover.",
                "Leave its group out of training.lora.targets, or train all weights.",
            )
        module.__class__ = ADAPTED[type(module)]  # whatever layer spec built it
        _attach(module, lora, zlib.crc32(f"{seed} {global_name(model, name)}".encode()))
    # Recomputation only records what some input needs a gradient for, and the frozen embedding's output does not.
    if getattr(model, "embedding", None) is not None:
        model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


def _attach(module: Any, lora: LoraConfig, seed: int) -> None:
    weight, split = module.weight, module.split
    generator = torch.Generator().manual_seed(seed)  # the whole of A on every rank, so that no layout changes it
    bound = 1 / math.sqrt(module.input_size)
    whole_rI = torch.empty(lora.rank, module.input_size).uniform_(-bound, bound, generator=generator)
    size, rank = module.tp_group.size(), module.tp_group.rank()
    a = whole_rI.chunk(size, 1)[rank] if "lora_a" in split else whole_rI
    module.lora_a = nn.Parameter(a.to(weight).contiguous())
    module.lora_b = nn.Parameter(weight.new_zeros(weight.shape[0], lora.rank))
    module.scale = lora.alpha / lora.rank
    for name in ("lora_a", "lora_b"):
        param = getattr(module, name)
        if name in split:
            tp.set_tensor_model_parallel_attributes(param, True, split[name], 1)
        else:  # each rank sees its part of the sequence: gradients add up
            param.sequence_parallel = module.sequence_parallel


def core_of(chunk: Any) -> Any:
    """The GPTModel of a model chunk, inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def global_name(core: Any, name: str) -> str:
    """A module's or parameter's name with layers counted over the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(core.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


@contextlib.contextmanager
def base_weights(models: list[nn.Module]) -> Iterator[None]:
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

    def __init__(self, plain: Mapping[str, Tensor], adapted: Mapping[str, Adapted]) -> None:
        self._plain, self._adapted = plain, adapted
        self.computed = frozenset(adapted)
        """Names whose tensors are made anew each time, and are no live memory."""
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._adapted:
            return self._plain[name]
        if self._last is None or self._last[0] != name:
            self._last = name, self._adapted[name].merged()
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)
