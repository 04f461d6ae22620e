"""What runs inside the pool's processes for a student and its teacher, each a policy of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlctl.backends.base import Teaching
from rlctl.backends.batch import GroupLogprobs, MicroBatchLoss, MinibatchResult
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.backends.policy_rank import PolicyRank
from rlctl.data.rollouts import RolloutColumns
from support.dtensor_cases import make_worker as make_module_worker
from support.dtensor_cases import wholes
from support.parallel_cases import Case, Piece, fill, gather_gradients, make_worker, pieces, plan_of, spec_of
from support.reference import Optim

Taught = dict[int, list[GroupLogprobs]]


def run_teacher(
    rank: int, case: Case, weights: dict[str, Tensor], batch: dict[int, RolloutColumns], teaching: Teaching
) -> tuple[Taught, dict[str, Any]]:
    """The log-probs that this rank gives, by group, and what there is of optimizer and gradients; the teacher has been
    in host memory before."""
    worker = MegatronWorker(rank, case.parallel.world_size, "127.0.0.1", replace(spec_of(case), teaches=teaching))
    worker.build()
    fill(worker, weights)
    freed = worker.sleep()
    worker.wake()
    shard = plan_of(case, batch).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    _, values = worker.teach()
    kept = [parameter for chunk in worker.chunks for parameter in chunk.parameters() if parameter.requires_grad]
    found = {"optimizer": worker.optimizer, "trained": len(kept), "freed": freed}
    return {group: [own] for group, own in zip(shard.columns, values, strict=False)}, found


def run_module_teacher(
    rank: int, case: Case, directory: Path, batch: dict[int, RolloutColumns], teaching: Teaching
) -> tuple[Taught, dict[str, Any]]:
    """`run_teacher` of transformers' modules."""
    spec = replace(spec_of(case), teaches=teaching, model_dir=directory)
    worker = DTensorWorker(rank, case.parallel.world_size, "127.0.0.1", spec)
    worker.prepare()
    worker.build()
    worker.load_model(directory)
    freed = worker.sleep()
    worker.wake()
    shard = plan_of(case, batch).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    _, values = worker.teach()
    trained = sum(parameter.requires_grad for parameter in worker.model.parameters())
    found = {"optimizer": worker.optimizer, "trained": trained, "freed": freed}
    return {group: [own] for group, own in zip(shard.columns, values, strict=False)}, found


def run_module_student(
    rank: int,
    case: Case,
    directory: Path,
    batch: dict[int, RolloutColumns],
    taught: Taught,
    loss: MicroBatchLoss,
) -> Piece:
    """`run_student` of transformers' modules; gradients are whole, by transformers' names."""
    worker = make_module_worker(rank, case, directory)
    result = _learn(worker, rank, case, batch, taught, loss)
    return Piece([result], {}, [(name, value, 0, 1, None) for name, value in wholes(worker, "grad").items()], [])


def together(ranks: list[Taught]) -> Taught:
    """What all ranks of a teacher gave, by group."""
    found: Taught = {}
    for rank in ranks:
        for group, parts in rank.items():
            found.setdefault(group, []).extend(parts)
    return found


def run_student(
    rank: int,
    case: Case,
    weights: dict[str, Tensor],
    batch: dict[int, RolloutColumns],
    taught: Taught,
    loss: MicroBatchLoss,
) -> Piece:
    """One optimizer step on what a teacher gave."""
    worker = make_worker(rank, case, weights)
    result = _learn(worker, rank, case, batch, taught, loss)
    gather_gradients(worker)
    return Piece([result], {}, list(pieces(worker, "grad")), [])


def _learn(
    worker: PolicyRank,
    rank: int,
    case: Case,
    batch: dict[int, RolloutColumns],
    taught: Taught,
    loss: MicroBatchLoss,
) -> MinibatchResult | None:
    worker.load_batch(plan_of(case, batch).shards[case.parallel.data_rank(rank)], list)
    worker.learn_from(taught, list)
    return worker.train_minibatch(0, loss, Optim().lr)
