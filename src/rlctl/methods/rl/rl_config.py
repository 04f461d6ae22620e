"""The configuration of reinforcement learning; an algorithm with further settings derives a class from it."""

from __future__ import annotations

from pydantic import model_validator

from rlctl.config.section import changed
from rlctl.methods.rl.sections import AdvantageConfig, CriticConfig, LossConfig, PolicyLoss
from rlctl.settings.config import RolloutConfig, Schedule


class AlgorithmConfig(RolloutConfig):
    """The sections of every RL algorithm. A loss without the keys of `RlConfig` derives its configuration from this."""

    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    loss: PolicyLoss = PolicyLoss()

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained next to the policy."""
        return self.advantage.baseline == "critic"

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        critic = self.critic
        of_critic = Schedule("critic's ", "critic.", "critic.lr", critic.lr, critic.weight_decay, critic.scheduler)
        return (*super().schedules, of_critic) if self.has_critic else super().schedules

    @property
    def penalty_in_reward(self) -> bool:
        """Whether the KL penalty is a part of each token's reward."""
        return self.loss.kl_coefficient > 0 and self.loss.kl_in == "reward"

    @property
    def whitens_penalties(self) -> bool:
        """Whether the ranks whiten the advantages of tokens, which have lost their KL penalties by then; a critic's
        advantages are made there anyway."""
        return self.penalty_in_reward and self.advantage.whiten and not self.has_critic

    @property
    def learns_from_rewards(self) -> bool:
        return True

    @property
    def compares_rewards(self) -> bool:
        """Whether a prompt whose rollouts all have the same reward gives no gradient."""
        return self.advantage.compares and self.learns_from_rewards

    @model_validator(mode="after")
    def validate_turns_that_are_judged(self) -> AlgorithmConfig:
        if not self.advantage.judges_turns:
            return self
        key = f"advantage.{'malformed_thinking' if self.advantage.invalid_tool_call is None else 'invalid_tool_call'}"
        if not self.plays:
            raise ValueError(f"{key} is for the turns of an environment: set environment.name or environment.tools")
        if self.penalty_in_reward:
            raise ValueError(f"{key} leaves no place for loss.kl_in = reward: set loss.kl_in=loss")
        return self

    @model_validator(mode="after")
    def validate_groups_that_are_compared(self) -> AlgorithmConfig:
        compared = self.compares_rewards
        if self.batch.generations > 1 or not (compared or self.filter.groups != "keep"):
            return self
        key = "advantage.normalize_std = true" if compared else f"filter.groups = {self.filter.groups}"
        if self.advantage.baseline in ("mean", "leave-one-out"):
            key = f"advantage.baseline = {self.advantage.baseline}"
        raise ValueError(
            f"batch.generations = 1, but {key} compares the rollouts of a prompt: set at least 2, or --algorithm ppo, "
            "which compares none"
        )

    @model_validator(mode="after")
    def validate_whitened_penalties(self) -> AlgorithmConfig:
        if not self.whitens_penalties:
            return self
        if self.advantage.whiten_over == "rollouts":
            raise ValueError(
                "advantage.whiten_over = rollouts needs one advantage per rollout, but loss.kl_in = "
                "reward gives each token its own: set it to tokens, or loss.kl_in to loss"
            )
        if self.loss.needs is not None and not {"old_logprobs", "reference_logprobs"} <= {*self.loss.needs}:
            raise ValueError(
                "advantage.whiten = true with loss.kl_in = reward needs old_logprobs and reference_logprobs: add them "
                "to loss.needs"
            )
        return self

    @model_validator(mode="after")
    def validate_shift_of_a_sum(self) -> AlgorithmConfig:
        if self.reward.shift and self.advantage.per_term:
            raise ValueError(
                f"reward.shift = {self.reward.shift:g} is added to the sum of the terms, and advantage.per_term = true "
                "compares each term by itself: leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def validate_critic(self) -> AlgorithmConfig:
        if not self.has_critic:
            if self.critic != CriticConfig():
                odd = dict(changed(self.critic, CriticConfig(), "critic."))
                plain = " ".join(f"--set {key}={'null' if value is None else value}" for key, value in odd.items())
                raise ValueError(
                    f"{next(iter(odd))} has no effect: advantage.baseline = {self.advantage.baseline} uses no critic "
                    f"(--algorithm ppo does): leave it out, or where the run that is resumed has it, add {plain}"
                )
            return self
        for wrong, reason in (
            (self.advantage.normalize_std, "advantage.normalize_std = true compares the rollouts of a prompt; "
             "advantage.baseline = critic compares tokens with their values: set it to false"),
            (self.advantage.per_term, "advantage.per_term = true compares reward terms within a group, and "
             "advantage.baseline = critic learns from their sum: set it to false"),
            (self.advantage.whiten_over == "rollouts", "advantage.whiten_over = rollouts compares an advantage of each "
             "rollout, and advantage.baseline = critic has those of tokens: set it to tokens"),
            (self.training.lora.rank > 0, "training.lora.rank > 0 trains adapters, and advantage.baseline = critic "
             "trains all weights of both models: set it to 0, or use an algorithm without a critic"),
            (self.penalty_in_reward and self.loss.needs is not None and "old_logprobs" not in self.loss.needs,
             "loss.kl_in = reward needs old_logprobs where a critic makes the advantages: add it to loss.needs"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def validate_sums_over_an_episode(self) -> AlgorithmConfig:
        if not any(environment.thinking == "template" for environment in self.plays):
            return self
        penalized = self.loss.kl_coefficient > 0
        for sums, key in (
            (self.has_critic and self.critic.gamma < 1, f"critic.gamma = {self.critic.gamma:g}"),
            (penalized and self.loss.kl_in == "reward", "loss.kl_in = reward"),
            (penalized and self.loss.kl_in == "loss" and self.loss.kl_score_term, "loss.kl_score_term = true"),
        ):
            if sums:
                raise ValueError(
                    f"{key} looks at all tokens that follow, and with environment.thinking = template a turn's tokens "
                    "do not see later contexts: set environment.thinking=keep, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def validate_filter_has_rewards(self) -> AlgorithmConfig:
        if self.filter.groups != "keep" and not self.learns_from_rewards:
            raise ValueError(
                f"filter.groups = {self.filter.groups} chooses by rewards, and with distillation.reward_weight = 0 "
                "none are learned from"
            )
        return self


class RlConfig(AlgorithmConfig):
    """The configuration of `rlctl train grpo`: of algorithms with the clipped loss, and of algorithms from outside
    rlctl without a class of their own."""

    loss: LossConfig = LossConfig()
