"""What runs in the pool's processes: what a policy computes with, compared with its float32 weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.backends.megatron.optimizer import inner_optimizers
from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.methods.rl.critic import ClippedValueLoss, TokenAdvantages
from rlctl.weights.plan_execution import execute
from rlctl.weights.rounding import bfloat16_bits, float16_bits
from rlctl.weights.transfer_plan import receive_plan
from support.critic_cases import CLIP, CONFIG, make_critic, rewarded
from support.parallel_cases import (
    Batch,
    BrokenLoss,
    Case,
    Loss,
    Model,
    column_by_rollout,
    load_batch,
    make_worker,
    plan_of,
    whole,
    wholes,
)
from support.reference_policy import Optim

Found = dict[str, tuple[Tensor, Tensor]]
"""By name: what is computed with, and float32."""


def by_rule(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Round by the plain form of the rule, instead of the tested form."""
    bits = (bfloat16_bits if dtype == torch.bfloat16 else float16_bits)(master.contiguous().view(torch.int32))
    return bits.view(dtype)


def agreement(found: Found) -> tuple[bool, int, int]:
    """Return (whether all values follow the rule, number that differ from rounding to nearest, number of values)."""
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
    return seen_by(worker, lambda: worker.add_logprobs("old_logprobs"))


def seen_by(worker: Any, forward: Callable[[], Any]) -> Found:
    """Every parameter as the model sees it during a forward pass, whole, and its float32 weights, whole."""
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, _given: Any, path: str) -> None:
        for name, value in module.named_parameters(recurse=False):
            seen[f"{path}.{name}"] = whole(value)

    hooks = [
        module.register_forward_pre_hook(lambda m, given, path=path: look(m, given, path))
        for path, module in getattr(worker.model, "inner", worker.model).named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    forward()
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


def run_critic(rank: int, case: Case, model: Model, batch: Batch) -> tuple[Any, tuple[bool, int, int]]:
    """The result of a critic's step, and what it holds after it, compared as above."""
    worker = make_critic(rank, case, model)
    worker.load_batch(plan_of(case, batch, rewarded(batch)).shards[case.parallel.data_rank(rank)], list)
    worker.critic_begin()
    worker.estimate(TokenAdvantages(CONFIG))
    result = worker.train_critic(0, ClippedValueLoss(CLIP), Optim().lr)
    if case.backend == "megatron":
        return result, agreement(megatron_weights(worker.critic))
    return result, agreement(seen_by(worker.critic, lambda: worker.estimate(TokenAdvantages(CONFIG))))


def sent(worker: Any, place: Path) -> dict[str, Tensor]:
    """What a refit would send of a policy of one process, under the names and in the dtypes of a model directory."""
    layout, held = open_hf_model(place).layout, worker.parameters()
    found = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in layout.params.items()}
    for copy in receive_plan(worker.layouts(), layout).prove().copies:
        execute(copy, held[copy.source_param], found[copy.destination_param], rounding=worker.rounding)
    return found


def run_export(
    rank: int, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, run: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a refit sends after two steps; and the same of a policy to which the run's checkpoint was given as a model.
    The checkpoint is exported into `run`."""
    model = weights if case.backend == "megatron" else directory
    worker = make_worker(rank, case, model)
    load_batch(worker, rank, case, batch)
    for _ in range(2):
        worker.train_minibatch(0, Loss(), Optim().lr)
    policy = run / "checkpoints" / "step_1" / "policy"
    policy.mkdir(parents=True)
    worker.save_begin(policy)
    worker.save_finish()
    values = {"model.dtype": case.dtype, "training.lora.rank": case.lora.rank, "training.lora.alpha": case.lora.alpha}
    manifest = {
        "model": {"directory": str(directory), "fingerprint": model_fingerprint(directory)},
        "config": {key: {"value": value} for key, value in (values | {"optimizer.rounding": worker.rounding}).items()},
        "plan": {"training": {"precision": "bf16"}},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    megatron_to_hf(run, run / "exported", config_from=directory)
    held = sent(worker, run / "exported")
    if case.lora.rank:
        return held, held
    again = make_worker(rank, case, None if case.backend == "megatron" else directory, load=False)
    again.load_model(policy)
    return held, sent(again, run / "exported")


def run_float16(rank: int, case: Case, model: Model, batch: Batch) -> tuple:
    """Log-probs before training by rollout, and the results of a step that is taken, one whose loss is not finite, and
    one more that is taken."""
    worker = make_worker(rank, case, model)
    shard = load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    losses = (Loss(), BrokenLoss(), Loss())
    return logprobs, [worker.train_minibatch(0, loss, Optim().lr) for loss in losses]
