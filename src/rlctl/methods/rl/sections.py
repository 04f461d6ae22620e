"""Sections of reinforcement learning: advantages, losses, the critic, distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlctl.config.facts import Unloadable
from rlctl.config.section import NonNegative, NonNegativeNumber, Positive, PositiveNumber, Section
from rlctl.settings.run import OwnLossConfig
from rlctl.settings.training import LogprobColumn, SchedulerConfig


class AdvantageConfig(Section):
    """From rewards to the advantages of rollouts."""

    baseline: Annotated[Literal["mean", "leave-one-out", "none", "critic"], Unloadable(to=("critic",))] = "mean"
    """Baseline that is subtracted from a reward: the mean of its group, the mean of the group's other rollouts, none,
    or at each token the value that a critic gives it (see the section `critic`)."""
    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group."""
    std_of: Literal["group", "others"] = "group"
    """Rewards of that standard deviation: those of the whole group, or those of its other rollouts, where advantages
    stay as they are if these are all equal."""
    per_term: bool = False
    """Compute the advantages of each reward term by itself and add them up by the weights of the terms (GDPO)."""
    whiten: bool = False
    """Give the advantages of all tokens of a step's batch the mean 0 and the standard deviation 1."""
    whiten_over: Literal["tokens", "rollouts"] = "tokens"
    """Unit of that mean and standard deviation: tokens, so that long rollouts count more, or rollouts."""
    clip_low: float | None = None
    """Least advantage of a rollout, below which it is cut; unset: none."""
    clip_high: float | None = None
    """Largest advantage of a rollout, above which it is cut; unset: none."""
    malformed_thinking: float | None = None
    """Advantage of a turn with `<think>` or `</think>` in its answer; unset: the episode's."""
    invalid_tool_call: float | None = None
    """Advantage of a turn with an invalid tool call; unset: the episode's. Overrides `malformed_thinking`."""

    @model_validator(mode="after")
    def validate_where_advantages_are_clipped(self) -> AdvantageConfig:
        if self.baseline == "critic" and (self.clip_low, self.clip_high) != (None, None):
            raise ValueError("advantage.clip_low and advantage.clip_high need a baseline other than critic")
        return self

    @property
    def judges_turns(self) -> bool:
        """Whether turns with a fault get a separate advantage."""
        return (self.malformed_thinking, self.invalid_tool_call) != (None, None)

    @property
    def compares(self) -> bool:
        """Whether the rollouts of a group are compared with each other."""
        return self.baseline in ("mean", "leave-one-out") or self.normalize_std


class KlPenalty(Section):
    """The KL penalty to the reference policy."""

    kl_coefficient: NonNegativeNumber = 0.0
    """Weight of the KL penalty to the reference policy; with 0 no reference model is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence to the reference policy."""
    kl_cap: PositiveNumber | None = None
    """Largest KL penalty of one token, before its weight; unset: no limit."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL penalty: a term of the loss, or of the reward, where the advantage of a token loses the penalty
    of that token and of all that follow it. `advantage.whiten` whitens what is left (REINFORCE++)."""
    kl_weight: Literal["off", "policy", "importance"] = "off"
    """With `kl_in=loss`, the weight of each token's penalty, which has a gradient: the probability of the token under
    the policy, divided by itself without gradient (`policy`: the value stays, and the token is held to account for its
    own penalty), or by that under the engine (`importance`)."""
    kl_score_term: bool = False
    """With `kl_in=loss`, also hold each token to account for the penalty of the tokens that follow it: the gradient of
    the estimator alone leaves that out, and is not the gradient of the KL divergence."""


class EntropyBonus(Section):
    """The entropy of the policy, as a term of the loss."""

    entropy_coefficient: NonNegativeNumber = 0.0
    """Weight of the entropy of each token's distribution, which is added to what is maximised."""


class Average(Section):
    """From the losses of tokens to one number."""

    level: Literal["token", "sequence", "constant"] = "token"
    """Unit of the average: all tokens of the batch; sequences, each with the mean of its tokens; or sequences, each
    with the sum of its tokens divided by `length_divisor`."""
    length_divisor: Positive | None = None
    """Divisor of every sequence's sum with `level=constant`; unset: generation.max_new_tokens."""


