"""Checkpoints of adapter runs (`training.lora`), from any backend: adapters of published tensors, merged or placed in a
rank's layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.megatron.megatron_directory import Base
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.settings.training import LoraConfig, Rounding
from rlctl.weights import torch_dist as keys
from rlctl.weights.adapter_sites import Site, places, saved_whole, sites
from rlctl.weights.dtensor import module_layout
from rlctl.weights.layout import Layout, ParamSpec, Piece, Span
from rlctl.weights.transforms import MergeLora, ReadThrough

if TYPE_CHECKING:
    import torch

    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

Pairs = dict[str, "tuple[torch.Tensor, torch.Tensor]"]
"""A [rank, inputs] and B [outputs, rank] by published tensor."""
A, B, WHOLE = ".lora_a", ".lora_b", ".whole"
MEGATRON, STATES = "decoder.", ("optimizer.", "chained_")
"""Key prefixes of Megatron's adapters and of optimizer states; others are transformers' modules."""


def adapter_keys(shapes: Collection[str]) -> list[str]:
    """The keys of a checkpoint that are adapters of the model (not their optimizer's)."""
    return [key for key in shapes if key.endswith((A, B)) and not key.startswith(STATES)]


def settings_of(base: Base) -> LoraConfig:
    """The settings of a run's adapters. Raises InputError where its manifest does not say."""
    prefix = "training.lora."
    keys = (key for key in base.config if key.startswith(prefix) and key != f"{prefix}refit")
    stored = {key.removeprefix(prefix): base.config[key].get("value") for key in keys}
    if not stored.get("rank") or not stored.get("alpha"):
        hint = "Name the run that trained them, or a checkpoint inside of it."
        raise InputError("The checkpoint holds adapters, but its run's manifest says nothing of them.", hint)
    return LoraConfig.model_validate(stored)


@dataclass(frozen=True)
class SavedAdapters:
    """The adapters of published tensors, as a source: A [rank, inputs] and B [outputs, rank] by tensor."""

    pairs: Pairs
    scales: dict[str, float]
    dtype: str = "float32"
    rounding: Rounding = "nearest"
    """The compute dtype of the adapted layers, and the rounding of their base."""
    transposed: frozenset[str] = frozenset()
    """Published stacks of experts with inputs before outputs."""
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    """Published tensors that were trained whole (`training.lora.modules_to_save`)."""

    def onto(self, layout: Layout) -> Layout:
        """A layout of the base's weights, read with the adapters merged."""
        merges = {
            tensor: ReadThrough(
                MergeLora(
                    tensor + A, tensor + B, self.scales[tensor], self.dtype, self.rounding, tensor in self.transposed
                )
            )
            for tensor in self.pairs
        }
        pieces = [
            replace(p, transforms=(merges[p.tensor], *p.transforms))
            if p.tensor in merges
            else p.renamed(p.tensor, p.tensor + WHOLE)
            if p.tensor in self.whole
            else p
            for p in layout.pieces
        ]
        replaced = {p.param for p in layout.pieces if p.tensor in self.whole}
        state = {
            name: ParamSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self.params.items()
        }
        params = {name: spec for name, spec in layout.params.items() if name not in replaced}
        return Layout(layout.rank, params | state, tuple(pieces), layout.fills)

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
        of_pairs = {tensor + A: a for tensor, (a, _) in pairs} | {tensor + B: b for tensor, (_, b) in pairs}
        return of_pairs | {tensor + WHOLE: value for tensor, value in self.whole.items()}

    def read(self, param: str) -> torch.Tensor:
        return self.params[param]

    def drop(self, param: str) -> None:
        pass


def read_adapters(reader: TorchDistReader, facts: ModelFacts, lora: LoraConfig, prefix: str = "") -> SavedAdapters:
    """Return a checkpoint's adapters by published tensor; `prefix` reads one of Adam's moments instead. Raises
    InputError for an unknown layer, or for other settings."""
    stored, run_sites = adapter_keys(reader.shapes), sites(facts, lora).by_tensor
    whole = {key: reader.whole(prefix + key) for key in stored}
    of_megatron = all(key.startswith(MEGATRON) for key in stored)
    pairs = _of_layers(reader, facts, whole, run_sites) if of_megatron else _of_modules(reader, facts, whole)
    for tensor, (a, _) in pairs.items():
        if tensor not in run_sites or a.shape[-2] != run_sites[tensor].rank:
            rank = run_sites[tensor].rank if tensor in run_sites else "none"
            raise InputError(
                f"{reader.directory} has adapters of rank {a.shape[-2]} on {tensor}; training.lora has {rank} there.",
                "Use the settings of the run that trained them.",
            )
    whole_modules = {tensor: reader.whole(prefix + param) for param, tensor in saved_whole(facts, lora).items()}
    transposed = frozenset(tensor for tensor in pairs if run_sites[tensor].place.transposed)
    return SavedAdapters(
        pairs, {tensor: run_sites[tensor].scale for tensor in pairs}, transposed=transposed, whole=whole_modules
    )


def _of_layers(
    reader: TorchDistReader, facts: ModelFacts, whole: dict[str, torch.Tensor], run_sites: dict[str, Site]
) -> Pairs:
    """Adapters of Megatron's layers: A of each site below the one before, B in the weight's rows."""
    layout = keys.layout(facts, "float32", keys.style_of(reader.shapes), holds=lambda key: True)
    for key in whole:  # an adapter that belongs to no layer would be lost
        if f"{key.rpartition('.')[0]}.weight" not in layout.params:
            raise InputError(f"{reader.directory}: {key} belongs to no layer of this model.")
    order = {site.module: number for number, site in enumerate(run_sites.values())}
    pieces, together = list[Piece](), dict[tuple[str, tuple[int, ...]], set[str]]()
    for piece in layout.pieces:
        if piece.tensor in run_sites and piece.param.removesuffix(".weight") + A in whole:
            pieces.append(piece)
            together.setdefault((piece.param, _lead(piece)), set()).add(run_sites[piece.tensor].module)
    number = {
        module: i for modules in together.values() for i, module in enumerate(sorted(modules, key=order.__getitem__))
    }
    pairs: Pairs = {}
    for piece in pieces:
        layer, rank = piece.param.removesuffix(".weight"), run_sites[piece.tensor].rank
        tensor_rows, tensor_columns = piece.tensor_box
        a, b = whole[layer + A][_lead(piece)], whole[layer + B][_lead(piece)]
        if len(a) != rank * len(together[piece.param, _lead(piece)]):
            raise InputError(
                f"{reader.directory}: {layer}{A} has {len(a)} rows, and training.lora takes {rank} for each of "
                f"{', '.join(sorted(together[piece.param, _lead(piece)]))}.",
                "Use the settings of the run that trained them.",
            )
        a = a[rank * number[run_sites[piece.tensor].module] :][:rank]
        rows, columns = piece.param_box[-2:]
        outputs = max(output.tensor_box[0].last for output in layout.by_tensor[piece.tensor]) + 1
        own_a, own_b = pairs.setdefault(piece.tensor, (a.new_zeros(a.shape), b.new_zeros(outputs, b.shape[1])))
        own_a[:, _slice(tensor_columns)] = a[:, _slice(columns)]
        own_b[_slice(tensor_rows)] = b[_slice(rows)]
    return pairs


def _lead(piece: Piece) -> tuple[int, ...]:
    """The layer, where layers are stacked."""
    return tuple(span.start for span in piece.param_box[:-2])


def _of_modules(reader: TorchDistReader, facts: ModelFacts, whole: dict[str, torch.Tensor]) -> Pairs:
    layout, pairs = module_layout(facts, "float32"), Pairs()
    used, transposed = set[str](), {place.param for place in places(facts) if place.transposed}
    for piece in layout.pieces:
        module = piece.param.removesuffix(".weight")
        if {module + A, module + B} <= whole.keys():
            used |= {module + A, module + B}
            of_a, of_b = _places(piece, transposed=piece.param in transposed)
            pairs[piece.tensor] = whole[module + A][of_a], whole[module + B][of_b]
    if lost := whole.keys() - used:
        raise InputError(f"{reader.directory}: {min(lost)} belongs to no layer of this model.")
    return pairs


def _places(piece: Piece, *, transposed: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the indices of a published tensor's A and B in A and B of transformers' matrix or stack. The
    leading axes are the expert (all, of a published stack), and gate or up."""
    *lead, rows, columns = piece.param_box
    rows, columns = (columns, rows) if transposed else (rows, columns)
    stack = tuple(_slice(span) if span.count > 1 else span.start for span in lead)
    return (*stack[:1], ..., _slice(columns)), (*stack, ..., _slice(rows), slice(None))


def of_site(site: Site, pairs: Pairs, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine A and B of published tensors into A and B of transformers' matrix or stack, the inverse of reading
    them. Raises InputError for a missing one."""
    import torch

    pieces = [piece for tensor in site.place.tensors for piece in layout.by_tensor[tensor]]
    if missing := next((piece.tensor for piece in pieces if piece.tensor not in pairs), None):
        raise InputError(f"There is no adapter of {missing} to load.", "Is it of this run?")
    if not site.place.is_expert:
        return pairs[pieces[0].tensor]
    a, b = map(torch.zeros, site.place.adapter_shapes(site.rank))
    for piece in pieces:
        of_a, of_b = _places(piece, transposed=site.place.transposed)
        a[of_a], b[of_b] = pairs[piece.tensor]
    return a, b


def fill_layer(pairs: Pairs, pieces: Iterable[Piece], a: torch.Tensor, b: torch.Tensor) -> None:
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
