"""Self-distillation: a teacher that is an average of the policy's earlier weights, against transformers in float64, and
bit by bit after a resume under another layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.backends.base import OwnTeacher
from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from rlctl.methods.rl.distillation import Distillation, DistillationRlConfig
from rlctl.settings.training import LoraConfig
from rlctl.training.run_loss import RunLoss
from support.own_teacher_cases import Pieces, Steps, run_own_teacher
from support.parallel_cases import WEIGHT, Case, assemble
from support.pool import Pools, Published, slowly
from support.reference_policy import hf_model, make_batch, megatron_weights
from support.teacher_logprobs import rollouts_of, table

VOCAB, RATE, STEPS = 256, 0.25, 3


def published_names(case: Case, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by transformers' names: Megatron's are the same numbers in other places."""
    if case.backend == "dtensor":
        return weights
    places, offset = {}, 0
    for name, value in hf_model(case.kind).state_dict().items():
        places[name] = torch.arange(offset, offset + value.numel(), dtype=torch.float64).view(value.shape)
        offset += value.numel()
    flat = torch.full((offset,), torch.nan, dtype=torch.float64)
    for name, ids in megatron_weights(case.kind, places).items():
        flat[ids.long().flatten()] = weights[name].double().flatten()
    return {name: flat[ids.long()] for name, ids in places.items()}


def whole(case: Case, ranks: list[Pieces]) -> dict[str, Tensor]:
    weights = {name: value for name, value in assemble(ranks)[0].items() if "lora_" not in name}
    return {name: value.double() for name, value in published_names(case, weights).items()}


def divergence(case: Case, policy: dict[str, Tensor], teacher: dict[str, Tensor]) -> float:
    """The loss of the batch by the formula: KL(teacher || policy) over the whole vocabulary."""
    models, total = [hf_model(case.kind).double() for _ in range(2)], 0.0
    for model, weights in zip(models, (policy, teacher), strict=True):
        model.load_state_dict(weights)
    for columns in make_batch().values():
        for row in range(columns.rollouts):
            span = columns.slice(row)
            with torch.no_grad():
                log_p, log_t = (table(model, columns.tokens_T[span], columns.loss_mask_T[span])[0] for model in models)
            total += float(WEIGHT * (log_t.exp() * (log_t - log_p)).sum())
    return total


CASES = {
    "megatron-tp2": Case(parallel=ParallelSpec(tp=2)),
    "megatron-pp2": Case(parallel=ParallelSpec(pp=2)),
    "megatron-dp2": Case(parallel=ParallelSpec(dp=2)),
    "dtensor-dp2": Case(parallel=ParallelSpec(dp=2), backend="dtensor"),
    "dtensor-tp2": Case(parallel=ParallelSpec(tp=2), backend="dtensor"),
    "megatron-bfloat16": Case(parallel=ParallelSpec(tp=2), dtype="bfloat16"),
    "dtensor-bfloat16": Case(parallel=ParallelSpec(dp=2), dtype="bfloat16", backend="dtensor"),
    "megatron-adapters": Case(parallel=ParallelSpec(tp=2), lora=LoraConfig(rank=4)),
    "dtensor-adapters": Case(parallel=ParallelSpec(dp=2), lora=LoraConfig(rank=4), backend="dtensor"),
}


@pytest.mark.parametrize("name", slowly(CASES.keys(), "megatron-tp2"))
def test_a_policy_learns_from_an_average_of_its_earlier_weights(
    pools: Pools, published: Published, name: str, tmp_path: Path
) -> None:
    case, own = CASES[name], OwnTeacher(VOCAB, every=1, rate=RATE)
    sections: dict[str, Any] = {
        "run": {"algorithm": "distillation"}, "teacher": {"policy": True, "update_every": 1, "update_rate": RATE},
        "distillation": {"loss": "top-k", "top_k": VOCAB}, "loss": {"importance_correction": "off"},
    }  # fmt: skip
    loss = RunLoss(Distillation(DistillationRlConfig.model_validate(sections)))
    rows, batch = rollouts_of(make_batch(), advantage=0.5), make_batch()
    shared = (own, batch, rows, loss)
    ranks = pools(2).run(run_own_teacher, case, published(case.kind), *shared, range(STEPS), tmp_path)
    policies, teachers = (
        [whole(case, [getattr(rank, part)[step] for rank in ranks]) for step in range(STEPS)]
        for part in ("policies", "teachers")
    )
    average, narrow = policies[0], case.dtype != "float32"
    rtol = 2**-7 if narrow and case.backend == "megatron" else 1e-5  # one bfloat16 above or below
    for step in range(STEPS):
        if step:
            average = {key: (1 - RATE) * average[key] + RATE * policies[step][key] for key in average}
        for key, value in average.items():
            assert torch.allclose(teachers[step][key], value, rtol=rtol, atol=1e-7), (step, key)
        expected = divergence(case, policies[step], average)
        sampled = sum(WEIGHT * 0.5 for columns in batch.values() for _ in range(int(columns.loss_mask_T.sum())))
        result = only_result([rank.results[step] for rank in ranks])
        if not narrow:
            assert result.loss + sampled == pytest.approx(expected, rel=1e-4, abs=1e-7), step
    assert any(digest.startswith("teacher/") for rank in ranks for digest in rank.digests)

    alone = replace(case, parallel=ParallelSpec())
    last = range(STEPS - 1, STEPS)
    same = pools(2).run(run_own_teacher, case, published(case.kind), *shared, last, None, tmp_path)
    assert same_as(ranks, same)
    [other] = pools(1).run(
        run_own_teacher, alone, published(case.kind), *shared, range(STEPS - 1, STEPS), None, tmp_path
    )
    for key, value in whole(alone, [other.teachers[0]]).items():
        assert torch.equal(teachers[-1][key], value), key


def same_as(whole_run: list[Steps], resumed: list[Steps]) -> bool:
    """Whether the last step of a run and that of its resume are equal, bit by bit."""
    return all(
        (one.results[-1] and one.results[-1].loss) == (other.results[-1] and other.results[-1].loss)
        and all(torch.equal(a[1], b[1]) for a, b in zip(one.teachers[-1], other.teachers[-1], strict=True))
        for one, other in zip(whole_run, resumed, strict=True)
    )
