"""Sections on the run: batches, validation, checks, the cluster, checkpoints and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlctl.config.section import NonNegative, NonNegativeNumber, PathText, Positive, PositiveNumber, Seconds, Section
from rlctl.settings.data import ValidationData
from rlctl.settings.rewards import RewardTerm
from rlctl.settings.training import LogprobColumn


class ValidationConfig(Section):
    """How often and on which prompts the policy is measured while it trains. Validation changes nothing of training."""

    every: NonNegative = 0
    """Interval of validations, in steps; 0: none."""
    at_start: bool = False
    """Validate before the first step too."""
    at_end: bool = False
    """Validate after the last step too, whatever the interval."""
    data: ValidationData = ValidationData()
    holdout: NonNegative = 0
    """Number of prompts that are taken away from training; `run.seed` chooses them, and they are validated on where
    `validation.data.name` is unset."""
    max_prompts: Positive = 256
    """Largest number of prompts of one validation; `run.seed` chooses them."""
    stop_after: Positive | None = None
    """End the run after this many validations without improvement of the metric `run.keep_best_by`, or of the mean
    reward or the loss where that names no metric of validation; unset: never."""

    @property
    def wanted(self) -> bool:
        """Whether a run validates at all."""
        return self.every > 0 or self.at_start or self.at_end

    @model_validator(mode="after")
    def validate_what_can_be_stopped_by(self) -> ValidationConfig:
        if self.stop_after is not None and not self.every:
            raise ValueError("validation.stop_after needs validations: set validation.every")
        return self


class SampledValidationConfig(ValidationConfig):
    """How often and on which prompts the policy is measured while it trains. Validation changes nothing of training."""

    samples: Positive = 1
    """Number of samples of each prompt."""
    temperature: NonNegativeNumber = 0.0
    """Temperature of sampling; 0 takes the most likely token."""
    reward: tuple[RewardTerm, ...] = ()
    """Scorers of validation; unset: those of the run's reward."""


class TextValidationConfig(ValidationConfig):
    """How often and on which texts the policy is measured while it trains. Validation changes nothing of training."""

    answers: NonNegative = 0
    """Number of held-out texts whose prompts an engine answers at each validation; 0: none, and no engine starts."""
    temperature: NonNegativeNumber = 0.0
    """Temperature of these answers; 0 takes the most likely token."""

    @model_validator(mode="after")
    def validate_answers_are_asked_for(self) -> TextValidationConfig:
        if self.answers and not self.wanted:
            raise ValueError("validation.answers needs validations: set validation.every or validation.at_end")
        return self


VALIDATION_PREFIX = "validation/"
"""In front of the names of validation's metrics, wherever they stand next to others."""
MOST_ROLLOUTS = 1_000_000
"""Rollouts of a step whose scalars the driver can hold and the planner can deal out."""


class BatchConfig(Section):
    """Dataset rows and optimizer steps of one step."""

    prompts: Positive = 8
    """Dataset rows in each step."""
    optimizer_steps: Positive = 1
    """Optimizer steps on each batch (PPO mini-batches)."""
    epochs: Positive = 1
    """Number of times that the optimizer steps of a batch are taken, over the same data (PPO epochs)."""

    @property
    def rollouts(self) -> int:
        """Number of sequences that a step learns from."""
        return self.prompts

    @property
    def product(self) -> str:
        """The keys whose product is `rollouts`, with the value."""
        return f"batch.prompts = {self.prompts:,} rows"

    @model_validator(mode="after")
    def validate_size_of_a_step(self) -> BatchConfig:
        if self.rollouts > MOST_ROLLOUTS:
            raise ValueError(f"{self.product}; a step has at most {MOST_ROLLOUTS:,}")
        if self.rollouts % self.optimizer_steps:
            raise ValueError(
                f"{self.product} do not split into batch.optimizer_steps = {self.optimizer_steps} equal parts"
            )
        return self


class GroupBatchConfig(BatchConfig):
    """Prompts, rollouts and optimizer steps of one step."""

    prompts: Positive = 8
    """Prompts in each step."""
    generations: Positive = 8
    """Rollouts of each prompt (the group); 1 is allowed for algorithms without group baselines."""

    @property
    def rollouts(self) -> int:
        """Rollouts in each step."""
        return self.prompts * self.generations

    @property
    def product(self) -> str:
        return f"batch.prompts x batch.generations = {self.rollouts:,} rollouts"


class TextLossConfig(Section):
    """The loss on texts."""

    function: str | None = None
    """Loss of your own, `path/to/file.py:function`, instead of the method's: it takes a TokenBatch and returns the
    loss of each response token."""
    needs: tuple[LogprobColumn, ...] | None = None
    """Log-probs that are computed before training, for a loss of your own; unset: those of the method."""
    level: Literal["token", "sequence"] = "token"
    """Unit of the average: all tokens of the batch, or texts, each with the mean of its tokens."""


