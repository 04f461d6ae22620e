"""Differences between megatron-core 0.16 and 0.19, and gaps without TransformerEngine."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import queue
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from rlctl.errors import ConfigError, MachineError

VERSIONS = ((0, 16), (0, 20))
"""First version that works, and the first that was not tried."""
TRANSFORMER_ENGINE = "transformer_engine"
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "uint8"}
"""Short names of data types in Megatron's options (its 8-bit states are bytes)."""


def require_version() -> str:
    """The installed version of megatron-core. Raises ConfigError outside the range that this backend is written for."""
    import megatron.core

    version = megatron.core.__version__
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if not VERSIONS[0] <= major_minor < VERSIONS[1]:
        raise ConfigError(f"megatron-core {version} is not supported.", "Install megatron-core >=0.16,<0.20.")
    return version


def make_config(cls: type, values: dict[str, Any], overrides: dict[str, Any], section: str) -> Any:
    """Build `cls` from `values` known to this version and the user's `overrides`. Raises ConfigError for unknown or
    refused overrides."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    names = list(fields)
    for key in overrides:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else None
            raise ConfigError(f"{section}.{key} is not a field of Megatron-Core's {cls.__name__}.", hint)
    arguments = {key: value for key, value in values.items() if key in names} | overrides
    try:
        return cls(**{key: _real(fields[key], value) for key, value in arguments.items()})
    except (ValueError, AssertionError, TypeError) as error:
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(
            f"Megatron-Core refuses the configuration: {reason}", f"Section `{section}` or `training`."
        ) from error


def _real(field: dataclasses.Field, value: Any) -> Any:
    """The torch dtype or enum member that a configuration file spells. Raises ConfigError for an unknown dtype."""
    if not isinstance(value, str):
        return value
    if isinstance(field.default, enum.Enum):
        return type(field.default)[value]
    if "torch.dtype" not in str(field.type):
        return value
    name = value.removeprefix("torch.")
    attribute = getattr(torch, DTYPE_NAMES.get(name, name), None)
    if not isinstance(attribute, torch.dtype):
        raise ConfigError(f"`{field.name}` = {value}: torch has no such data type.", "For example bfloat16.")
    return attribute


def call_known(function: Callable[..., Any], **kwargs: Any) -> Any:
    """Call `function` with the keywords that its installed version accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**kwargs)
    return function(**{key: value for key, value in kwargs.items() if key in parameters})


def mlp_submodules(mlp: Any) -> Any:
    """The submodules of a layer spec's MLP: 0.16 has a ModuleSpec there, 0.19 the class with its arguments bound."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def import_transformer_engine(enabled: bool) -> None:
    """Import TransformerEngine before Megatron-Core, and hide a broken installation from it. Raises MachineError for a
    broken one that is `wanted`."""
    if find_spec(TRANSFORMER_ENGINE) is None:
        return
    try:
        importlib.import_module(f"{TRANSFORMER_ENGINE}.pytorch")
    except Exception as error:  # it may be anything: symbols, libraries and versions are looked for at import
        for name in [name for name in sys.modules if name.partition(".")[0] == TRANSFORMER_ENGINE]:
            del sys.modules[name]
        sys.modules[TRANSFORMER_ENGINE] = None  # type: ignore[assignment]
        if enabled:
            raise MachineError(
                f"TransformerEngine is installed and cannot be imported with torch {torch.__version__}: "
                f"{type(error).__name__}: {error}.",
                "Build it against this torch (docs/start_gpu_node.md), or train on Megatron's own layers with "
                "`--set megatron.transformer_impl=local`.",
            ) from error


def require_transformer_engine() -> None:
    """Raise MachineError where TransformerEngine is installed and Megatron-Core cannot use it."""
    from megatron.core.models.gpt import gpt_layer_specs

    if not getattr(gpt_layer_specs, "HAVE_TE", False):
        raise MachineError(
            "TransformerEngine is installed, but Megatron-Core cannot import it.",
            "Install a build for this torch, or train on Megatron's own layers with "
            "`--set megatron.transformer_impl=local`.",
        )


def require_float8(config: Any) -> None:
    """Raise ConfigError if TransformerEngine or the device lacks the float8 products of `config`, before the first
    forward pass asserts."""
    from megatron.core.fp8_utils import get_fp8_context

    try:
        with torch.no_grad(), get_fp8_context(config):
            pass
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"megatron.fp8 = {config.fp8} with fp8_recipe {config.fp8_recipe} cannot run here: {error}",
            "Set another megatron.fp8_recipe, or remove megatron.fp8.",
        ) from error


def destroy_subgroups() -> None:
    """Destroy all process groups but the default; `destroy_model_parallel` leaks their sockets and threads."""
    from torch.distributed import GroupMember, destroy_process_group
    from torch.distributed.distributed_c10d import _world

    for group in [group for group in _world.pg_map if group is not GroupMember.WORLD]:
        destroy_process_group(group)


def write_checkpoints_in_this_process() -> None:
    """Let saves pass their results within this process (`MegatronSave`), where Megatron starts another one for that."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for name in ("_get_write_results_queue", "get_write_results_queue"):  # 0.16, 0.19
        # Each save asks once. A policy's and its critic's saves may run at the same time, with separate results.
        setattr(filesystem_async, name, lambda *args, **kwargs: queue.Queue())


@functools.cache
def fill_gaps() -> None:
    """Fill the gaps that Megatron-Core has where TransformerEngine is not installed, with CUDA or without; once."""
    for gap in GAPS:
        gap()


def _name_missing_gemm() -> None:
    """0.16: the router's backward reads `te_general_gemm`, which is only defined with TransformerEngine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _score_groups_by_their_best_two() -> None:
    """Score a group of experts by the sum of its best two, as in DeepSeek-V3; Megatron sums a different number."""
    from megatron.core.transformer.moe import moe_utils

    def best_two(
        scores: torch.Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        by_group = scores.view(num_tokens, num_groups, -1)
        chosen = by_group.topk(2, dim=-1)[0].sum(-1).topk(group_topk, dim=-1)[1]
        kept = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=scores.device).scatter(1, chosen, True)
        return torch.topk(by_group.masked_fill(~kept[..., None], float("-inf")).flatten(1), k=topk, dim=-1)

    moe_utils.group_limited_topk = best_two


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
    """torch's Adam has a `step` tensor where DistributedOptimizer expects state shaped like the parameter."""
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

    DistributedOptimizer._get_main_param_and_optimizer_states = state_of
    DistributedOptimizer._set_main_param_and_optimizer_states = set_state


GAPS: tuple[Callable[[], None], ...] = (
    _name_missing_gemm,
    _score_groups_by_their_best_two,
    _name_missing_mla_linears,
    _recompute_without_fp8,
    _checkpoint_torch_adam,
)
