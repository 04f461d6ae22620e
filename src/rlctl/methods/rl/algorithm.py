"""The seam of algorithms. `grpo.py` is one; a new one is a file like it and a line in `available.py`.

Its options are the sections `advantage`, `loss` and `filter` of the configuration. An algorithm's object lives in the
driver, where torch is not imported, and is pickled to the policy's ranks, where `token_loss` and `measure` run: a file
of an algorithm imports torch inside of those two only. Suffixes: G the rollouts of a group, N those of an optimizer
mini-batch, R response tokens.

`RunLoss` is what a policy trains on. It also measures what every algorithm has: the entropy of the policy and, where
engines sample, how far their log-probs are from the trainer's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rlctl.backends.batch import (
    LogprobColumn,
    LossOutput,
    MicroBatchLoss,
    MinibatchResult,
    TokenBatch,
    TrainBatch,
)
from rlctl.data.mixing import source_settings
from rlctl.data.rollouts import FAULTS, Rollout, RolloutGroup
from rlctl.methods.rl.advantages import nearly_equal, overlong_penalty, token_weights, whitened, whitened_rollouts
from rlctl.methods.rl.sections import AdvantageConfig
from rlctl.rollouts.turn_faults import BITS
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.metrics import TOKENS, Metric, nested
from rlctl.training.user_loss import UserLoss

if TYPE_CHECKING:
    import torch

ENTROPY = Metric("entropy", "mean", "entropy (nats)", "entropy")
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
and not training: mean and maximum of |d|, the KL divergence by k3, and the mean of exp(|d|), which NeMo-RL calls the
multiplicative token probability error. The importance weights of trainer to engine are those before any bound or
mask, with their effective sample size; 1 where both computed the same."""
NAMES_OF_A_STEP = frozenset({
    "accuracy", "answered_fraction", "critic", "dropped_groups", "dropped_rollouts", "dropped_rows", "entropy",
    "grad_norm", "groups_without_signal", "imbalance", "importance", "length_penalty", "logprob_diff", "loss", "lr",
    "micro_batches", "missing_groups", "offloaded_bytes", "optimizer_steps", "padding_fraction",
    "positions", "prompt_tokens_mean",
    "refit_seconds", "refit_verified", "response_tokens_max", "response_tokens_mean", "reward_by_source",
    "reward_error", "reward_mean", "reward_std", "reward_terms", "rollout_tokens", "sampled_rollouts",
    "sampling_rounds", "scorer_failures", "seconds", "skipped_fraction", "skipped_rollouts", "skipped_steps",
    "staleness", "step", "stop_reasons", "system", "tokens", "tokens_by_version", "tokens_per_s", "trained_tokens",
    "truncated_fraction", "unshared_tokens", "validation", "validation_at_start", "versions_since_admission",
    "weight_version",
})  # fmt: skip
"""Names in metrics.jsonl that every algorithm's steps may have; no algorithm's own metric can be called so."""
SQUARES = "/squares"
"""Ending of the name of a sum of squares."""


