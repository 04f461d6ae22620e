"""Rollouts: token columns of a group of completions, and the driver's scalars for each. Suffixes: G rollouts of the
group, T their packed tokens (prompt and completion of each)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlctl.data.prompt_rows import PromptRow

ROUTED_EXPERTS = "routed_experts"
"""Further column, int16 [T, layers, experts a token]: where the engine's routers sent the token; -1: not recorded."""
TURN = "turn"
"""Further column of episodes, int32: the turn of the model, from 0, that a response token belongs to; -1 elsewhere."""
TURN_REWARD = "turn_reward"
"""Further column of episodes, float32: the reward of its turn at each response token, 0 elsewhere."""
FAULTS = "turn_faults"
"""Further column of episodes that have any, float32: bits of the faults of its turn (`rollouts/turn_faults.py`)."""
REWARD_PART = "reward/"
"""Beginning of the names of an environment's parts of its reward, among the counts of an episode."""
LOSS_WEIGHTS = "loss_weights"
"""Further column, float32: factor of the loss of each response token, next to the weight that its rollout gives it."""
CHUNK = "chunk"
"""Columns for teachers with another tokenizer: each token's part of the text (`data/cross_tokens.py`)."""
LENGTH = "length"
TIMEOUT = "timeout"
LIMIT_REASONS = (
    LENGTH, "abort", TIMEOUT, "turns", "context", "sampled_tokens", "tool_calls", "broken_calls", "episode_timeout"
)  # fmt: skip
"""Stop reasons set by a limit."""


def chunk_column(teacher: int) -> str:
    """Return the column of the chunks that the policy and a teacher with another tokenizer share."""
    return f"{CHUNK}/{teacher}"


TokensByVersion = tuple[tuple[int, int], ...]
"""(version of the weights, response tokens that they chose), the oldest first. A rollout without tokens has a 0."""


@dataclass(frozen=True, eq=False)
class MediaPart:
    """Non-text content of a prompt, such as an image, with tokens among the others."""

    kind: str
    """Name of the kind as engines know it: `image`."""
    data: np.ndarray
    """The part itself as engines take it; an image is uint8 [height, width, 3]."""
    start: int
    """Place of its first token among the tokens that it belongs to: a prompt's, a rollout's, a row's."""
    tokens: int
    """Number of tokens that the model reads it as."""
    written: tuple[int, ...]
    """The tokens written by a chat template, which the engine replaces."""


@dataclass(frozen=True)
class RolloutColumns:
    """Token columns of one group, in the object store. They pass the driver only in checkpoints (`save_groups`) or with
    engines on separate nodes."""

    tokens_T: np.ndarray  # int32
    offsets_G: np.ndarray  # int32 [G + 1]: rollout g holds tokens_T[offsets_G[g] : offsets_G[g + 1]]
    loss_mask_T: np.ndarray  # bool: True where the policy chose the token (a response token)
    logprobs_T: np.ndarray  # float32: the engine's log-prob of each response token, 0 elsewhere
    weight_version_T: np.ndarray  # int32: version of the weights that chose the token, -1 elsewhere
    extra_T: dict[str, np.ndarray] = field(default_factory=dict)
    """Further token columns. Columns with one number a token reach the loss by name (`TokenBatch.extra_R`)."""
    media_G: tuple[tuple[MediaPart, ...], ...] = ()
    """The media of each rollout in their order; empty where no rollout has any."""

    @property
    def rollouts(self) -> int:
        return len(self.offsets_G) - 1

    def slice(self, rollout: int) -> slice:
        return slice(int(self.offsets_G[rollout]), int(self.offsets_G[rollout + 1]))

    def media(self, rollout: int) -> tuple[MediaPart, ...]:
        return self.media_G[rollout] if self.media_G else ()


@dataclass(frozen=True)
class ModelRequest:
    """A request of a program to the model: a node in the tree of its episode."""

    number: int
    """From 1, in the order of the answers."""
    parent: int | None
    """The request whose answer it continues; None: it begins a conversation."""
    began_s: float
    ended_s: float
    """Seconds since the program began."""
    prompt_tokens: int
    """All tokens that the model read."""
    calls: Sequence[Mapping[str, str]] = ()
    """`id`, `name` and `arguments` (JSON) of the tool calls in the answer."""


@dataclass(frozen=True)
class Turn:
    """One message of an episode."""

    role: str
    text: str
    tokens: int
    """Tokens that it became; of messages that were written together, the first has them all."""
    reward: float | None
    """The reward of a turn of the model; None for other messages."""
    request: ModelRequest | None = None
    """The program's request that a turn of the model answers."""
    auxiliary: str = ""
    """Why a request is not trained, such as `title`, for its messages and its answer; empty for all other turns."""

    def record(self) -> dict[str, Any]:
        """Return the turn as JSON."""
        return {name: v for name, v in asdict(self).items() if v or name not in ("request", "auxiliary")}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Turn:
        """Return the turn of a `record`."""
        return cls(**{**record, "request": ModelRequest(**record["request"]) if record.get("request") else None})


