"""A student and teachers with different tokenizers, each under a layout of its own, against transformers in one
process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.backends.base import Teaching
from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.batching.mixtures import Mixture
from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from rlctl.data.cross_tokens import Projection
from rlctl.data.rollouts import RolloutColumns, chunk_column
from rlctl.data.texts import TrainedText
from rlctl.methods.distill import Distill, DistillConfig
from rlctl.rollouts.dataset import columns_of
from rlctl.training.run_loss import RunLoss
from support.divergences import logits_of, of_chunks, of_tokens
from support.parallel_cases import Case, Model, assemble
from support.pool import Pools, slowly
from support.reference_policy import Optim, hf_model, megatron_weights
from support.teacher_logprobs import TeacherLogprobs, run_student, run_teacher, together

TOP, TEACHER_SEED, VOCAB, WEIGHT = 40, 7, 256, 0.01
PROJECTION = Projection(
    np.repeat(np.arange(VOCAB), 2), np.stack([np.arange(VOCAB) % 250, (3 * np.arange(VOCAB)) % 250], 1).ravel(),
    np.tile(np.array([0.9, 0.1], np.float32), VOCAB), 250,
)  # fmt: skip
"""Two tokens of the teacher, of 250, for each of the student."""
SMALLER = Projection(np.arange(5, VOCAB), (7 * np.arange(5, VOCAB)) % 180, np.ones(VOCAB - 5, np.float32), 180)
"""To a teacher of 180 tokens; the first five tokens of the student have no counterpart."""
SEPARATE = Mixture("divergences", TOP)


def texts(teachers: dict[int, Projection]) -> dict[int, RolloutColumns]:
    """Three texts, in the tokens of the student and of each teacher with other tokens. Chunks have one to three tokens,
    and the last one of the first text is the student's alone."""
    random, found = np.random.default_rng(11), {}
    for position, chunks in enumerate((9, 6, 12)):
        sizes = random.integers(1, 4, (1 + len(teachers), chunks))
        chunk_T = [np.repeat(np.arange(chunks), own) for own in sizes]
        if position == 0:
            chunk_T[1:] = [own[: sizes[number, :-1].sum()] for number, own in enumerate(chunk_T[1:], 1)]
        known = [250, *(projection.teacher_vocab for projection in teachers.values())]
        tokens = [random.integers(0, size, len(own)).astype(np.int32) for size, own in zip(known, chunk_T, strict=True)]
        made = [TrainedText(tokens_T, np.arange(len(tokens_T)) > 0) for tokens_T in tokens]
        columns = {
            chunk_column(number): np.concatenate([
                own if sample in (0, place) else np.full(len(own), -1) for sample, own in enumerate(chunk_T)
            ]).astype(np.float32)
            for place, number in enumerate(teachers, 1)
        }  # fmt: skip
        found[position] = columns_of(made, columns)
    return found


def expected(
    student: torch.nn.Module, teachers: list[tuple[float, torch.nn.Module, set[int]]],
    projections: dict[int, Projection],
) -> float:  # fmt: skip
    """The loss of all texts by the formulas, with its gradient in the student. `teachers`: (weight, model, texts)."""
    total = 0.0
    for position, columns in texts(projections).items():
        ours, divergence = logits_of(student, columns, 0), torch.zeros((), dtype=torch.float64)
        weights = sum(weight for weight, _, places in teachers if position in places)
        for number, (weight, teacher, places) in enumerate(teachers):
            if position not in places:
                continue
            sample = 1 + [*projections].index(number) if number in projections else 0
            with torch.no_grad():
                theirs = logits_of(teacher, columns, sample)
            if number in projections:
                chunk_T = columns.extra_T[chunk_column(number)]
                chunk_s, chunk_t = (torch.from_numpy(chunk_T[columns.slice(n)][1:]) for n in (0, sample))
                own = of_chunks(ours, theirs, projections[number], chunk_s, chunk_t, TOP, 0.7)
            else:
                own = of_tokens(ours, theirs, TOP, 0.7)
            divergence = divergence + weight / weights * own
        ids = torch.from_numpy(columns.tokens_T[columns.slice(0)].astype(np.int64))
        likelihood = ours.log_softmax(-1).gather(1, ids[1:, None]).sum()
        loss = -(likelihood / divergence).detach() * divergence - 0.5 * likelihood
        (WEIGHT * loss).backward()
        total += float(WEIGHT * loss.detach())
    return total


