"""Megatron's gradient buffers and distributed optimizer: one guarded step, and moves to host memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor

from rlctl.backends.base import PolicySpec
from rlctl.backends.host_memory import HostMemory, Offloaded, refill_with_zeros, storages_of
from rlctl.backends.megatron.args import ddp_values, optimizer_values
from rlctl.backends.megatron.compat import make_config
from rlctl.backends.megatron.host_states import keep_on_host
from rlctl.backends.megatron.masters import round_weights
from rlctl.backends.muon import muon_of
from rlctl.backends.results import StepOutcome


def wrap_chunks(spec: PolicySpec, config: Any, models: list[Any]) -> list[Any]:
    """Wrap model chunks with contiguous gradient buffers, reduced in float32 over data-parallel ranks; a teacher has
    none."""
    if spec.dtype != "float32":
        from megatron.core.transformer.module import Float16Module

        models = [Float16Module(config, model) for model in models]
        # The router's correction bias stays in float32, as published. Megatron rounds it with everything else and
        # widens it again in the first forward pass, after weights were loaded.
        for module in (module for model in models for module in model.modules()):
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias.data = module.expert_bias.data.float()
    if spec.teaches is not None:
        return [model.requires_grad_(requires_grad=False) for model in models]
    ddp = make_config(DistributedDataParallelConfig, ddp_values(spec), spec.ddp, "ddp")
    chunks = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=number > 0) for number, model in enumerate(models)
    ]
    if ddp.overlap_grad_reduce:  # how Megatron's schedules hold back reductions that run during the backward pass
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


def build_optimizer(spec: PolicySpec, chunks: list[Any], use_muon: Callable[[Any], None]) -> Any:
    """Megatron's AdamW with its weight-decay exclusions (biases and norms). `use_muon` has Muon update an optimizer's
    hidden matrices. Collective."""
    config = make_config(OptimizerConfig, optimizer_values(spec), spec.optimizer.passed, "optimizer")
    # With offload the float32 weights need as much room as gradients before they leave.
    with without_gradients(chunks) if spec.optimizer_offload else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(config, chunks)
        for inner in inner_optimizers(optimizer) if spec.dtype != "float32" else ():
            round_weights(inner, spec.optimizer)
        share_loss_scale(inner_optimizers(optimizer))
        if spec.optimizer.optimizer == "muon":
            use_muon(optimizer)
        if spec.optimizer_offload:
            memory = HostMemory()
            for inner in inner_optimizers(optimizer):
                keep_on_host(inner, memory)
    for inner in inner_optimizers(optimizer):
        if isinstance(inner.optimizer, torch.optim.AdamW):
            # torch's fused kernel, where TransformerEngine's is absent: one pass over a parameter, not about eight
            inner.optimizer.defaults["fused"] = True
            for group in inner.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
    return optimizer


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Dense and expert optimizer, without optimizers that have no parameters on this rank; a teacher has none."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer] if optimizer is not None else [])
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


class SharedScaler(DynamicGradScaler):
    """One loss scale for the dense and the expert optimizer, which would otherwise change theirs in the middle of a
    step."""

    def update(self, found_inf: bool) -> None:
        """Do nothing: each optimizer calls this."""

    def end_step(self, skipped: bool) -> None:
        super().update(skipped)


def share_loss_scale(inners: list[Any]) -> None:
    for inner in inners:
        if isinstance(inner.grad_scaler, DynamicGradScaler):
            inner.grad_scaler = inners[0].grad_scaler
            inner.grad_scaler.__class__ = SharedScaler


@torch.no_grad()
def set_masters(optimizer: Any, masters: Mapping[Tensor, Tensor]) -> None:
    """Give the optimizers the float32 weights of their parameters; each data-parallel rank keeps a range."""
    make_states(optimizer)
    for inner in inner_optimizers(optimizer):
        for parameter in inner.model_param_group_index_map:
            span = inner._get_model_param_range_map(parameter)["param"]
            states = inner._get_main_param_and_optimizer_states(parameter)  # copies, of states in host memory
            main_state = {"param": masters[parameter].flatten()[span.start : span.end]}
            inner._set_main_param_and_optimizer_states(parameter, states | main_state)


def make_states(optimizer: Any) -> None:
    """Create states of optimizers without a step, which Megatron would not save (for example during a critic's
    warm-up)."""
    steps = count_of(optimizer)
    for inner in inner_optimizers(optimizer):
        if any(inner.optimizer.state.values()):
            continue
        groups = inner.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0  # Megatron makes states by a step without gradients, which decays the weights
        muon = muon_of(inner.optimizer)
        with muon.creating_states() if muon is not None else contextlib.nullcontext():
            inner._init_optimizer_states_with_dummy_values()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
    set_count(optimizer, steps)


def set_count(optimizer: Any, steps: float) -> None:
    """Set the number of steps: a number per group in TransformerEngine's Adam, a device tensor per parameter in
    torch's."""
    for inner in inner_optimizers(optimizer):
        if (muon := muon_of(inner.optimizer)) is not None:
            muon.steps = int(steps)
        for group in inner.optimizer.param_groups:
            group["step"] = int(steps)
        for state in inner.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(steps)


