"""Checkpoints of runs that train adapters (`training.lora`), merged into the weights that the run began with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlctl.checkpoints.megatron.megatron_directory import Base
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.weights import torch_dist as keys
from rlctl.weights.layout import Layout, ParamSpec, Span
from rlctl.weights.transforms import MergeLora, ReadThrough

if TYPE_CHECKING:
    import torch

    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

A, B = ".lora_a", ".lora_b"


def adapter_keys(shapes: Collection[str]) -> list[str]:
    """The keys of a checkpoint that are adapters of the model (not their optimizer's)."""
    return [key for key in shapes if key.startswith("decoder.") and key.endswith((A, B))]


def scale_of(base: Base) -> float:
    """The scale of a run's adapters: alpha / rank. Raises InputError where its manifest does not say."""
    try:
        return base.config["training.lora.alpha"]["value"] / base.config["training.lora.rank"]["value"]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        hint = "Name the run that trained them, or a checkpoint inside of it."
        raise InputError("The checkpoint holds adapters, but its run's manifest says nothing of them.", hint) from error


@dataclass(frozen=True)
class Adapters:
    """The adapters of published tensors, as a source: A [rank, inputs] and B [outputs, rank] by tensor."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    def onto(self, layout: Layout) -> Layout:
        """A layout of the base's weights, read with the adapters merged."""
        merges = {tensor: ReadThrough(MergeLora(tensor + A, tensor + B, self.scale)) for tensor in self.pairs}
        pieces = (
            replace(p, transforms=(merges[p.tensor], *p.transforms)) if p.tensor in merges else p for p in layout.pieces
        )
        own = {
            name: ParamSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self.params.items()
        }
        return Layout(layout.rank, layout.params | own, tuple(pieces), layout.fills)

    @cached_property
    def params(self) -> dict[str, torch.Tensor]:
        pairs = self.pairs.items()
        return {tensor + A: a for tensor, (a, _) in pairs} | {tensor + B: b for tensor, (_, b) in pairs}

    def read(self, param: str) -> torch.Tensor:
        return self.params[param]

    def drop(self, param: str) -> None:
        pass


def read_adapters(reader: TorchDistReader, facts: ModelFacts, scale: float) -> Adapters:
    """Megatron's adapters, of fused matrices, as adapters of the published tensors.

    Raises InputError for an adapter of a layer that the model does not have, or one of another shape.
    """
    layout = keys.layout(facts, "float32", keys.style_of(reader.shapes), holds=lambda key: True)
    wanted = adapter_keys(reader.shapes)
    whole = {key: _whole(reader, key) for key in wanted}
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for piece in layout.pieces:
        layer = piece.param.removesuffix(".weight")
        if layer + A not in whole or piece.param == layer:
            continue
        lead = tuple(span.start for span in piece.param_box[:-2])  # the layer, where layers are stacked
        tensor_rows, tensor_columns = piece.tensor_box
        a, b = whole[layer + A][lead], whole[layer + B][lead]
        rows, columns = piece.param_box[-2:]
        if b.shape[0] < rows.last + 1 or a.shape[1] != layout.params[piece.param].shape[-1]:
            raise InputError(f"{reader.directory}: {layer}{A} is of another shape than the model's layer.")
        outputs = max(one.tensor_box[0].last for one in layout.by_tensor[piece.tensor]) + 1
        own_a, own_b = pairs.setdefault(piece.tensor, (a.new_zeros(a.shape), b.new_zeros(outputs, b.shape[1])))
        own_a[:, _slice(tensor_columns)] = a[:, _slice(columns)]
        own_b[_slice(tensor_rows)] = b[_slice(rows)]
    for key in wanted:  # an adapter that belongs to no layer would be lost
        if f"{key.rpartition('.')[0]}.weight" not in layout.params:
            raise InputError(f"{reader.directory}: {key} belongs to no layer of this model.")
    return Adapters(pairs, scale)


def _whole(reader: TorchDistReader, key: str) -> torch.Tensor:
    import torch

    parts = reader.chunks(key)
    out = torch.empty(reader.shapes[key].shape, dtype=reader.read(parts[0]).dtype)
    for chunk in parts:
        out[tuple(_slice(span) for span in chunk.box)] = reader.read(chunk)
    return out


def _slice(span: Span) -> slice:
    return slice(span.start, span.last + 1, span.step)