class Algorithm(ABC):
    """An algorithm with its configuration; a subclass gives at least `advantages` and `token_loss`."""

    requires: frozenset[LogprobColumn] = frozenset()
    """Log-probs without which it cannot run, whatever the configuration says."""
    rows: ClassVar[Literal["prompts", "texts", "pairs", "labels"]] = "prompts"
    """The rows that it learns from, as `data.rows` has it."""
    metrics: Sequence[Metric] = ()
    """The metrics that `measure` computes."""
    user_loss: UserLoss | None = None
    """A loss of the user's that is computed in place of `token_loss`."""

    def __init__(self, config: RlctlConfig) -> None:
        """`config` is what the user set; values that the planner decides are not in it yet."""
        self.config = config
        self.made_by: Callable[[RlctlConfig], Algorithm] = type(self)
        """Factory that makes the same algorithm in another process."""

    def use(self, loss: UserLoss) -> None:
        """Take a user's loss and its metrics in place of the algorithm's own."""
        self.user_loss = loss
        self.metrics = tuple(Metric(name, "mean", curve=name) for name in loss.names or ())

    @property
    def needs(self) -> frozenset[LogprobColumn]:
        """Log-probs that are computed before training, and that the planner counts."""
        return self.config.logprobs_needed

    @property
    def teacher_top(self) -> int:
        """Number of a teacher's most likely tokens at each position whose log-probs the loss needs."""
        return 0

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a rollout with advantage 0 has a gradient; if not, its tokens need not be computed."""
        return True

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
        """Return the advantages [G] of each group of a step's batch. An algorithm that compares rollouts of several
        prompts replaces this; here it is `advantages` of each group, and what the section `advantage` says of terms
        and of the batch."""

        def among_applying(values_G: np.ndarray) -> np.ndarray:
            """Others than the rollouts that a term applies to have no advantage by it, nor has one that is alone."""
            applies_G, found_G = ~np.isnan(values_G), np.zeros(len(values_G))
            if applies_G.sum() > self.config.advantage.compares:
                found_G[applies_G] = self.advantages(values_G[applies_G])
            return found_G

        found = [
            np.sum([weight * among_applying(values_G) for weight, values_G in self.compared(group)], axis=0)
            for group in groups
        ]
        if self.config.whitens_penalties:
            return found  # the ranks subtract the penalties of tokens, whiten and clip
        if not self.config.advantage.whiten or self.config.has_critic or not groups:
            return self._clipped(found)  # with a critic there are rewards until the ranks have the values of tokens
        tokens_N = np.array([self.learned_tokens(rollout) for group in groups for rollout in group.rollouts])
        ends, all_N = np.cumsum([len(group.rollouts) for group in groups])[:-1], np.concatenate(found)
        of_tokens = self.config.advantage.whiten_over == "tokens"
        return self._clipped(np.split(whitened(all_N, tokens_N) if of_tokens else whitened_rollouts(all_N), ends))

    def _clipped(self, advantages_P_G: list[np.ndarray]) -> list[np.ndarray]:
        low, high = self.config.advantage.clip_low, self.config.advantage.clip_high
        return advantages_P_G if low is high is None else [np.clip(one, low, high) for one in advantages_P_G]

    def compared(self, group: RolloutGroup) -> list[tuple[float, np.ndarray]]:
        """Return what the rollouts of a group are compared by, as (weight, values [G]): their `scores` with shift, with
        the factor of cut rollouts, and with what lengths cost, which `advantage.per_term` compares by itself."""
        penalties_G = self.length_penalties(group)
        factor_G = np.where([one.truncated for one in group.rollouts], self.config.reward.truncated_factor, 1.0)
        if not self._by_term(group):
            return [(1.0, factor_G * (group.rewards_G + self.config.reward.shift) + penalties_G)]
        found = [(weight, factor_G * values_G) for weight, values_G in self.scores(group)]
        return [*found, (1.0, penalties_G)] if penalties_G.any() else found

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
        weights += [1.0] * (len(names) - len(weights))  # a task's own scorer, and what an environment gives
        terms_G = (np.array([rollout.terms[name] for rollout in group.rollouts], dtype=np.float64) for name in names)
        return [pair for pair in zip(weights, terms_G, strict=False) if not np.isnan(pair[1]).all()]

    def length_penalties(self, group: RolloutGroup) -> np.ndarray:
        """Return what the length of each rollout costs, float64 [G], at most 0: of an episode that of its longest turn,
        since `generation.max_new_tokens` is the limit of each turn."""
        tokens_G, options = np.array([rollout.longest_turn for rollout in group.rollouts]), self.config.reward
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

    @abstractmethod
    def token_loss(self, batch: TokenBatch) -> torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss of each response token [R], without its weight; differentiable in `batch.logprobs_R`, and
        in `batch.entropy_R` where it depends on it. With it may come the values that `measure` would compute again."""

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        """Return the values [R] of `metrics` by name, without gradient; a sum or a maximum may also be a scalar."""
        return {}

    def before_training(
        self, batch: TrainBatch
    ) -> tuple[TrainBatch, MicroBatchLoss, Callable[[Sequence[MinibatchResult]], None]] | None:
        """Return a batch, what is computed of it before each step on `batch`, and the function that takes the results;
        None: nothing is computed."""
        return None

    def manifest(self) -> dict[str, Any]:
        """Return what the run's manifest keeps of it, and a resume compares."""
        code, package = getattr(self.made_by, "code", None), getattr(self.made_by, "package", None)
        made_of = {"file": code.fingerprint} if code else {"package": package} if package else {}
        own_loss = {"loss": self.user_loss.code.fingerprint} if self.user_loss else {}
        return {"name": self.config.run.algorithm} | made_of | own_loss

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.made_by, self.config, self.user_loss)


def _made(make: Callable[[RlctlConfig], Algorithm], config: RlctlConfig, loss: UserLoss | None) -> Algorithm:
    algorithm = make(config)
    algorithm.made_by = make
    if loss is not None:
        algorithm.use(loss)
    return algorithm


def declared(algorithm: Algorithm) -> tuple[Metric, ...]:
    """Return the metrics of a run of `algorithm` that are computed while it trains."""
    config = algorithm.config
    always = MEASURED_OF_ROLLOUTS if config.makes_rollouts else () if config.trains_reward_model else (ENTROPY,)
    return (*always, *algorithm.metrics)


