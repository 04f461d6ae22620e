"""Sections on the run: batches, validation, checks, the cluster, checkpoints and logs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlctl.config.facts import FREE, LAYOUT, REHEARSAL_DETAIL, Flag
from rlctl.config.plugins import plugin_names
from rlctl.config.section import NonNegative, NonNegativeNumber, PathText, Positive, PositiveNumber, Seconds, Section
from rlctl.settings.data import ValidationData
from rlctl.settings.rewards import RewardTerm
from rlctl.settings.training import LogprobColumn


class ValidationConfig(Section):
    """Interval and prompts of validation, which does not affect training."""

    every: Annotated[NonNegative, FREE] = 0
    """Interval of validations, in steps; 0: none."""
    at_start: Annotated[bool, FREE] = False
    """Validate before the first step too."""
    at_end: Annotated[bool, FREE] = False
    """Validate after the last step too, regardless of the interval."""
    data: Annotated[ValidationData, FREE] = ValidationData()
    holdout: NonNegative = 0
    """Number of prompts of each source held out from training, chosen by `run.seed`; validation uses them if
    `validation.data.name` is unset."""
    max_prompts: Annotated[Positive, FREE] = 256
    """Maximum number of prompts of one validation, chosen by `run.seed`; of held-out prompts, for each source."""
    stop_after: Annotated[Positive | None, FREE] = None
    """End the run after this many validations without improvement of `run.keep_best_by`, or of the mean reward or loss
    if that names no validation metric; unset: never."""

    @property
    def wanted(self) -> bool:
        """Whether a run validates at all."""
        return self.every > 0 or self.at_start or self.at_end

    @property
    def answered(self) -> int:
        """Number of held-out texts whose prompts an engine answers."""
        return 0

    @model_validator(mode="after")
    def validate_what_can_be_stopped_by(self) -> ValidationConfig:
        if self.stop_after is not None and not self.every:
            raise ValueError("validation.stop_after needs validations: set validation.every")
        return self


class SampledValidationConfig(ValidationConfig):
    """Interval and prompts of validation, which does not affect training."""

    samples: Annotated[Positive, FREE] = 1
    """Number of samples of each prompt."""
    temperature: Annotated[NonNegativeNumber, FREE] = 0.0
    """Sampling temperature; 0 is greedy."""
    reward: Annotated[tuple[RewardTerm, ...], FREE | REHEARSAL_DETAIL] = ()
    """Scorers of validation; unset: the run's scorers."""


class TextValidationConfig(ValidationConfig):
    """Interval and texts of validation, which does not affect training."""

    answers: NonNegative = 0
    """Number of held-out texts whose prompts an engine answers at each validation; 0 starts no engine."""
    temperature: Annotated[NonNegativeNumber, FREE] = 0.0
    """Sampling temperature of these answers; 0 is greedy."""

    @property
    def answered(self) -> int:
        return self.answers

    @model_validator(mode="after")
    def validate_answers_are_asked_for(self) -> TextValidationConfig:
        if self.answers and not self.wanted:
            raise ValueError("validation.answers needs validations: set validation.every or validation.at_end")
        return self


VALIDATION_PREFIX = "validation/"
"""Prefix of validation metrics that are shown or stored with other metrics."""
MOST_ROLLOUTS = 1_000_000
"""Maximum number of rollouts in a step. The driver holds their scalars."""


class BatchConfig(Section):
    """Dataset rows and optimizer steps of one step."""

    prompts: Annotated[Positive, Flag("batch_size", "Texts or pairs per step.")] = 8
    """Dataset rows in each step."""
    optimizer_steps: Positive = 1
    """Optimizer steps on each batch (PPO mini-batches)."""
    epochs: Positive = 1
    """Passes over each batch (PPO epochs)."""

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

    prompts: Annotated[Positive, Flag("prompts", "Prompts per step.")] = 8
    """Prompts in each step."""
    generations: Annotated[Positive, Flag("generations", "Rollouts per prompt.")] = 8
    """Rollouts of each prompt (the group); 1 is allowed for algorithms without group baselines."""

    @property
    def rollouts(self) -> int:
        """Rollouts in each step."""
        return self.prompts * self.generations

    @property
    def product(self) -> str:
        return f"batch.prompts x batch.generations = {self.rollouts:,} rollouts"


class OwnLossConfig(Section):
    """A user's loss function, which replaces the method's."""

    function: str | None = None
    """Loss function `path/to/file.py:function` that replaces the method's loss. It takes a TokenBatch and returns the
    loss of each response token."""
    params: dict[str, Any] = {}
    """Settings of `function`: values of its keyword-only parameters."""
    needs: tuple[LogprobColumn, ...] | None = None
    """Log-probs that rlctl computes before training for `function`; unset: the method's."""


