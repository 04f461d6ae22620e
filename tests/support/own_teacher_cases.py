"""What runs inside the pool's processes: a policy that learns from an average of its own earlier weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.backends.base import OwnTeacher
from rlctl.backends.batching.batch import MicroBatchLoss, MinibatchResult
from support.parallel_cases import Batch, Case, load_batch, make_worker, pieces
from support.teacher_logprobs import Rows

Pieces = list[tuple[Any, ...]]


@dataclass
class Steps:
    """One rank's part of some steps: results, and weights of policy and teacher before each of them."""

    results: list[MinibatchResult | None] = field(default_factory=list)
    policies: list[Pieces] = field(default_factory=list)
    teachers: list[Pieces] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def run_own_teacher(
    rank: int, case: Case, directory: Path, own: OwnTeacher, batch: Batch, rows: Rows, loss: MicroBatchLoss,
    steps: range, saves: Path | None = None, saved: Path | None = None,
) -> Steps:  # fmt: skip
    """Take `steps`, from a save if they are not the first ones; `saves`: before the last step, which follows a stay in
    host memory."""
    worker, found = make_worker(rank, case, directory, own_teacher=own), Steps()
    if saved is not None:
        worker.load_saved(saved)
    for step in steps:
        if step == steps[-1] and saves is not None:
            worker.save_begin(saves)
            found.digests = worker.save_finish()
            assert worker.save_written()
            assert worker.sleep() > 0
            worker.wake()
        if step and own.every and step % own.every == 0:
            worker.update_teacher(own.rate)
        load_batch(worker, rank, case, batch, rows)
        worker.add_logprobs("teacher_logprobs")
        found.policies.append([*pieces(worker, "data")])
        found.teachers.append([*pieces(worker.own_teacher, "data")])
        found.results.append(worker.train_minibatch(0, loss, 1e-2))
    return found
