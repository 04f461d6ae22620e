"""The batch of a step: the weights of its tokens, which sequences it leaves out, and the pass before it.

Suffix N: the rollouts or texts of one optimizer mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlctl.backends.batching.batch import TrainBatch, WeightedSequence
from rlctl.backends.clients import PolicyClient
from rlctl.training.capabilities import PassBeforeStep
from rlctl.training.method import Method

if TYPE_CHECKING:
    from rlctl.data.prompt_rows import PromptRow
    from rlctl.settings.config import RlctlConfig

Level = Literal["token", "sequence", "constant"]


def token_weights(response_tokens_N: np.ndarray, level: Level, divisor: float = 1.0) -> np.ndarray:
    """Return the weight of each response *token* of a rollout in the loss of one optimizer mini-batch; float64 [N].

    The backend sums weight * loss over the tokens of every rank and micro-batch and divides by nothing, so that the
    result does not depend on how rollouts were dealt to ranks and packed. `response_tokens_N`, counted by the loss
    mask, must hold the whole mini-batch, of all data-parallel ranks.

    - `token`: 1 / (all response tokens); long rollouts weigh more (DAPO, arXiv 2503.14476, section 3.3).
    - `sequence`: 1 / (n * tokens of this rollout); the mean over rollouts of their token means (GRPO, arXiv 2402.03300,
      equation 3).
    - `constant`: 1 / (n * divisor); the mean over rollouts of their token sums, by the same divisor for short and long
      ones (Dr. GRPO, arXiv 2503.20783, section 3.1; REINFORCE and RLOO with the divisor 1).

    n counts the rollouts with response tokens. A rollout without response or trained tokens has weight 0.
    """
    tokens_N = np.asarray(response_tokens_N, dtype=np.float64)
    rollouts = np.count_nonzero(tokens_N)
    match level:
        case "token":
            denominator_N = np.full_like(tokens_N, tokens_N.sum())
        case "sequence":
            denominator_N = tokens_N * rollouts
        case "constant":
            denominator_N = np.full_like(tokens_N, divisor * rollouts)
    return np.divide(1.0, denominator_N, out=np.zeros_like(tokens_N), where=tokens_N > 0)


def taught_as(config: RlctlConfig, row: PromptRow) -> str:
    """Return what names the teachers of a row: its data source, or the value of `teacher.field`."""
    teacher = config.teacher_section
    return row.field_at(teacher.field) if teacher is not None and teacher.field is not None else row.source


def run_pass_before(policy: PolicyClient, method: Method, batch: TrainBatch, step: int = 0) -> None:
    """Update the policy's own teacher, if it is due after `step` steps, and run the method's pass before training, if
    it has one."""
    policy.refresh_teacher(step)
    if not isinstance(method, PassBeforeStep):
        return
    other, loss, take = method.before_training(batch)
    policy.load_batch(other)
    for column in sorted(method.needs):
        policy.add_logprobs(column)
    take(policy.evaluate(len(other.minibatches), loss))


def without_idle(
    minibatches: Sequence[tuple[WeightedSequence, ...]], columns: dict[int, object], *, needs_advantage: bool
) -> TrainBatch:
    """Return mini-batches without sequences that have no gradient: of weight 0 or, with `needs_advantage`, of advantage
    0."""
    trained: list[tuple[WeightedSequence, ...]] = []
    skipped: list[WeightedSequence] = []
    for minibatch in minibatches:
        idle_N = [rollout.token_weight == 0 or (needs_advantage and rollout.advantage == 0) for rollout in minibatch]
        if True not in idle_N:
            trained.append(minibatch)
            continue
        skipped += compress(minibatch, idle_N)
        trained.append(tuple([rollout for rollout, idle in zip(minibatch, idle_N, strict=True) if not idle]))
    return TrainBatch(tuple(trained), columns, tuple(skipped))
