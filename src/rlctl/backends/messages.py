"""Requests to a generation engine and its answers: samples and groups of episodes. Imports neither torch nor vLLM.
Suffix G: the episodes of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import EpisodeFacts, MediaPart, TokensByVersion
from rlctl.settings.generation import GenerationConfig


@dataclass(frozen=True)
class Truncation:
    """Truncated sampling. vLLM applies temperature, then `min_p`, `top_k` and `top_p`, each to the tokens kept
    before."""

    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities add up to this."""
    top_k: int = -1
    """Keep the k most likely tokens; -1: all."""
    min_p: float = 0.0
    """Keep tokens that are at least this times as likely as the most likely one."""
    exact_top_k: bool = False
    """Whether the engine drops tokens beyond k that are as likely as the k-th (`EngineBackend.exact_top_k`)."""

    @classmethod
    def from_config(cls, config: GenerationConfig, vocabulary: int) -> Truncation | None:
        """Return the `generation` section's; None: all tokens are sampled from."""
        top_k = config.top_k if 0 < config.top_k < vocabulary else -1
        truncation = cls(config.top_p, top_k, config.min_p)
        return None if truncation == cls() else truncation


NEVER = -100.0
"""Logit bias of tokens that are never drawn, the lowest that vLLM accepts."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the same for all requests of a call."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion in addition to the model's own end tokens."""
    turn_ends: tuple[str | int, ...] = ()
    """Stops that end a turn of the chat format. Completion texts exclude these and the model's end tokens, and include
    other stops; token ids include all."""
    never: tuple[int, ...] = ()
    """Tokens that are never drawn, such as image tokens: `NEVER` is added to their logits."""
    timeout_s: float | None = None
    """Time limit from a sample's first token to its last; None: no limit."""

    @classmethod
    def from_config(
        cls,
        config: GenerationConfig,
        *,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
        never: tuple[int, ...] = (),
    ) -> Sampling:
        """Return the `generation` section, with the further stops of a chat format."""
        return cls(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop=tuple(dict.fromkeys((*config.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *config.stop_token_ids))),
            turn_ends=(*stop, *stop_token_ids),
            never=never,
        )


@dataclass(frozen=True)
class SampleRequest:
    """A requested sample: its context and sampling settings."""

    key: str
    """The caller's name for the answer. Keys that are equal up to their last dot belong to one prompt."""
    tokens: tuple[int, ...]
    seed: int
    """Seed of the sample, independent of its batch."""
    sampling: Sampling
    media: tuple[MediaPart, ...] = ()
    """Their image parts, in order."""


@dataclass(frozen=True)
class SampleResult:
    """The answer to a `SampleRequest`. Suffix R: the tokens that were sampled."""

    key: str
    tokens_R: np.ndarray  # int32
    logprobs_R: np.ndarray  # float32
    versions_R: np.ndarray  # int32: version of the weights that chose the token
    text: str
    """The model's text with special tokens, without the turn's end (`Sampling.turn_ends`)."""
    stop_reason: str
    """As `Rollout.stop_reason`."""
    routed_T: np.ndarray | None = None
    """int16 [T, layers, experts a token] of the request's and the sampled tokens, if recorded."""
    cached_tokens: int = 0
    """Request tokens found in the cache, if the engine reports them."""


@dataclass(frozen=True)
class GroupRequest:
    """One prompt, and the seed of each episode wanted of it."""

    group: int
    """The caller's number for the answer; in training the position of the prompt."""
    prompt_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    """One episode a seed."""
    row: PromptRow | None = None
    """The dataset row for an environment; the prompt is then built from `messages` and `reset`."""
    messages: tuple[dict[str, Any], ...] = ()
    seed: int = 0
    """The seed of the environments, which begin alike."""
    media: tuple[MediaPart, ...] = ()
    """The parts of the prompt that are not text, in order."""


@dataclass(frozen=True)
class SampledGroup:
    """An engine's answer to a GroupRequest: columns (or handles), and scalars by episode. Scored, it is a
    `RolloutGroup`."""

    group: int
    """The number that the request has."""
    columns: Any
    """The `RolloutColumns`."""
    texts: Any
    """The text of each episode's last answer, `list[str]` of length G."""
    prompt_tokens: int
    """Tokens that all episodes begin with."""
    tokens: tuple[int, ...]
    """All tokens of each episode, its prompt included."""
    response_tokens: tuple[int, ...]
    """Tokens of each episode that the policy chose, counted by the loss mask."""
    finish_reasons: tuple[str, ...]
    """As `Rollout.stop_reason`."""
    versions: tuple[TokensByVersion, ...]
    """The weights that chose the tokens of each episode."""
    rewards: tuple[float | None, ...]
    """The rewards that the episodes gave themselves; None: its completion is to be scored."""
    episodes: tuple[EpisodeFacts, ...] = ()
    """Counts of each episode with an environment."""
    transcripts: Any = None
    """Episodes by turn, `list[list[Turn]]` of length G; None without an environment."""
    images: tuple[int, ...] = ()
    """Images of each episode; empty: none has any."""
    image_tokens: tuple[int, ...] = ()
    """Tokens that they are read as."""


VALUES_A_GROUP = 3
"""Token-sized values of a result."""


def detached(results: Sequence[SampledGroup]) -> tuple[list[SampledGroup], list[Any]]:
    """Replace token-sized values in results by places in a list; `attached` undoes it."""
    values = [value for result in results for value in (result.columns, result.texts, result.transcripts)]
    places = range(0, len(values), VALUES_A_GROUP)
    sent = zip(places, results, strict=True)
    return [replace(r, columns=at, texts=at + 1, transcripts=at + 2) for at, r in sent], values


def attached(results: Sequence[SampledGroup], values: Sequence[Any]) -> list[SampledGroup]:
    return [
        replace(r, columns=values[r.columns], texts=values[r.texts], transcripts=values[r.transcripts]) for r in results
    ]


QUANTIZED = "is quantized by"
"""Words in a reason that mark a parameter as quantized."""