def count_of(optimizer: Any) -> int:
    """The number of steps taken, which is the same for all parameters."""
    counts = [0]
    for inner in inner_optimizers(optimizer):
        counts += [muon.steps] if (muon := muon_of(inner.optimizer)) is not None else []
        counts += [int(state["step"]) for state in inner.optimizer.state.values() if "step" in state][:1] or [
            int(group.get("step", 0)) for group in inner.optimizer.param_groups
        ]
    return max(counts)


def states_of(optimizer: Any) -> Iterator[tuple[str, Any, Tensor, dict[str, Tensor]]]:
    """Yield the optimizer states of each parameter with a range on this rank: (name, inner optimizer, parameter, states
    by name). Megatron returns copies of states in host memory."""
    for place, inner in enumerate(inner_optimizers(optimizer)):
        for number, (param, *_) in enumerate(ranges(inner)):
            states = inner._get_main_param_and_optimizer_states(param)
            yield f"{place}.{number}", inner, param, {name: v for name, v in states.items() if name != "step"}


def ranges(inner: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield (parameter, first element, end) of this rank's optimizer ranges in flattened parameters."""
    for of_buffer in inner.gbuf_ranges:
        for of_dtype in of_buffer.values():
            for of_bucket in of_dtype:
                for param, spans in of_bucket["param_map"].items():
                    yield param, spans["param"].start, spans["param"].end


def finalize_without_scaling(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients without its division by the number of tokens: the loss has its weights."""
    finalize_model_grads(model, None, **kwargs)


def take_step(optimizer: Any, lr: float, weight_decay: float | None = None) -> StepOutcome:
    """Take one step, or none if the gradient is not finite. `weight_decay` None: the optimizer's."""
    decay = optimizer.config.weight_decay if weight_decay is None else weight_decay
    for group in optimizer.param_groups:
        group["lr"] = lr
        # Megatron excludes biases and norms from weight decay by this factor, and leaves applying it to the scheduler.
        group["weight_decay"] = decay * group.get("wd_mult", 1.0)
    inners = inner_optimizers(optimizer)
    scaler = next((inner.grad_scaler for inner in inners if inner.config.fp16), None)
    scale = float(scaler.scale) if scaler is not None else None
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    skipped = overflow or not math.isfinite(norm)
    if scaler is not None:
        scaler.end_step(skipped)
    if skipped:
        return StepOutcome(norm, skipped=True, loss_scale=scale)
    for inner in inners:
        params = inner.get_parameters()  # none on a pipeline stage whose layers have no adapters
        if params and 0 < inner.config.clip_grad < norm:
            decoupled = getattr(inner.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
            clip_grad_by_total_norm_fp32(params, inner.config.clip_grad, norm, decoupled)
    optimizer.step_with_ready_grads()
    for group in optimizer.param_groups:
        if not group["params"]:  # on such a stage no optimizer counts, and the first stage writes the number
            group["step"] = group.get("step", 0) + 1
    return StepOutcome(norm, skipped=False, loss_scale=scale)


def buffers_of(chunks: list[Any]) -> Iterator[Any]:
    """Return Megatron's gradient (and parameter) buffers of model chunks, experts last."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):  # a teacher's have none
            wrapped: Any = chunk  # its `buffers` are a list; a module's are a method
            yield from (*wrapped.buffers, *wrapped.expert_parallel_buffers)


def gradients(chunks: list[Any]) -> Iterator[Tensor]:
    return (buffer.grad_data for buffer in buffers_of(chunks))


@contextlib.contextmanager
def without_gradients(chunks: list[Any]) -> Iterator[None]:
    """Room where the gradients are, which have no meaning between steps; zero afterwards."""
    sizes = [(storage, storage.nbytes()) for storage in storages_of(gradients(chunks)).values()]
    for storage, _ in sizes:
        storage.resize_(0)
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        refill_with_zeros(sizes)


def offload(
    chunks: list[Any], optimizer: Any, memory: HostMemory, more: Iterable[Tensor] = (), *, keep_weights: bool = False
) -> Offloaded:
    """Move weights, optimizer tensors and `more` (such as a reference) to host memory and zero the gradients.
    `keep_weights` keeps the model's weights."""
    forget_float8_copies(chunks)
    staying = storages_of(gradients(chunks)).keys() | (storages_of(_weights(chunks)).keys() if keep_weights else set())
    tensors = [*_weights(chunks), *_optimizer_tensors(optimizer), *more]
    moving = (tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in staying)
    return Offloaded(moving, gradients(chunks), memory)


def forget_float8_copies(chunks: list[Any]) -> None:
    """Drop TransformerEngine's cached float8 weights, which it rebuilds (`get_weight_workspace` in
    pytorch/module/base.py)."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def _weights(chunks: list[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        module = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        for value in (*module.parameters(), *module.buffers()):
            yield value.data
    yield from (buffer.param_data for buffer in buffers_of(chunks) if buffer.param_data is not None)


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """States and, in bfloat16, float32 weights; empty for a teacher or with `host_states`."""
    if optimizer is None:
        return
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            yield from (param.data for param in group["params"])
        for state in inner.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
