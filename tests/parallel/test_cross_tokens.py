"""A student and a teacher with different tokenizers, each under a layout of its own, against transformers in one
process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.backends.base import Teaching
from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from rlctl.data.cross_tokens import Projection
from rlctl.data.rollouts import CHUNK, RolloutColumns
from rlctl.data.texts import TrainedText
from rlctl.methods.distill import Distill, DistillConfig
from rlctl.rollouts.dataset import columns_of
from rlctl.training.run_loss import RunLoss
from support.parallel_cases import Case, Model, assemble
from support.pool import Pools, slowly
from support.reference_policy import Optim, hf_model, megatron_weights
from support.teacher_logprobs import run_student, run_teacher, together

TOP, TEACHER_SEED, VOCAB, WEIGHT = 40, 7, 256, 0.01
PROJECTION = Projection(
    np.repeat(np.arange(VOCAB), 2), np.stack([np.arange(VOCAB) % 250, (3 * np.arange(VOCAB)) % 250], 1).ravel(),
    np.tile(np.array([0.9, 0.1], np.float32), VOCAB), 250,
)  # fmt: skip
"""Two tokens of the teacher, of 250, for each of the student."""


def texts() -> dict[int, RolloutColumns]:
    """Three texts, of both tokenizers, in chunks of one to three tokens; the last chunk of the first is the student's
    alone."""
    random, found = np.random.default_rng(11), {}
    for position, chunks in enumerate((9, 6, 12)):
        sizes = random.integers(1, 4, (2, chunks))
        chunk_T = [np.repeat(np.arange(chunks), own) for own in sizes]
        if position == 0:
            chunk_T[1] = chunk_T[1][: sizes[1, :-1].sum()]
        tokens = [random.integers(0, 250, len(own)).astype(np.int32) for own in chunk_T]
        made = [TrainedText(tokens_T, np.arange(len(tokens_T)) > 0) for tokens_T in tokens]
        found[position] = columns_of(made, {CHUNK: np.concatenate(chunk_T).astype(np.float32)})
    return found


def expected(student: torch.nn.Module, teacher: torch.nn.Module) -> float:
    """The loss of all texts by the formulas, with its gradient in the student."""
    total = 0.0
    matrix = torch.zeros(VOCAB, 250, dtype=torch.float64)
    for one, other, weight in zip(PROJECTION.students_E, PROJECTION.teachers_E, PROJECTION.weights_E, strict=True):
        matrix[int(one), int(other)] += float(weight)
    for columns in texts().values():
        logits: list[Tensor] = []
        for sample, model in enumerate((student, teacher)):
            ids = torch.from_numpy(columns.tokens_T[columns.slice(sample)].astype(np.int64))
            with torch.set_grad_enabled(sample == 0):
                logits.append(model(ids[None]).logits[0, :-1])
        chunk_s, chunk_t = (torch.from_numpy(columns.extra_T[CHUNK][columns.slice(n)][1:]) for n in (0, 1))
        kept = logits[1][:, :250].amax(0).topk(TOP).indices
        log_t, p = logits[1][:, kept].log_softmax(-1), (logits[0].softmax(-1) @ matrix)[:, kept]
        divergence = torch.zeros((), dtype=torch.float64)
        for chunk in sorted(set(chunk_s.tolist()) & set(chunk_t.tolist())):
            mean_t, mean_p = log_t[chunk_t == chunk].mean(0), p[chunk_s == chunk].mean(0)
            log_p = (mean_p / (mean_p.sum() + 1e-10) + 1e-10).log()
            divergence = divergence + 0.7 * (mean_t.exp() * (mean_t - log_p)).sum()
            divergence = divergence + 0.3 * (log_p.exp() * (log_p - mean_t)).sum()
        ids = torch.from_numpy(columns.tokens_T[columns.slice(0)].astype(np.int64))
        likelihood = logits[0].log_softmax(-1).gather(1, ids[1:, None]).sum()
        loss = -(likelihood / divergence).detach() * divergence - 0.5 * likelihood
        (WEIGHT * loss).backward()
        total += float(WEIGHT * loss.detach())
    return total


def rollouts(sample: int) -> list[WeightedSequence]:
    return [
        WeightedSequence(position, sample, 1, len(columns.tokens_T[columns.slice(sample)]), 0.0, WEIGHT)
        for position, columns in texts().items()
    ]


CASES = {
    "alone": (Case(chunk=7), Case("qwen3", chunk=5)),
    "teacher-tp2-student-dp2": (Case(parallel=ParallelSpec(dp=2)), Case("qwen3", ParallelSpec(tp=2))),
    "teacher-dp2-student-tp2": (Case(parallel=ParallelSpec(tp=2)), Case("qwen3", ParallelSpec(dp=2), packing=False)),
    "teacher-cp2-student-cp2": (Case(parallel=ParallelSpec(cp=2)), Case("qwen3", ParallelSpec(cp=2))),
    "teacher-pp2-student-pp2": (Case(parallel=ParallelSpec(pp=2)), Case("qwen3", ParallelSpec(pp=2))),
}
BOTH = {
    f"{backend}-{name}": (backend, *cases)
    for name, cases in CASES.items()
    for backend in (("megatron",) if "pp" in name else ("megatron", "dtensor"))
}
QUICK = ("megatron-teacher-dp2-student-tp2", "dtensor-teacher-cp2-student-cp2")


@pytest.mark.parametrize(("backend", "student", "teacher"), slowly(BOTH, *QUICK))
def test_a_student_learns_from_a_teacher_with_other_tokens(
    pools: Pools, backend: str, student: Case, teacher: Case, tmp_path: Path
) -> None:
    student, teacher = (replace(one, backend=backend, temperature=1.0) for one in (student, teacher))
    models = (hf_model("llama"), hf_model(teacher.kind, TEACHER_SEED))
    held: list[Model] = []
    for name, case, model in zip(("student", "teacher"), (student, teacher), models, strict=True):
        if backend == "dtensor":
            model.save_pretrained(tmp_path / name)
            held.append(tmp_path / name)
        else:
            held.append(megatron_weights(case.kind, model.state_dict()))
    ours, theirs = (model.double() for model in models)
    loss = expected(ours, theirs)

    teaching = Teaching(250, TOP, by_text=True)
    ranks = pools(teacher.parallel.world_size).run(run_teacher, teacher, held[1], texts(), teaching, rollouts(1))
    known = together([own for own, _ in ranks])
    options = {"top_k": TOP, "forward_share": 0.7, "sft_weight": 0.5, "balanced": True}
    teacher_section = {"model": "named", "own_tokenizer": True}
    config = DistillConfig.model_validate(
        {"run": {"algorithm": "distill"}, "distillation": options, "teacher": teacher_section}
    )
    found = pools(student.parallel.world_size).run(
        run_student, student, held[0], texts(), known, RunLoss(Distill(config)), rollouts(0), PROJECTION
    )
    result = only_result([rank.results[0] for rank in found])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    grads, _ = assemble([rank.grads for rank in found])
    unclip = (result.grad_norm + 1e-6) / Optim().clip  # clipping scales them in place
    wanted = {name: value.grad.float() for name, value in ours.named_parameters() if value.grad is not None}
    for key, value in (wanted if backend == "dtensor" else megatron_weights("llama", wanted)).items():
        assert torch.allclose(grads[key] * unclip, value, rtol=1e-4, atol=1e-6), key
