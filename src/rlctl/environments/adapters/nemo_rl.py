"""Environments of NeMo-RL, without Ray."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlctl.environments.adapters.imports import imported
from rlctl.environments.interface import Step


class NemoRL:
    """A class of NeMo-RL's `EnvironmentInterface`, `module:Class`, made with `config`. The column `metadata` of a row
    is the environment's first metadata."""

    def __init__(self, environment: str, config: Mapping[str, Any] | None = None, metadata: str = "metadata") -> None:
        self.environment, self.config, self.column = environment, dict(config or {}), metadata

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        module, _, name = self.environment.partition(":")
        kind = getattr(imported(module, "nemo-rl"), name)
        actor = getattr(kind, "__ray_metadata__", None)  # the class below @ray.remote
        self.made = (actor.modified_class if actor else kind)(self.config)
        prompt = row["prompt"]
        self.log = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
        )
        self.metadata = row.get(self.column)

    async def step(self, text: str) -> Step:
        self.log.append({"role": "assistant", "content": text})
        result = self.made.step([self.log], [self.metadata])
        if inspect.isawaitable(result):
            result = await result
        observation_ = dict(result.observations[0])
        self.log.append(observation_)
        self.metadata = result.metadata[0]
        stops = result.next_stop_strings[0] if result.next_stop_strings else None
        done = bool(result.terminateds[0])
        messages = [] if done else [{"role": "user", "content": str(observation_["content"])}]
        return Step(messages, float(result.rewards[0]), done, tuple(stops or ()))
