"""Adapters on Megatron's layers, under tensor, sequence and pipeline parallelism.

Column-parallel layers split B by rows and replicate A; row-parallel layers split A by columns and replicate B. Only
[tokens, rank] crosses ranks. A layer that fuses several published matrices has an A for each, one below the other, but
for gate and up of a routed expert, which share one as in PEFT.

Shapes: E experts, r rank, T tokens.
"""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import torch
from megatron.core import tensor_parallel as tp
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from rlctl.backends.base import PolicySpec
from rlctl.backends.lora_adapter import EVERY, Adapted, Rows, WeightGradients, first_a, require_kind
from rlctl.backends.megatron.backend import layouts
from rlctl.backends.megatron.modules import normed_output
from rlctl.weights.adapter_sites import Site, sites
from rlctl.weights.dtensor import module_layout
from rlctl.weights.layout import Piece


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
        if self.idle:
            return out, bias
        inner_Tr = self.inner_product(input_)
        if self.sequence_parallel:
            inner_Tr = tp.gather_from_sequence_parallel_region(inner_Tr, group=self.tp_group)
        else:
            inner_Tr = tp.copy_to_tensor_model_parallel_region(inner_Tr, group=self.tp_group)
        return self.with_adapters(out, inner_Tr), bias


class AdaptedRow(AdaptedParallel, RowParallelLinear):
    """Splits its inputs; its output is whole, or a part of the sequence."""

    split: ClassVar[dict[str, int]] = {"weight": 1, "lora_a": 1}

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        out, bias = super().forward(input_)
        if self.idle:
            return out, bias
        inner_Tr = self.inner_product(input_)
        if self.sequence_parallel:
            inner_Tr = tp.reduce_scatter_to_sequence_parallel_region(inner_Tr, group=self.tp_group)
        else:
            inner_Tr = tp.reduce_from_tensor_model_parallel_region(inner_Tr, group=self.tp_group)
        return self.with_adapters(out, inner_Tr), bias


class AdaptedReplicated(Adapted, Linear):
    """A linear layer that every rank has whole, and sees its part of the sequence with."""

    split: ClassVar[dict[str, int]] = {}

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input)
        return (out if self.idle else self.with_adapters(out, self.inner_product(input))), bias


class AdaptedRouter(TopKRouter, Adapted):
    """A router, which every rank has whole."""

    split: ClassVar[dict[str, int]] = {}

    def gating(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().gating(input)
        [(site, _)], weight = self.sites, self._parameters["weight"]
        self._parameters["weight"] = WeightGradients.apply(weight, self.lora_a, self.lora_b, site.scale)
        try:
            return super().gating(input)
        finally:
            self._parameters["weight"] = weight


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    normed_output(RowParallelLinear): normed_output(AdaptedRow),  # the norm is of the sum of both
    Linear: AdaptedReplicated,
    TopKRouter: AdaptedRouter,
}
"""Layers with adapters, and their replacement classes."""


def adapt(model: Any, spec: PolicySpec) -> None:
    """Freeze a model chunk and add adapters (A uniform, B 0) at the sites that settings name. Raises ConfigError for
    modules that adapters do not cover."""
    model.requires_grad_(False)
    model.trains_adapters = True  # also on a pipeline stage whose layers have none
    # Megatron's checkpoints stack layers, which then need adapters of the same shapes.
    model.config.hetereogenous_dist_checkpoint |= not sites(spec.facts, spec.lora).are_alike(spec.facts.layers)
    of_params = _sites_of_params(spec)
    for name, module in model.named_modules():
        param = f"{global_name(model, name) if spec.parallel.vpp > 1 else name}.weight"
        if param in of_params:
            require_kind(name, module, ADAPTED)
            module.__class__ = ADAPTED[type(module)]  # for any layer spec
            parts, expert = of_params[param]
            _attach(module, parts, spec.seed, expert)
            module.adds = spec.lora.adds
    # Recomputation only records what some input needs a gradient for, and the frozen embedding's output does not.
    if getattr(model, "embedding", None) is not None:
        model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


def _sites_of_params(spec: PolicySpec) -> dict[str, tuple[tuple[tuple[Site, Rows], ...], int | None]]:
    """Return the sites in each parameter of this rank with their rows there, and the number of a routed expert."""
    wanted, pieces = sites(spec.facts, spec.lora).by_tensor, dict[str, dict[str, list[Piece]]]()
    modules = module_layout(spec.facts, "float32").by_tensor
    order = {site.module: number for number, site in enumerate(wanted.values())}
    experts = dict[str, int]()
    for piece in layouts(spec).layout(torch.distributed.get_rank()).pieces:
        if (site := wanted.get(piece.tensor)) is not None:
            pieces.setdefault(piece.param, {}).setdefault(site.module, []).append(piece)
            if site.place.is_expert:
                experts[piece.param] = modules[piece.tensor][0].param_box[0].start
    return {
        param: (
            tuple((wanted[by_site[module][0].tensor], _rows(by_site[module]))
                  for module in sorted(by_site, key=order.__getitem__)),
            experts.get(param),
        )
        for param, by_site in pieces.items()
    }  # fmt: skip


def _rows(pieces: list[Piece]) -> Rows:
    spans = [piece.param_box[0] for piece in pieces]
    if len(spans) == 1:
        return slice(spans[0].start, spans[0].start + spans[0].count)
    return torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])


def _attach(module: Any, parts: tuple[tuple[Site, Rows], ...], seed: int, expert: int | None) -> None:
    weight, split = module.weight, module.split
    whole = [_first_a(site, seed, expert) for site, _ in parts]
    a, rank = torch.cat(whole), whole[0].shape[0]
    a = a.chunk(module.tp_group.size(), 1)[module.tp_group.rank()] if "lora_a" in split else a
    module.lora_a = nn.Parameter(a.to(weight).contiguous())
    module.lora_b = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
    all_rows = len(parts) == 1 and (expert is not None or parts[0][1] == slice(0, len(weight)))
    module.sites = ((parts[0][0], EVERY),) if all_rows else parts
    for name in ("lora_a", "lora_b"):
        param = getattr(module, name)
        if expert is not None:  # as the expert's weights, of which each rank has its own
            param.allreduce = getattr(weight, "allreduce", True)
            tp.set_tensor_model_parallel_attributes(param, True, split.get(name, 0), 1)
        elif name in split:
            tp.set_tensor_model_parallel_attributes(param, True, split[name], 1)
        else:  # each rank sees its part of the sequence: gradients add up
            param.sequence_parallel = module.config.sequence_parallel


def _first_a(site: Site, seed: int, expert: int | None) -> Tensor:
    """Return A [r, I] of a site, or of one of its experts, as every backend begins with."""
    shape, _ = site.place.adapter_shapes(site.rank)
    whole = first_a(prod(shape[:-1]), shape[-1], seed, site.module).view(shape)
    return whole if expert is None else whole[expert]


def trains_adapters(core: Any) -> bool:
    return getattr(core, "trains_adapters", False)


def core_of(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def global_name(core: Any, name: str) -> str:
    """A module's or parameter's name with layers counted over the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and parts[2:]:
        parts[2] = str(core.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)
