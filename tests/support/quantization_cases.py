"""What runs in the pool's processes: policies whose weights are on a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.models.facts import ModelFacts
from rlctl.weights.plan_execution import strided, transformed
from rlctl.weights.transfer_plan import receive_plan
from support.parallel_cases import Batch, Case, Loss, column_by_rollout, load_batch, make_worker
from support.reference_policy import Optim

Boxes = list[tuple[str, tuple, Tensor]]
"""(published tensor, box, values) of one rank's share."""


def sent(worker: Any, directory: Path) -> Boxes:
    """This rank's share of what a refit sends."""
    held = worker.sent_parameters()
    plan = receive_plan(worker.layouts(), open_hf_model(directory).layout, only=worker.rank)
    return [
        (
            copy.tensor,
            copy.tensor_box,
            transformed(strided(held[copy.source_param], copy.source_view), copy).bfloat16().clone(),
        )
        for copy in plan.copies
    ]


def run_steps(
    rank: int, case: Case, directory: Path, batch: Batch, steps: int, own_facts: ModelFacts | None = None
) -> tuple[Boxes, Boxes, list, dict]:
    """What is sent before and after some steps, the results of these, and log-probs before them."""
    worker = make_worker(rank, case, directory, own_facts=own_facts)
    shard = load_batch(worker, rank, case, batch)
    begun = sent(worker, directory)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    results = [worker.train_minibatch(0, Loss(), Optim().lr) for _ in range(steps)]
    return begun, sent(worker, directory), results, logprobs


def run_reference_and_resumed(
    rank: int, case: Case, directory: Path, batch: Batch, place: Path
) -> tuple[dict, dict, Boxes, Boxes]:
    """Log-probs of the reference of a policy after a step; of a policy without a grid before any; what is sent after
    the step, and by a policy that has read its checkpoint."""
    worker = make_worker(rank, case, directory)
    worker.hold_reference()
    shard = load_batch(worker, rank, case, batch)
    worker.train_minibatch(0, Loss(), Optim().lr)
    worker.add_logprobs("reference_logprobs")
    reference = column_by_rollout(worker, shard, "reference_logprobs")
    worker.save_begin(place)
    worker.save_finish()
    after = sent(worker, directory)
    again = make_worker(rank, case, directory)
    again.load_saved(place)
    plain = make_worker(rank, Case(case.kind, case.parallel, case.dtype, backend=case.backend), directory)
    load_batch(plain, rank, case, batch)
    plain.add_logprobs("old_logprobs")
    return reference, column_by_rollout(plain, shard, "old_logprobs"), after, sent(again, directory)
