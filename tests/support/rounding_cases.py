"""What runs in the pool's processes: what a policy computes with, compared with its float32 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.backends.megatron.optimizer import inner_optimizers
from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.checkpoints.plan_execution import execute
from rlctl.checkpoints.rounding import bfloat16_bits, float16_bits
from rlctl.data.rollouts import RolloutColumns
from rlctl.rl.critic import ClippedValueLoss, TokenAdvantages
from rlctl.weights.transfer_plan import SingleWorld, receive_plan
from support.critic_cases import CLIP, CONFIG, rewarded
from support.critic_cases import make_critic as make_megatron_critic
from support.dtensor_cases import make_worker, whole, wholes
from support.dtensor_critics import make_critic
from support.parallel_cases import BrokenLoss, Case, Loss, column_by_rollout, plan_of
from support.parallel_cases import make_worker as make_megatron
from support.reference import Optim

Batch = dict[int, RolloutColumns]
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


def run_megatron(rank: int, case: Case, weights: dict[str, Tensor], batch: Batch) -> list[tuple[bool, int, int]]:
    """Before training, and after each of two steps."""
    worker = make_megatron(rank, case, weights)
    worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
    found = [agreement(megatron_weights(worker))]
    for _ in range(2):
        worker.train_minibatch(0, Loss(), Optim().lr)
        found.append(agreement(megatron_weights(worker)))
    return found


def run_dtensor(rank: int, case: Case, directory: Path, batch: Batch) -> list[tuple[bool, int, int]]:
    """Likewise."""
    worker = make_worker(rank, case, directory)
    worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
    found = [agreement(dtensor_weights(worker))]
    for _ in range(2):
        worker.train_minibatch(0, Loss(), Optim().lr)
        found.append(agreement(dtensor_weights(worker)))
    return found


def run_changed_backend(
    rank: int, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, places: list[Path]
) -> list[dict[str, Tensor]]:
    """What Megatron holds after a step, what it holds when FSDP2 has taken the checkpoint over and handed it back
    without a step, and the float32 weights of both."""
    worker = make_megatron(rank, case, weights)
    worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
    worker.train_minibatch(0, Loss(), Optim().lr)
    worker.save_begin(places[0])
    worker.save_finish()
    between = make_worker(rank, case, directory, load=False)
    between.load_saved(places[0])
    between.save_begin(places[1])
    between.save_finish()
    back = make_megatron(rank, case, None)
    back.load_saved(places[1])
    held = [{name: value.clone() for name, value in one.parameters().items()} for one in (worker, back)]
    masters = [{name: master for name, (_, master) in megatron_weights(one).items()} for one in (worker, back)]
    return [*held, *masters]


def run_critic(rank: int, backend: str, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch) -> Any:
    """What a critic holds after one step, compared as above."""
    megatron = backend == "megatron"
    made = make_megatron_critic(rank, case, weights) if megatron else make_critic(rank, case, directory, offload=False)
    worker: Any = made
    worker.load_batch(plan_of(case, batch, rewarded(batch)).shards[case.parallel.data_rank(rank)], list)
    worker.critic_begin()
    worker.estimate(TokenAdvantages(CONFIG))
    result = worker.train_critic(0, ClippedValueLoss(CLIP), Optim().lr)
    if megatron:
        return result, agreement(megatron_weights(worker.critic))
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda m, _given, path=path: seen.update(
                {f"{path}.{name}": whole(value) for name, value in m.named_parameters(recurse=False)}
            )
        )
        for path, module in worker.critic.model.named_modules()
    ]
    worker.estimate(TokenAdvantages(CONFIG))
    for hook in hooks:
        hook.remove()
    masters = {name: whole(value) for name, value in worker.critic.model.named_parameters()}
    return result, agreement({name: (own, masters[name]) for name, own in seen.items() if name in masters})


def sent(worker: Any, place: Path) -> dict[str, Tensor]:
    """What a refit would send of a policy of one process, under the names and in the dtypes of a model directory."""
    layout, held = open_hf_model(place).layout, worker.parameters()
    found = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in layout.params.items()}
    for copy in receive_plan(worker.layouts(), SingleWorld(layout), 0).prove().copies:
        execute(copy, held[copy.source_param], found[copy.destination_param], rounding=worker.rounding)
    return found


def run_export(
    rank: int, backend: str, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, run: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a refit sends after two steps; and the same of a policy to which the run's checkpoint was given as a model.
    The checkpoint is exported into `run`."""
    megatron = backend == "megatron"
    worker: Any = make_megatron(rank, case, weights) if megatron else make_worker(rank, case, directory)
    worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
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
    again: Any = make_megatron(rank, case, None) if megatron else make_worker(rank, case, directory, load=False)
    again.load_model(policy)
    return held, sent(again, run / "exported")


def run_float16(
    rank: int, backend: str, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch
) -> tuple:
    """Log-probs before training by rollout, and the results of a step that is taken, one whose loss is not finite, and
    one more that is taken."""
    megatron = backend == "megatron"
    worker: Any = make_megatron(rank, case, weights) if megatron else make_worker(rank, case, directory)
    shard = plan_of(case, batch).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    losses = (Loss(), BrokenLoss(), Loss())
    return logprobs, [worker.train_minibatch(0, loss, Optim().lr) for loss in losses]
