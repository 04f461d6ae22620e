"""Sections on rewards and environments."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rlctl.config.facts import FREE, REHEARSAL_DETAIL, Flag
from rlctl.config.section import NonNegative, NonNegativeNumber, PathText, Positive, PositiveNumber, Seconds, Section


class RewardTerm(Section):
    """One scorer of the reward."""

    name: str
    """`task`, `exact-match`, `math-verify`, `ifeval`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor of this scorer in the sum."""
    params: dict[str, Any] = {}
    """Arguments of `format`, `exact_alnum`, `math_expr`, `bbox_giou` or `geo3k`, such as `answer_tag`."""


class SourceReward(Section):
    """Scorers of the completions of one source."""

    terms: Annotated[
        tuple[RewardTerm, ...],
        REHEARSAL_DETAIL,
        Flag(
            "reward",
            "task, exact-match, math-verify, dapo-math, ifeval, file.py:function; repeatable.",
            metavar="NAME[=WEIGHT]",
            kind=list[str],
        ),
    ] = ()
    """Scorers whose weighted sum is the reward."""
    extract: Literal["auto", "last-number", "last-line", "boxed", "answer-tag", "choice", "full"] = "auto"
    """Extraction of the answer from the completion; auto chooses by the task. `choice` takes the letter of an
    option."""


OnError = Literal["stop", "zero", "drop"]


class RewardConfig(SourceReward):
    """Scorers of completions, and length penalties."""

    timeout_s: Annotated[Seconds, FREE] = 60.0
    """Time limit for scoring the rollouts of one step."""
    on_error: Annotated[OnError, FREE] = "drop"
    """Reaction to a user function or environment that fails on a rollout. stop: end the run; zero: the score is 0;
    drop: leave out the rollout. A failing function ends the run in the first batch, and later if more than 5% of ten
    batches fail; for environments see `environment.failing`."""
    shift: float = 0.0
    """Constant added to each reward before `truncated_factor` and length penalties. It affects advantages;
    `reward_mean` excludes it."""
    overlong_buffer: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of generation.max_new_tokens, at its end, where each token costs reward; 0: none. The penalty min(0,
    -exceed / buffer) x overlong_factor affects advantages; `reward_mean` excludes it. Episodes use their longest
    turn."""
    truncated_factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor for rewards of completions that hit a length limit. It affects advantages; `reward_mean` excludes it."""
    overlong_factor: PositiveNumber = 1.0
    """Penalty of a completion with the full generation.max_new_tokens."""


def host_and_port(listen: str) -> tuple[str, int]:
    """Return the host and port of `environment.listen`; port 0 stands for any free one. Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    if not listen or (listen.startswith(":") and listen.count(":") == 1):  # would be all addresses
        raise ValueError(f"environment.listen = {listen!r} has no host: 0.0.0.0 is all addresses of the machine")
    if not colon or (":" in host and not host.endswith("]")):  # a host alone; addresses of IPv6 contain colons
        return listen.strip("[]"), 0
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"environment.listen = {listen!r}: {port!r} is no port (1 to 65535)")
    return host.strip("[]"), int(port)


