"""Episodes in training: tokens of environments have no loss, and each of an episode's contexts (the branches of a tree
of requests among them) is a sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.clients import only_result
from rlctl.config.parallel import ParallelSpec
from rlctl.data.rollouts import RolloutColumns
from support.parallel_cases import WEIGHT, Case, assemble, model_of, run_case
from support.pool import Pools, Published
from support.reference_policy import (
    Optim,
    advantage,
    close,
    hf_model,
    make_batch,
    megatron_weights,
    prompt_tokens,
    token_loss,
)

CONTEXTS = 2


def of_contexts() -> dict[int, RolloutColumns]:
    """Groups of sequences, of which each two neighbors are the contexts of one episode, with tokens of an environment
    between those of the model. In odd groups the second context is a branch of the first: it begins with the prompt and
    a token that the model chose there, which has its loss there."""
    found = {}
    for group, columns in make_batch(generations=2 * CONTEXTS).items():
        tokens, mask, prompt = columns.tokens_T.copy(), columns.loss_mask_T.copy(), prompt_tokens(columns)
        for row in range(columns.rollouts):
            span = columns.slice(row)
            mask[span.start + prompt + 1 : span.stop - 1 : 3] = False
            if group % 2 and row % CONTEXTS:
                tokens[span.start + prompt] = tokens[columns.slice(row - 1).start + prompt]
                mask[span.start + prompt] = False
        logprobs = np.where(mask, columns.logprobs_T, 0)
        found[group] = replace(columns, tokens_T=tokens, loss_mask_T=mask, logprobs_T=logprobs)
    return found


def as_episodes(batch: dict[int, RolloutColumns]) -> tuple[dict[int, RolloutColumns], list[WeightedSequence]]:
    """Return the columns of the episodes, and the sequences that are trained on."""
    rows = [
        WeightedSequence(
            group,
            row // CONTEXTS,
            prompt_tokens(columns),
            int(columns.offsets_G[row + 1] - columns.offsets_G[row]),
            advantage(group, row // CONTEXTS),
            WEIGHT,
            int(columns.offsets_G[row] - columns.offsets_G[row // CONTEXTS * CONTEXTS]),
        )
        for group, columns in batch.items()
        for row in range(columns.rollouts)
    ]
    return {group: replace(one, offsets_G=one.offsets_G[::CONTEXTS]) for group, one in batch.items()}, rows


@cache
def expected() -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients in float64, a sequence at a time."""
    model, total = hf_model("llama").double(), 0.0
    for group, columns in of_contexts().items():
        for row in range(columns.rollouts):
            span = columns.slice(row)
            tokens = torch.from_numpy(columns.tokens_T[span].astype(np.int64))
            mask = torch.from_numpy(columns.loss_mask_T[span])
            table = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)[mask[1:]]
            loss = token_loss(
                table.gather(1, tokens[mask][:, None])[:, 0],
                -(table.exp() * table).sum(-1),
                torch.from_numpy(columns.logprobs_T[span][columns.loss_mask_T[span]]).double(),
                torch.tensor(advantage(group, row // CONTEXTS)).double(),
                torch.tensor(WEIGHT).double(),
            )
            loss.backward()
            total += float(loss.detach())
    return total, {name: value.grad.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    "case",
    [
        Case(backend="dtensor", parallel=ParallelSpec(dp=2)),
        Case(backend="dtensor", share_prompts=False),
        Case(backend="dtensor", parallel=ParallelSpec(cp=2)),
        Case(),
        Case(parallel=ParallelSpec(cp=2)),
        Case(share_prompts=False, packing=False),
    ],
    ids=["fsdp-dp2", "fsdp-not-shared", "fsdp-cp2", "megatron", "megatron-cp2", "megatron-not-packed"],
)
def test_gradients_of_episodes_are_those_of_their_contexts(pools: Pools, published: Published, case: Case) -> None:
    of_modules = case.backend == "dtensor"
    columns, rows = as_episodes(of_contexts())
    ranks = pools(case.parallel.world_size).run(run_case, case, model_of(case, published), columns, None, None, rows)
    loss, module_grads = expected()
    first = only_result([rank.results[0] for rank in ranks])
    assert abs(first.loss - loss) <= 1e-6 * max(1, abs(loss))
    grads, _ = assemble([rank.grads for rank in ranks])
    unclip = (first.grad_norm + 1e-6) / Optim().clip  # clipping scales them in place
    wanted = module_grads if of_modules else megatron_weights("llama", module_grads)
    for name, value in wanted.items():
        assert close(grads[name].double() * unclip, value), (name, (grads[name] * unclip - value).abs().max())
