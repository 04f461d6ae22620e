"""What runs in the pool's processes: what a policy computes with, compared with its float32 weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.backends.megatron.optimizer import inner_optimizers
from rlctl.checkpoints.rounding import bfloat16_bits, float16_bits
from support.parallel_cases import (
    Batch,
    BrokenLoss,
    Case,
    Loss,
    Model,
    column_by_rollout,
    load_batch,
    make_worker,
    whole,
    wholes,
)
from support.reference import Optim

Found = dict[str, tuple[Tensor, Tensor]]
"""By name: what is computed with, and float32."""


def by_rule(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain form of the rule, not the one that is measured."""
    bits = (bfloat16_bits if dtype == torch.bfloat16 else float16_bits)(master.contiguous().view(torch.int32))
    return bits.view(dtype)


def agreement(found: Found) -> tuple[bool, int, int]:
    """Whether all values are those of the rule; how many differ from rounding to nearest, and of how many."""
    same = all(torch.equal(computed, by_rule(master, computed.dtype)) for computed, master in found.values())
    differing = sum(int((computed != master.to(computed.dtype)).sum()) for computed, master in found.values())
    return same, differing, sum(master.numel() for _, master in found.values())


def megatron_weights(worker: Any) -> Found:
    """This rank's range of each parameter, and its float32 weights."""
    worker._gather_parameters()
    found = {}
    for number, inner in enumerate(inner_optimizers(worker.optimizer)):
        for place, param in enumerate(inner.model_param_group_index_map):
            span = inner._get_model_param_range_map(param)["param"]
            own = param.detach().flatten()[span.start : span.end].clone()
            found[f"{number}.{place}"] = (
                own,
                inner._get_main_param_and_optimizer_states(param)["param"].detach().clone(),
            )
    return found


def dtensor_weights(worker: Any) -> Found:
    """Every parameter as the model sees it during a forward pass, whole, and its float32 weights, whole."""
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, _given: Any, path: str) -> None:
        for name, value in module.named_parameters(recurse=False):
            seen[f"{path}.{name}"] = whole(value)

    hooks = [
        module.register_forward_pre_hook(lambda m, given, path=path: look(m, given, path))
        for path, module in worker.model.inner.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    worker.add_logprobs("old_logprobs")
    for hook in hooks:
        hook.remove()
    masters = wholes(worker, "data")
    # Tensor-parallel layers have plain tensors of their rank while they compute.
    return {
        name: (own, masters[name]) for name, own in seen.items() if name in masters and own.shape == masters[name].shape
    }


def run_rounded(rank: int, case: Case, model: Model, batch: Batch) -> list[tuple[bool, int, int]]:
    """Before training, and after each of two steps."""
    worker = make_worker(rank, case, model)
    weights = megatron_weights if case.backend == "megatron" else dtensor_weights
    load_batch(worker, rank, case, batch)
    found = [agreement(weights(worker))]
    for _ in range(2):
        worker.train_minibatch(0, Loss(), Optim().lr)
        found.append(agreement(weights(worker)))
    return found


def run_changed_backend(
    rank: int, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, places: list[Path]
) -> list[dict[str, Tensor]]:
    """What Megatron holds after a step, what it holds when FSDP2 has taken the checkpoint over and handed it back
    without a step, and the float32 weights of both."""
    worker = make_worker(rank, case, weights)
    load_batch(worker, rank, case, batch)
    worker.train_minibatch(0, Loss(), Optim().lr)
    worker.save_begin(places[0])
    worker.save_finish()
    between = make_worker(rank, replace(case, backend="dtensor"), directory, load=False)
    between.load_saved(places[0])
    between.save_begin(places[1])
    between.save_finish()
    back = make_worker(rank, case, None)
    back.load_saved(places[1])
    held = [{name: value.clone() for name, value in one.parameters().items()} for one in (worker, back)]
    masters = [{name: master for name, (_, master) in megatron_weights(one).items()} for one in (worker, back)]
    return [*held, *masters]


def run_float16(rank: int, case: Case, model: Model, batch: Batch) -> tuple:
    """Log-probs before training by rollout, and the results of a step that is taken, one whose loss is not finite, and
    one more that is taken."""
    worker = make_worker(rank, case, model)
    shard = load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    losses = (Loss(), BrokenLoss(), Loss())
    return logprobs, [worker.train_minibatch(0, loss, Optim().lr) for loss in losses]
