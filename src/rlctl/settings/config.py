"""The configuration classes that training methods build on: the sections of every method, of methods with engines,
of methods that read texts, and of methods that sample rollouts.

A method derives its own class from one of them and adds its sections (`methods/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import model_validator

from rlctl.config.facts import FREE
from rlctl.config.section import Section, changed
from rlctl.config.user_code import MODEL
from rlctl.settings.data import DataConfig, ModelConfig
from rlctl.settings.generation import FilterConfig, GenerationConfig, RefitConfig, RolloutsConfig, VllmConfig
from rlctl.settings.other_models import RewardModelConfig, SourceTeacher, TeacherConfig, first_of, require_one_owner
from rlctl.settings.rewards import OBSERVED_TOKENS, EnvironmentConfig, RewardConfig
from rlctl.settings.run import (
    VALIDATION_PREFIX,
    BatchConfig,
    ChecksConfig,
    ClusterConfig,
    GroupBatchConfig,
    OwnLossConfig,
    RolloutChecksConfig,
    RunConfig,
    SampledValidationConfig,
    TextValidationConfig,
    ValidationConfig,
)
from rlctl.settings.training import (
    DdpConfig,
    MegatronConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
)


@dataclass(frozen=True)
class Schedule:
    """A model's learning rate and weight decay over the steps of a run."""

    what: str
    """Prefix of the rates' names in messages, such as the critic's; empty: the policy."""
    prefix: str
    """Prefix of the section `scheduler`, with a period."""
    lr_key: str
    lr: float
    weight_decay: float
    scheduler: SchedulerConfig

    def check(self) -> None:
        """Raise ValueError where the ends of the schedule are above `lr`, or its phases overlap."""
        prefix, schedule = self.prefix, self.scheduler
        used = {"init_lr": schedule.warmup_steps > 0, "min_lr": schedule.decay != "constant"}
        for key in (key for key, has_effect in used.items() if has_effect and getattr(schedule, key) > self.lr):
            raise ValueError(
                f"{prefix}scheduler.{key} = {getattr(schedule, key):g} is above {self.lr_key} = {self.lr:g}, which is "
                "the highest learning rate of a schedule: lower one or raise the other"
            )
        if used["min_lr"] and schedule.decay_steps is not None and schedule.decay_steps <= schedule.warmup_steps:
            raise ValueError(
                f"{prefix}scheduler.decay_steps = {schedule.decay_steps} is not above {prefix}scheduler.warmup_steps = "
                f"{schedule.warmup_steps}: the decay begins after the warm-up and ends at step decay_steps"
            )


