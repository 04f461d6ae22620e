"""Environments of SkyRL-gym."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.environments.adapters.imports import imported
from rlctl.environments.interface import Message, Step


class SkyRLGym:
    """A registered environment of SkyRL-gym, or `module:Class` of one. The columns of the row are its `extras`."""

    def __init__(self, name: str, **config: Any) -> None:
        self.name, self.config = name, config

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        gym, given = imported("skyrl_gym", "skyrl-gym"), dict(row)
        if self.config:
            from omegaconf import OmegaConf

            given["env_config"] = OmegaConf.create(self.config)
        module, _, name = self.name.rpartition(":")
        if module:
            self.env = getattr(imported(module, "skyrl-gym"), name)(given.get("env_config"), extras=given)
        else:
            made = {"env_config": given["env_config"]} if "env_config" in given else {}
            self.env = gym.make(self.name, extras=given, **made)
        prompt = row["prompt"]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        said, _ = self.env.init(asked)
        return [dict(one) for one in said[len(asked) :]]

    def step(self, text: str) -> Step:
        found = self.env.step(text)
        numbers = {name: value for name, value in found["metadata"].items() if isinstance(value, int | float)}
        return Step(list(found["observations"]), found["reward"], bool(found["done"]), metrics=numbers)

    def close(self) -> None:
        self.env.close()
