"""Games of TextArena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.environments.adapters.imports import imported
from rlctl.environments.interface import Step


class TextArena:
    """A game of one player of TextArena, by its name. Its reward comes at the end."""

    def __init__(self, game: str) -> None:
        self.game = game

    @classmethod
    def prepare(cls, game: str) -> None:
        imported("textarena", "textarena").make(game)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.env, self.seen = imported("textarena", "textarena").make(self.game), ""
        self.env.reset(num_players=1, seed=seed)
        return self._new()

    def step(self, text: str) -> Step:
        done, _ = self.env.step(text)
        if not done:
            return Step(self._new())
        rewards, _ = self.env.close()
        return Step(reward=float(next(iter(rewards.values()))), done=True)

    def _new(self) -> str:
        _, text = self.env.get_observation()
        new, self.seen = text.removeprefix(self.seen), text
        return str(new).strip()
