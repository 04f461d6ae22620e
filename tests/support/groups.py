"""Finished groups without tokens, for tests of what the driver computes from scalars."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import Rollout, RolloutGroup
from rlctl.rollouts.dataset import TextGroup, TextLengths

PROMPT_TOKENS = 5


def group(
    position: int, rewards: Sequence[float], response_tokens: Sequence[int], tokens: Sequence[int] | None = None
) -> RolloutGroup:
    """A group with these rewards and lengths; `tokens` of each rollout, where not all after the prompt are its own."""
    lengths = tokens or [PROMPT_TOKENS + count for count in response_tokens]
    rollouts = tuple(
        Rollout(
            position=position, sample=sample, seed=sample, versions=((0, count),), stop_reason="stop",
            prompt_tokens=PROMPT_TOKENS, tokens=length, response_tokens=count, reward=reward, terms={}, accuracy=None,
        )
        for sample, (reward, count, length) in enumerate(zip(rewards, response_tokens, lengths, strict=True))
    )  # fmt: skip
    prompt = PromptRow(position, f"row {position}", f"question {position}", None)
    return RolloutGroup(position, prompt, rollouts, f"columns{position}", f"texts{position}")


def text_group(position: int, response_tokens: Sequence[int]) -> TextGroup:
    """A dataset row with texts of these lengths."""
    texts = tuple(TextLengths(PROMPT_TOKENS, PROMPT_TOKENS + count, count) for count in response_tokens)
    return TextGroup(position, PromptRow(position, f"row {position}", "", None), texts, f"columns{position}")