class ChecksConfig(Section):
    """Limits at which a run stops."""

    max_skipped_steps: Positive = 5
    """Number of steps in a row without any finite gradient that stops the run."""


class RolloutChecksConfig(ChecksConfig):
    """Limits at which a step warns, or the run stops."""

    logprob_diff_warning: PositiveNumber | None = None
    """Mean absolute difference between the engine's and the trainer's log-probs above which a step warns; unset: 1e-4
    for float32, 0.05 for bfloat16, and 0.2 where linear layers compute in float8."""
    logprob_diff_error: PositiveNumber | None = None
    """Mean absolute difference that stops the run; unset: 0.01 for float32, else 0.5."""
    max_steps_without_signal: Positive = 5
    """Number of steps in a row after which it is said that all rollouts of each prompt have the same reward."""


class ClusterConfig(Section):
    """The machine: nodes, GPUs, Ray, and timeouts."""

    nodes: Annotated[int, Field(gt=0, le=10_000)] | None = None
    """Number of nodes."""
    gpus_per_node: Annotated[int, Field(ge=0, le=16_384)] | None = None
    """Number of GPUs of each node; 0 computes on the CPU."""
    gpu: str = "auto"
    """GPU type (h100, a100, ...), `auto` for the type that this machine has, or `cpu`."""
    ray_address: str | None = None
    """Address of a Ray cluster to join; unset: start one on this machine and stop it at the end."""
    start_timeout_s: Seconds = 600.0
    """Longest time that starting Ray and the workers may take."""
    step_timeout_s: Seconds = 3600.0
    """Longest time of each wait during a step."""
    engine_restarts: NonNegative = 3
    """Number of engines that a run may lose; each is replaced and refitted. With 0 the run ends when one is lost."""

    @model_validator(mode="after")
    def validate_gpus_or_none(self) -> ClusterConfig:
        count = self.gpus_per_node
        if count is not None and self.gpu != "auto" and (self.gpu == "cpu") != (count == 0):
            raise ValueError(
                f"cluster.gpu = {self.gpu}, but cluster.gpus_per_node = {count}: set both for GPUs, or neither"
            )
        return self


LoggerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class RunConfig(Section):
    """Length, directory, seed, checkpoints and logs of a run."""

    algorithm: str = "grpo"
    """Algorithm by its name, or one of your own as `path/to/file.py:Class`. It sets the keys that docs/algorithms.md
    lists for it, and any other source can set them differently."""
    steps: Positive = 100
    """Number of steps of the run; each trains on one batch."""
    epochs: PositiveNumber | None = None
    """Number of times that each row of the data is trained on, in place of `run.steps`."""
    goal: Literal["fast", "safe", "cheap"] = "fast"
    """Aim of the planner: the shortest step (fast), more free memory (safe), or the fewest GPU seconds (cheap)."""
    dir: PathText | None = None
    """Run directory; unset: `runs/<model>-<data>-<time>`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the order of prompts and of sampling, of 32 bits."""
    checkpoint_every: NonNegative | None = None
    """Interval of checkpoints, in steps; 0: only at the end; unset: by time, as `checkpoint_minutes` says."""
    checkpoint_minutes: PositiveNumber = 5.0
    """Time between two checkpoints where `checkpoint_every` is unset. It is longer where saving would otherwise take
    more than 5% of the time of the run."""
    keep_last: Positive | None = None
    """Number of newest checkpoints to keep; unset: one if `keep_best` is set, two where `checkpoint_every` is unset,
    and else all."""
    keep_best: Positive | None = None
    """Number of checkpoints to keep for their value of `keep_best_by`, in addition to the newest."""
    keep_best_by: str = "reward_mean"
    """Metric by which checkpoints are good: `reward_mean` of the step, or `validation/<name>`, such as
    `validation/accuracy`."""
    save_final: bool = True
    """Save a checkpoint at the end."""
    stop_within_s: Seconds = 300.0
    """Longest time that the step under way and its save may take after SIGTERM, SIGUSR1 or SIGHUP. Set it below what
    the sender leaves before it kills; the processes are ended within 15 s more."""
    log_rollouts: NonNegative = 4
    """Number of rollouts of each step that are written to rollouts/."""
    show_samples: NonNegative | None = None
    """Interval of steps with which the best and the worst completion are shown, 0: never; unset: 10 in a terminal."""
    loggers: tuple[LoggerName, ...] | None = None
    """Loggers in addition to metrics.jsonl; unset: tensorboard, and wandb if WANDB_API_KEY is set."""
    project: Annotated[str, Field(min_length=1)] = "rlctl"
    """Name of the project in Weights & Biases and Trackio, and of the experiment in MLflow."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run in loggers; unset: the name of its directory."""
