"""An adapter of another library's environments: tasks of reasoning-gym with several attempts.

--env reasoning-attempts --set environment.params.task=chain_sum --set environment.params.attempts=3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reasoning_gym

from rlctl.environments.interface import Message, Step


class ReasoningAttempts:
    """The model answers until the task's own scorer gives the full score, or its attempts are used up."""

    def __init__(self, task: str = "chain_sum", attempts: int = 3, **settings: Any) -> None:
        self.task, self.attempts, self.settings = task, attempts, settings

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.tasks = reasoning_gym.create_dataset(self.task, size=1, seed=seed, **self.settings)
        self.entry, self.left = self.tasks[0], self.attempts
        return f"{self.entry['question']}\nWrite the answer alone."

    def step(self, message: Message) -> Step:
        score = self.tasks.score_answer(message["content"].strip(), self.entry)
        self.left -= 1
        if score == 1 or self.left == 0:
            return Step(reward=float(score), done=True, metrics={"attempts": self.attempts - self.left})
        return Step(f"That is not right. You have {self.left} more.")
