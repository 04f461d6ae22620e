"""The base of RL algorithms. `grpo.py` is one; a new one is a file like it and a line in `methods/available.py`.

An algorithm trains on sampled and scored rollouts; its options are the sections `advantage`, `loss` and `filter` of its
configuration class. Every algorithm measures the policy's entropy, and how far the engines' log-probs are from the
trainer's. Suffixes: G rollouts of a group, N rollouts of an optimizer mini-batch, R response tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlctl.backends.batching.batch import AdvantageEstimate, TokenBatch, TrainBatch, WeightedSequence
from rlctl.data.mixing import source_settings
from rlctl.data.rollouts import FAULTS, Rollout, RolloutGroup
from rlctl.methods.rl.advantages import (
    PenalizedAdvantages,
    nearly_equal,
    overlong_penalty,
    whitened,
    whitened_rollouts,
)
from rlctl.methods.rl.rollout_method import RolloutMethod
from rlctl.methods.rl.sections import AdvantageConfig
from rlctl.rollouts.turn_faults import BITS
from rlctl.settings.training import LogprobColumn
from rlctl.telemetry.metrics import Metric
from rlctl.training.run_loss import ENTROPY
from rlctl.training.train_batch import taught_as, token_weights, without_idle

if TYPE_CHECKING:
    import torch

MEASURED_OF_ROLLOUTS = (
    Metric("logprob_diff/mean", "mean", "log-prob difference of engine and trainer, mean", "diff", ".1e"),
    Metric("logprob_diff/max", "max", "log-prob difference, max"),
    Metric("logprob_diff/kl", "mean", "KL(engine || trainer)"),
    Metric("logprob_diff/prob_error", "mean", "multiplicative probability error"),
    ENTROPY,
    Metric("importance/mean", "mean"),
    Metric("importance/max", "max"),
    Metric("importance/effective", "effective"),
)
"""The difference d of log-probs is between engine and trainer under the weights that sampled, so that it is arithmetic
and not training: mean and maximum of |d|, the KL divergence by k3, and the mean of exp(|d|), the
multiplicative error of a token's probability. The importance weights of trainer to engine are those before any bound or
mask, with their effective sample size; 1 where both computed the same."""


class Algorithm(RolloutMethod):
    """An RL algorithm; a subclass gives at least `advantages` and `token_loss`."""

    needs_old_logprobs: ClassVar[bool] = False
    """Whether the loss compares with the old policy in addition to the ratio."""

    @property
    def needs(self) -> frozenset[LogprobColumn]:
        """Log-probs that are computed before training. With one optimizer step a batch the old policy is the current
        one, whose log-probs the training pass computes anyway; a critic's returns, and advantages that are whitened,
        hold penalties that must be known before."""
        config = self.config
        if config.loss.needs is not None:
            return frozenset(config.loss.needs)
        old, penalty = config.batch.optimizer_steps * config.batch.epochs > 1, config.loss.kl_coefficient > 0
        if config.loss.importance_correction == "ratio":  # to the engine's log-probs: what else needs the trainer's?
            old &= config.penalty_in_reward or config.loss.sequence_mask is not None or self.needs_old_logprobs
        old = old or config.whitens_penalties or (config.has_critic and config.penalty_in_reward)
        columns: dict[LogprobColumn, bool] = {"old_logprobs": old, "reference_logprobs": penalty,
                                              "teacher_logprobs": config.has_teacher}  # fmt: skip
        return frozenset(column for column, needed in columns.items() if needed)

    @property
    def nll_weight(self) -> float:
        """Weight of the negative log-likelihood of `imitated` rollouts, a mean over their tokens."""
        return self.config.loss.positive_nll_weight

    @property
    def token_advantages(self) -> AdvantageEstimate | None:
        """Function that computes per-token advantages on the ranks; None: tokens have the advantage of their
        rollout."""
        return PenalizedAdvantages(self.config) if self.config.whitens_penalties else None

    @property
    def skips_idle(self) -> bool:
        """Whether rollouts without a gradient are left out of the training pass."""
        return self.config.filter.skip

    @property
    def learns_without_advantage(self) -> bool:
        """Whether rollouts with advantage 0 have a gradient; if not, their tokens need not be computed."""
        return True

    def train_batch(self, groups: Sequence[RolloutGroup], optimizer_steps: int) -> TrainBatch:
        return replace(make_batch(groups, self, optimizer_steps), estimate=self.token_advantages)

    def keeps(self, rewards_G: np.ndarray) -> bool:
        """Return whether a group with these rewards is trained on; `filter.groups` says what becomes of others."""
        return self.config.filter.groups == "keep" or not nearly_equal(rewards_G)

    def trains_on(self, group: RolloutGroup) -> bool:
        """Return whether a group, which may have lost rollouts to a failing reward function, is trained on."""
        least = 1 + (self.config.advantage.compares and self.config.learns_from_rewards)
        if group.dropped and len(group.rollouts) < least:
            return False
        return any(weight and self.keeps(values_G[~np.isnan(values_G)]) for weight, values_G in self.scores(group))

    @abstractmethod
    def advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return the advantage of each rollout of a group; float64 [G]."""

    def batch_advantages(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray]:
        """Return the advantages [G] of each group of a step's batch: `advantages` of each group, then the section
        `advantage` for terms and batch. An algorithm that compares rollouts of several prompts replaces this."""

        compared = [self.compared(group) for group in groups]
        by_values = iter(self._among_applying([values_G for pairs in compared for _, values_G in pairs]))
        advantages = [
            sum((weight * next(by_values) for weight, _ in pairs), start=np.zeros(len(group.rollouts)))
            for group, pairs in zip(groups, compared, strict=True)
        ]
        if self.config.whitens_penalties:
            return advantages  # the ranks subtract the penalties of tokens, whiten and clip
        if not self.config.advantage.whiten or self.config.has_critic or not groups:
            return self._clipped(
                advantages
            )  # with a critic there are rewards until the ranks have the values of tokens
        tokens_N = np.array([self.learned_tokens(rollout) for group in groups for rollout in group.rollouts])
        ends, all_N = np.cumsum([len(group.rollouts) for group in groups])[:-1], np.concatenate(advantages)
        of_tokens = self.config.advantage.whiten_over == "tokens"
        return self._clipped(np.split(whitened(all_N, tokens_N) if of_tokens else whitened_rollouts(all_N), ends))

    def _among_applying(self, values_P_G: list[np.ndarray]) -> list[np.ndarray]:
        """Return the advantages of each group. Others than the rollouts that a term applies to have no advantage by it,
        nor has one that is alone."""
        applies_P_G = [~np.isnan(values_G) for values_G in values_P_G]
        counted = [int(applies_G.sum()) > self.config.advantage.compares for applies_G in applies_P_G]
        rewards_P_G = [
            values[applies] for values, applies, any_ in zip(values_P_G, applies_P_G, counted, strict=True) if any_
        ]
        among = iter(self.advantages_of(rewards_P_G))
        totals = [np.zeros(len(values_G)) for values_G in values_P_G]
        for found_G, applies_G, any_ in zip(totals, applies_P_G, counted, strict=True):
            if any_:
                found_G[applies_G] = next(among)
        return totals

    def advantages_of(self, rewards_P_G: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return `advantages` of each group."""
        return [self.advantages(rewards_G) for rewards_G in rewards_P_G]

    def _clipped(self, advantages_P_G: list[np.ndarray]) -> list[np.ndarray]:
        low, high = self.config.advantage.clip_low, self.config.advantage.clip_high
        return advantages_P_G if low is high is None else [np.clip(values_G, low, high) for values_G in advantages_P_G]

    def compared(self, group: RolloutGroup) -> list[tuple[float, np.ndarray]]:
        """Return the values that a group's rollouts are compared by, as (weight, values [G]): their `scores` with
        shift, the factor of cut rollouts, and the cost of lengths, which `advantage.per_term` compares separately."""
        penalties_G, factor, factor_G = self.length_penalties(group), self.config.reward.truncated_factor, np.float64(1)
        if factor != 1.0:
            factor_G = np.where([rollout.truncated for rollout in group.rollouts], factor, 1.0)
        if not self._by_term(group):
            return [(1.0, factor_G * (group.rewards_G + self.config.reward.shift) + penalties_G)]
        values = [(weight, factor_G * values_G) for weight, values_G in self.scores(group)]
        return [*values, (1.0, penalties_G)] if penalties_G.any() else values

    def imitated(self, group: RolloutGroup) -> np.ndarray:
        """Return which rollouts of a group have a positive reward, whose likelihood `loss.positive_nll_weight` makes
        larger; bool [G]."""
        if not self.config.loss.positive_nll_weight:
            return np.zeros(len(group.rollouts), bool)
        return np.sum([weight * np.nan_to_num(values_G) for weight, values_G in self.compared(group)], axis=0) > 0

    def _by_term(self, group: RolloutGroup) -> bool:
        return self.config.advantage.per_term and bool(group.rollouts[0].terms)

    def scores(self, group: RolloutGroup) -> list[tuple[float, np.ndarray]]:
        """Return the rewards of a group as scorers and environments gave them, as (weight, values [G]), or with
        `advantage.per_term` each term of them (GDPO, arXiv 2601.05242). Whether a group is trained on depends on these
        alone: dynamic sampling is for groups with right and wrong answers (DAPO, arXiv 2503.14476, equation 11), and
        lengths that differ are no such difference. A term is NaN for rollouts that it does not apply to, and is left
        out where it applies to none."""
        if not self._by_term(group):
            return [(1.0, group.rewards_G)]
        # They are in the order of the configured ones. Rollouts from before a resume that changed the terms may have
        # more or fewer.
        names = group.rollouts[0].terms
        terms = {source.label: source.reward.terms for source in source_settings(self.config)}
        weights = [term.weight for term in terms[group.prompt.source]]
        weights += [1.0] * (len(names) - len(weights))  # a task's scorer, or an environment's reward
        terms_G = (np.array([rollout.terms[name] for rollout in group.rollouts], dtype=np.float64) for name in names)
        return [pair for pair in zip(weights, terms_G, strict=False) if not np.isnan(pair[1]).all()]

    def length_penalties(self, group: RolloutGroup) -> np.ndarray:
        """Return what the length of each rollout costs, float64 [G], at most 0: of an episode that of its longest turn,
        since `generation.max_new_tokens` is the limit of each turn."""
        options = self.config.reward
        if not options.overlong_buffer:
            return np.zeros(len(group.rollouts))
        tokens_G = np.array([rollout.longest_turn for rollout in group.rollouts])
        limit = self.config.generation.max_new_tokens
        return overlong_penalty(tokens_G, limit, options.overlong_buffer, options.overlong_factor)

    def learned_tokens(self, rollout: Rollout) -> int:
        """Return the number of response tokens that a rollout is learned from."""
        masked = rollout.truncated and self.config.filter.truncated == "mask"
        return 0 if masked else rollout.response_tokens

    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        """Return the weight of each response token of a rollout; float64 [N]. All normalization is in them."""
        options = self.config.loss
        divisor = options.length_divisor or self.config.generation.max_new_tokens
        return token_weights(response_tokens_N, options.level, divisor)

    def adjusted(self, batch: TokenBatch) -> TokenBatch:
        """Return a micro-batch with the advantages of faulty turns (`advantage.malformed_thinking` and others)."""
        return _judged(batch, self.config.advantage)

    @property
    def always_measured(self) -> tuple[Metric, ...]:
        return MEASURED_OF_ROLLOUTS

    def measure_always(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        import torch

        from rlctl.methods.rl.losses import LOG_RATIO_LIMIT, k3, old_logprobs, unbounded_weights

        log_ratio_R = torch.where(batch.counted_R, old_logprobs(batch) - batch.rollout_logprobs_R, 0.0)
        difference_R = log_ratio_R.abs()
        weights_R = unbounded_weights(old_logprobs(batch), batch, self.config.loss)
        return {
            "entropy": batch.entropy_R,
            "logprob_diff/mean": difference_R,
            "logprob_diff/max": difference_R,
            "logprob_diff/kl": k3(log_ratio_R),
            "logprob_diff/prob_error": difference_R.clamp(max=LOG_RATIO_LIMIT).exp(),
            "importance/mean": weights_R,
            "importance/max": weights_R,
            "importance/effective": weights_R,
        }


def make_batch(groups: Sequence[RolloutGroup], algorithm: Algorithm, optimizer_steps: int) -> TrainBatch:
    """Return the rollouts of the groups that the algorithm trains on, with advantages and token weights.

    There are `optimizer_steps` mini-batches of about equal numbers of rollouts, or fewer if there are fewer rollouts.
    Rollouts without a gradient are then left out of them, unless `filter.skip` is off.
    """
    kept = [group for group in groups if algorithm.trains_on(group)]
    rollouts = [rollout for group in kept for rollout in group.rollouts]
    advantages_N = np.concatenate([np.zeros(0), *algorithm.batch_advantages(kept)])
    imitated_N = np.zeros(len(rollouts), bool)
    if algorithm.nll_weight and kept:
        imitated_N = np.concatenate([algorithm.imitated(group) for group in kept])
    parts = [part for part in np.array_split(np.arange(len(rollouts)), optimizer_steps) if len(part)]
    spans = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
    minibatches = [_minibatch(rollouts[span], advantages_N[span], imitated_N[span], algorithm) for span in spans]
    columns = {group.position: group.columns for group in kept}
    batch = TrainBatch(tuple(minibatches), columns)
    if algorithm.skips_idle:
        batch = without_idle(minibatches, columns, needs_advantage=not algorithm.learns_without_advantage)
    return replace(batch, sources={group.position: taught_as(algorithm.config, group.prompt) for group in kept})


def _minibatch(
    rollouts: Sequence[Rollout], advantages_N: np.ndarray, imitated_N: np.ndarray, algorithm: Algorithm
) -> tuple[WeightedSequence, ...]:
    """Return the rollouts of an optimizer step; those in `imitated_N` also have a weight for their likelihood."""
    tokens_N = np.array([algorithm.learned_tokens(rollout) for rollout in rollouts])
    weights_N = algorithm.token_weights(tokens_N)
    nll_weight = algorithm.nll_weight / max(1, int(tokens_N[imitated_N].sum()))
    nll_weights_N = np.where(imitated_N & (weights_N != 0), nll_weight, 0.0)
    scalars_N = (advantages_N.tolist(), weights_N.tolist(), nll_weights_N.tolist())
    return tuple([
        WeightedSequence(r.position, r.sample, r.prompt_tokens, tokens, advantage, weight, begin, nll_weight)
        for r, advantage, weight, nll_weight in zip(rollouts, *scalars_N, strict=True)
        for begin, tokens in (((0, r.tokens),) if r.episode is None else r.contexts())
    ])  # fmt: skip


def _judged(batch: TokenBatch, options: AdvantageConfig) -> TokenBatch:
    import torch

    if not options.judges_turns or (faults_R := batch.extra_R.get(FAULTS)) is None:
        return batch
    advantages_R = batch.advantages_R
    for name, bit in BITS.items():
        if (value := getattr(options, name)) is not None:
            advantages_R = torch.where(faults_R.int() & bit != 0, value, advantages_R)
    return replace(batch, advantages_R=advantages_R)
