"""Training on packed texts and pairs has the loss and the gradient of unpacked ones in transformers, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import MinibatchResult, TrainBatch
from rlctl.backends.batching.packing import plan_batch
from rlctl.backends.clients import only_result
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.config.parallel import ParallelSpec
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.texts import TrainedText
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.kto import Kto
from rlctl.methods.rl.algorithm import Algorithm
from rlctl.rollouts.dataset import columns_of, group_of
from rlctl.settings.training import OptimizerConfig
from rlctl.training.run_loss import RunLoss
from support.parallel_cases import Case, make_worker, wholes
from support.pool import Pools, slowly
from support.reference_policy import facts, hf_model

SHIFT = 0.3
"""The reference is the policy, and its log-probs are made less by this."""
ROW = 48
MARGINS = {1: 0.5, 2: -0.25}
"""Of a reward model's pairs by their positions; others have none."""


def texts_of(position: int, pairs: bool) -> list[TrainedText]:
    """Texts of several lengths; some have context between two answers. Those of a pair share their prompt."""
    rng, found = np.random.default_rng(position), []
    prompt = rng.integers(3, facts("qwen3").vocab, 3 + position)
    for sample in range(1 + pairs):
        tokens = np.concatenate([prompt, rng.integers(3, facts("qwen3").vocab, 4 + 2 * position - sample)])
        mask = np.arange(len(tokens)) >= len(prompt)
        mask[len(prompt) + 2] = position % 2 == 0
        found.append(TrainedText(tokens.astype(np.int32), mask))
    return found


def head_of() -> torch.Tensor:
    """The head of a reward model."""
    return 0.1 * torch.randn(1, facts("qwen3").hidden, generator=torch.Generator().manual_seed(7))


def algorithm_of(name: str) -> Algorithm:
    return method_from_config(resolve(flags={"run.algorithm": name}, environment={}).config)


def batch_of(name: str) -> TrainBatch:
    groups = []
    for position in range(5):
        texts = texts_of(position, pairs=name != "sft")
        tokens = sum(len(text.tokens_T) for text in texts)
        extra = {"label": np.full(tokens, position % 2 == 0, np.float32)} if name == "kto" else {}
        if name == "rm":
            texts = [text.scored() for text in texts]
            tokens = sum(len(text.tokens_T) for text in texts)
            extra = {"margin": np.full(tokens, MARGINS[position], np.float32)} if position in MARGINS else {}
        groups.append(group_of(position, PromptRow(0, "", "", None), texts, columns_of(texts, extra)))
    return algorithm_of(name).train_batch(groups, 1)


def divergence() -> float:
    """The estimate of the divergence before a step of kto."""
    return SHIFT * float(np.mean([texts_of(position, pairs=True)[1].mask_T.sum() for position in range(5)]))


def run_texts(
    rank: int, case: Case, model: Path, name: str
) -> tuple[MinibatchResult | None, Any, MinibatchResult | None]:
    """The result and the gradient of a step that changes nothing, and what is measured before it."""
    algorithm, batch = algorithm_of(name), batch_of(name)
    worker = make_worker(rank, case, model, optimizer=OptimizerConfig(clip_grad=0), valued=name == "rm")
    if name == "rm":
        set_head(worker)
    worker.hold_reference()
    estimate = None
    if isinstance(algorithm, Kto):
        other, estimate_loss, _ = algorithm.before_training(batch)
        load(worker, case, rank, other, name)
        estimate = worker.evaluate_minibatch(0, estimate_loss)
        algorithm.z0 = divergence()
    load(worker, case, rank, batch, name)
    evaluated = worker.evaluate_minibatch(0, RunLoss(algorithm))
    result = worker.train_minibatch(0, RunLoss(algorithm), 0.0, 0.0)
    if result is not None:
        assert evaluated.loss == pytest.approx(result.loss, rel=1e-6)
        assert evaluated.sums == pytest.approx(result.sums, rel=1e-6)
    return result, wholes(worker, "grad") if case.backend == "dtensor" else None, estimate


def load(worker: Any, case: Case, rank: int, batch: TrainBatch, name: str) -> None:
    plan = plan_batch(
        batch.minibatches, batch.columns, dp=case.parallel.dp, micro_batch_tokens=ROW,
        whole_groups=name in ("dpo", "rm"), share_prompts=case.share_prompts, multiple=case.parallel.row_multiple,
        micro_batch_multiple=case.parallel.micro_batch_multiple,
    )  # fmt: skip
    assert plan.stats.micro_batches * case.parallel.dp > 1
    assert any(len(micro) > 1 + (name != "kto") for shard in plan.shards for micro in shard.minibatches[0])
    worker.load_batch(plan.shards[case.parallel.data_rank(rank)], list)
    for column in sorted(algorithm_of(name).needs):
        worker.add_logprobs(column)
        for row in worker._rows[0]:
            if column in row.columns_R:  # the last pipeline stage has it
                row.columns_R[column] = row.columns_R[column] - SHIFT