class ImportanceCorrection(Section):
    """The correction for the difference between the distributions of engine and trainer."""

    importance_correction: Literal["off", "untruncated", "truncated", "masked", "ratio"] = "truncated"
    """Correction for the difference between the engine's and the trainer's log-probs: tokens weigh by the ratio of the
    two probabilities, as it is, truncated at `importance_cap`, or 0 outside of [importance_floor, importance_cap]. With
    `ratio` they have no weight, and the clipped ratio is that of the policy to the engine's log-probs."""
    importance_level: Literal["token", "sequence"] = "token"
    """Unit of that ratio: each token, or the product over the tokens of a rollout, which all of them then have."""
    importance_cap: PositiveNumber = 2.0
    """Upper bound of the importance weight."""
    importance_floor: NonNegativeNumber | None = None
    """Lower bound of the importance weight; unset: with `masked` 1 / importance_cap, with `truncated` none."""

    @model_validator(mode="after")
    def validate_bounds_of_importance(self) -> ImportanceCorrection:
        floor, cap = self.importance_floor, self.importance_cap
        if floor is not None and floor > cap:
            raise ValueError(f"loss.importance_floor = {floor:g} is above loss.importance_cap = {cap:g}")
        if floor is None and self.importance_correction == "masked" and cap <= 1:
            raise ValueError(
                f"loss.importance_cap = {cap:g} leaves no weight where loss.importance_floor is unset, which is 1 / "
                "importance_cap then: set loss.importance_floor"
            )
        return self


class RolloutMasks(Section):
    """Rollouts that are not learned from, because they are too far from the policy."""

    sequence_mask: tuple[NonNegativeNumber, PositiveNumber] | None = None
    """Bounds of the geometric mean of a rollout's ratios of trainer to engine, for example [0.999, 1.002]; a rollout
    outside of them is not learned from. Unset: off."""
    error_mask: Annotated[float, Field(gt=1)] | None = None
    """Largest mean of exp|log(trainer / engine)| over the tokens of a rollout; a rollout beyond it is not learned from.
    Unset: off."""
    off_policy_mask: PositiveNumber | None = None
    """Largest mean of log(engine / policy) over the tokens of a rollout with a negative advantage, in nats; a rollout
    beyond it is not learned from. Unset: off."""

    @model_validator(mode="after")
    def validate_bounds_of_the_sequence_mask(self) -> RolloutMasks:
        if self.sequence_mask is not None and self.sequence_mask[0] >= self.sequence_mask[1]:
            raise ValueError(f"loss.sequence_mask = {list(self.sequence_mask)}: the lower bound comes first")
        return self


class Imitation(Section):
    """The likelihood of good rollouts, as a term of the loss."""

    positive_nll_weight: NonNegativeNumber = 0.0
    """Weight of the negative log-likelihood of rollouts with a positive reward, which is added: its mean over all their
    tokens (VAPO)."""


class PolicyLoss(KlPenalty, EntropyBonus, Average, ImportanceCorrection, RolloutMasks, Imitation, OwnLossConfig):
    """The keys that every policy loss reads: its KL penalty, its average, and the correction for what the engine
    computes differently."""

    needs: tuple[LogprobColumn, ...] | None = None
    """Log-probs that are computed before training; unset: `old_logprobs` with several optimizer steps a batch (seldom
    with `importance_correction=ratio`), `reference_logprobs` with a KL penalty, `teacher_logprobs` with a teacher."""


class RatioBounds(Section):
    """Bounds of the ratio of the policies."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower bound: the ratio of the policies is clipped at 1 - clip_low."""
    clip_high: PositiveNumber = 0.2
    """Upper bound: the ratio of the policies is clipped at 1 + clip_high."""


class DualClip(Section):
    """The bound of the loss of negative advantages."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Lower bound c of the loss for negative advantages (dual-clip PPO); unset: off."""


class LossConfig(DualClip, RatioBounds, PolicyLoss):
    """The clipped policy loss, its KL penalty, and the correction for the engine's numerical differences."""


class CriticConfig(Section):
    """The value model of `advantage.baseline=critic`, which ppo sets: its training, and the advantages from its values.
    Betas and epsilon of its Adam, and options for Megatron's optimizer, come from `optimizer`."""

    lr: PositiveNumber = 1e-5
    """Learning rate of the critic; with a schedule its highest value."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay of the critic."""
    clip_grad: NonNegativeNumber = 1.0
    """Largest norm of the critic's gradient; 0 turns clipping off."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Learning rate and weight decay of the critic over the steps, with the keys of the section `scheduler`."""
    warmup_steps: NonNegative = 0
    """Number of first steps that train the critic alone."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of a reward for each token that lies between."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation: 1 learns from whole rollouts, 0 from the value of the next token."""
    value_clip: PositiveNumber | None = 0.2
    """Largest distance from its value before the step at which the value of a token is still moved; unset: no limit."""
    loss_weight: PositiveNumber = 1.0
    """Factor of the critic's loss: half of the mean squared distance from the returns."""
