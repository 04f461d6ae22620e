"""Megatron's gradient buffers and distributed optimizer around the model chunks, and one guarded step of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from rlctl.backends.base import PolicySpec
from rlctl.backends.megatron.args import ddp_values, optimizer_values
from rlctl.backends.megatron.compat import make_config
from rlctl.backends.megatron.host_memory import HostMemory
from rlctl.backends.megatron.host_states import keep_on_host
from rlctl.backends.megatron.storages import without_gradients


@dataclass(frozen=True)
class StepOutcome:
    """`grad_norm` is that before clipping, over all ranks."""

    grad_norm: float
    skipped: bool


def wrap_chunks(spec: PolicySpec, config: Any, models: list[Any]) -> list[DistributedDataParallel]:
    """Model chunks with contiguous gradient buffers, reduced in float32 over the data-parallel ranks."""
    ddp = make_config(DistributedDataParallelConfig, ddp_values(spec), spec.ddp, "ddp")
    if spec.dtype == "bfloat16":
        from megatron.core.transformer.module import Float16Module

        models = [_keep_router_bias(Float16Module(config, model)) for model in models]
    chunks = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=number > 0) for number, model in enumerate(models)
    ]
    _overlap(config, ddp, chunks)
    return chunks


def _keep_router_bias(model: Any) -> Any:
    """The router's correction bias stays in float32, as published. Megatron rounds it with everything else and widens
    it again in the first forward pass, after weights were loaded."""
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias.data = module.expert_bias.data.float()
    return model


def _overlap(config: Any, ddp: Any, chunks: list[DistributedDataParallel]) -> None:
    """What Megatron's schedules need to know where reductions run during the backward pass."""
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]


def build_optimizer(spec: PolicySpec, chunks: list[DistributedDataParallel]) -> Any:
    """Megatron's AdamW with its weight-decay exclusions (biases and norms). The driver sets the learning rate of each
    step."""
    config = make_config(OptimizerConfig, optimizer_values(spec), spec.optimizer.passed, "optimizer")
    if not spec.optimizer_offload:
        optimizer = get_megatron_optimizer(config, chunks)
    else:
        with without_gradients(chunks):  # the float32 weights need as much room before they leave as gradients do
            optimizer = get_megatron_optimizer(config, chunks)
            memory = HostMemory()
            for inner in inner_optimizers(optimizer):
                keep_on_host(inner, memory)
    fuse_adam(optimizer)
    return optimizer


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Dense and expert optimizer, those without parameters on this rank left out."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


def fuse_adam(optimizer: Any) -> None:
    """torch's fused kernel where TransformerEngine's is absent: one pass over memory for each parameter, not about
    eight."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner.optimizer, torch.optim.AdamW):
            inner.optimizer.defaults["fused"] = True
            for group in inner.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def finalize_without_scaling(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients without its division by the number of tokens: weights are in the loss
    already."""
    finalize_model_grads(model, None, **kwargs)


def take_step(optimizer: Any, lr: float, weight_decay: float | None = None) -> StepOutcome:
    """One step at learning rate `lr` and `weight_decay` (None: that of the optimizer's configuration); none at all when
    the gradient is not finite (the state stays as it was)."""
    decay = optimizer.config.weight_decay if weight_decay is None else weight_decay
    for group in optimizer.param_groups:
        group["lr"] = lr
        # Megatron excludes biases and norms from weight decay by this factor, and leaves applying it to the scheduler.
        group["weight_decay"] = decay * group.get("wd_mult", 1.0)
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if overflow or not math.isfinite(norm):
        return StepOutcome(norm, skipped=True)
    for inner in inner_optimizers(optimizer):
        if 0 < inner.config.clip_grad < norm:
            decoupled = getattr(inner.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
            clip_grad_by_total_norm_fp32(inner.get_parameters(), inner.config.clip_grad, norm, decoupled)
    optimizer.step_with_ready_grads()
    return StepOutcome(norm, skipped=False)
