"""The distribution of several teachers of one rollout. Suffixes: R response tokens, K most likely tokens, M the tokens
that every teacher of the rollout has a log-prob of.

    probabilities   p(v) = sum of w_i p_i(v)             w_i: the teachers' weights, divided by their sum
    log-probs       log p(v) = sum of w_i log p_i(v)     a product of experts, whose sum over the vocabulary is below 1

With the whole vocabulary each teacher has all log-probs. With fewer tokens each teacher first gives its own K most
likely tokens, and then the log-probs of everyone's; the mixture keeps the K of them that it finds most likely.

    divergences     sum of w_i D_i, the divergence from each teacher over its own most likely tokens: no mixture

Teachers with other tokenizers have other vocabularies, and only their divergences can be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlctl.backends.batching.batch import RolloutLogprobs
from rlctl.settings.other_models import Mix


class Taught(NamedTuple):
    """The log-probs of a group by one of its teachers."""

    weight: float
    handles: Sequence[object]
    teacher: int = 0
    """Its number in `teacher.models`."""


@dataclass(frozen=True)
class Mixture:
    """How several teachers of a rollout make one distribution."""

    mix: Mix = "probabilities"
    top: int = 0
    """Most likely tokens of each position that the loss compares; 0: only chosen tokens."""
    whole: bool = False
    """These are all tokens of the vocabulary."""

    @property
    def separate(self) -> bool:
        """Whether each teacher is compared by itself."""
        return self.top > 0 and self.mix == "divergences"

    @property
    def asks_again(self) -> bool:
        """Whether a teacher is asked for the log-probs of the others' most likely tokens, too."""
        return self.top > 0 and not self.whole and not self.separate


ALONE = Mixture()
"""Of one teacher."""


def mixed(parts: Sequence[tuple[float, RolloutLogprobs]], mixture: Mixture) -> RolloutLogprobs:
    """Return the log-probs of a rollout under the mixture of its teachers, given as (weight, log-probs)."""
    if len(parts) == 1:
        return parts[0][1]
    weights = np.array([weight for weight, _ in parts])
    weights = weights / weights.sum()

    def mean(values: Sequence[np.ndarray]) -> np.ndarray:
        stacked = np.stack(values).astype(np.float64)
        if mixture.mix != "probabilities":
            return np.tensordot(weights, stacked, 1)
        shift = stacked.max(0)
        return np.log(np.tensordot(weights, np.exp(stacked - shift), 1)) + shift

    logprobs_R = mean([part.logprobs_R for _, part in parts]).astype(np.float32)
    if not mixture.top:
        return RolloutLogprobs(logprobs_R, parts[0][1].top_ids_RK, parts[0][1].top_logprobs_RK)
    order = [np.argsort(part.top_ids_RK, axis=1, kind="stable") for _, part in parts]
    ids_RM = np.take_along_axis(parts[0][1].top_ids_RK, order[0], 1)
    top_RM = mean([
        np.take_along_axis(part.top_logprobs_RK, order_RM, 1) for (_, part), order_RM in zip(parts, order, strict=True)
    ])  # fmt: skip
    top_RM[:, 1:][ids_RM[:, 1:] == ids_RM[:, :-1]] = -np.inf  # a token that several teachers named counts once
    best_RK = np.argsort(-top_RM, axis=1, kind="stable")[:, : mixture.top]
    ids_RK, top_RK = (np.take_along_axis(values_RM, best_RK, 1) for values_RM in (ids_RM, top_RM))
    return RolloutLogprobs(logprobs_R, ids_RK, top_RK.astype(np.float32))
