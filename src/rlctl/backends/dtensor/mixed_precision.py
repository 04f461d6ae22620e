"""FSDP2's mixed precision, with float32 shards that are rounded by rlctl's rule (`optimizer.rounding`) when they are
gathered, where FSDP2 rounds to nearest.

FSDP2 has an extension for that (`fsdp_pre_all_gather`), but only for tensors of a class of their own, with which its
padding of uneven shards and DTensor's views do not go. The two places at which it casts are replaced instead; both
exist in torch 2.11 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlctl.checkpoints.rounding import narrowed
from rlctl.config.schema import Rounding
from rlctl.errors import MachineError


@dataclass(frozen=True)
class RoundingPolicy(MixedPrecisionPolicy):
    """A mixed-precision policy that says how float32 shards are rounded."""

    rounding: Rounding = "nearest"


def mixed_precision(dtype: torch.dtype | None, rounding: Rounding) -> MixedPrecisionPolicy:
    """Return the policy of modules that compute in `dtype` (None: float32) and add up gradients in float32."""
    if dtype is not None and rounding != "nearest":
        _replace_casts()
    return RoundingPolicy(param_dtype=dtype, reduce_dtype=torch.float32, rounding=rounding)


@cache
def _replace_casts() -> None:
    """Raises MachineError where this version of torch casts elsewhere."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

    names = "_get_param_all_gather_inputs", "all_gather_inputs"
    collectives, param = vars(_fsdp_collectives), vars(_fsdp_param.FSDPParam)
    if names[0] not in collectives or names[1] not in param:
        raise MachineError(
            f"torch {torch.__version__} gathers FSDP2's weights in another way than the versions that rlctl knows.",
            "Install torch 2.11 to 2.13, or set optimizer.rounding=nearest.",
        )
    of_group, of_param = collectives[names[0]], param[names[1]].fget

    def rounded(one: Any) -> bool:
        return one.param_dtype is not None and getattr(one.mp_policy, "rounding", "nearest") != "nearest"

    def inputs_of_param(self: Any) -> list[Tensor]:
        return [narrowed(self._sharded_param_data, self.param_dtype)] if rounded(self) else of_param(self)

    def inputs_of_group(params: list[Any]) -> list[list[Tensor]]:
        return [one.all_gather_inputs for one in params] if any(map(rounded, params)) else of_group(params)

    _fsdp_collectives._get_param_all_gather_inputs = inputs_of_group
    setattr(_fsdp_param.FSDPParam, names[1], property(inputs_of_param))
