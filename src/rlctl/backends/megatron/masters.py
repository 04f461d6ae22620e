"""Megatron's distributed optimizer with rlctl's rounding (`optimizer.rounding`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlctl.backends.movement import Movement
from rlctl.errors import ConfigError
from rlctl.settings.training import OptimizerConfig, Rounding
from rlctl.weights.rounding import narrow_into


class RoundingOptimizer(DistributedOptimizer):
    """The distributed optimizer: `round_weights` makes one of an existing one."""

    rounding: Rounding = "unbiased"
    movement: Movement | None = None
    visiting: set[int] | None = None
    """The identities of the float32 weights that are on the device, where others wait in host memory."""

    def step_with_ready_grads(self) -> bool:
        self.look()
        return super().step_with_ready_grads()

    def _copy_main_params_to_model_params(self) -> None:
        self.copy_weights()

    def copy_weights(self) -> None:
        """Give the model this rank's shard of the weights that the optimizer has just updated."""
        for model, master in self.masters():
            narrow_into(model, master, self.rounding)
            if self.movement is not None:
                self.movement.after(id(master), master)

    def look(self) -> None:
        if self.movement is not None:
            for _, master in self.masters():
                self.movement.before(id(master), master)

    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield flat shards of each weight: the model's live one and the optimizer's."""
        for models, masters in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model, master in (
                pair for group in zip(models, masters, strict=True) for pair in zip(*group, strict=True)
            ):
                if self.visiting is not None and id(master) not in self.visiting:
                    continue
                span = self._get_model_param_range_map(model)["gbuf_world_in_bucket"]
                buffer, _, bucket = self.model_param_gbuf_map[model]
                whole: Any = self.buffers[buffer].buckets[bucket].param_data
                yield whole.view(-1)[span.start : span.end], master


def round_weights(inner: Any, settings: OptimizerConfig) -> None:
    """Turn a Megatron optimizer of narrow weights into a `RoundingOptimizer`. Raises ConfigError if it rounds
    already."""
    if type(inner) is DistributedOptimizer and not inner.config.use_precision_aware_optimizer:
        rounding: Any = inner
        rounding.__class__, rounding.rounding = RoundingOptimizer, settings.rounding
    elif settings.rounding != "nearest":
        key = "use_precision_aware_optimizer" if inner.config.use_precision_aware_optimizer else "optimizer"
        raise ConfigError(
            f"optimizer.{key} = {getattr(inner.config, key)} rounds weights to nearest, and optimizer.rounding = "
            f"{settings.rounding}.",
            "Set optimizer.rounding=nearest, or remove the other.",
        )
