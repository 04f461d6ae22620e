"""What runs in the pool's processes for a policy of transformers' modules with a critic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.base import CriticSpec
from rlctl.backends.batch import MinibatchResult
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.dtensor.worker import HEAD as SAVED_HEAD
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.rl.critic import ClippedValueLoss, TokenAdvantages
from support.critic_cases import CLIP, COLUMNS, CONFIG, HEAD, head_of, named_for, rewarded, step_both
from support.critic_cases import make_critic as make_megatron
from support.dtensor_cases import Batch, whole
from support.parallel_cases import Case, column_by_rollout, plan_of, spec_of
from support.reference import Optim


@dataclass
class CriticOutcome:
    """One rank's results of two optimizer steps of the critic; whole tensors by Megatron's names on rank 0."""

    results: list[MinibatchResult | None]
    columns: dict[str, dict[tuple[int, int], Tensor]]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    policy_stayed: bool


def make_critic(rank: int, case: Case, directory: Path, *, offload: bool, load: bool = True) -> DTensorWorker:
    """A policy with a critic, both on the weights in `directory`, with a head that is not 0."""
    spec = spec_of(case)
    spec = replace(spec, model_dir=directory, critic=CriticSpec(spec.optimizer, offload))
    worker = DTensorWorker(rank, case.parallel.world_size, "127.0.0.1", spec)
    worker.prepare()
    worker.build()
    if load:
        worker.load_model(directory)
        worker.critic_begin()
        head = local_part(_critic(worker).model.get_parameter("head.weight").detach())
        assert not head.any()
        head.copy_(head_of(case.kind)[: head.shape[0]])  # of its one row, the first shard has all
        worker.critic_end()
    return worker


def _critic(worker: DTensorWorker) -> DTensorWorker:
    assert isinstance(worker.critic, DTensorWorker)
    return worker.critic


def _wholes(worker: DTensorWorker, kind: str, what: str) -> dict[str, Tensor]:
    """The critic's weights or gradients, whole. Collective."""
    critic = _critic(worker)
    critic._reshard()
    named = dict(critic.saved())
    if what == "grad":
        parameters = {name.removeprefix("inner."): p.grad for name, p in critic.model.named_parameters()}
        named = {name: value for name, value in parameters.items() if value is not None}
        named[SAVED_HEAD] = named.pop("head.weight")
    found = {name: whole(value) for name, value in named.items()}
    head = found.pop(SAVED_HEAD)
    return named_for(kind, found) | {HEAD: head}


def run_critic(rank: int, case: Case, directory: Path, batch: Batch) -> CriticOutcome:
    """As `critic_cases.run_critic`."""
    turns = case.parallel.dp == 1
    worker = make_critic(rank, case, directory, offload=turns)
    before = {name: value.clone() for name, value in worker.parameters().items()}
    shard = plan_of(case, batch, rewarded(batch)).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    results, grads = list[Any](), dict[str, Tensor]()
    worker.critic_begin()
    worker.estimate(TokenAdvantages(CONFIG))
    for step in range(2):
        results.append(worker.train_critic(0, ClippedValueLoss(CLIP), Optim().lr))
        if step == 0:
            grads = _wholes(worker, case.kind, "grad")
        if step == 0 and not turns:
            _sleep_together(worker)
    params = _wholes(worker, case.kind, "data")
    worker.critic_end()
    stayed = all(torch.equal(before[name], value) for name, value in worker.parameters().items())
    columns = {column: column_by_rollout(worker, shard, column) for column in COLUMNS}  # type: ignore[arg-type]
    return CriticOutcome(results, columns, grads if rank == 0 else {}, params if rank == 0 else {}, stayed)


def _sleep_together(worker: DTensorWorker) -> None:
    """Put both models to sleep, the policy's weights later as for a refit, and wake them."""
    worker.critic_end()
    assert 0 < worker.sleep(keep_weights=True) < worker.sleep()
    for model in (worker, _critic(worker)):
        assert not sum(local_part(p).untyped_storage().nbytes() for p in model.model.parameters())
    worker.wake()
    worker.critic_begin()


def run_critic_checkpoint(
    rank: int, before: Case, after: Case, directory: Path, batch: Batch, saved: Path
) -> tuple[list[Any], list[Any], dict[str, Tensor], dict[str, Tensor]]:
    """(results, the critic's weights) of the second step: uninterrupted, and after save, rebuild as `after`, load."""
    worker = make_critic(rank, before, directory, offload=True)
    step_both(worker, before, batch, rank)
    assert worker.parameters_not_finite() == []
    worker.save_begin(saved)
    digests = worker.save_finish()
    assert worker.damaged_files(saved, digests) == []
    straight = step_both(worker, before, batch, rank)
    worker.critic_begin()
    kept = _wholes(worker, before.kind, "data")
    worker.critic_end()
    worker = make_critic(rank, after, directory, offload=False, load=False)
    worker.load_saved(saved)
    return [straight], [step_both(worker, after, batch, rank)], kept, _wholes(worker, after.kind, "data")


def run_critic_changed(
    rank: int, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, places: list[Path]
) -> list[Any]:
    """(critic's, policy's) result of Megatron's second step, of the dtensor backend's that goes on after the first, and
    of Megatron's that goes on with what the dtensor backend saved before its step."""
    for place in places:
        place.mkdir(exist_ok=True)
    torch.distributed.barrier()
    straight = make_megatron(rank, case, weights)
    step_both(straight, case, batch, rank)
    straight.save_begin(places[0])
    straight.save_finish()
    results: list[Any] = [step_both(straight, case, batch, rank)]
    changed = make_critic(rank, case, directory, offload=False, load=False)
    changed.load_saved(places[0])
    changed.save_begin(places[1])
    changed.save_finish()
    results.append(step_both(changed, case, batch, rank))
    back = make_megatron(rank, case, None)
    back.load_saved(places[1])
    return [*results, step_both(back, case, batch, rank)]