@dataclass(frozen=True)
class EpisodeFailure:
    """Why the environment of an episode failed."""

    reason: str
    """`raised`, `died`, `timeout`, `program` (it asked the model nothing), `prompt` (too long), `template`, `sandbox`
    (it did not start), or a limit of programs: `memory`, `processes` or `disk`."""
    cause: str
    """The error, without the row."""
    message: str
    """The error with the environment and the row."""


@dataclass(frozen=True)
class EpisodeFacts:
    """The counts of an episode with an environment."""

    turns: int
    """Turns of the model."""
    counts: Mapping[str, float]
    """Sums over the turns: `tool_calls` and `broken_calls`, and the metrics of the environment."""
    failure: str | None = None
    """Why the environment failed; None: it did not."""
    contexts: tuple[int, ...] = ()
    """Token positions where further contexts begin, which do not see earlier tokens (`environment.thinking`)."""
    longest_turn: int = 0
    """Tokens of the longest turn of the model."""
    reason: str = ""
    """`EpisodeFailure.reason` of a failure."""
    cause: str = ""
    """`EpisodeFailure.cause` of a failure."""
    model_s: float = field(default=0.0, compare=False)
    """Seconds in which the engine continued it."""
    environment_s: float = field(default=0.0, compare=False)
    """Seconds outside of the engine, including attempts that failed."""


def contexts_of(tokens: int, episode: EpisodeFacts | None) -> list[tuple[int, int]]:
    """Return (begin, tokens) of each context of a rollout of `tokens` tokens."""
    if episode is None or not episode.contexts:
        return [(0, tokens)]
    begins = (0, *episode.contexts)
    return [(begin, end - begin) for begin, end in zip(begins, (*begins[1:], tokens), strict=True)]


@dataclass(frozen=True)
class Rollout:
    """The scalars of one sampled and scored rollout."""

    position: int
    """Place of its prompt in the endless order of prompts; all rollouts of a group share it."""
    sample: int
    """Number of the rollout in its group, and its row in the group's columns."""
    seed: int
    """Seed of its random stream, which follows from the run's seed, the position and the sample."""
    versions: TokensByVersion
    """The weights that chose its tokens."""
    stop_reason: str
    """`stop` (end token or stop text), `length`, `timeout` (`rollouts.timeout_s`) or `abort` (a refit). Episodes:
    `done`, `length` (last turn cut off), an `environment` limit, `context` (`model.max_length`), or `environment`
    (failure)."""
    prompt_tokens: int
    """Tokens before the first response token."""
    tokens: int
    """All tokens: prompt, responses and everything between."""
    response_tokens: int
    """Tokens that the policy chose, counted by the loss mask."""
    reward: float | None
    """None: the run has no rewards."""
    terms: Mapping[str, float | None]
    """Score of each reward term before its weight, by its label; None where it does not apply."""
    accuracy: float | None
    """1 if the reference scorer accepts the answer, else 0; None without such a scorer."""
    answered: bool | None = None
    """Whether the reference scorer can read an answer; None without such a scorer."""
    episode: EpisodeFacts | None = None
    """None: it has one turn and no environment."""
    images: int = 0
    """Images in it."""
    image_tokens: int = 0
    """Tokens that they are read as."""

    @property
    def first_version(self) -> int:
        """Oldest weights that chose one of its tokens, where engines sampled it."""
        return self.versions[0][0]

    @property
    def longest_turn(self) -> int:
        """Response tokens of the longest turn, which `generation.max_new_tokens` limits: all of a single one."""
        return self.episode.longest_turn if self.episode else self.response_tokens

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it rather than the policy."""
        return self.stop_reason in LIMIT_REASONS

    def contexts(self) -> list[tuple[int, int]]:
        """Return (begin, tokens) of each context that the model has read; most rollouts have one."""
        return contexts_of(self.tokens, self.episode)


@dataclass(frozen=True)
class RolloutGroup:
    """Finished rollouts of one prompt, with handles (Ray object references) of columns."""

    position: int
    prompt: PromptRow
    rollouts: tuple[Rollout, ...]
    columns: object
    """Handle of the group's `RolloutColumns`."""
    texts: object | None
    """Handle of completion texts, `list[str]` of length G; None: they are not kept."""
    transcripts: object | None = None
    """Handle of episodes by turn, `list[list[Turn]]` of length G; None without an environment."""
    dropped: tuple[str, ...] = ()
    """The error of a reward function or an environment on each rollout that is not among `rollouts` for that reason."""
    failed: tuple[EpisodeFailure, ...] = ()
    """The failures of environments, also of dropped rollouts."""

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        return self.rollouts

    @property
    def rewards_G(self) -> np.ndarray:
        """Return the rewards, float64 [G]; 0 without rewards."""
        return np.array([rollout.reward or 0.0 for rollout in self.rollouts], dtype=np.float64)
