"""Checkpoints of runs that train adapters (`training.lora`): the adapters, merged into the weights that the run began
with as these are read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.base import Base
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.weights import torch_dist as keys
from rlctl.weights.layout import Box, Layout, ParamSpec
from rlctl.weights.transforms import MergeLora, Stored

if TYPE_CHECKING:
    import torch

    from rlctl.checkpoints.stream import Source
    from rlctl.checkpoints.torch_dist import TorchDistReader

A, B = ".lora_a", ".lora_b"


def adapter_keys(shapes: Collection[str]) -> list[str]:
    """The keys of a checkpoint that are adapters of the model (not their optimizer's)."""
    return [key for key in shapes if key.startswith("decoder.") and key.endswith((A, B))]


def scale_of(base: Base) -> float:
    """What the adapters of a run count: alpha / rank. Raises InputError where its manifest does not say."""
    try:
        return base.config["training.lora.alpha"]["value"] / base.config["training.lora.rank"]["value"]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        hint = "Name the run that trained them, or a checkpoint inside of it."
        raise InputError("The checkpoint holds adapters, but its run's manifest says nothing of them.", hint) from error


@dataclass(frozen=True)
class Adapters:
    """The adapters of published tensors: A [rank, inputs] and B [outputs, rank] by tensor."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    def onto(self, layout: Layout) -> Layout:
        """A layout of the base's weights, read with the adapters merged."""
        pieces = tuple(
            replace(piece, transforms=(self._merge(piece.tensor), *piece.transforms))
            if piece.tensor in self.pairs
            else piece
            for piece in layout.pieces
        )
        own = {
            name: ParamSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self._params().items()
        }
        return Layout(layout.rank, layout.params | own, pieces, layout.fills)

    def _merge(self, tensor: str) -> Stored:
        return Stored(MergeLora(tensor + A, tensor + B, self.scale))

    def beside(self, source: Source) -> Source:
        """The base's source with the adapters in it."""
        return _Beside(source, self._params())

    def _params(self) -> dict[str, torch.Tensor]:
        pairs = self.pairs.items()
        return {tensor + A: a for tensor, (a, _) in pairs} | {tensor + B: b for tensor, (_, b) in pairs}


@dataclass(frozen=True)
class _Beside:
    base: Source
    own: dict[str, torch.Tensor]

    def read(self, param: str) -> torch.Tensor:
        return self.own[param] if param in self.own else self.base.read(param)

    def drop(self, param: str) -> None:
        if param not in self.own:
            self.base.drop(param)


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
        lead, tensor_rows, tensor_columns = _place(piece.param_box), piece.tensor_box[0], piece.tensor_box[1]
        a, b = whole[layer + A][lead], whole[layer + B][lead]
        rows, columns = piece.param_box[-2:]
        if b.shape[0] < rows.last + 1 or a.shape[1] != layout.params[piece.param].shape[-1]:
            raise InputError(f"{reader.directory}: {layer}{A} is of another shape than the model's layer.")
        own_a, own_b = pairs.setdefault(
            piece.tensor, (a.new_zeros(a.shape), b.new_zeros(_rows(layout, piece.tensor), b.shape[1]))
        )
        own_a[:, _slice(tensor_columns)] = a[:, _slice(columns)]
        own_b[_slice(tensor_rows)] = b[_slice(rows)]
    _refuse_unknown(reader, layout, wanted)
    return Adapters(pairs, scale)


def _whole(reader: TorchDistReader, key: str) -> torch.Tensor:
    import torch

    parts = reader.chunks(key)
    out = torch.empty(reader.shapes[key].shape, dtype=reader.read(parts[0]).dtype)
    for chunk in parts:
        out[tuple(_slice(span) for span in chunk.box)] = reader.read(chunk)
    return out


def _place(box: Box) -> tuple[int, ...]:
    """Indices of the leading axes: the layer, where layers are stacked."""
    return tuple(span.start for span in box[:-2])


def _slice(span: Any) -> slice:
    return slice(span.start, span.last + 1, span.step)


def _rows(layout: Layout, tensor: str) -> int:
    return max(piece.tensor_box[0].last for piece in layout.by_tensor[tensor]) + 1


def _refuse_unknown(reader: TorchDistReader, layout: Layout, wanted: list[str]) -> None:
    """An adapter that belongs to no layer would be lost."""
    for key in wanted:
        if f"{key.rpartition('.')[0]}.weight" not in layout.params:
            raise InputError(f"{reader.directory}: {key} belongs to no layer of this model.")
