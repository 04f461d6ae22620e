"""FSDP2's mixed precision with rlctl's rounding (`optimizer.rounding`) of float32 shards.

FSDP2's own hook (`fsdp_pre_all_gather`) needs a tensor subclass, which its padding of uneven shards and DTensor's views
do not support. The two casts are replaced instead; both exist in torch 2.11 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from rlctl.backends.quantization import WeightGrid
from rlctl.errors import MachineError
from rlctl.settings.training import Rounding
from rlctl.weights.rounding import narrowed


@dataclass(frozen=True)
class RoundingPolicy(MixedPrecisionPolicy):
    """A mixed-precision policy with a rounding rule for float32 shards."""

    rounding: Rounding = "nearest"


def mixed_precision(dtype: torch.dtype | None, rounding: Rounding) -> MixedPrecisionPolicy:
    """Return the policy of modules that compute in `dtype` (None: float32) and add up gradients in float32."""
    if dtype is not None and rounding != "nearest":
        _replace_casts()
    return RoundingPolicy(param_dtype=dtype, reduce_dtype=torch.float32, rounding=rounding)


GRID = "rlctl_grid"
"""The attribute of FSDP2's parameter that rounds this rank's flat part of it in place."""


def _keep(_flat: Tensor) -> None:
    """Leave the weights as they are."""


def round_gathered(model: Any, grid: WeightGrid) -> None:
    """Round a sharded model's weights to a grid when gathered."""
    _replace_casts()
    paths = {module: path for path, module in model.inner.named_modules()}
    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    for param in (param for state in states for group in state._fsdp_param_groups for param in group.fsdp_params):
        name = f"{paths.get(param._module_info.module)}.{param._module_info.param_name}"
        if name in grid.parts:
            setattr(param, GRID, partial(grid.round, name))


@cache
def _replace_casts() -> None:
    """Raise MachineError where this version of torch casts elsewhere."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

    names = "_get_param_all_gather_inputs", "all_gather_inputs"
    collectives, param = vars(_fsdp_collectives), vars(_fsdp_param.FSDPParam)
    if names[0] not in collectives or names[1] not in param:
        raise MachineError(
            f"torch {torch.__version__} gathers FSDP2's weights in another way than the versions that rlctl knows.",
            "Install torch 2.11 to 2.13, or set optimizer.rounding=nearest.",
        )
    of_group, of_param = collectives[names[0]], param[names[1]].fget

    def rounded(param: Any) -> bool:
        unbiased = getattr(param.mp_policy, "rounding", "nearest") != "nearest"
        return param.param_dtype is not None and (unbiased or hasattr(param, GRID))

    def inputs_of_param(self: Any) -> list[Tensor]:
        if not rounded(self):
            return of_param(self)
        flat = narrowed(self._sharded_param_data, self.param_dtype, self.mp_policy.rounding)
        getattr(self, GRID, _keep)(flat)
        return [flat]

    def inputs_of_group(params: list[Any]) -> list[list[Tensor]]:
        return [param.all_gather_inputs for param in params] if any(map(rounded, params)) else of_group(params)

    _fsdp_collectives._get_param_all_gather_inputs = inputs_of_group
    setattr(_fsdp_param.FSDPParam, names[1], property(inputs_of_param))
