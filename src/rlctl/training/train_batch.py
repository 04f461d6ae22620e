"""The batch of a step without idle sequences, and the pass before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from rlctl.backends.batching.batch import TrainBatch, WeightedRollout
from rlctl.backends.clients import PolicyClient
from rlctl.training.capabilities import PassBeforeStep
from rlctl.training.method import Method


def run_pass_before(policy: PolicyClient, method: Method, batch: TrainBatch) -> None:
    """Run the method's pass before training, if it has one."""
    if not isinstance(method, PassBeforeStep):
        return
    other, loss, take = method.before_training(batch)
    policy.load_batch(other)
    for column in sorted(method.needs):
        policy.add_logprobs(column)
    take(policy.evaluate(len(other.minibatches), loss))


def without_idle(
    minibatches: Sequence[tuple[WeightedRollout, ...]], columns: dict[int, object], *, needs_advantage: bool
) -> TrainBatch:
    """Return mini-batches without sequences that have no gradient: of weight 0 or, with `needs_advantage`, of advantage
    0."""
    trained: list[tuple[WeightedRollout, ...]] = []
    skipped: list[WeightedRollout] = []
    for minibatch in minibatches:
        idle_N = [rollout.token_weight == 0 or (needs_advantage and rollout.advantage == 0) for rollout in minibatch]
        if True not in idle_N:
            trained.append(minibatch)
            continue
        skipped += compress(minibatch, idle_N)
        trained.append(tuple([rollout for rollout, idle in zip(minibatch, idle_N, strict=True) if not idle]))
    return TrainBatch(tuple(trained), columns, tuple(skipped))
