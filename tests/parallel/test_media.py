"""Texts with images and three positions a token, by a toy from outside: packed, cut and spread over ranks they have the
loss and the gradient of one text at a time in transformers, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import MinibatchResult
from rlctl.backends.batching.packing import plan_batch
from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.settings.training import OptimizerConfig
from rlctl.training.run_loss import RunLoss
from support import parallel_cases
from support.parallel_cases import Case, make_worker, wholes
from support.pool import Pools
from support.reference_policy import hf_model
from support.toy_images import ImageSource, ImageWorker, embedded, grid_positions, text

ROW = 48


def sft() -> Algorithm:
    return method_from_config(resolve(flags={"run.algorithm": "sft"}, environment={}).config)


def run_images(rank: int, case: Case, model: Path) -> tuple[MinibatchResult | None, Any]:
    """The result and the gradient of a step that changes nothing."""
    parallel_cases.WORKERS["toy"] = ImageWorker
    worker = make_worker(rank, case, model, optimizer=OptimizerConfig(clip_grad=0))
    batch = sft().train_batch(ImageSource(lambda columns: columns).next(0).groups, 1)
    plan = plan_batch(
        batch.minibatches, batch.columns, dp=case.parallel.dp, micro_batch_tokens=ROW, packing=case.packing,
        share_prompts=case.share_prompts, multiple=case.parallel.row_multiple,
        micro_batch_multiple=case.parallel.micro_batch_multiple,
    )  # fmt: skip
    assert plan.stats.micro_batches > 1
    worker.load_batch(plan.shards[case.parallel.data_rank(rank)], list)
    result = worker.train_minibatch(0, RunLoss(sft()), 0.0, 0.0)
    return result, wholes(worker, "grad")


def reference() -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over the answers' tokens, one text at a time."""
    model: Any = copy.deepcopy(hf_model("qwen3")).double()
    losses = []
    for position in range(4):
        for sample in range(2):
            own = text(position, sample, position % 3)
            row: Any = type("Row", (), {})()
            row.tokens_T = torch.from_numpy(own.tokens_T).long()
            row.positions_kT = torch.from_numpy(grid_positions(own.tokens_T, own.media))
            places = [range(part.start, part.start + part.tokens) for part in own.media]
            row.media, row.media_T = own.media, torch.full((len(own.tokens_T),), -1)
            row.media_T[[place for one in places for place in one]] = torch.arange(sum(map(len, places)))
            row.media_T = row.media_T if own.media else None
            logits = model(inputs_embeds=embedded(model.get_input_embeddings(), row)).logits[0].log_softmax(-1)
            where = torch.from_numpy(np.flatnonzero(own.mask_T))
            losses.append(-logits[where - 1, row.tokens_T[where]])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(share_prompts=False, parallel=ParallelSpec(dp=2)),
        Case(parallel=ParallelSpec(cp=2)),
        Case(packing=False, share_prompts=False),
    ],
    ids=["shared", "dp", "cp", "unpacked"],
)
def test_images_are_packed_cut_and_spread(case: Case, pools: Pools, published: Callable[[str], Path]) -> None:
    case = Case(**vars(case) | {"kind": "qwen3", "backend": "toy"})
    found = pools(case.parallel.world_size).run(run_images, case, published("qwen3"))
    result, (loss, gradient) = only_result([one for one, _ in found]), reference()
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value.double(), gradient[name], rtol=1e-3, atol=1e-6)
