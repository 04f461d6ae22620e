"""A student that learns from a teacher, each under a layout of its own, against transformers in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.backends.base import Teaching
from rlctl.backends.batching.mixtures import Mixture
from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from rlctl.methods.rl.distillation import Distillation, DistillationRlConfig
from rlctl.training.run_loss import RunLoss
from support.parallel_cases import WEIGHT, Case, Model, assemble
from support.pool import Pools, slowly
from support.reference_policy import Optim, advantage, hf_model, make_batch, megatron_weights
from support.teacher_logprobs import rollouts_of, run_student, run_teacher, run_teachers, table, together

TOP = 5
TEACHER_SEED = 7


def expected(student: torch.nn.Module, teacher: torch.nn.Module, options: dict) -> tuple[float, float]:
    """The loss of the batch by the formulas, with its gradient in the student; and the mean of teacher_kl."""
    batch, total, kls = make_batch(), 0.0, []
    for group, columns in batch.items():
        for row in range(columns.rollouts):
            span = columns.slice(row)
            tokens, mask = columns.tokens_T[span], columns.loss_mask_T[span]
            with torch.no_grad():
                theirs, chosen = table(teacher, tokens, mask)
            ours, _ = table(student, tokens, mask)
            sampled, wanted = ours.gather(1, chosen)[:, 0], theirs.gather(1, chosen)[:, 0]
            kls += (sampled - wanted).tolist()
            if options["loss"] == "sampled":
                gain = advantage(group, row) + (wanted - sampled).detach()
                loss = -(gain * (sampled - sampled.detach()).exp()).sum()
            else:
                values, ids = theirs.topk(TOP)
                log_t, log_p = values.log_softmax(-1), ours.gather(1, ids).log_softmax(-1)
                loss = (log_t.exp() * (log_t - log_p)).sum()
                loss = loss - advantage(group, row) * (sampled - sampled.detach()).exp().sum()
            (WEIGHT * loss).backward()
            total += float(WEIGHT * loss.detach())
    return total, float(np.mean(kls))


CASES = {
    "alone": (Case(), Case("qwen3")),
    "teacher-tp1-student-tp2": (Case(parallel=ParallelSpec(tp=2), chunk=7), Case("qwen3", chunk=5)),
    "teacher-tp2-student-dp2": (Case(parallel=ParallelSpec(dp=2)), Case("qwen3", ParallelSpec(tp=2))),
    "teacher-dp2-student-pp2": (Case(parallel=ParallelSpec(pp=2)), Case("qwen3", ParallelSpec(dp=2), packing=False)),
    "teacher-pp2-student-cp2": (Case(parallel=ParallelSpec(cp=2)), Case("qwen2", ParallelSpec(pp=2))),
    "teacher-cp2-student-tp2": (Case(parallel=ParallelSpec(tp=2)), Case("qwen3", ParallelSpec(cp=2))),
}


QUICK = ("teacher-tp1-student-tp2",)
MODULES = {
    "alone": (Case(chunk=7), Case("qwen3", chunk=5)),
    "teacher-tp2-student-dp2": (Case(parallel=ParallelSpec(dp=2)), Case("qwen3", ParallelSpec(tp=2))),
    "teacher-dp2-student-tp2": (Case(parallel=ParallelSpec(tp=2)), Case("qwen3", ParallelSpec(dp=2), packing=False)),
    "teacher-cp2-student-cp2": (Case(parallel=ParallelSpec(cp=2)), Case("qwen2", ParallelSpec(cp=2))),
}
"""On the dtensor backend."""


@pytest.mark.parametrize("form", ["sampled", "top-k"])
@pytest.mark.parametrize("name", slowly(CASES.keys(), *QUICK))
def test_a_student_learns_what_its_teacher_says(pools: Pools, name: str, form: str) -> None:
    student, teacher = CASES[name]
    weights = [megatron_weights(case.kind, model.state_dict()) for case, model in of_both(student, teacher)]
    grads = check(pools, student, teacher, form, weights[0], weights[1])
    for key, value in megatron_weights("llama", grads.wanted).items():
        assert torch.allclose(grads.found[key], value, rtol=1e-4, atol=1e-6), key


QUICK_MODULES = [("teacher-tp2-student-dp2", "top-k")]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in QUICK_MODULES else pytest.mark.slow)
        for name in MODULES
        for form in ("sampled", "top-k")
    ],
)
def test_a_student_of_modules_learns_what_its_teacher_says(pools: Pools, name: str, form: str, tmp_path: Path) -> None:
    student, teacher = (replace(case, backend="dtensor") for case in MODULES[name])
    for place, (_, model) in zip(("student", "teacher"), of_both(student, teacher), strict=True):
        model.save_pretrained(tmp_path / place)
    grads = check(pools, student, teacher, form, tmp_path / "student", tmp_path / "teacher")
    for key, value in grads.wanted.items():
        assert torch.allclose(grads.found[key], value, rtol=1e-4, atol=1e-6), key


def of_both(student: Case, teacher: Case) -> list[tuple[Case, Any]]:
    return [(student, hf_model("llama")), (teacher, hf_model(teacher.kind, TEACHER_SEED))]


class Gradients(NamedTuple):
    """The student's, as they were found, and by transformers' names as they should be."""

    found: dict[str, Tensor]
    wanted: dict[str, Tensor]


def check(pools: Pools, student: Case, teacher: Case, form: str, of_student: Model, of_teacher: Model) -> Gradients:
    """Compare the loss and its metric."""
    options = {"loss": form, "top_k": TOP, "reward_weight": 1}
    ours, theirs = hf_model("llama").double(), hf_model(teacher.kind, TEACHER_SEED).double()
    loss, kl = expected(ours, theirs, options)

    teaching = Teaching(vocab=256, top=TOP if form == "top-k" else 0)
    ranks = pools(teacher.parallel.world_size).run(run_teacher, teacher, of_teacher, make_batch(), teaching)
    for _, kept in ranks:
        assert kept["optimizer"] is None
        assert kept["trained"] == 0
        assert kept["freed"] > 0
    known = [(1.0, together([own for own, _ in ranks]))]
    config = DistillationRlConfig.model_validate(
        {"run": {"algorithm": "distillation"}, "distillation": options, "loss": {"importance_correction": "off"}}
    )
    run_loss = RunLoss(Distillation(config))
    found = pools(student.parallel.world_size).run(run_student, student, of_student, make_batch(), known, run_loss)

    result = only_result([rank.results[0] for rank in found])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert run_loss.metrics([result])["teacher_kl"] == pytest.approx(kl, rel=1e-5)
    grads, _ = assemble([rank.grads for rank in found])
    unclip = (result.grad_norm + 1e-6) / Optim().clip  # clipping scales them in place
    wanted = {name: value.grad.float() for name, value in ours.named_parameters()}
    return Gradients({key: value * unclip for key, value in grads.items()}, wanted)


WEIGHTS = (3.0, 1.0)
VOCAB = 256
SHARE = 0.7
"""Of KL(teachers || student)."""


def of_several(student: torch.nn.Module, teachers: list[torch.nn.Module], form: str, mix: str, top: int) -> float:
    """The loss of the batch with a mixture of teachers by the formulas, with its gradient in the student."""
    shares, total = torch.tensor(WEIGHTS, dtype=torch.float64) / sum(WEIGHTS), 0.0
    for columns in make_batch().values():
        for row in range(columns.rollouts):
            span = columns.slice(row)
            tokens, mask = columns.tokens_T[span], columns.loss_mask_T[span]
            with torch.no_grad():
                tables = [table(teacher, tokens, mask)[0] for teacher in teachers]
            ours, chosen = table(student, tokens, mask)
            if mix == "probabilities":
                theirs = sum(share * each.exp() for share, each in zip(shares, tables, strict=True)).log()
            else:
                theirs = sum(share * each for share, each in zip(shares, tables, strict=True))
            if form == "sampled":
                sampled = ours.gather(1, chosen)[:, 0]
                gain = theirs.gather(1, chosen)[:, 0] - sampled.detach()
                loss = -(gain * (sampled - sampled.detach()).exp()).sum()
            else:
                named = torch.zeros_like(theirs, dtype=torch.bool)
                for each in tables:
                    named.scatter_(1, each.topk(top).indices, value=True)
                ids = theirs.where(named, -torch.inf).topk(top).indices
                log_t, log_p = (each.gather(1, ids).log_softmax(-1) for each in (theirs, ours))
                loss = (SHARE * log_t.exp() * (log_t - log_p) + (1 - SHARE) * log_p.exp() * (log_p - log_t)).sum()
            (WEIGHT * loss).backward()
            total += float(WEIGHT * loss.detach())
    return total


MIXED = {
    f"{backend}-{form}-{mix}": (backend, form, mix, "one architecture")
    for backend in ("megatron", "dtensor")
    for form in ("sampled", "top-k", "whole")
    for mix in ("probabilities", "log-probs")
}
"""`whole`: the whole vocabulary is compared."""
MIXED |= {
    f"{backend}-{place}": (backend, "top-k", "probabilities", place)
    for backend in ("megatron", "dtensor")
    for place in ("beside", "in turn")
}
"""Teachers of two architectures in the same processes, on the device or in host memory while the other computes."""


@pytest.mark.parametrize(("backend", "form", "mix", "place"), slowly(MIXED, "megatron-top-k-probabilities"))
def test_a_student_learns_from_the_mixture_of_its_teachers(
    pools: Pools, backend: str, form: str, mix: Any, place: str, tmp_path: Path
) -> None:
    parallel = ParallelSpec(dp=2) if backend == "dtensor" else ParallelSpec(tp=2)
    student = Case(parallel=parallel, backend=backend)
    teacher = Case("qwen3", ParallelSpec(tp=2), chunk=5, backend=backend)
    kinds = ("qwen3", "qwen3" if place == "one architecture" else "qwen2")
    models = [hf_model("llama"), *(hf_model(kind, TEACHER_SEED + number) for number, kind in enumerate(kinds))]
    held: list[Model] = []
    cases = (student, *(replace(teacher, kind=kind) for kind in kinds))
    for number, (case, model) in enumerate(zip(cases, models, strict=True)):
        if backend == "dtensor":
            model.save_pretrained(tmp_path / str(number))
            held.append(tmp_path / str(number))
        else:
            held.append(megatron_weights(case.kind, model.state_dict()))
    ours, *theirs = (model.double() for model in models)
    top = {"sampled": 0, "top-k": TOP, "whole": VOCAB}[form]
    loss = of_several(ours, theirs, form, mix, top)

    beside = () if place == "one architecture" else (kinds, place == "beside")
    ranks = pools(2).run(run_teachers, teacher, held[1:], make_batch(), Teaching(VOCAB, top), *beside)
    known = list(zip(WEIGHTS, (together(parts) for parts in ranks[0]), strict=True))
    options = {"loss": "sampled" if form == "sampled" else "top-k", "forward_share": SHARE}
    config = DistillationRlConfig.model_validate(
        {"run": {"algorithm": "distillation"}, "distillation": options | ({"top_k": top} if top else {}),
         "loss": {"importance_correction": "off", "clip_low": 1, "clip_high": 1}}
    )  # fmt: skip
    run_loss, mixture = RunLoss(Distillation(config)), Mixture(mix, top, whole=top == VOCAB)
    batch, rows = make_batch(), rollouts_of(make_batch())
    found = pools(2).run(run_student, student, held[0], batch, known, run_loss, rows, None, mixture)
    result = only_result([rank.results[0] for rank in found])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    grads, _ = assemble([rank.grads for rank in found])
    unclip = (result.grad_norm + 1e-6) / Optim().clip  # clipping scales them in place
    wanted = {name: value.grad.float() for name, value in ours.named_parameters()}
    for key, value in (wanted if backend == "dtensor" else megatron_weights("llama", wanted)).items():
        assert torch.allclose(grads[key] * unclip, value, rtol=1e-4, atol=1e-6), key
