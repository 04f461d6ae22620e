"""Gaps that Megatron-Core has where TransformerEngine is not installed, with CUDA or without; a function each. For
megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def fill() -> None:
    """Fills them in this process; once."""
    if getattr(fill, "done", False):
        return
    for gap in GAPS:
        gap()
    fill.done = True  # type: ignore[attr-defined]


def _name_missing_gemm() -> None:
    """0.16: the router's backward reads `te_general_gemm`, which is only defined with TransformerEngine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _name_missing_mla_linears() -> None:
    """0.16 tests isinstance against a stub without TransformerEngine; 0.19 leaves `Linear` undefined."""
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer import multi_latent_attention as mla

    if getattr(mla, "HAVE_TE", False) and not isinstance(getattr(mla, "TELinear", None), type):
        mla.HAVE_TE = False
    if not isinstance(getattr(mla, "Linear", None), type):
        mla.Linear = Linear


def _recompute_without_fp8() -> None:
    """0.16: `self.fp8 = fp8 is not None` takes the default False for FP8, which needs TransformerEngine."""
    from megatron.core.tensor_parallel import random

    init = random.CheckpointWithoutOutput.__init__

    @functools.wraps(init)
    def init_without(self: Any, fp8: Any = False) -> None:
        init(self, fp8)
        self.fp8 = bool(fp8)

    random.CheckpointWithoutOutput.__init__ = init_without


def _checkpoint_torch_adam() -> None:
    """torch's Adam keeps a `step` tensor in its state, where DistributedOptimizer expects state shaped like the
    parameter.

    `step` travels with the param groups instead. It is loaded as one tensor that all parameters share, which Adam
    would then count up once for each parameter: every parameter gets a copy.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if optimizer.Adam is not torch.optim.AdamW:  # Apex's
        return

    def state_of(self: Any, model_param: Any) -> dict[str, torch.Tensor]:
        group, order = self.model_param_group_index_map[model_param]
        param = self.optimizer.param_groups[group]["params"][order]
        return {"param": param, **{key: value for key, value in self.optimizer.state[param].items() if key != "step"}}

    @torch.no_grad()
    def set_state(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        for key, target in state_of(self, model_param).items():
            target.copy_(tensors[key])

    load = DistributedOptimizer.load_state_dict

    @torch.no_grad()
    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    DistributedOptimizer._get_main_param_and_optimizer_states = state_of
    DistributedOptimizer._set_main_param_and_optimizer_states = set_state
    DistributedOptimizer.load_state_dict = load_with_own_steps


GAPS: tuple[Callable[[], None], ...] = (
    _name_missing_gemm,
    _name_missing_mla_linears,
    _recompute_without_fp8,
    _checkpoint_torch_adam,
)
