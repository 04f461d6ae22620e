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
        gym, columns = imported("skyrl_gym", "skyrl-gym"), dict(row)
        if self.config:
            from omegaconf import OmegaConf

            columns["env_config"] = OmegaConf.create(self.config)
        module, _, name = self.name.rpartition(":")
        if module:
            self.env = getattr(imported(module, "skyrl-gym"), name)(columns.get("env_config"), extras=columns)
        else:
            made = {"env_config": columns["env_config"]} if "env_config" in columns else {}
            self.env = gym.make(self.name, extras=columns, **made)
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        dialog, _ = self.env.init(messages)
        return [dict(message) for message in dialog[len(messages) :]]

    def step(self, text: str) -> Step:
        result = self.env.step(text)
        numbers = {name: value for name, value in result["metadata"].items() if isinstance(value, int | float)}
        return Step(list(result["observations"]), result["reward"], bool(result["done"]), metrics=numbers)

    def close(self) -> None:
        self.env.close()
