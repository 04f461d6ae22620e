"""Tensor and sequence parallelism of transformers' modules.

Parameters are DTensors over the tensor-parallel ranks, so FSDP2, the gradient norm, the optimizer and checkpoints know
each rank's part. Modules compute on local tensors. Between attention, MLP and head, ranks hold parts of the row's
tokens, gathered before and reduce-scattered after. Undivided parameters see part of the tokens, heads or expert widths,
so their gradients are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rlctl.backends.batching.context_parallel import Gather, ShareOut
from rlctl.backends.lora_adapter import is_adapter
from rlctl.checkpoints.hf.transformers_model import layers_of
from rlctl.models.matrices import Role
from rlctl.weights.dtensor import ROW_BIASES, DTensorWorld

KEYS_AND_VALUES = frozenset({Role.K, Role.V, Role.K_BIAS, Role.V_BIAS})
GATE_AND_UP_APART = 4
"""The axes of experts' `gate_up_proj` in the layout, where transformers has three."""


View = Callable[[Any], Tensor]
"""A parameter -> what its module computes with."""


def divide(inner: Any, world: DTensorWorld, mesh: DeviceMesh, experts: DeviceMesh | None) -> None:
    """Divide parameters without memory over `mesh` (tp), and spread experts over `experts` (ep, tp); make modules use
    their parts."""
    group, made = mesh.get_group(), dict[int, nn.Parameter]()
    for path, module in inner.named_modules():
        paths = {name: f"{path}.{name}" for name, value in module._parameters.items() if value is not None}
        for name, full_name in paths.items():
            parameter = module._parameters[name]
            assert parameter is not None
            if id(parameter) not in made:  # tied weights stay tied
                made[id(parameter)] = _divided(parameter, full_name, world, mesh, experts)
            module._parameters[name] = made[id(parameter)]
        table = isinstance(module, nn.Embedding) and world.roles.get(f"{path}.weight") is Role.EMBEDDING
        if table and group.size() > 1:
            lookup: Any = partial(_embed, module, group)
            module.forward = lookup
        elif paths and (group.size() > 1 or any(map(world.is_expert, paths.values()))):
            views = {name: _view(world, full_name, group) for name, full_name in paths.items()}
            module.forward = partial(with_views, module, module.forward, views, "parameters")
    for layer in layers_of(inner) if group.size() > 1 else ():
        for module in (layer.self_attn, layer.mlp):
            module.forward = partial(_on_whole_rows, module.forward, group)


def divide_alike(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module that sees only the rank's tokens on every rank of `mesh`."""
    for name, parameter in tuple(module.named_parameters(recurse=False)):
        tensor = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        module._parameters[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    module.forward = partial(
        with_views, module, module.forward, dict.fromkeys(module._parameters, local_view), "parameters"
    )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, a gradient or a state; a view of the live memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _divided(
    parameter: nn.Parameter, name: str, world: DTensorWorld, mesh: DeviceMesh, experts: DeviceMesh | None
) -> nn.Parameter:
    """Return a parameter without memory as a DTensor in its layout's shape (expert gate and up apart), or unchanged if
    undivided."""
    adapter = is_adapter(name)
    stored = parameter.detach() if adapter else parameter.detach().view(world.modules.params[name].shape)
    axis = world.adapter_axis(name) if adapter else world.axis(name)
    places = [Replicate() if axis is None else Shard(axis)]
    if experts is not None and world.is_expert(world.adapted(name)[0] if adapter else name):
        stored = distribute_tensor(stored, experts, [Shard(0), *places], src_data_rank=None)
    elif mesh.size() > 1:
        stored = distribute_tensor(stored, mesh, places, src_data_rank=None)
    return nn.Parameter(stored, requires_grad=parameter.requires_grad)


def _view(world: DTensorWorld, name: str, group: Any) -> View:
    param, which = world.adapted(name) if is_adapter(name) else (name, "")
    role = None if which == "lora_a" else world.roles.get(param)
    heads, width = world.facts.kv_heads, world.facts.head_dim
    if role in KEYS_AND_VALUES and heads < group.size():
        return partial(_one_head, group.rank() * heads // group.size() * width, width)
    if role in ROW_BIASES:
        return lambda parameter: local_view(parameter) / group.size()
    if which != "lora_a" and world.is_expert(param) and len(world.modules.params[param].shape) == GATE_AND_UP_APART:
        return lambda parameter: local_view(parameter).flatten(1, 2)
    return local_view


def local_view(parameter: Any) -> Tensor:
    """This rank's part of a parameter, whose gradient becomes the parameter's."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])


def _one_head(start: int, rows: int, parameter: Any) -> Tensor:
    """Return this rank's key or value head, if ranks outnumber heads. It is stored divided and gathered in the forward
    pass."""
    gathered = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return gathered.narrow(0, start, rows)


def with_views(
    module: nn.Module, forward: Callable[..., Any], views: Mapping[str, View], kind: str, *args: Any, **kwargs: Any
) -> Any:
    """`forward` of a module whose parameters (or buffers: `kind`) are replaced by the results of `views` during the
    call."""
    original = getattr(module, f"_{kind}")
    owned = {name: original[name] for name in views}
    original.update({name: views[name](value) for name, value in owned.items()})
    try:
        return forward(*args, **kwargs)
    finally:
        original.update(owned)


def _embed(module: nn.Embedding, group: Any, tokens_1T: Tensor) -> Tensor:
    """[1, T / ranks, H]: each rank looks up the tokens of its part of the vocabulary."""
    weight = local_view(module.weight)
    local = tokens_1T - group.rank() * weight.shape[0]
    outside = (local < 0) | (local >= weight.shape[0])
    embedded = F.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0.0)
    shared = ShareOut.apply(embedded[0], group)[None]
    scale = getattr(module, "embed_scale", None)  # Gemma's
    return shared if scale is None else shared * scale.to(shared.dtype)


def _on_whole_rows(forward: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    """`forward` of attention or an MLP on the tokens of all ranks; its output is this rank's part of the sum."""
    if args:
        args = (Gather.apply(args[0][0], group)[None], *args[1:])
    else:
        kwargs["hidden_states"] = Gather.apply(kwargs["hidden_states"][0], group)[None]
    out = forward(*args, **kwargs)
    hidden_1TH, *others = out if isinstance(out, tuple) else (out,)
    shared = ShareOut.apply(hidden_1TH[0], group)[None]
    return (shared, *others) if isinstance(out, tuple) else shared
