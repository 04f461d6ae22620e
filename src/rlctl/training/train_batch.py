"""From the groups of a step to the batch that the policy trains on: advantages, token weights and mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from rlctl.backends.batching.batch import TrainBatch, WeightedRollout
from rlctl.backends.clients import PolicyClient
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.training.method import Method


def estimate_first(policy: PolicyClient, method: Method, batch: TrainBatch) -> None:
    """Compute what an algorithm wants to know before it trains on a batch."""
    asked = method.before_training(batch)
    if asked is None:
        return
    other, loss, take = asked
    policy.load_batch(other)
    for column in sorted(method.needs):
        policy.add_logprobs(column)
    take(policy.evaluate(len(other.minibatches), loss))


def make_batch(groups: Sequence[RolloutGroup], method: Method, optimizer_steps: int) -> TrainBatch:
    """Return the rollouts of the groups that the algorithm keeps, with advantages and token weights.

    There are `optimizer_steps` mini-batches of about equal numbers of rollouts, or fewer where rollouts do not suffice.
    Rollouts without a gradient are taken out of them afterwards, unless `filter.skip` is off.
    """
    kept = [group for group in groups if method.trains_on(group)]
    rollouts = [rollout for group in kept for rollout in group.rollouts]
    advantages_N = np.concatenate([np.zeros(0), *method.batch_advantages(kept)])
    imitated_N = np.zeros(len(rollouts), bool)
    if method.nll_weight and kept:
        imitated_N = np.concatenate([method.imitated(group) for group in kept])
    parts = np.array_split(np.arange(len(rollouts)).reshape(-1, method.sequences), optimizer_steps)
    spans = [slice(int(part[0, 0]), int(part[-1, -1]) + 1) for part in parts if len(part)]
    minibatches = [_minibatch(rollouts[span], advantages_N[span], imitated_N[span], method) for span in spans]

    needs_advantage = not method.learns_without_advantage
    trained: list[tuple[WeightedRollout, ...]] = []
    skipped: list[WeightedRollout] = []
    for minibatch in minibatches:
        idle_N = [one.token_weight == 0 or (needs_advantage and one.advantage == 0) for one in minibatch]
        if not method.skips_idle or True not in idle_N:
            trained.append(minibatch)
            continue
        skipped += compress(minibatch, idle_N)
        trained.append(tuple([one for one, idle in zip(minibatch, idle_N, strict=True) if not idle]))
    read_by_teacher = {group.position: group.for_teacher for group in kept if group.for_teacher is not None}
    return TrainBatch(
        tuple(trained),
        {group.position: group.columns for group in kept},
        tuple(skipped),
        tuple(
            tuple(_as_teacher_reads(read_by_teacher[rollout.position], rollout) for rollout in one) for one in trained
        )
        if read_by_teacher
        else (),
    )


def _as_teacher_reads(theirs: Rollout, ours: WeightedRollout) -> WeightedRollout:
    """Return the text of a rollout as a teacher's own tokenizer writes it."""
    return ours._replace(sample=theirs.sample, prompt_tokens=theirs.prompt_tokens, tokens=theirs.tokens)


def _minibatch(
    rollouts: Sequence[Rollout], advantages_N: np.ndarray, imitated_N: np.ndarray, method: Method
) -> tuple[WeightedRollout, ...]:
    """Return the rollouts of an optimizer step; those in `imitated_N` also have a weight of their likelihood."""
    tokens_N = np.array([method.learned_tokens(rollout) for rollout in rollouts])
    weights_N = method.token_weights(tokens_N)
    nll_weight = method.nll_weight / max(1, int(tokens_N[imitated_N].sum()))
    nll_weights_N = np.where(imitated_N & (weights_N != 0), nll_weight, 0.0)
    scalars_N = (advantages_N.tolist(), weights_N.tolist(), nll_weights_N.tolist())
    return tuple([
        WeightedRollout(r.position, r.sample, r.prompt_tokens, tokens, advantage, weight, begin, nll_weight)
        for r, advantage, weight, nll_weight in zip(rollouts, *scalars_N, strict=True)
        for begin, tokens in (((0, r.tokens),) if r.episode is None else r.contexts())
    ])  # fmt: skip
