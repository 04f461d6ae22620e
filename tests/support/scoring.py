"""Scorers that are not tried, for tests of what surrounds them: a trial starts a process, which takes a second."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.rewards.scoring_process import Score, Work


class NoProcess:
    """Finds everything right."""

    compares = False

    def __init__(self, plan: Any) -> None: ...

    def score(self, work: list[Work]) -> list[Score]:
        return [Score(1.0) for _ in work]

    def close(self) -> None: ...


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of rewards are made without their trial; tests of rewards have it."""
    monkeypatch.setattr("rlctl.rewards.prepare_rewards.ScoringProcess", NoProcess)