@dataclass(frozen=True)
class RunLoss:
    """The `MicroBatchLoss` of an algorithm: its loss over response tokens, weighted and summed, and metrics' parts."""

    algorithm: Algorithm

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss and metrics of one micro-batch."""
        import torch

        algorithm, own = self.algorithm, self.algorithm.user_loss
        batch = _judged(_finite(batch), algorithm.config.advantage)
        found = algorithm.token_loss(batch) if own is None else own(batch, algorithm.config.loss)
        loss_R, measured = found if isinstance(found, tuple) else (found, None)
        # Left-out tokens have weight 0; where() also keeps an infinite value of theirs from becoming 0 * inf.
        loss = torch.where(batch.counted_R, batch.token_weights_R * loss_R, 0.0).sum()
        if batch.nll_weights_R is not None:
            loss = loss - (batch.nll_weights_R * batch.logprobs_R).sum()
        with torch.no_grad():
            measured = algorithm.measure(batch) if measured is None else measured
            values = {**_measured_always(batch, algorithm.config), **measured}
            return self._reduced(loss, values, batch.counted_R)

    def _reduced(self, loss: torch.Tensor, values: dict[str, torch.Tensor], mask_R: torch.Tensor) -> LossOutput:
        """Raises ValueError where the algorithm measured something else than it declares."""
        import torch

        reductions = {metric.name: metric.reduce for metric in declared(self.algorithm)}
        if reductions.keys() != values.keys():
            odd = sorted(reductions.keys() ^ values.keys())
            raise ValueError(f"metrics declared and measured by the algorithm differ: {', '.join(odd)}")
        dtype = loss.dtype
        sums, maxima = {TOKENS: mask_R.to(dtype).sum()}, {}
        for name, value in values.items():
            kept = torch.where(mask_R, value.detach().to(dtype), 0.0) if value.ndim else value.detach()
            if reductions[name] == "max":
                maxima[name] = kept.max()
            else:
                sums[name] = kept.sum()
            if reductions[name] == "effective":
                sums[name + SQUARES] = kept.square().sum()
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    def metrics(self, results: Sequence[MinibatchResult]) -> dict[str, Any]:
        """Return the metrics over all optimizer steps of a batch; none where no token was computed."""
        tokens = sum(result.sums.get(TOKENS, 0.0) for result in results)
        if not tokens:
            return {}
        found, flat = {}, {}
        for metric in declared(self.algorithm):
            if metric.reduce == "max":
                found[metric.name] = max(result.maxima.get(metric.name, 0.0) for result in results)
            else:
                total = sum(result.sums.get(metric.name, 0.0) for result in results)
                count = sum(result.sums.get(metric.per, 0.0) for result in results)
                found[metric.name] = total if metric.reduce != "mean" else total / count if count else 0.0
            if metric.reduce == "effective":
                squares = sum(result.sums.get(metric.name + SQUARES, 0.0) for result in results)
                found[metric.name] = found[metric.name] ** 2 / (tokens * squares) if squares else 0.0
            if metric.flat:
                flat[metric.name] = found.pop(metric.name)
        return nested(found) | flat


def _finite(batch: TokenBatch) -> TokenBatch:
    """Return the batch with 0 in place of what is not finite in the columns of tokens that are left out: an infinite
    log-prob of theirs has no part in the loss, but 0 times its gradient would be NaN."""
    columns = ("logprobs_R", "full_logprobs_R", "entropy_R", "rollout_logprobs_R", "old_logprobs_R",
               "old_full_logprobs_R", "reference_logprobs_R", "teacher_logprobs_R", "teacher_top_RK",
               "top_logprobs_RK")  # fmt: skip
    given = {name: getattr(batch, name) for name in columns}
    odd = {name: ~values.isfinite() for name, values in given.items() if values is not None}
    left_out = {name: odd_R & ~(batch.counted_R if odd_R.ndim == 1 else batch.counted_R[:, None])
                for name, odd_R in odd.items()}  # fmt: skip
    return replace(batch, **{name: given[name].masked_fill(here, 0.0) for name, here in left_out.items()})


def _judged(batch: TokenBatch, options: AdvantageConfig) -> TokenBatch:
    """Return the batch with the advantages of turns that have a fault."""
    import torch

    if not options.judges_turns or (faults_R := batch.extra_R.get(FAULTS)) is None:
        return batch
    advantages_R = batch.advantages_R
    for name, bit in BITS.items():
        if (value := getattr(options, name)) is not None:
            advantages_R = torch.where(faults_R.int() & bit != 0, value, advantages_R)
    return replace(batch, advantages_R=advantages_R)


def _measured_always(batch: TokenBatch, config: RlctlConfig) -> dict[str, torch.Tensor]:
    if not config.makes_rollouts:
        return {} if config.trains_reward_model else {"entropy": batch.entropy_R}
    import torch

    from rlctl.methods.rl.losses import LOG_RATIO_LIMIT, k3, old_logprobs, unbounded_weights

    log_ratio_R = torch.where(batch.counted_R, old_logprobs(batch) - batch.rollout_logprobs_R, 0.0)
    difference_R = log_ratio_R.abs()
    weights_R = unbounded_weights(old_logprobs(batch), batch, config.loss)
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