class EnvironmentConfig(Section):
    """The environment that answers the model, its tools, and its limits. `reward.on_error` covers its failures."""

    name: Annotated[
        PathText | None,
        Flag("env", "Environment of several turns: a built-in one, or your class.", metavar="NAME|FILE:CLASS"),
    ] = None
    """Built-in environment, `path/to/file.py:Class`, or an environment of an installed package; unset: rollouts have
    one turn, unless there are tools."""
    params: dict[str, Any] = {}
    """Arguments of the environment's class."""
    tools: Annotated[
        tuple[str, ...],
        Flag("tool", "Function that the model may call. Repeatable.", metavar="FILE:FUNCTION", kind=list[str]),
    ] = ()
    """Functions that the model may call, each as `path/to/file.py:function`."""
    tool_format: Literal[
        "auto", "hermes", "llama", "mistral", "deepseek", "deepseek-v3.2", "gpt-oss", "qwen3-coder", "glm", "gemma4",
        "kimi-k2", "minimax-m1", "minimax-m2", "seed-oss", "granite", "phi4", "nemotron-v2", "cohere", "pythonic"
    ] = "auto"  # fmt: skip
    """Format of tool calls; auto detects it from the chat template."""
    append: Literal["template", "raw"] = "template"
    """Form of the environment's messages: messages of the chat template, or raw text."""
    thinking: Literal["keep", "template"] = "keep"
    """Treatment of thoughts (`<think>...</think>`) in earlier turns: keep them, or remove them where the chat template
    does. The model then continues from a new context, and an episode trains as several sequences."""
    turns: Positive = 10
    """Maximum number of turns."""
    sampled_tokens: Positive | None = None
    """Maximum number of sampled tokens over all turns; unset: as many as fit."""
    tool_calls: Positive | None = None
    """Maximum number of tool calls; unset: limited by the turns."""
    broken_calls: Positive | None = None
    """Number of unreadable or refused tool calls that ends an episode; unset: no limit."""
    no_reward: tuple[Literal["duplicated-thinking", "empty-answer", "malformed-thinking"], ...] = ()
    """Faults that set an episode's reward to 0: a turn whose answer repeats its thought, no answer at the end, or a
    turn with unmatched `<think>` and `</think>` tags."""
    unwanted_tokens: tuple[NonNegative, ...] = ()
    """Token ids that set an episode's reward to 0 if the model samples one."""
    tool_s: NonNegativeNumber = 0.0
    """Mean time of one answer of the environment in seconds, for the planner."""
    turn_timeout_s: Seconds = 60.0
    """Time limit for one answer of the environment."""
    timeout_s: Seconds = 600.0
    """Time limit of an episode."""
    retries: NonNegative = 1
    """Number of retries of an episode whose environment failed."""
    failing: Annotated[float, Field(ge=0, lt=1), FREE] = 0.05
    """Largest share of episodes in ten batches that `reward.on_error=drop` may leave out because the environment
    failed. More pause its source, or end the run if no other source is left."""
    memory_gib: PositiveNumber = 4.0
    """Memory limit of an episode's process, and of its programs together, in GiB."""
    sandbox: str | None = None
    """Where programs run (`program`, `verifiers`, `harbor`): none, bubblewrap, docker, podman, or a command to which
    the program's command is appended. Words after a name are further arguments of bwrap, or of the container's start.
    Unset: none, and for harbor docker or podman."""
    image: str | None = None
    """Image of the containers of docker and podman; tasks of harbor name theirs."""
    network: str = "full"
    """Network of programs in a sandbox. full: the machine's, or the container runtime's default; model: only the model
    (bubblewrap); other names: a network of docker or podman, such as host."""
    processes: Positive = 512
    """Largest number of processes of an episode's programs."""
    disk_gib: PositiveNumber = 10.0
    """Disk limit of an episode's programs, in GiB: temporary files without a sandbox, else all that they write."""
    thoughts: Literal["apart", "content"] = "apart"
    """Place of a thought (`<think>...</think>`) in the answers that programs get: a separate field, as from servers
    with a reasoning parser, or the content."""
    train_auxiliary: bool = False
    """Also train on programs' requests for other model names, such as those of sub-agents, and on titles."""
    listen: Annotated[str, FREE] = "127.0.0.1"
    """Address of this machine at which programs ask the model, on a free port; 0.0.0.0: all addresses, and programs get
    the one that the machine sends from. HOST:PORT: each engine takes the first free port from PORT on.
    Each request needs the key of its episode."""
    address: Annotated[str | None, FREE] = None
    """Address that programs get in place of `listen`, for sandboxes elsewhere that come through a tunnel or a proxy:
    `https://HOST`, where `{port}` stands for the engine's port."""

    @model_validator(mode="after")
    def validate_thinking(self) -> EnvironmentConfig:
        if self.thinking == "template" and self.append == "raw":
            raise ValueError("environment.thinking=template needs a template: leave environment.append unset")
        return self

    @model_validator(mode="after")
    def validate_addresses(self) -> EnvironmentConfig:
        host_and_port(self.listen)
        if self.address is not None and not re.fullmatch(r"https?://[^\s{}]*(\{port\}[^\s{}]*)?", self.address):
            raise ValueError(f"environment.address = {self.address!r} is no http:// or https:// address")
        return self

    @property
    def wanted(self) -> bool:
        """Whether rollouts have an environment or tools."""
        return bool(self.name or self.tools)

    @property
    def answers_s(self) -> float:
        """Time that the environment takes in an episode of all turns, in seconds."""
        return self.turns * self.tool_s


class SourceEnvironment(EnvironmentConfig):
    """The environment of one source. Unset keys have the values of `environment`; `params` belong to the name."""

    def over(self, shared: EnvironmentConfig) -> EnvironmentConfig:
        """Return the settings of the source's episodes."""
        values = {key: getattr(self, key) for key in self.model_fields_set}
        if "name" in values:
            values.setdefault("params", {})
        return EnvironmentConfig.model_construct(**{**dict(shared), **values})

    @model_serializer(mode="wrap")
    def _set_keys(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in whole(self).items() if key in self.model_fields_set}


OBSERVED_TOKENS = 32
"""Tokens of an environment behind a turn of the model, as they are planned."""
