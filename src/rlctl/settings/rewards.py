"""Sections on rewards and environments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlctl.config.section import NonNegative, NonNegativeNumber, PathText, Positive, PositiveNumber, Seconds, Section


class RewardTerm(Section):
    """One scorer of the reward."""

    name: str
    """`task`, `exact-match`, `math-verify`, `ifeval`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor of this scorer in the sum."""


class SourceReward(Section):
    """Scorers of the completions of one source."""

    terms: tuple[RewardTerm, ...] = ()
    """Scorers whose weighted sum is the reward."""
    extract: Literal["auto", "last-number", "last-line", "boxed", "answer-tag", "choice", "full"] = "auto"
    """How the answer is taken out of the completion; auto does what the task calls for. `choice` takes the letter of an
    option."""


MODEL = "model:"
"""Beginning of the name of a reward model as a scorer."""
OnError = Literal["stop", "zero", "drop"]


class RewardConfig(SourceReward):
    """Scorers of completions, and what a long completion costs."""

    timeout_s: Seconds = 60.0
    """Longest time that scoring the rollouts of one step may take."""
    on_error: OnError = "drop"
    """Reaction to a function or an environment of yours that fails on a rollout. stop: the run ends; zero: that score
    is 0; drop: the rollout is left out, but the run ends in its first batch, and later where more than 5% of ten
    batches fail."""
    shift: float = 0.0
    """Number that is added to the reward of each rollout before `truncated_factor` and the cost of its length. It is
    learned from, and is not in `reward_mean`."""
    overlong_buffer: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of generation.max_new_tokens, at its end, in which each token of a completion costs reward; 0: none. The
    penalty min(0, -exceed / buffer) x overlong_factor is learned from, and is not in `reward_mean`. The longest turn
    of an episode counts."""
    truncated_factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor of the rewards of completions that a limit of length ended. They are learned from as that says, and
    `reward_mean` is without it."""
    overlong_factor: PositiveNumber = 1.0
    """Penalty of a completion that takes all of generation.max_new_tokens."""


class EnvironmentConfig(Section):
    """The environment of rollouts: it answers the model, with tools that the model may call, within these limits. A
    failure in it is treated as `reward.on_error` says."""

    name: PathText | None = None
    """A built-in environment, `path/to/file.py:Class`, or one that an installed package adds; unset: a rollout has one
    turn, unless there are tools."""
    params: dict[str, Any] = {}
    """Arguments of the environment's class."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call, each as `path/to/file.py:function`."""
    tool_format: Literal[
        "auto", "hermes", "llama", "mistral", "deepseek", "deepseek-v3.2", "gpt-oss", "qwen3-coder", "glm", "gemma4",
        "kimi-k2", "minimax-m1", "minimax-m2", "seed-oss", "granite", "phi4", "nemotron-v2", "cohere", "pythonic"
    ] = "auto"  # fmt: skip
    """The format in which the model writes calls; auto finds that of its chat template."""
    append: Literal["template", "raw"] = "template"
    """How the answers of the environment are written: as messages of the chat template, or as they are."""
    thinking: Literal["keep", "template"] = "keep"
    """Whether thoughts (`<think>...</think>`) of earlier turns stay in the context, or go where the chat template takes
    them out: the model then goes on from a new context, and an episode is trained on as several sequences."""
    turns: Positive = 10
    """Largest number of turns of the model."""
    sampled_tokens: Positive | None = None
    """Largest number of tokens that the model writes in all turns together; unset: as many as fit."""
    tool_calls: Positive | None = None
    """Largest number of calls; unset: as many as there are turns for."""
    broken_calls: Positive | None = None
    """Calls that cannot be read or are refused, after which an episode ends; unset: it goes on."""
    no_reward: tuple[Literal["duplicated-thinking", "empty-answer", "malformed-thinking"], ...] = ()
    """Faults that take the reward of a whole episode: a turn whose answer is its thought, no answer at the end, or a
    turn with `<think>`, with `</think>` where no thought has begun or more often, or without it where one has."""
    unwanted_tokens: tuple[NonNegative, ...] = ()
    """Token ids that take the reward of an episode in which the model writes one of them."""
    tool_s: NonNegativeNumber = 0.0
    """Seconds that the environment takes for one answer on average, for the plan."""
    turn_timeout_s: Seconds = 60.0
    """Longest time that the environment may take for one answer."""
    timeout_s: Seconds = 600.0
    """Longest time of an episode."""
    retries: NonNegative = 1
    """How often an episode whose environment failed is played again from its start."""
    memory_gib: PositiveNumber = 4.0
    """Most memory that the process of one episode may take, in GiB."""

    @model_validator(mode="after")
    def validate_thinking(self) -> EnvironmentConfig:
        if self.thinking == "template" and self.append == "raw":
            raise ValueError("environment.thinking=template needs a template: leave environment.append unset")
        return self

    @property
    def wanted(self) -> bool:
        """Whether rollouts have an environment or tools."""
        return bool(self.name or self.tools)


OBSERVED_TOKENS = 32
"""Tokens of an environment behind a turn of the model, as they are planned."""
