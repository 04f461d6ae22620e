"""Adapters on Megatron's layers, under tensor, sequence and pipeline parallelism.

Column-parallel layers split B by rows and replicate A; row-parallel layers split A by columns and replicate B. Only
[tokens, rank] crosses ranks.

Shapes: r rank, T tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as tp
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from rlctl.backends.lora_adapter import Adapted, first_a, is_excluded, require_kind, takes_adapter
from rlctl.backends.megatron.modules import normed_output
from rlctl.settings.training import LoraConfig


class AdaptedParallel(Adapted):
    """The common part of both kinds of adapted layer."""

    split: ClassVar[dict[str, int]]
    """Parameter -> the dimension that is split over tensor-parallel ranks."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """As the base layer's, with the adapters split as they are."""
        tensors = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),  # type: ignore[attr-defined]
            prefix,
            self.split,
            sharded_offsets,
            tp_group=self.tp_group,  # type: ignore[attr-defined]
            dp_cp_group=metadata["dp_cp_group"],
        )
        key = f"{prefix}lora_b"
        if prefix.endswith("linear_fc1."):  # gate and up are split separately, like the weight in Megatron
            tensors[key] = apply_swiglu_sharded_factory(tensors[key], sharded_offsets)
        return tensors


class AdaptedColumn(AdaptedParallel, ColumnParallelLinear):
    """Splits its outputs; its input is whole, or a part of the sequence."""

    split: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0, "lora_b": 0}

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_, *args, **kwargs)
        if not torch.is_grad_enabled():
            return out, bias
        inner_Tr = F.linear(input_.detach(), self.lora_a)
        if self.sequence_parallel:
            inner_Tr = tp.gather_from_sequence_parallel_region(inner_Tr, group=self.tp_group)
        else:
            inner_Tr = tp.copy_to_tensor_model_parallel_region(inner_Tr, group=self.tp_group)
        return self.with_gradients(out, inner_Tr), bias


class AdaptedRow(AdaptedParallel, RowParallelLinear):
    """Splits its inputs; its output is whole, or a part of the sequence."""

    split: ClassVar[dict[str, int]] = {"weight": 1, "lora_a": 1}

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        out, bias = super().forward(input_)
        if not torch.is_grad_enabled():
            return out, bias
        inner_Tr = F.linear(input_.detach(), self.lora_a)
        if self.sequence_parallel:
            inner_Tr = tp.reduce_scatter_to_sequence_parallel_region(inner_Tr, group=self.tp_group)
        else:
            inner_Tr = tp.reduce_from_tensor_model_parallel_region(inner_Tr, group=self.tp_group)
        return self.with_gradients(out, inner_Tr), bias


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    normed_output(RowParallelLinear): normed_output(AdaptedRow),  # the norm is of the sum of both
}
"""Layers with adapters, and their replacement classes."""


def adapt(model: Any, lora: LoraConfig, seed: int) -> None:
    """Freeze a model chunk and add adapters (A uniform, B 0) to the targets. Raises ConfigError for unsupported
    targets."""
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if not takes_adapter(name.rpartition(".")[2], lora) or getattr(module, "is_expert", False):
            continue
        if is_excluded(global_name(model, name), lora):
            continue
        require_kind(name, module, ADAPTED)
        module.__class__ = ADAPTED[type(module)]  # for any layer spec
        _attach(module, lora, first_a(lora.rank, module.input_size, seed, global_name(model, name)))
    # Recomputation only records what some input needs a gradient for, and the frozen embedding's output does not.
    if getattr(model, "embedding", None) is not None:
        model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


def _attach(module: Any, lora: LoraConfig, whole_rI: Tensor) -> None:
    weight, split = module.weight, module.split
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
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def global_name(core: Any, name: str) -> str:
    """A module's or parameter's name with layers counted over the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(core.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)
