"""Values derived from the data: `run.steps` and `model.max_length`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import Resolved
from rlctl.models.facts import ModelFacts
from rlctl.planner.from_config import assumed_prompt, room_for
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.settings.config import RlctlConfig
from rlctl.training.method import Method


def fitting_length(config: RlctlConfig, facts: ModelFacts, method: Method, prompts: PromptStream | None) -> int:
    """Return `model.max_length`, or the length of the longest prompt plus its completion, and drop longer prompts if
    `data.too_long` allows it. Raises InputError for a prompt that is too long."""
    length, new = config.model.max_length, config.turn_tokens
    if length is None:
        longest = max(prompts.lengths()) if prompts else assumed_prompt(facts)
        length = room_for(facts, longest, config.new_tokens if new else 0)
    if prompts:
        prompts.limit = limit = length - 1 if new else length
        prompts.room = length - new if length > new else limit
        if new:
            prompts.leave_out_long(limit, config.run.seed)
        prompts.require_fit()
    return length


def steps_of_epochs(resolved: Resolved, prompts: PromptStream) -> int | None:
    """Return the number of steps in `run.epochs`, and tell `prompts` how many rows they take; None if `run.epochs` is
    unset or the user set `run.steps` too."""
    config = resolved.config
    if config.run.epochs is None or resolved.origin["run.steps"].startswith(("flag", "--set")):
        return None
    rows = sum(len(dataset.prompts) for dataset in prompts.datasets)
    steps = max(1, math.ceil(config.run.epochs * rows / config.batch.prompts))
    prompts.planned = config.batch.prompts * steps
    return steps


def tell_of_little_room(tell: Tell, prompt_tokens: Sequence[int], new: int, length: int) -> None:
    if new and (tight := sum(tokens + new > length for tokens in prompt_tokens)):
        tell(
            f"{tight} of the first {len(prompt_tokens)} prompts leave less than {new} tokens for a completion: "
            f"it ends at --max-length {length}"
        )


def repeated_rows(config: RlctlConfig, prompts: PromptStream) -> list[str]:
    """Return a note if one step uses the same rows several times."""
    rows, taken = sum(len(dataset.prompts) for dataset in prompts.datasets), config.batch.prompts
    if rows >= taken:
        return []
    least, most = taken // rows, -(-taken // rows)
    times = f"{least} times" if least == most else f"{least} or {most} times"
    return [
        f"the data has {rows} row{'s' * (rows > 1)}, fewer than a step takes ({taken}): each step has a row {times}"
    ]
