"""Functions for the pool's processes with two policies: a student and its teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.backends.base import Teaching
from rlctl.backends.batching.batch import GroupLogprobs, MicroBatchLoss, WeightedSequence
from rlctl.backends.batching.mixtures import ALONE, Mixture, Taught
from rlctl.data.cross_tokens import Projection
from rlctl.models.facts import ModelFacts
from support.parallel_cases import (
    WEIGHT,
    Batch,
    Case,
    Model,
    Piece,
    fill,
    gather_gradients,
    load_batch,
    make_worker,
    pieces,
    spec_of,
)
from support.reference_policy import Optim

TeacherLogprobs = dict[int, list[GroupLogprobs]]
Rows = list[WeightedSequence] | None
"""The rollouts of the batch that are read; None: all."""


def table(model: object, tokens: np.ndarray, mask: np.ndarray) -> tuple[Tensor, Tensor]:
    """float64 (log-probs of all tokens [R, V], chosen tokens [R, 1]) of one rollout's response."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    kept = torch.from_numpy(mask)[1:]
    return torch.log_softmax(model(ids[None]).logits[0, :-1], -1)[kept], ids[1:, None][kept]  # type: ignore[operator]


def rollouts_of(batch: Batch, advantage: float = 0.0) -> list[WeightedSequence]:
    """The rollouts of a batch with one advantage."""
    return [
        WeightedSequence(at, row, int(np.argmax(columns.loss_mask_T[columns.slice(row)])),
                         len(columns.tokens_T[columns.slice(row)]), advantage, WEIGHT)
        for at, columns in batch.items()
        for row in range(columns.rollouts)
    ]  # fmt: skip


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


def run_teachers(
    rank: int, case: Case, models: list[Model], batch: Batch, teaching: Teaching, kinds: Sequence[str] = (),
    resident: bool = True,
) -> list[list[TeacherLogprobs]]:  # fmt: skip
    """The log-probs of teachers that take turns, of all ranks by teacher; with fewer tokens than the vocabulary, at the
    most likely tokens of all of them. `kinds`: of each, where their architectures differ."""
    places = [model if isinstance(model, Path) else None for model in models]
    specs = [replace(spec_of(replace(case, kind=kind)), teaches=teaching) for kind in kinds]
    beside = [replace(spec, model_dir=place) for spec, place in zip(specs, places, strict=False)][1:]
    more = {"beside": tuple(beside), "together": resident}
    worker = make_worker(rank, case, models[0], load=False, teaches=teaching, **more)
    found: list[list[TeacherLogprobs]] = []
    looks = 2 if teaching.top < teaching.vocab else 1
    for look in range(looks):
        before, found = found, []
        for number, model in enumerate(models):
            if kinds:
                worker.use_model(number)
            if isinstance(model, Path):
                worker.load_model(model)
            else:
                assert model is not None
                fill(worker._active, model)
            shard = load_batch(worker, rank, case, batch)
            if look:
                worker.take_tokens({at: [together(ranks)[at] for ranks in before] for at in shard.columns}, list)
            _, values = worker.export_logprobs()
            own = {group: [value] for group, value in zip(shard.columns, values, strict=False)}
            everyone: list[TeacherLogprobs] = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(everyone, own)
            found.append(everyone)
    return found


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
    rank: int, case: Case, model: Model, batch: Batch, known: list[tuple[float, TeacherLogprobs]], loss: MicroBatchLoss,
    rows: Rows = None, projections: Mapping[int, Projection] | None = None, mixture: Mixture = ALONE,
) -> Piece:  # fmt: skip
    """One optimizer step on what teachers gave, with the weight of each; a group is without those that gave nothing."""
    worker = make_worker(rank, case, model)
    load_batch(worker, rank, case, batch, rows)
    worker.hold_projections(projections or {})
    taught = {
        at: [Taught(weight, parts[at], number) for number, (weight, parts) in enumerate(known) if at in parts]
        for at in batch
    }
    worker.import_logprobs(taught, list, mixture)
    result = worker.train_minibatch(0, loss, Optim().lr)
    gather_gradients(worker)
    return Piece([result], {}, list(pieces(worker, "grad")), [])