class TextLossConfig(OwnLossConfig):
    """The loss on texts."""

    level: Literal["token", "sequence"] = "token"
    """Average over all tokens of the batch, or over texts, each with the mean of its tokens."""


class ChecksConfig(Section):
    """Limits at which a run stops."""

    max_skipped_steps: Positive = 5
    """Number of consecutive steps without a finite gradient that stops the run."""

    @property
    def signal_steps(self) -> int:
        """Number of consecutive steps without a signal to learn from after which the run warns; 0: it never does."""
        return 0

    @property
    def largest_difference(self) -> float | None:
        """The mean absolute difference of log-probs between engines and policy that stops the run; None: the limit of
        the precision."""
        return None

    @property
    def computes_exactly(self) -> bool:
        """Whether engines and policy compute log-probs with the same bits."""
        return False


class RolloutChecksConfig(ChecksConfig):
    """Limits at which a step warns, or the run stops."""

    logprob_diff_warning: PositiveNumber | None = None
    """Mean absolute difference between the engine's and the trainer's log-probs above which a step warns; unset: 1e-4
    in float32, 0.05 in bfloat16, and 0.2 with float8 linear layers."""
    logprob_diff_error: PositiveNumber | None = None
    """Mean absolute difference that stops the run; unset: 0.01 for float32, else 0.5."""
    max_steps_without_signal: Positive = 5
    """Number of consecutive steps with equal rewards in every group after which the run warns."""
    exact: bool = False
    """Engines and policy compute log-probs with the same bits, on CPUs and more slowly; any difference stops the
    run."""

    @property
    def computes_exactly(self) -> bool:
        return self.exact

    @property
    def signal_steps(self) -> int:
        return self.max_steps_without_signal

    @property
    def largest_difference(self) -> float | None:
        return self.logprob_diff_error


UNMEASURED_STEP_S = 3600.0


class ClusterConfig(Section):
    """The machine: nodes, GPUs, Ray, and timeouts."""

    nodes: Annotated[Annotated[int, Field(gt=0, le=10_000)] | None, LAYOUT, Flag("nodes", "Number of nodes.")] = None
    """Number of nodes."""
    gpus_per_node: Annotated[
        Annotated[int, Field(ge=0, le=16_384)] | None, LAYOUT, Flag("gpus_per_node", "GPUs per node.")
    ] = None
    """GPUs per node; 0 computes on the CPU."""
    gpu: Annotated[str, LAYOUT, Flag("gpu", "GPU type; auto detects it, cpu uses none.", metavar="TYPE|auto|cpu")] = (
        "auto"
    )
    """GPU type (h100, a100, ...), `auto` for this machine's, or `cpu`."""
    ray_address: Annotated[str | None, Flag("ray_address", "Ray cluster to join.", metavar="HOST:PORT")] = None
    """Address of a Ray cluster to join; unset: start one on this machine and stop it at the end."""
    start_timeout_s: Seconds = 600.0
    """Time limit for starting Ray and the workers."""
    step_timeout_s: Seconds | None = None
    """Time limit of each wait during a step. Unset: ten times the slowest call so far, at least 5 minutes, for calls of
    the policy that the run has measured; an hour for other waits."""
    engine_restarts: NonNegative = 3
    """Maximum number of lost engines that a run replaces and refits; 0: the first loss ends the run."""
    spare_nodes: Annotated[NonNegative, LAYOUT] = 0
    """Number of nodes, of `cluster.nodes`, that stay free to replace lost nodes."""
    policy_restarts: NonNegative = 3
    """Maximum number of restarts of the policy after a loss of ranks; 0: the first loss ends the run."""

    @property
    def step_limit_s(self) -> float:
        """Time limit of waits without a measured limit."""
        return self.step_timeout_s or UNMEASURED_STEP_S

    @model_validator(mode="after")
    def validate_gpus_or_none(self) -> ClusterConfig:
        count = self.gpus_per_node
        if count is not None and self.gpu != "auto" and (self.gpu == "cpu") != (count == 0):
            raise ValueError(
                f"cluster.gpu = {self.gpu}, but cluster.gpus_per_node = {count}: set both for GPUs, or neither"
            )
        return self


LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Loggers that come with rlctl."""


class RunConfig(Section):
    """Length, directory, seed, checkpoints and logs of a run."""

    method: Annotated[
        str | None, Flag("method", "Training method: grpo, sft, dpo, kto, rm or distill.", metavar="NAME")
    ] = None
    """Training method, with the name of its command `rlctl train NAME`. Unset: the command's method, or for a command
    without one, such as `rlctl plan`, the method of `run.algorithm`."""
    algorithm: Annotated[
        str,
        Flag(
            "algorithm",
            "grpo, dapo, ppo, gspo, rloo, distillation and six more, or yours.",
            metavar="NAME|FILE:CLASS",
        ),
    ] = "grpo"
    """Algorithm by name, or `path/to/file.py:Class`. It sets the keys that docs/algorithms.md lists; every other source
    of values overrides them."""
    steps: Annotated[Positive, FREE, Flag("steps", "Number of training steps.")] = 100
    """Number of steps of the run; each trains on one batch."""
    epochs: Annotated[PositiveNumber | None, FREE, Flag("epochs", "Passes over the data; replaces --steps.")] = None
    """Passes over the data; replaces `run.steps`."""
    goal: Annotated[
        Literal["fast", "safe", "cheap"],
        FREE,
        Flag(
            "goal",
            "Plan for fast steps, free memory, or low cost in GPU seconds.",
            metavar="fast|safe|cheap",
            kind=str,
        ),
    ] = "fast"
    """Aim of the planner: the shortest step (fast), more free memory (safe), or the fewest GPU seconds (cheap)."""
    dir: Annotated[
        PathText | None, FREE | REHEARSAL_DETAIL, Flag("run_dir", "Directory of the run.", metavar="DIR")
    ] = None
    """Run directory; unset: `runs/<model>-<data>-<time>`."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Flag("seed", "Seed for data order and sampling.")] = 0
    """Seed of data order and sampling (32 bits)."""
    checkpoint_every: Annotated[NonNegative | None, FREE | REHEARSAL_DETAIL] = None
    """Interval of checkpoints, in steps; 0: only at the end; unset: by time (`checkpoint_minutes`)."""
    checkpoint_minutes: Annotated[PositiveNumber, FREE] = 5.0
    """Time between checkpoints if `checkpoint_every` is unset; longer if saving would take more than 5% of the run."""
    keep_last: Annotated[Positive | None, FREE | REHEARSAL_DETAIL] = None
    """Number of newest checkpoints to keep; unset: one if `keep_best` is set, two if `checkpoint_every` is unset, else
    all."""
    keep_best: Annotated[Positive | None, FREE] = None
    """Number of best checkpoints by `keep_best_by` to keep, in addition to the newest."""
    keep_best_by: Annotated[str, FREE] = "reward_mean"
    """Metric that ranks checkpoints: `reward_mean` of the rollouts that their weights sampled, in later steps, or
    `validation/<name>`, such as `validation/accuracy`."""
    save_final: Annotated[bool, FREE] = True
    """Save a checkpoint at the end."""
    save_copies: Annotated[bool | None, FREE] = None
    """Copy weights and optimizer states to host memory at a save, so that training goes on; false: copy nothing, and
    the next update waits until the checkpoint is written; unset: false on GPUs where host memory is short."""
    memory_checkpoint_every: Annotated[NonNegative | None, FREE] = None
    """Interval, in steps, of checkpoints in the hosts' memory, from which a lost policy restarts
    (`cluster.policy_restarts`). With several nodes, another node has a copy of each node's part. 0: none; unset: on
    GPUs with enough host memory, as often as copies take at most 3% of the time."""
    stop_within_s: Annotated[Seconds, FREE] = 300.0
    """Time limit for finishing and saving the current step after SIGTERM, SIGUSR1 or SIGHUP. Set it below the sender's
    grace period; the processes end within 15 s more."""
    log_rollouts: Annotated[NonNegative, FREE | REHEARSAL_DETAIL] = 4
    """Rollouts per step that are written to rollouts/."""
    show_samples: Annotated[
        NonNegative | None,
        FREE | REHEARSAL_DETAIL,
        Flag("show_samples", "Show the best and worst completion every N steps; 0: never.", metavar="N"),
    ] = None
    """Interval, in steps, for showing the best and worst completion; 0: never; unset: 10 in a terminal."""
    loggers: Annotated[tuple[str, ...] | None, FREE] = None
    """Loggers in addition to metrics.jsonl; unset: tensorboard, and wandb if WANDB_API_KEY is set."""
    heartbeat_url: Annotated[Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None, FREE] = None
    """HTTP address of a monitoring service. It receives a POST with run and step after each step; failures never end
    the run. The manifest and the report store the address."""
    project: Annotated[str, Field(min_length=1), FREE] = "rlctl"
    """Name of the project in Weights & Biases and Trackio, and of the experiment in MLflow."""
    name: Annotated[Annotated[str, Field(min_length=1)] | None, FREE] = None
    """Name of the run in loggers; unset: the name of its directory."""

    @field_validator("loggers")
    @classmethod
    def validate_loggers(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        available = (*LOGGERS, *plugin_names("rlctl.loggers"))
        for name in names or ():
            if name not in available:
                raise ValueError(f"rlctl has no logger {name!r}, only {', '.join(available)}")
        return names
