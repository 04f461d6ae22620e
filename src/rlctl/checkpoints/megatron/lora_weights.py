"""Checkpoints of adapter runs (`training.lora`), from any backend: adapters of published tensors, merged or placed in a
rank's layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlctl.checkpoints.megatron.megatron_directory import Base
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.settings.training import Rounding
from rlctl.weights import torch_dist as keys
from rlctl.weights.dtensor import param_names
from rlctl.weights.layout import Layout, ParamSpec, Piece, Span
from rlctl.weights.transforms import MergeLora, ReadThrough

if TYPE_CHECKING:
    import torch

    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

A, B = ".lora_a", ".lora_b"
MEGATRON, STATES = "decoder.", ("optimizer.", "chained_")
"""Key prefixes of Megatron's adapters and of optimizer states; others are transformers' modules."""


def adapter_keys(shapes: Collection[str]) -> list[str]:
    """The keys of a checkpoint that are adapters of the model (not their optimizer's)."""
    return [key for key in shapes if key.endswith((A, B)) and not key.startswith(STATES)]


def scale_of(base: Base) -> float:
    """The scale of a run's adapters: alpha / rank. Raises InputError where its manifest does not say."""
    try:
        return base.config["training.lora.alpha"]["value"] / base.config["training.lora.rank"]["value"]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        hint = "Name the run that trained them, or a checkpoint inside of it."
        raise InputError("The checkpoint holds adapters, but its run's manifest says nothing of them.", hint) from error


@dataclass(frozen=True)
class SavedAdapters:
    """The adapters of published tensors, as a source: A [rank, inputs] and B [outputs, rank] by tensor."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float
    dtype: str = "float32"
    rounding: Rounding = "nearest"
    """The compute dtype of the adapted layers, and the rounding of their base."""

    def onto(self, layout: Layout) -> Layout:
        """A layout of the base's weights, read with the adapters merged."""
        merges = {
            tensor: ReadThrough(MergeLora(tensor + A, tensor + B, self.scale, self.dtype, self.rounding))
            for tensor in self.pairs
        }
        pieces = (
            replace(p, transforms=(merges[p.tensor], *p.transforms)) if p.tensor in merges else p for p in layout.pieces
        )
        state = {
            name: ParamSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self.params.items()
        }
        return Layout(layout.rank, layout.params | state, tuple(pieces), layout.fills)

    def computed_in(self, dtype: str, rounding: Rounding) -> SavedAdapters:
        """These adapters as a model that computes in `dtype` multiplies by them."""
        from rlctl.weights.plan_execution import dtype_of
        from rlctl.weights.rounding import narrowed

        narrow = {
            tensor: (narrowed(a, dtype_of(dtype), rounding), narrowed(b, dtype_of(dtype), rounding))
            for tensor, (a, b) in self.pairs.items()
        }
        return replace(self, pairs=narrow, dtype=dtype, rounding=rounding)

    @cached_property
    def params(self) -> dict[str, torch.Tensor]:
        pairs = self.pairs.items()
        return {tensor + A: a for tensor, (a, _) in pairs} | {tensor + B: b for tensor, (_, b) in pairs}

    def read(self, param: str) -> torch.Tensor:
        return self.params[param]

    def drop(self, param: str) -> None:
        pass


def read_adapters(reader: TorchDistReader, facts: ModelFacts, scale: float = 1.0, prefix: str = "") -> SavedAdapters:
    """Return a checkpoint's adapters by published tensor; `prefix` reads one of Adam's moments instead. Raises
    InputError for an unknown layer."""
    adapters = adapter_keys(reader.shapes)
    whole = {key: reader.whole(prefix + key) for key in adapters}
    if not all(key.startswith(MEGATRON) for key in adapters):
        return SavedAdapters(_of_modules(reader, facts, whole), scale)
    layout = keys.layout(facts, "float32", keys.style_of(reader.shapes), holds=lambda key: True)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for piece in layout.pieces:
        layer = piece.param.removesuffix(".weight")
        if layer + A not in whole or piece.param == layer:
            continue
        lead = tuple(span.start for span in piece.param_box[:-2])  # the layer, where layers are stacked
        tensor_rows, tensor_columns = piece.tensor_box
        a, b = whole[layer + A][lead], whole[layer + B][lead]
        rows, columns = piece.param_box[-2:]
        outputs = max(output.tensor_box[0].last for output in layout.by_tensor[piece.tensor]) + 1
        own_a, own_b = pairs.setdefault(piece.tensor, (a.new_zeros(a.shape), b.new_zeros(outputs, b.shape[1])))
        own_a[:, _slice(tensor_columns)] = a[:, _slice(columns)]
        own_b[_slice(tensor_rows)] = b[_slice(rows)]
    for key in adapters:  # an adapter that belongs to no layer would be lost
        if f"{key.rpartition('.')[0]}.weight" not in layout.params:
            raise InputError(f"{reader.directory}: {key} belongs to no layer of this model.")
    return SavedAdapters(pairs, scale)


def _of_modules(
    reader: TorchDistReader, facts: ModelFacts, whole: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tensors = {param: tensor for tensor, param in param_names(facts).items()}
    pairs = {}
    for key in whole:
        module = key.rpartition(".")[0]
        tensor = tensors.get(f"{module}.weight")
        if tensor is None or not {module + A, module + B} <= whole.keys():
            raise InputError(f"{reader.directory}: {key} belongs to no layer of this model.")
        pairs[tensor] = whole[module + A], whole[module + B]
    return pairs


def fill_layer(
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], pieces: Iterable[Piece], a: torch.Tensor, b: torch.Tensor
) -> None:
    """Copy adapters of published tensors into a rank's layer, by `pieces`. Raises InputError for a missing one."""
    for piece in pieces:
        if piece.tensor not in pairs:
            raise InputError(f"The checkpoint holds no adapter of {piece.tensor}.", "Is it a checkpoint of this run?")
        whole_a, whole_b = pairs[piece.tensor]
        tensor_rows, tensor_columns = piece.tensor_box
        rows, columns = piece.param_box
        a[:, _slice(columns)] = whole_a[:, _slice(tensor_columns)].to(a)
        b[_slice(rows)] = whole_b[_slice(tensor_rows)].to(b)


def _slice(span: Span) -> slice:
    return slice(span.start, span.last + 1, span.step)