def rollouts(batch: dict[int, RolloutColumns], sample: int) -> list[WeightedSequence]:
    return [
        WeightedSequence(position, sample, 1, len(columns.tokens_T[columns.slice(sample)]), 0.0, WEIGHT)
        for position, columns in batch.items()
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
    one, batch = {0: PROJECTION}, texts({0: PROJECTION})
    student, teacher = (replace(one, backend=backend, temperature=1.0) for one in (student, teacher))
    models = [hf_model("llama"), hf_model(teacher.kind, TEACHER_SEED)]
    held = [weights_of(*each, tmp_path / str(n)) for n, each in enumerate(zip((student, teacher), models, strict=True))]
    ours, theirs = (model.double() for model in models)
    loss = expected(ours, [(1.0, theirs, {*batch})], one)
    teaching = Teaching(250, TOP, chunk_column(0))
    ranks = pools(teacher.parallel.world_size).run(run_teacher, teacher, held[1], batch, teaching, rollouts(batch, 1))
    known = [(1.0, together([own for own, _ in ranks]))]
    check_student(pools, student, held[0], batch, known, one, loss, ours)


TAUGHT = {0: (3.0, {0, 1, 2}), 1: (1.0, {0, 2}), 2: (0.5, {1, 2})}
"""The weight and the texts of each of three teachers. The second has the student's tokens, and the others their own."""
OTHERS = {0: PROJECTION, 2: SMALLER}
SEVERAL = {
    "megatron-tp2": ("megatron", Case(parallel=ParallelSpec(tp=2), chunk=5)),
    "megatron-cp2": ("megatron", Case(parallel=ParallelSpec(cp=2))),
    "megatron-pp2": ("megatron", Case(parallel=ParallelSpec(pp=2))),
    "dtensor-dp2": ("dtensor", Case(parallel=ParallelSpec(dp=2), chunk=5)),
    "dtensor-tp2": ("dtensor", Case(parallel=ParallelSpec(tp=2))),
}


@pytest.mark.parametrize(("backend", "student"), slowly(SEVERAL, "megatron-tp2", "dtensor-dp2"))
def test_a_student_learns_from_teachers_with_different_tokens_by_their_weights(
    pools: Pools, backend: str, student: Case, tmp_path: Path
) -> None:
    batch, student = texts(OTHERS), replace(student, backend=backend, temperature=1.0)
    teacher = Case("qwen3", backend=backend, temperature=1.0)
    models = [hf_model("llama"), *(hf_model("qwen3", TEACHER_SEED + number) for number in TAUGHT)]
    cases = (student, *(teacher for _ in TAUGHT))
    held = [weights_of(*each, tmp_path / str(n)) for n, each in enumerate(zip(cases, models, strict=True))]
    ours, *theirs = (model.double() for model in models)
    loss = expected(ours, [(*TAUGHT[n][:1], model, TAUGHT[n][1]) for n, model in enumerate(theirs)], OTHERS)
    known = []
    for number, (weight, places) in TAUGHT.items():
        own, teaching = {at: batch[at] for at in places}, Teaching(VOCAB, TOP)
        if number in OTHERS:
            teaching = Teaching(OTHERS[number].teacher_vocab, TOP, chunk_column(number))
        read = rollouts(own, 1 + [*OTHERS].index(number) if number in OTHERS else 0)
        ranks = pools(1).run(run_teacher, teacher, held[1 + number], own, teaching, read)
        known.append((weight, together([part for part, _ in ranks])))
    check_student(pools, student, held[0], batch, known, OTHERS, loss, ours)


def weights_of(case: Case, model: torch.nn.Module, directory: Path) -> Model:
    if case.backend == "dtensor":
        model.save_pretrained(directory)  # pyright: ignore[reportCallIssue] - transformers' model
        return directory
    return megatron_weights(case.kind, model.state_dict())


def check_student(
    pools: Pools, student: Case, held: Model, batch: dict[int, RolloutColumns],
    known: list[tuple[float, TeacherLogprobs]], projections: dict[int, Projection], loss: float, ours: torch.nn.Module,
) -> None:  # fmt: skip
    """Compare the loss and the gradients of one step with `loss` and those of `ours`."""
    options = {"top_k": TOP, "forward_share": 0.7, "sft_weight": 0.5, "balanced": True}
    teacher_section = {"model": "named", "own_tokenizer": True}
    config = DistillConfig.model_validate(
        {"run": {"algorithm": "distill"}, "distillation": options, "teacher": teacher_section}
    )
    found = pools(student.parallel.world_size).run(
        run_student, student, held, batch, known, RunLoss(Distill(config)), rollouts(batch, 0), projections, SEPARATE
    )
    result = only_result([rank.results[0] for rank in found])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    grads, _ = assemble([rank.grads for rank in found])
    unclip = (result.grad_norm + 1e-6) / Optim().clip  # clipping scales them in place
    wanted = {name: value.grad.float() for name, value in ours.named_parameters() if value.grad is not None}
    for key, value in (wanted if student.backend == "dtensor" else megatron_weights("llama", wanted)).items():
        assert torch.allclose(grads[key] * unclip, value, rtol=1e-4, atol=1e-6), key
