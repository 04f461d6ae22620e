"""Every algorithm's loss, gradient and metrics are the same on both backends, whatever the layout of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from rlctl.data.rollouts import RolloutColumns
from rlctl.methods.available import ALGORITHMS, BUILT_IN, method_from_config
from rlctl.methods.configuration import resolve
from rlctl.training.run_loss import RunLoss
from support.parallel_cases import Case, load_batch, make_worker
from support.pool import Pools
from support.reference_policy import advantage, hf_model, make_batch, megatron_weights

PENALTY = ("loss.kl_coefficient=0.1", "loss.entropy_coefficient=0.01")
LAYOUTS = {"alone": (ParallelSpec(), ParallelSpec()), "cp2-dp2": (ParallelSpec(cp=2), ParallelSpec(dp=2))}
"""The layouts of transformers' modules and of Megatron."""
OF_TOKENS = [name for name in BUILT_IN if name not in ("distill", "rm")]
"""Algorithms that need neither a teacher's most likely tokens nor a head of values, whose own tests compare those."""


def loss_of(name: str) -> RunLoss:
    sets = PENALTY if name in ALGORITHMS else ()
    if name == "distillation":
        sets = ("teacher.model=named",)
    return RunLoss(method_from_config(resolve(flags={"run.algorithm": name}, sets=sets, environment={}).config))


def labelled(group: int, columns: RolloutColumns) -> RolloutColumns:
    """Return `columns` with labels for KTO: sequences with a positive advantage are good."""
    good_G = [float(advantage(group, row) > 0) for row in range(columns.rollouts)]
    return replace(columns, extra_T={"label": np.repeat(np.float32(good_G), np.diff(columns.offsets_G))})


def run_losses(rank: int, case: Case, model: Any, losses: list[RunLoss]) -> list[Any]:
    """The result of a step by each loss from the same weights, which are loaded from a directory or given."""
    worker = make_worker(rank, case, model)
    worker.hold_reference()
    batch = {group: labelled(group, columns) for group, columns in make_batch(generations=2).items()}
    found = []
    for loss in losses:
        load_batch(worker, rank, case, batch)
        worker.add_logprobs("old_logprobs")
        worker.add_logprobs("reference_logprobs")
        for row in worker._rows[0]:
            row.columns_R["reference_logprobs"] = row.columns_R["reference_logprobs"] - 0.3
            row.columns_R["teacher_logprobs"] = 0.9 * row.columns_R["old_logprobs"]
        found.append(worker.train_minibatch(0, loss, 0.0, 0.0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("alone", marks=pytest.mark.guard), "cp2-dp2"])
def test_every_algorithm_is_the_same_on_both_backends(pools: Pools, name: str, tmp_path: Path) -> None:
    model, losses = hf_model("qwen3"), [loss_of(name) for name in OF_TOKENS]
    model.save_pretrained(tmp_path)
    weights = megatron_weights("qwen3", model.state_dict())
    modules, megatron = LAYOUTS[name]
    case = Case("qwen3", whole_groups=True)  # dpo compares the rollouts of a group
    by_modules, by_megatron = replace(case, parallel=modules, backend="dtensor"), replace(case, parallel=megatron)
    of_modules = pools(modules.world_size).run(run_losses, by_modules, tmp_path, losses)
    of_megatron = pools(megatron.world_size).run(run_losses, by_megatron, weights, losses)
    for index, algorithm in enumerate(OF_TOKENS):
        ours, theirs = (only_result([rank[index] for rank in ranks]) for ranks in (of_modules, of_megatron))
        assert ours.grad_norm > 0, algorithm
        for key in ("loss", "grad_norm"):
            assert getattr(ours, key) == pytest.approx(getattr(theirs, key), rel=1e-5, abs=1e-6), (algorithm, key)
        assert ours.sums == pytest.approx(theirs.sums, rel=1e-4, abs=1e-5), algorithm
        assert ours.maxima == pytest.approx(theirs.maxima, rel=1e-4, abs=1e-5), algorithm
