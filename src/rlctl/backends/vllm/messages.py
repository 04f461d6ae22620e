"""What is asked of a generation engine and what it answers. Nothing here imports torch or vLLM.

Suffix G: the samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlctl.config.schema import GenerationConfig
from rlctl.data.rollouts import Rollout


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the same for all requests of a call."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the text returned ends before them, the tokens include them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides the model's own end tokens; they belong to it."""

    @classmethod
    def from_config(
        cls, config: GenerationConfig, *, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = ()
    ) -> Sampling:
        """The `generation` section, with the further stops of a chat format."""
        return cls(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop=tuple(dict.fromkeys((*config.stop, *stop))),
            stop_token_ids=stop_token_ids,
        )


@dataclass(frozen=True)
class GroupRequest:
    """One prompt, and the seed of each sample wanted of it."""

    group: int
    prompt_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    """One sample a seed. A sample depends on its own seed alone, not on its neighbours in the batch."""


@dataclass(frozen=True)
class GroupResult:
    """The samples of one prompt: what is token-sized, or handles of it, and scalars."""

    group: int
    columns: Any
    """The `RolloutColumns`."""
    texts: Any
    """The completion texts, `list[str]` of length G."""
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    """Length of each completion, its end token included."""
    truncated: tuple[bool, ...]
    """Stopped by a length limit rather than by an end token or a stop text."""
    finish_reasons: tuple[str, ...]
    """`stop`, `length`, or `abort` where a refit ended it."""
    weight_versions: tuple[int, ...]
    """Oldest weights that chose a token of the completion."""
    logprob_sums: tuple[float, ...]


VALUES_A_GROUP = 2
"""Token-sized values of a result."""


def apart(results: Sequence[GroupResult]) -> tuple[list[GroupResult], list[Any]]:
    """Results that hold places in the list beside them where their token-sized values were; `joined` undoes it."""
    values = [value for result in results for value in (result.columns, result.texts)]
    places = range(0, len(values), VALUES_A_GROUP)
    return [replace(r, columns=at, texts=at + 1) for at, r in zip(places, results, strict=True)], values


def joined(results: Sequence[GroupResult], values: Sequence[Any]) -> list[GroupResult]:
    """The results with `values`, or handles of them, in their places."""
    return [replace(result, columns=values[result.columns], texts=values[result.texts]) for result in results]


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself once it runs."""

    vllm_version: str
    device: str
    max_length: int
    kv_cache_tokens: int
    stop_token_ids: tuple[int, ...]
    seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)
    """The vLLM engine arguments in effect, as passed."""


def rollouts_of(result: GroupResult, generations: int) -> list[Rollout]:
    """The driver's records of one group, numbered for steps of `generations` samples a prompt."""
    return [
        Rollout(
            id=result.group * generations + index,
            group=result.group,
            index=index,
            prompt_tokens=result.prompt_tokens,
            response_tokens=result.response_tokens[index],
            weight_version=result.weight_versions[index],
            truncated=result.truncated[index],
            columns=result.columns,
            texts=result.texts,
        )
        for index in range(len(result.response_tokens))
    ]


QUANTISED = "is quantised by"
"""In reasons why a parameter is not the published tensor."""


@dataclass(frozen=True)
class Reading:
    """Fingerprint of one box as the engine holds it."""

    tensor: str
    """Published name; of a buffer or of a parameter that cannot be read, the engine's own."""
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    value: int
    site: str
    expected: int | None = None
    """Of a buffer, which no refit changes: the value that it must have."""
    unreadable: str = ""
    """Why there is no value; empty: there is one."""


@dataclass(frozen=True)
class Taken:
    """Published tensors that take one way into a worker's model, for one reason."""

    path: str
    """`direct` or `loader`."""
    reason: str
    tensors: tuple[str, ...]


@dataclass
class Received:
    """What a worker did in one refit."""

    seconds: float = 0.0
    waited_s: float = 0.0
    """Part of `seconds` in which nothing had come that could be loaded."""
    tensors: int = 0
    bytes: int = 0
    path: str = "loader"
    """`direct`, `loader`, or `mixed`."""