class RlctlConfig(Section):
    """The sections of every training method."""

    step_metrics: ClassVar[tuple[str, ...]] = ()
    """Step metrics that can rank checkpoints (`run.keep_best_by`), in addition to validation metrics."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    batch: BatchConfig = BatchConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    ddp: DdpConfig = DdpConfig()
    megatron: MegatronConfig = MegatronConfig()
    cluster: Annotated[ClusterConfig, FREE] = ClusterConfig()
    checks: Annotated[ChecksConfig, FREE] = ChecksConfig()
    run: RunConfig = RunConfig()

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules of the models that are trained."""
        optimizer = self.optimizer
        return (Schedule("", "", "optimizer.lr", optimizer.lr, optimizer.weight_decay, self.scheduler),)

    @property
    def engine_settings(self) -> EngineConfig | None:
        """The configuration with its sections on engines; None where the method has no engines."""
        return None

    @property
    def rollout_settings(self) -> RolloutConfig | None:
        """The configuration with its sections on rollouts; None where the method samples none to train on."""
        return None

    @property
    def named_teacher(self) -> TeacherConfig | None:
        """The teacher, or the first of several; None where none is named."""
        return None

    @property
    def source_teachers(self) -> tuple[SourceTeacher, ...]:
        """The teachers of a run with several, each for some data sources; empty: there is one or none."""
        return ()

    @property
    def teacher_has_tokenizer(self) -> bool:
        """Whether the teacher reads the texts with another tokenizer than the policy's."""
        return False

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards make advantages; if not, a run need not have any."""
        return False

    def has_scores(self, scorers: bool) -> bool:
        """Return whether rollouts are scored. `scorers`: the data or the configuration name some."""
        return False

    @property
    def turn_tokens(self) -> int:
        """Largest number of tokens that a rollout samples in one turn; 0: the method samples no rollouts."""
        return 0

    @property
    def samples_while_training(self) -> bool:
        """Whether engines sample while the policy trains."""
        return False

    @property
    def new_tokens(self) -> int:
        """The largest number of tokens after a prompt; 0: nothing is sampled."""
        return 0

    @property
    def mean_new_tokens(self) -> float:
        """The mean number of tokens after a prompt that the planner assumes; 0: nothing is sampled."""
        return 0.0

    @property
    def reward_models(self) -> tuple[str, ...]:
        """Names of the reward models that score rollouts, each once."""
        return ()

    @model_validator(mode="after")
    def validate_metric_of_the_best(self) -> RlctlConfig:
        by, every, saves = self.run.keep_best_by, self.validation.every, self.run.checkpoint_every
        if by in self.step_metrics or (by == "reward_mean" and self.run.keep_best is None):
            return self
        if by == "reward_mean":
            raise ValueError(
                f"run.keep_best = {self.run.keep_best} needs run.keep_best_by = {VALIDATION_PREFIX}loss: "
                f"`rlctl train {self.run.algorithm}` has no rewards"
            )
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
    def validate_optimizer(self) -> RlctlConfig:
        settings = self.optimizer
        if settings.optimizer != "muon":
            odd = [key for key, _ in changed(settings, OptimizerConfig(), "optimizer.") if ".muon_" in key]
            if odd:
                raise ValueError(f"{odd[0]} has no effect: optimizer.optimizer = {settings.optimizer}")
        elif self.training.lora.rank > 0:
            raise ValueError(
                "optimizer.optimizer = muon does not go with training.lora.rank > 0: Muon orthogonalizes updates of "
                "whole matrices, and adapters are factors of low rank; set optimizer.optimizer = adamw"
            )
        elif "language" in self.model.freeze:
            raise ValueError(
                "optimizer.optimizer = muon does not go with model.freeze = language: Muon trains the matrices of the "
                "language part; set optimizer.optimizer = adamw"
            )
        return self

    @model_validator(mode="after")
    def validate_schedule_of_the_learning_rate(self) -> RlctlConfig:
        for schedule in self.schedules:
            schedule.check()
        return self


class EngineConfig(RlctlConfig):
    """The sections of methods that can start engines."""

    generation: GenerationConfig = GenerationConfig()
    refit: Annotated[RefitConfig, FREE] = RefitConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def engine_settings(self) -> EngineConfig:
        return self

    @property
    def rollout_timeout_s(self) -> float:
        """Longest time from the first token of a completion to its last, in seconds."""
        return self.cluster.step_limit_s / 2

    @property
    def new_tokens(self) -> int:
        return self.generation.max_new_tokens

    @property
    def mean_new_tokens(self) -> float:
        return self.generation.mean_length or self.generation.max_new_tokens / 2

    @model_validator(mode="after")
    def validate_one_quantization(self) -> EngineConfig:
        quantization = self.training.quantization.format
        if quantization != "none" and self.vllm.passed.get("quantization"):
            raise ValueError(
                f"training.quantization.format = {quantization} does not go with vllm.quantization, with which the "
                "engines round the weights again"
            )
        return self


class TextConfig(EngineConfig):
    """The sections of methods that read texts. Engines start only for `validation.answers`."""

    validation: TextValidationConfig = TextValidationConfig()
    loss: OwnLossConfig = OwnLossConfig()


class RolloutConfig(EngineConfig):
    """The sections of methods that sample rollouts, and of the commands that generate, evaluate and play."""

    step_metrics: ClassVar[tuple[str, ...]] = ("reward_mean",)

    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    validation: SampledValidationConfig = SampledValidationConfig()
    batch: GroupBatchConfig = GroupBatchConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    filter: FilterConfig = FilterConfig()
    teacher: TeacherConfig = TeacherConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    checks: Annotated[RolloutChecksConfig, FREE] = RolloutChecksConfig()

    @property
    def rollout_settings(self) -> RolloutConfig:
        return self

    @property
    def named_teacher(self) -> TeacherConfig | None:
        return first_of(self.teacher)

    @property
    def source_teachers(self) -> tuple[SourceTeacher, ...]:
        return self.teacher.models

    @property
    def reward_models(self) -> tuple[str, ...]:
        of_sources = [term for source in self.data.sources if source.reward for term in source.reward.terms]
        terms = (*self.reward.terms, *of_sources, *self.validation.reward)
        return tuple(dict.fromkeys(term.name for term in terms if term.name.startswith(MODEL)))

    @property
    def samples_while_training(self) -> bool:
        return self.rollouts.mode == "async"

    def has_scores(self, scorers: bool) -> bool:
        return scorers or (self.learns_from_rewards and not self.environment.name)

    @property
    def turn_tokens(self) -> int:
        return self.generation.max_new_tokens

    @property
    def rollout_timeout_s(self) -> float:
        return self.rollouts.timeout_s or super().rollout_timeout_s

    @property
    def new_tokens(self) -> int:
        """The largest number of tokens after a prompt: of a completion, or of all turns of an episode."""
        new = super().new_tokens
        return self.environment.turns * (new + OBSERVED_TOKENS) if self.environment.wanted else new

    @property
    def mean_new_tokens(self) -> float:
        """The mean number of tokens after a prompt that the planner assumes; episodes take half of their turns."""
        mean = super().mean_new_tokens
        return (self.environment.turns + 1) / 2 * (mean + OBSERVED_TOKENS) if self.environment.wanted else mean

    @model_validator(mode="after")
    def validate_one_teacher_of_each_source(self) -> RolloutConfig:
        require_one_owner(self.teacher, self.data.source_labels)
        return self

    @model_validator(mode="after")
    def validate_prompts_that_are_cut(self) -> RolloutConfig:
        if self.data.too_long == "cut" and self.environment.wanted:
            raise ValueError(
                "data.too_long = cut does not go with an environment, which writes the prompts of its episodes: drop "
                "leaves out those that are too long"
            )
        return self

    @model_validator(mode="after")
    def validate_discarded_weights(self) -> RolloutConfig:
        if not self.generation.discard_weights:
            return self
        for key, value, needs in (
            ("refit.sparse", self.refit.sparse, "sends changes to weights that the engines still hold"),
            ("rollouts.mode", self.rollouts.mode == "async" and "async", "lets engines generate between two refits"),
            ("filter.groups", self.filter.groups == "replace" and "replace", "may sample again before the refit"),
        ):
            if value:
                raise ValueError(
                    f"generation.discard_weights = true does not go with {key} = {str(value).lower()}, which {needs}"
                )
        return self

    @model_validator(mode="after")
    def validate_rollouts_end_before_the_step(self) -> RolloutConfig:
        if self.rollout_timeout_s >= self.cluster.step_limit_s:
            raise ValueError(
                f"rollouts.timeout_s = {self.rollout_timeout_s:g} is not below cluster.step_timeout_s = "
                f"{self.cluster.step_limit_s:g}, after which a step fails"
            )
        return self
