"""Linear layers of quantized bases, packed in memory and dequantized for each product, forward and backward.

Shapes: O outputs, I inputs, r rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.packed_matrix import PackedMatrix
from rlctl.errors import ConfigError, InputError
from rlctl.models.facts import ModelFacts
from rlctl.models.quantized_base import packed_tensors
from rlctl.weights.dtensor import module_name


class PackedLinear(nn.Linear):
    """A frozen linear layer without `weight`."""

    bits: int
    codes: Tensor
    zeros: Tensor
    scales: Tensor

    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.bits, self.codes, self.zeros, self.scales)

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.matrix(), self.bias)


class _Product(torch.autograd.Function):
    """input @ weight.T + bias, with the weight dequantized in either direction and never kept."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return F.linear(input, matrix.dequantized(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad @ ctx.matrix.dequantized(), None, None


def pack_layers(inner: Any, facts: ModelFacts, dtype: torch.dtype) -> None:
    """Make packed layers of a model without memory; `dtype`: the scales'. Raises ConfigError for another class."""
    base = facts.quantized
    for tensor, (outputs, inputs) in packed_tensors(facts).items():
        assert base is not None
        name = module_name(tensor).removesuffix(".weight")
        module: Any = inner.get_submodule(name)
        if type(module) is not nn.Linear:
            raise ConfigError(
                f"model.name: {name} is packed and a {type(module).__name__}, for which there is no packed form.",
                "Use the same model without quantization.",
            )
        groups = inputs // base.group if base.group else 1
        del module.weight
        module.__class__ = PackedLinear
        packed: Any = module
        packed.bits = base.bits
        for buffer, shape, kind in (
            ("codes", (outputs, inputs * base.bits // 32), torch.int32),
            ("zeros", (outputs, groups), torch.uint8),
            ("scales", (outputs, groups), dtype),
        ):
            module.register_buffer(buffer, torch.empty(shape, dtype=kind, device="meta"))


def packed_layers(inner: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in inner.named_modules() if isinstance(module, PackedLinear)}


@torch.no_grad()
def load_packed(inner: nn.Module, directory: Path) -> None:
    """Fill the packed layers from a published directory. Raises InputError for a layer that is not packed there."""
    layers = packed_layers(inner)
    model = open_hf_model(directory)
    tensors = {module_name(name): name for name in model.layout.params}
    for name in sorted(layers, key=lambda name: model.source.place(tensors[f"{name}.weight"])):
        tensor, layer = tensors[f"{name}.weight"], layers[name]
        if tensor not in model.source.layers:
            raise InputError(
                f"{directory}: tensor {tensor} is not packed, but config.json says that all linear layers are, except "
                "those that it names.",
                "Correct quantization_config, or download the model again.",
            )
        matrix = model.source.layers.read(tensor)
        for buffer, values in ((layer.codes, matrix.codes), (layer.zeros, matrix.zeros), (layer.scales, matrix.scales)):
            buffer.copy_(values)
        model.source.drop(tensor)