def set_head(worker: Any) -> None:
    if isinstance(worker, DTensorWorker):
        head = local_part(worker.model.get_parameter("head.weight").detach())
        head.copy_(head_of()[: head.shape[0]])  # of its one row, the first shard has all
        return
    for name, value in worker._named():
        if name == "output_layer.weight":
            value.data.copy_(head_of())
    worker.weights_changed()


def scores() -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradient of a reward model by transformers, one text at a time."""
    model: Any = copy.deepcopy(hf_model("qwen3")).double()
    head, losses = head_of().double().requires_grad_(), []
    for position in range(5):
        good, bad = (
            model.model(torch.from_numpy(text.tokens_T).long()[None]).last_hidden_state[0, -1] @ head[0]
            for text in texts_of(position, pairs=True)
        )
        losses.append(-torch.sigmoid(good - bad - MARGINS.get(position, 0.0)).log())
    loss = torch.stack(losses).mean()
    loss.backward()
    gradient = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert head.grad is not None
    return loss.item(), gradient | {"head": head.grad}


def reference(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradient by transformers, one text at a time."""
    model: Any = copy.deepcopy(hf_model("qwen3")).double()
    if name == "rm":
        return scores()
    beta, logps, tokens = 0.1, list[torch.Tensor](), 0
    for position in range(5):
        for text in texts_of(position, pairs=name == "dpo"):
            ids = torch.from_numpy(text.tokens_T).long()
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(1, ids[1:, None])[:, 0]
            logps.append(chosen[torch.from_numpy(text.mask_T[1:])])
            tokens += int(text.mask_T.sum())
    if name == "sft":
        loss = -torch.cat(logps).sum() / tokens
    elif name == "kto":
        moved = [beta * ((one - (one.detach() - SHIFT)).sum() - divergence()) for one in logps]
        loss = torch.stack(
            [1 - (value if place % 2 == 0 else -value).sigmoid() for place, value in enumerate(moved)]
        ).mean()
    else:
        rewards = [beta * (one - (one.detach() - SHIFT)).sum() for one in logps]
        margins = [good - bad for good, bad in zip(rewards[0::2], rewards[1::2], strict=True)]
        loss = -torch.stack(margins).sigmoid().log().mean()
    loss.backward()
    return loss.item(), {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


SIZES = {
    "alone": ParallelSpec(), "tp2": ParallelSpec(tp=2), "pp2": ParallelSpec(pp=2), "cp2": ParallelSpec(cp=2),
    "dp2": ParallelSpec(dp=2),
}  # fmt: skip
CASES = {
    f"{name}-{backend}-{size}": (name, backend, parallel)
    for name in ("sft", "dpo", "kto", "rm")
    for backend in ("megatron", "dtensor")
    for size, parallel in SIZES.items()
    if (backend, size) != ("dtensor", "pp2")
}
GUARDED = (
    "sft-megatron-cp2", "sft-dtensor-dp2", "dpo-megatron-pp2", "dpo-dtensor-tp2", "kto-megatron-tp2",
    "kto-dtensor-alone", "rm-megatron-pp2", "rm-dtensor-dp2",
)  # fmt: skip
"""Each method on each backend."""


@pytest.mark.parametrize(("name", "backend", "parallel"), slowly(CASES, guards=GUARDED))
def test_packed_texts_have_the_gradient_of_unpacked_ones(
    pools: Pools, published: Callable[[str], Path], name: str, backend: str, parallel: ParallelSpec
) -> None:
    loss, gradient = reference(name)
    norm = float(torch.stack([value.norm() for value in gradient.values()]).norm())
    case = Case("qwen3", parallel, backend=backend)
    ranks = pools(parallel.world_size).run(run_texts, case, published("qwen3"), name)
    result, found = only_result([result for result, *_ in ranks]), ranks[0][1]
    if name == "kto":
        algorithm = algorithm_of(name)
        assert isinstance(algorithm, Kto)
        algorithm.before_training(batch_of(name))[2]([only_result([estimate for *_, estimate in ranks])])
        assert algorithm.z0 == pytest.approx(divergence(), rel=1e-5)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    if backend == "dtensor":
        gradient.pop("head", None)
        assert found.keys() == gradient.keys()
        for key, value in gradient.items():
            torch.testing.assert_close(found[key].double(), value, rtol=1e-4, atol=1e-6)
