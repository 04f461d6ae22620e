"""The configuration classes that training methods build on: the sections of every method, of methods with engines,
of methods that read texts, and of methods that sample rollouts.

A method derives its own class from one of them and adds its sections (`methods/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import model_validator

from rlctl.config.facts import FREE
from rlctl.config.section import Section, changed
from rlctl.config.user_code import MODEL
from rlctl.settings.data import DataConfig, ModelConfig
from rlctl.settings.generation import FilterConfig, GenerationConfig, RefitConfig, RolloutsConfig, VllmConfig
from rlctl.settings.other_models import ListedTeacher, RewardModelConfig, TeacherConfig, first_of, require_owners
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
    def teacher_section(self) -> TeacherConfig | None:
        """The section on teachers; None where the method has none."""
        return None

    @property
    def named_teacher(self) -> TeacherConfig | None:
        """The teacher that the run computes, or the first of several; None: it computes none."""
        return first_of(self.teacher_section) if self.teacher_section is not None else None

    @property
    def listed_teachers(self) -> Mapping[int, ListedTeacher]:
        """The entries of `teacher.models` that the run computes, by number; empty: `teacher.model`, or none."""
        return self.teacher_section.computed if self.teacher_section is not None else {}

    @property
    def served_teachers(self) -> Mapping[int, ListedTeacher]:
        """The entries of `teacher.models` with an endpoint, by number."""
        return self.teacher_section.served if self.teacher_section is not None else {}

    @property
    def has_teacher(self) -> bool:
        """Whether the policy learns from log-probs of a teacher."""
        return self.named_teacher is not None or self.own_teacher is not None or bool(self.served_teachers)

    @property
    def own_teacher(self) -> TeacherConfig | None:
        """The settings of self-distillation; None: the policy is not its own teacher."""
        return self.teacher_section if self.teacher_section is not None and self.teacher_section.policy else None

    @property
    def tokenizer_teachers(self) -> tuple[int, ...]:
        """The numbers of the teachers that read the texts with another tokenizer than the policy's; a single teacher
        has the number 0."""
        return ()

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
    def teacher_section(self) -> TeacherConfig:
        return self.teacher

    @property
    def reward_models(self) -> tuple[str, ...]:
        of_sources = [term for source in self.data.sources if source.reward for term in source.reward.terms]
        terms = (*self.reward.terms, *of_sources, *self.validation.reward)
        return tuple(dict.fromkeys(term.name for term in terms if term.name.startswith(MODEL)))

    @property
    def samples_while_training(self) -> bool:
        return self.rollouts.mode == "async"

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """The settings of each source's episodes by its label; one source has an empty label. Without name and tools
        (`wanted`) its completions have one turn."""
        sources = zip(self.data.source_labels, self.data.sources, strict=True)
        every = {
            label: self.environment if source.environment is None else source.environment.over(self.environment)
            for label, source in sources
        }
        return every or {"": self.environment}

    @property
    def plays(self) -> tuple[EnvironmentConfig, ...]:
        """The environments of the sources that have one."""
        return tuple(environment for environment in self.environments.values() if environment.wanted)

    def has_scores(self, scorers: bool) -> bool:
        rewarded = all(environment.name for environment in self.environments.values())
        return scorers or (self.learns_from_rewards and not rewarded)

    @property
    def turn_tokens(self) -> int:
        return self.generation.max_new_tokens

    @property
    def rollout_timeout_s(self) -> float:
        return self.rollouts.timeout_s or super().rollout_timeout_s

    @property
    def new_tokens(self) -> int:
        """The largest number of tokens after a prompt: of a completion, or of all turns of the longest episode."""
        new = super().new_tokens
        return max((environment.turns * (new + OBSERVED_TOKENS) for environment in self.plays), default=new)

    @property
    def mean_new_tokens(self) -> float:
        """The mean number of tokens after a prompt that the planner assumes; episodes take half of their turns."""
        mean, environments = super().mean_new_tokens, self.environments.values()
        weights = [source.weight or 1.0 for source in self.data.sources] or [1.0]
        means = (
            (environment.turns + 1) / 2 * (mean + OBSERVED_TOKENS) if environment.wanted else mean
            for environment in environments
        )
        return sum(weight * of_source for weight, of_source in zip(weights, means, strict=True)) / sum(weights)

    @model_validator(mode="after")
    def validate_teachers(self) -> RolloutConfig:
        require_owners(self.teacher, self.data.source_labels)
        if self.teacher.served and self.generation.temperature != 1:
            raise ValueError(
                f"generation.temperature = {self.generation.temperature:g} does not go with teacher.models[].endpoint: "
                "servers give log-probs at the temperature 1"
            )
        return self

    @model_validator(mode="after")
    def validate_prompts_that_are_cut(self) -> RolloutConfig:
        played = [label for label, environment in self.environments.items() if environment.wanted]
        if self.data.too_long == "cut" and played:
            of_source = f" of {played[0]}" if played[0] else ""
            raise ValueError(
                f"data.too_long = cut does not go with an environment{of_source}, which writes the prompts of its "
                "episodes: drop leaves out those that are too long"
            )
        return self

    @model_validator(mode="after")
    def validate_thoughts_by_source(self) -> RolloutConfig:
        for label, environment in self.environments.items():
            if environment.thinking == "template" and environment.append == "raw":
                raise ValueError(
                    f"environment.thinking=template of {label} needs a template: leave environment.append unset"
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
