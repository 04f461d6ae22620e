"""Tensor parallelism, with sequence parallelism, of transformers' modules.

Parameters are DTensors over the tensor-parallel ranks, so that FSDP2, the gradient's norm, the optimizer and
checkpoints know which part a rank has. Arithmetic is on local tensors: whoever owns parameters sees its part of them
during its forward pass. Between attention, MLP and head the ranks share the tokens of a row; tokens are gathered in
front of these three, and the partial sums behind them are added up and shared out again.

One rule gives the gradients: what is not divided sees a part of the tokens, or of the heads, on each rank, so that its
gradient is to be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rlctl.backends.context_parallel import GatherContext
from rlctl.backends.lora import is_adapter
from rlctl.models.matrices import Role
from rlctl.weights.dtensor import DTensorWorld

KEYS_AND_VALUES = frozenset({Role.K, Role.V, Role.K_BIAS, Role.V_BIAS})


class ShareOut(torch.autograd.Function):
    """Sums [T, H] over the ranks and gives each its part of the tokens; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x_TH.new_empty((x_TH.shape[0] // group.size(), *x_TH.shape[1:]))
        torch.distributed.reduce_scatter_tensor(out, x_TH.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        out = grad.new_empty((grad.shape[0] * ctx.group.size(), *grad.shape[1:]))
        torch.distributed.all_gather_into_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class GatherValues(torch.autograd.Function):
    """The values of the tokens of all ranks. Each rank computes the same from them, and keeps the gradient of its own
    tokens."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = values_T.new_empty(values_T.shape[0] * group.size())
        torch.distributed.all_gather_into_tensor(out, values_T.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()], None


def gather_tokens(x_1TH: Tensor, group: Any) -> Tensor:
    """The tokens of all ranks; backward sums and scatters."""
    return GatherContext.apply(x_1TH[0], group)[None]


def share_out(x_1TH: Tensor, group: Any) -> Tensor:
    return ShareOut.apply(x_1TH[0], group)[None]


@dataclass(frozen=True)
class Narrow:
    """The rows of a parameter that a rank needs, where there are more ranks than heads of keys and values. It is stored
    divided like any other, and gathered in the forward pass."""

    start: int
    rows: int


def divide(inner: Any, world: DTensorWorld, mesh: DeviceMesh) -> None:
    """Divide the parameters of a model without memory over the ranks of `mesh`, and have its modules compute with their
    parts."""
    group, made = mesh.get_group(), dict[int, nn.Parameter]()
    for path, module in inner.named_modules():
        own = {name: f"{path}.{name}" for name, value in module._parameters.items() if value is not None}
        for name, full_name in own.items():
            parameter = module._parameters[name]
            assert parameter is not None
            if id(parameter) not in made:  # tied weights stay tied
                axis = world.adapter_axis(full_name) if is_adapter(name) else world.axis(full_name)
                made[id(parameter)] = divided(parameter, mesh, axis)
            module._parameters[name] = made[id(parameter)]
        if isinstance(module, nn.Embedding):
            lookup: Any = partial(_embed, module, group)
            module.forward = lookup
        elif own:
            kept = _narrow(world, next(iter(own.values())), group)
            module.forward = partial(with_local_parameters, module, module.forward, tuple(own), kept)
    for layer in inner.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.forward = partial(_on_whole_rows, module.forward, group)


def divide_alike(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank of `mesh` the parameters of a module that sees the tokens of the rank alone."""
    names = tuple(module._parameters)
    for name in names:
        parameter = module._parameters[name]
        assert parameter is not None
        module._parameters[name] = divided(parameter, mesh, None)
    module.forward = partial(with_local_parameters, module, module.forward, names, None)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, a gradient or a state; a view of the live memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided(parameter: nn.Parameter, mesh: DeviceMesh, axis: int | None) -> nn.Parameter:
    """A parameter without memory as a DTensor over `mesh`, divided along `axis` (None: every rank has it)."""
    place = Replicate() if axis is None else Shard(axis)
    tensor = distribute_tensor(parameter.detach(), mesh, [place], src_data_rank=None)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _narrow(world: DTensorWorld, name: str, group: Any) -> Narrow | None:
    """The one head of keys or values whose queries this rank has; None: it has whole heads of its own."""
    heads = world.facts.kv_heads
    if world.roles.get(name) not in KEYS_AND_VALUES or heads >= group.size():
        return None
    return Narrow(group.rank() * heads // group.size() * world.facts.head_dim, world.facts.head_dim)


def _local(parameter: Any, kept: Narrow | None) -> Tensor:
    """This rank's part of a parameter, whose gradient becomes the parameter's."""
    if not isinstance(parameter, DTensor):
        return parameter
    whole = parameter.placements[0].is_replicate()
    if kept is not None and not whole:
        gathered = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return gathered.narrow(0, kept.start, kept.rows)
    return parameter.to_local(grad_placements=[Partial()] if whole else parameter.placements)


def with_local_parameters(
    module: nn.Module,
    forward: Callable[..., Any],
    names: tuple[str, ...],
    kept: Narrow | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`forward` of a module whose parameters are, for that moment, this rank's parts."""
    owned = {name: module._parameters[name] for name in names}
    module._parameters.update({name: _local(value, kept) for name, value in owned.items()})  # type: ignore[arg-type]
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(owned)


def _embed(module: nn.Embedding, group: Any, tokens_1T: Tensor) -> Tensor:
    """[1, T / ranks, H]: each rank looks up the tokens of its part of the vocabulary."""
    weight = _local(module.weight, None)
    local = tokens_1T - group.rank() * weight.shape[0]
    outside = (local < 0) | (local >= weight.shape[0])
    found = F.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0.0)
    shared = share_out(found, group)
    scale = getattr(module, "embed_scale", None)  # Gemma's
    return shared if scale is None else shared * scale.to(shared.dtype)


def _on_whole_rows(forward: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    """`forward` of attention or an MLP on the tokens of all ranks; its output is this rank's part of the sum."""
    if args:
        args = (gather_tokens(args[0], group), *args[1:])
    else:
        kwargs["hidden_states"] = gather_tokens(kwargs["hidden_states"], group)
    out = forward(*args, **kwargs)
    return (share_out(out[0], group), *out[1:]) if isinstance(out, tuple) else share_out(out, group)
