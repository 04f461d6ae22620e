"""AdamW over sharded parameters: the gradient's norm over all ranks, clipping, and one guarded step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlctl.backends.base import PolicySpec
from rlctl.backends.dtensor.backend import optimizer_values
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.results import LossScale, StepOutcome, squared_norm

STATE_SPACE = ("A_log", "dt_bias", "D")
"""Decay rates of state-space layers; Mamba's training does not decay them."""


def build_optimizer(spec: PolicySpec, model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW of the trained parameters; norms, biases and state-space rates have no weight decay, as in
    Megatron."""
    groups: dict[Any, dict[str, Any]] = {}
    # Some norms have two axes (Command R's, of each head's queries and keys).
    modules = {path: module for path, module in model.named_modules() if "Norm" in type(module).__name__}
    norms = {f"{path}.{name}" for path, norm in modules.items() for name, _ in norm.named_parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            leaf = name.rpartition(".")[2]
            decays = not (name in norms or parameter.dim() == 1 or leaf.endswith("bias") or leaf in STATE_SPACE)
            # The fused kernel takes parameters of one mesh, and spread experts have another.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((decays, mesh), {"params": [], "decays": decays})["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), **optimizer_values(spec))


def take_step(
    spec: PolicySpec,
    optimizer: torch.optim.AdamW,
    lr: float,
    weight_decay: float | None,
    loss_scale: LossScale | None = None,
) -> StepOutcome:
    """Take one step, or none if the gradient is not finite. `weight_decay` None: the optimizer's; `loss_scale`: divides
    gradients. Collective."""
    gradients = [_reduced(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    scale = loss_scale.value if loss_scale is not None else None
    if scale is not None:
        torch._foreach_div_([local_part(gradient) for gradient in gradients], scale)
    norm, clip = total_norm(gradients), spec.optimizer.clip_grad
    if loss_scale is not None:
        loss_scale.update(skipped=not math.isfinite(norm))
    if not math.isfinite(norm):
        return StepOutcome(norm, skipped=True, loss_scale=scale)
    if 0 < clip < norm:
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], clip / (norm + 1e-6))
    decay = spec.optimizer.weight_decay if weight_decay is None else weight_decay
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, decay * group["decays"]
    optimizer.step()
    return StepOutcome(norm, skipped=False, loss_scale=scale)


def _reduced(parameter: Tensor) -> Tensor:
    """Return a gradient summed over tensor-parallel ranks with partial sums; FSDP2 sums its parameters' gradients."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def total_norm(gradients: Iterable[Tensor]) -> float:
    """The norm over all ranks; what several ranks hold alike counts once. Collective."""
    world = torch.distributed.get_world_size()
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        square = squared_norm(local_part(gradient))
        total = total.to(square.device) + square * _parts(gradient) / world
    torch.distributed.all_reduce(total)
    return float(total.sqrt())


def _parts(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, place in enumerate(tensor.placements) if not place.is_replicate())
