"""Functions for the pool's processes with two policies: a student and its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlctl.backends.base import Teaching
from rlctl.backends.batching.batch import GroupLogprobs, MicroBatchLoss, WeightedSequence
from rlctl.data.cross_tokens import Projection
from rlctl.models.facts import ModelFacts
from support.parallel_cases import Batch, Case, Model, Piece, gather_gradients, load_batch, make_worker, pieces
from support.reference_policy import Optim

TeacherLogprobs = dict[int, list[GroupLogprobs]]
Rows = list[WeightedSequence] | None
"""The rollouts of the batch that are read; None: all."""


def run_teacher(
    rank: int, case: Case, model: Model, batch: Batch, teaching: Teaching, rows: Rows = None
) -> tuple[TeacherLogprobs, dict[str, Any]]:
    """The log-probs that this rank gives, by group, and what there is of optimizer and gradients; the teacher has been
    in host memory before."""
    worker = make_worker(rank, case, model, teaches=teaching)
    freed = worker.sleep()
    worker.wake()
    shard = load_batch(worker, rank, case, batch, rows)
    _, values = worker.export_logprobs()
    trained = sum(parameter.requires_grad for own in worker.models for parameter in own.parameters())
    found = {"optimizer": worker.optimizer, "trained": trained, "freed": freed}
    return {group: [own] for group, own in zip(shard.columns, values, strict=False)}, found


def run_scorer(
    rank: int, case: Case, directory: Path, facts: ModelFacts, batch: Batch, rows: list[WeightedSequence]
) -> dict[int, GroupLogprobs]:
    """The scores that this rank gives, by group; the reward model has been in host memory before."""
    worker = make_worker(rank, case, directory, own_facts=facts, valued=True, teaches=Teaching(facts.vocab))
    worker.sleep()
    worker.wake()
    shard = load_batch(worker, rank, case, batch, rows)
    _, values = worker.export_logprobs()
    return dict(zip(shard.columns, values, strict=False))


def together(ranks: list[TeacherLogprobs]) -> TeacherLogprobs:
    """What all ranks of a teacher gave, by group."""
    found: TeacherLogprobs = {}
    for rank in ranks:
        for group, parts in rank.items():
            found.setdefault(group, []).extend(parts)
    return found


def run_student(
    rank: int, case: Case, model: Model, batch: Batch, known: TeacherLogprobs, loss: MicroBatchLoss, rows: Rows = None,
    projection: Projection | None = None,
) -> Piece:  # fmt: skip
    """One optimizer step on what a teacher gave."""
    worker = make_worker(rank, case, model)
    load_batch(worker, rank, case, batch, rows)
    if projection is not None:
        worker.hold_projection(projection)
    worker.import_logprobs(known, list)
    result = worker.train_minibatch(0, loss, Optim().lr)
    gather_gradients(worker)
    return Piece([result], {}, list(pieces(worker, "grad")), [])
