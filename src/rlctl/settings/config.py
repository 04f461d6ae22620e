"""The whole configuration."""

from __future__ import annotations

from pydantic import model_validator

from rlctl.config.section import Section, _changed
from rlctl.methods.preference_section import PreferenceConfig
from rlctl.methods.rl.sections import AdvantageConfig, CriticConfig, DistillationConfig, LossConfig
from rlctl.settings.data import DataConfig, ModelConfig
from rlctl.settings.generation import FilterConfig, GenerationConfig, RefitConfig, RolloutsConfig, VllmConfig
from rlctl.settings.other_models import RewardModelConfig, TeacherConfig
from rlctl.settings.rewards import MODEL, OBSERVED_TOKENS, EnvironmentConfig, RewardConfig
from rlctl.settings.run import VALIDATION_PREFIX, BatchConfig, ChecksConfig, ClusterConfig, RunConfig, ValidationConfig
from rlctl.settings.training import (
    DdpConfig,
    LogprobColumn,
    MegatronConfig,
    OptimizerConfig,
    QuantizationConfig,
    SchedulerConfig,
    TrainingConfig,
)


class RlctlConfig(Section):
    """The whole configuration of a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    validation: ValidationConfig = ValidationConfig()
    batch: BatchConfig = BatchConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    loss: LossConfig = LossConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    filter: FilterConfig = FilterConfig()
    teacher: TeacherConfig = TeacherConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    distillation: DistillationConfig = DistillationConfig()
    preference: PreferenceConfig = PreferenceConfig()
    training: TrainingConfig = TrainingConfig()
    generation: GenerationConfig = GenerationConfig()
    refit: RefitConfig = RefitConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    ddp: DdpConfig = DdpConfig()
    megatron: MegatronConfig = MegatronConfig()
    vllm: VllmConfig = VllmConfig()
    cluster: ClusterConfig = ClusterConfig()
    checks: ChecksConfig = ChecksConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def validate_metric_of_the_best(self) -> RlctlConfig:
        by, every, saves = self.run.keep_best_by, self.validation.every, self.run.checkpoint_every
        if by == "reward_mean":
            if self.run.keep_best is not None and not self.makes_rollouts:
                raise ValueError(
                    f"run.keep_best = {self.run.keep_best} needs run.keep_best_by = {VALIDATION_PREFIX}loss: a run on "
                    "texts has no rewards"
                )
            return self
        if not by.startswith(VALIDATION_PREFIX) or by == VALIDATION_PREFIX:
            raise ValueError(f"run.keep_best_by = {by} is neither reward_mean nor {VALIDATION_PREFIX}<name>")
        if not every:
            raise ValueError(f"run.keep_best_by = {by} needs validations: set validation.every")
        if saves is not None and saves % every:
            raise ValueError(
                f"run.keep_best_by = {by} needs a validation at each checkpoint: run.checkpoint_every = {saves} is no "
                f"multiple of validation.every = {every}"
            )
        return self

    @model_validator(mode="after")
    def validate_schedules_of_learning_rates(self) -> RlctlConfig:
        critic = self.critic
        schedules = [("", "optimizer.lr", self.optimizer.lr, self.scheduler)]
        for prefix, name, lr, one in [*schedules, ("critic.", "critic.lr", critic.lr, critic.scheduler)]:
            used = {"init_lr": one.warmup_steps > 0, "min_lr": one.decay != "constant"}
            for key in (key for key, has_effect in used.items() if has_effect and getattr(one, key) > lr):
                raise ValueError(
                    f"{prefix}scheduler.{key} = {getattr(one, key):g} is above {name} = {lr:g}, which is the highest "
                    "learning rate of a schedule: lower one or raise the other"
                )
            if used["min_lr"] and one.decay_steps is not None and one.decay_steps <= one.warmup_steps:
                raise ValueError(
                    f"{prefix}scheduler.decay_steps = {one.decay_steps} is not above {prefix}scheduler.warmup_steps = "
                    f"{one.warmup_steps}: the decay begins after the warm-up and ends at step decay_steps"
                )
        return self

    @model_validator(mode="after")
    def validate_keys_of_texts(self) -> RlctlConfig:
        data, plain = self.data, DataConfig()
        if data.train_on != plain.train_on and data.rows != "texts":
            raise ValueError(f"data.train_on = {data.train_on} has no effect: data.rows = {data.rows}")
        if data.too_long == "cut" and self.makes_rollouts and self.environment.wanted:
            raise ValueError(
                "data.too_long = cut does not go with an environment, which writes the prompts of its episodes: drop "
                "leaves out those that are too long"
            )
        plain = PreferenceConfig()
        of_labels = {"beta": self.preference.beta} if data.rows == "labels" else {}
        of_labels |= {key: getattr(self.preference, key) for key in ("good_weight", "bad_weight") if of_labels}
        plain = plain.model_copy(update=of_labels)
        if (data.rows != "pairs" or self.trains_reward_model) and self.preference != plain:
            odd = next(iter(dict(_changed(self.preference, plain, "preference."))))
            what = "a reward model has scores of its own"
            what = what if self.trains_reward_model else f"data.rows = {data.rows} has no preferences"
            raise ValueError(f"{odd} has no effect: {what}")
        return self

    @model_validator(mode="after")
    def validate_what_is_quantized(self) -> RlctlConfig:
        settings = self.training.quantization
        if settings.format == "none":
            if settings != QuantizationConfig():
                odd = next(iter(dict(_changed(settings, QuantizationConfig(), "training.quantization."))))
                raise ValueError(f"{odd} has no effect: training.quantization.format = none")
            return self
        for wrong, why in (
            (self.training.lora.rank > 0, "training.lora.rank > 0 trains adapters of weights that stay"),
            (self.trains_reward_model, "`train rm` trains a model of scores, which no engine computes"),
            (bool(self.vllm.passed.get("quantization")), "vllm.quantization has the engines round the weights again"),
        ):
            if wrong:
                raise ValueError(f"training.quantization.format = {settings.format} does not go with this: {why}")
        return self

    @model_validator(mode="after")
    def validate_pairs_of_an_optimizer_step(self) -> RlctlConfig:
        if self.data.rows in ("pairs", "labels") and self.batch.prompts % self.batch.optimizer_steps:
            raise ValueError(
                f"batch.prompts = {self.batch.prompts} {self.data.rows} do not split into batch.optimizer_steps = "
                f"{self.batch.optimizer_steps} equal parts"
            )
        return self

    @model_validator(mode="after")
    def validate_distillation_on_texts(self) -> RlctlConfig:
        of_texts = {
            "distillation.sft_weight": self.distillation.sft_weight > 0,
            "distillation.balanced": self.distillation.balanced,
            "teacher.own_tokenizer": self.teacher.own_tokenizer,
        }
        if self.run.algorithm != "distill" and (asked := next((key for key, on in of_texts.items() if on), None)):
            raise ValueError(f"{asked} is for `train distill`, whose texts are given and have a likelihood to learn")
        if self.teacher.own_tokenizer and self.distillation.outside == "tail":
            raise ValueError(
                "distillation.outside = tail does not go with teacher.own_tokenizer: a projected distribution has "
                "nothing outside of the teacher's most likely tokens that could be compared"
            )
        return self

    @property
    def teacher_top(self) -> int:
        """Number of a teacher's most likely tokens at each position that distillation compares."""
        compares = self.run.algorithm == "distill" or self.distillation.loss == "top-k"
        return self.distillation.top_k if self.teacher.model and compares else 0

    @property
    def reward_models(self) -> tuple[str, ...]:
        """Names of the reward models that score rollouts, each once."""
        of_sources = [term for one in self.data.sources if one.reward for term in one.reward.terms]
        terms = (*self.reward.terms, *of_sources, *self.validation.reward)
        return tuple(dict.fromkeys(term.name for term in terms if term.name.startswith(MODEL)))

    @property
    def trains_reward_model(self) -> bool:
        """Whether the model has a scalar head in place of logits."""
        return self.run.algorithm == "rm"

    @model_validator(mode="after")
    def validate_answers_of_validation(self) -> RlctlConfig:
        if self.validation.answers and (self.makes_rollouts or self.trains_reward_model):
            why = "a reward model answers nothing" if self.trains_reward_model else "its prompts are answered anyway"
            raise ValueError(f"validation.answers = {self.validation.answers} has no effect: {why}")
        return self

    @model_validator(mode="after")
    def validate_texts_are_not_sampled(self) -> RlctlConfig:
        if not self.makes_rollouts and self.rollouts.mode == "async":
            raise ValueError(f"rollouts.mode = async makes rollouts, and data.rows = {self.data.rows} needs none")
        return self

    @model_validator(mode="after")
    def validate_rollouts_end_before_the_run(self) -> RlctlConfig:
        if self.rollout_timeout_s >= self.cluster.step_timeout_s:
            raise ValueError(
                f"rollouts.timeout_s = {self.rollout_timeout_s:g} is not below cluster.step_timeout_s = "
                f"{self.cluster.step_timeout_s:g}, after which a step fails"
            )
        return self

    @model_validator(mode="after")
    def validate_turns_that_are_judged(self) -> RlctlConfig:
        if not self.advantage.judges_turns:
            return self
        key = f"advantage.{'malformed_thinking' if self.advantage.invalid_tool_call is None else 'invalid_tool_call'}"
        if not self.environment.wanted:
            raise ValueError(f"{key} is for the turns of an environment: set environment.name or environment.tools")
        if self.penalty_in_reward:
            raise ValueError(f"{key} leaves no place for loss.kl_in = reward: set loss.kl_in=loss")
        return self

    @model_validator(mode="after")
    def validate_groups_that_are_compared(self) -> RlctlConfig:
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
    def validate_whitened_penalties(self) -> RlctlConfig:
        if not self.whitens_penalties:
            return self
        if self.advantage.whiten_over == "rollouts":
            raise ValueError(
                "advantage.whiten_over = rollouts compares an advantage of each rollout, and loss.kl_in = reward gives "
                "each token one of its own: set it to tokens, or loss.kl_in to loss"
            )
        if self.loss.needs is not None and not {"old_logprobs", "reference_logprobs"} <= {*self.loss.needs}:
            raise ValueError(
                "advantage.whiten = true with loss.kl_in = reward needs old_logprobs and reference_logprobs: add them "
                "to loss.needs"
            )
        return self

    @model_validator(mode="after")
    def validate_critic(self) -> RlctlConfig:
        if not self.has_critic:
            if self.critic != CriticConfig():
                odd = dict(_changed(self.critic, CriticConfig(), "critic."))
                plain = " ".join(f"--set {key}={'null' if value is None else value}" for key, value in odd.items())
                raise ValueError(
                    f"{next(iter(odd))} has no effect: advantage.baseline = {self.advantage.baseline} uses no critic "
                    f"(--algorithm ppo does): leave it out, or where the run that is resumed has it, add {plain}"
                )
            return self
        for wrong, why in (
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
                raise ValueError(why)
        return self

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained next to the policy. The planner, the workers and the loop all read this."""
        return self.advantage.baseline == "critic"

    @property
    def penalty_in_reward(self) -> bool:
        """Whether the KL penalty is a part of each token's reward."""
        return self.loss.kl_coefficient > 0 and self.loss.kl_in == "reward"

    @property
    def whitens_penalties(self) -> bool:
        """Whether the ranks whiten the advantages of tokens, which have lost their KL penalties by then; a critic's
        advantages are made there anyway. The advantages of distillation are whitened before a teacher adds to them."""
        penalized = self.penalty_in_reward and self.run.algorithm != "distillation"
        return penalized and self.advantage.whiten and not self.has_critic

    @property
    def makes_rollouts(self) -> bool:
        """Whether engines sample what is trained on; if not, it is read from a dataset."""
        return self.data.rows == "prompts"

    @property
    def new_tokens(self) -> int:
        """The most tokens that come behind a prompt: those of a completion, or of all turns of an episode."""
        new = self.generation.max_new_tokens
        return self.environment.turns * (new + OBSERVED_TOKENS) if self.environment.wanted else new

    @property
    def mean_new_tokens(self) -> float:
        """Tokens behind a prompt that the planner assumes; of an episode, those of half of its turns."""
        mean = self.generation.mean_length or self.generation.max_new_tokens / 2
        return (self.environment.turns + 1) / 2 * (mean + OBSERVED_TOKENS) if self.environment.wanted else mean

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards are compared; if not, a run need not have any."""
        return self.makes_rollouts and (self.run.algorithm != "distillation" or self.distillation.reward_weight > 0)

    @property
    def compares_rewards(self) -> bool:
        """Whether nothing is learned from a prompt whose rollouts all have the same reward."""
        return self.advantage.compares and self.learns_from_rewards

    @model_validator(mode="after")
    def validate_shift_of_a_sum(self) -> RlctlConfig:
        if self.reward.shift and self.advantage.per_term:
            raise ValueError(
                f"reward.shift = {self.reward.shift:g} is added to the sum of the terms, and advantage.per_term = true "
                "compares each term by itself: leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def validate_filter_has_rewards(self) -> RlctlConfig:
        if self.has_critic and self.run.algorithm == "distillation":
            raise ValueError("advantage.baseline = critic learns from rewards, and distillation learns from a teacher")
        if self.filter.groups != "keep" and not self.makes_rollouts:
            raise ValueError(
                f"filter.groups = {self.filter.groups} chooses by rewards, and data.rows = {self.data.rows} has none"
            )
        if self.filter.groups != "keep" and not self.learns_from_rewards:
            raise ValueError(
                f"filter.groups = {self.filter.groups} chooses by rewards, and with distillation.reward_weight = 0 "
                "none are learned from"
            )
        return self

    @property
    def rollout_timeout_s(self) -> float:
        """Longest time from the first token of a rollout to its last."""
        return self.rollouts.timeout_s or self.cluster.step_timeout_s / 2

    @property
    def logprobs_needed(self) -> frozenset[LogprobColumn]:
        """Log-probs that are computed before training. The planner and the training loop both read this. With one
        optimizer step a batch the old policy is the current one, whose log-probs the training pass computes anyway;
        a critic's returns, and advantages that are whitened, hold penalties that must be known before."""
        if self.data.rows == "pairs" and not self.preference.holds_reference:
            return frozenset(self.loss.needs or ()) - {"reference_logprobs"}
        if self.loss.needs is not None:
            return frozenset(self.loss.needs)
        old, penalty = self.batch.optimizer_steps * self.batch.epochs > 1, self.loss.kl_coefficient > 0
        if self.loss.importance_correction == "ratio":  # the ratio is to the engine's: what else needs the trainer's?
            old &= self.penalty_in_reward or self.loss.sequence_mask is not None or self.run.algorithm == "distillation"
        old = old or self.whitens_penalties or (self.has_critic and self.penalty_in_reward)
        columns: dict[LogprobColumn, bool] = {"old_logprobs": old, "reference_logprobs": penalty,
                                              "teacher_logprobs": self.teacher.model is not None}  # fmt: skip
        return frozenset(column for column, needed in columns.items() if needed)
