"""The divergence of one text from a teacher by the formulas of `methods/distill.py`, from transformers' logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlctl.data.cross_tokens import Projection
from rlctl.data.rollouts import RolloutColumns


def logits_of(model: torch.nn.Module, columns: RolloutColumns, sample: int) -> Tensor:
    ids = torch.from_numpy(columns.tokens_T[columns.slice(sample)].astype(np.int64))
    return model(ids[None]).logits[0, :-1]


def both(log_t: Tensor, log_p: Tensor, share: float) -> Tensor:
    forward, reverse = (log_t.exp() * (log_t - log_p)).sum(), (log_p.exp() * (log_p - log_t)).sum()
    return share * forward + (1 - share) * reverse


def of_chunks(
    student: Tensor, teacher: Tensor, projection: Projection, chunk_s: Tensor, chunk_t: Tensor, top: int, share: float
) -> Tensor:
    """The divergence of a text from a teacher with other tokens, from logits."""
    matrix = torch.zeros(student.shape[1], projection.teacher_vocab, dtype=torch.float64)
    for one, other, weight in zip(projection.students_E, projection.teachers_E, projection.weights_E, strict=True):
        matrix[int(one), int(other)] += float(weight)
    kept = teacher[:, : projection.teacher_vocab].amax(0).topk(top).indices
    log_t, p = teacher[:, kept].log_softmax(-1), (student.softmax(-1) @ matrix)[:, kept]
    divergence = torch.zeros((), dtype=torch.float64)
    for chunk in sorted(set(chunk_s.tolist()) & set(chunk_t.tolist())):
        mean_t, mean_p = log_t[chunk_t == chunk].mean(0), p[chunk_s == chunk].mean(0)
        divergence = divergence + both(mean_t, (mean_p / (mean_p.sum() + 1e-10) + 1e-10).log(), share)
    return divergence


def of_tokens(student: Tensor, teacher: Tensor, top: int, share: float) -> Tensor:
    """The divergence of a text from a teacher with the student's tokens, from logits."""
    kept = teacher.topk(top).indices
    log_t, log_p = (each.log_softmax(-1).gather(1, kept).log_softmax(-1) for each in (teacher, student))
    return both(log_t, log_p, share)
