"""The interface of environments: who answers the model during a rollout of several turns.

An environment is a plain class, one instance an episode, in a separate process:

    class GuessNumber:
        def __init__(self, largest=9):  # environment.params
            self.largest = largest

        def reset(self, row, seed):
            self.number = random.Random(seed).randint(1, self.largest)
            return [{"role": "user", "content": f"Guess a number from 1 to {self.largest}."}]

        def step(self, message):
            guess = message["content"].strip()
            if guess == str(self.number):
                return Step(reward=1.0, done=True)
            return Step([{"role": "user", "content": "No. Guess again."}])

`rlctl train grpo --env game.py:GuessNumber` trains on it. Each method may be `def` or `async def`. Much may be left out
or written differently:

- `reset(self, row)` and `reset(self, **columns)` work too. `reset` returns the messages behind the prompt of the row,
  or one text of the user's, or nothing where the row says it all. The rollouts of a group get the same row and seed.
- `step(self, text)` gets the text alone, since its argument is not called `message`. It may return a mapping with the
  fields of `Step`, where `observation`, `observations` and `obs` are other names of `messages`, and `terminated` and
  `truncated` of `done`; or messages alone, after which the episode goes on.
- A class of Gymnasium works as it is, where observations are texts or messages: `reset(self, *, seed, options)` gets
  the columns of the row as `options` and returns an observation and a mapping, and `step` returns (observation, reward,
  terminated, truncated, info), or the older tuple of four. `info` is not read.
- `tools` names methods that the model may call. Their calls are made and answered before `step` hears of the message,
  and it hears of none that holds a call. A class with tools needs no `step`: the first message without a call ends the
  episode. A class that has neither `step` nor `tools` offers all its public methods.
- `get_reward(self)`, optional, is called at the end; its value is added to the rewards of the steps.
- `Step.ask` says all that the model is to read next, where an environment decides on the whole conversation.
- A class derived from `Agent` has `run` instead: it asks the model over HTTP, as programs do. It starts programs by
  `self.sandbox.run`.
- `close(self)` ends the episode; it is called also where that failed.
- `prepare(cls, **params)`, a class method, does once what all episodes need, such as reading an index: the processes of
  episodes are forked from the one that called it. A text that it returns is shown before the run.

An error in a method ends the rollout as `reward.on_error` says, and never the run; a tool raises `Failure` for this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl.environments.sandboxes import Sandbox

Message = dict[str, Any]
"""A chat message with `role` and `content`."""


class Failure(Exception):
    """Raised by a tool that failed for a reason that is not the model's, such as a server that is down. The episode
    then counts as failed; the model reads other exceptions of a tool."""


def is_cut(message: Message) -> bool:
    """Return whether a limit has ended the model's turn, so that its last call may be unfinished."""
    return message.get("stop_reason", "stop") != "stop"


@dataclass(frozen=True)
class Ask:
    """All that the model reads before its next turn."""

    messages: Sequence[Message] = ()
    """The conversation from its start, in OpenAI's form."""
    known: int = 0
    """Number of leading messages known from the previous turn, whose tokens the model keeps. 0 starts a new context."""
    tokens: Sequence[int] | None = None
    """The conversation as token ids, in place of messages."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of tools that the template shows. The calls of the answer are then in its `tool_calls`."""
    max_tokens: int | None = None
    """Most tokens of the answer, where that is less than the run's own limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, in addition to the run's own."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, in addition to the run's own."""


@dataclass(frozen=True)
class Step:
    """The answer of an environment to one message of the model."""

    messages: Sequence[Message] | str = ()
    """Messages that the model reads before its next turn; a text is one message of the user's."""
    reward: float = 0.0
    """Reward of the turn; the episode's is their sum. None counts as 0."""
    done: bool = False
    """Whether the episode is over."""
    stop: tuple[str, ...] | None = None
    """Texts that end the next turn, in addition to the run's; None: the class attribute `stop`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the turn; the episode's are their sums, and a run shows their means."""
    ask: Ask | None = None
    """The model's next conversation, in place of `messages`; `reset` may return it too."""


MODEL = "policy"
"""The name of the model for clients."""


@dataclass(frozen=True)
class ModelAddress:
    """Where an episode's clients find the model."""

    url: str
    """URL of the server with the episode's key, without `/v1`."""
    key: str = field(repr=False)
    """The episode's API key. It ends with the episode."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables that OpenAI's and Anthropic's clients read."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": self.key, "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.key, "ANTHROPIC_MODEL": MODEL,
        }  # fmt: skip


class Agent(ABC):
    """The base class of environments that ask the model over HTTP, with any client."""

    sandboxed: bool = False
    """Whether all programs that it starts run in `sandbox`, which `environment.sandbox` chooses."""
    containers: bool = False
    """Whether `sandbox` has to be a container."""
    sandbox: Sandbox
    """The episode's sandbox, during `run`."""

    @abstractmethod
    async def run(self, row: Mapping[str, Any], seed: int, model: ModelAddress) -> Mapping[str, Any]:
        """Play an episode to its end. Return `reward`, and `reward_components` or other numbers as metrics."""


class Environment:
    """A base class for those who like one; nothing needs it."""

    tools: tuple[str, ...] = ()
    """Names of methods that the model may call."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, such as the closing tag of a call."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | str | None:
        """Begin an episode for a row's columns, including `prompt` and `answer`. Return the messages after the row's
        prompt."""

    def step(self, message: Message) -> Step:
        """Answer a message of the model. Without this method the first message that calls no tool ends the episode.

        `content` is what it wrote, without the token that ends the turn; `tokens` and `logprobs` are what it sampled,
        `prompt_tokens` what it had read, and `stop_reason` is `stop`, `length` or `timeout`. `tool_calls` are there, in
        OpenAI's form, where `Ask.tools` asked for them."""
        return Step(done=True)

    def close(self) -> None:
        """End the episode."""
