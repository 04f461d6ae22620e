"""Several sources of prompts in one run: each source's settings, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from rlctl.data.prompt_rows import GYM_PREFIX
from rlctl.errors import ConfigError, InputError
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import EnvironmentConfig, RewardConfig

LONGEST_ROUND = 100_000
"""Positions after which the turns of the sources repeat; finer weights are rounded to parts of it."""
NOT_OF_DATA = ("name", "weight", "reward", "environment")
"""Keys of a source that do not replace one of `data`."""


@dataclass(frozen=True)
class SourceSettings:
    """One source of a run's prompts, as if it were the only one."""

    label: str
    """Its name, with a number where several have the same name; empty where a run has one source."""
    weight: float | None
    """None: no source of the run has one."""
    data: DataConfig
    reward: RewardConfig
    environment: EnvironmentConfig

    @property
    def makes_tasks(self) -> bool:
        """Whether there are no rows: the environment makes the tasks."""
        return bool(self.environment.name) and not self.data.name


def source_settings(config: RlctlConfig) -> tuple[SourceSettings, ...]:
    """Return each source's settings: its keys over `data`, `reward` and `environment`. Raises ConfigError for an
    environment where the method samples no rollouts."""
    shared_reward = rollouts.reward if (rollouts := config.rollout_settings) else RewardConfig()
    environments = rollouts.environments if rollouts else {}
    if not config.data.sources:
        return (SourceSettings("", 1.0, config.data, shared_reward, environments.get("", EnvironmentConfig())),)
    settings, weighted = [], any(source.weight is not None for source in config.data.sources)
    for source, label in zip(config.data.sources, config.data.source_labels, strict=True):
        if source.environment is not None and rollouts is None:
            raise ConfigError(
                f"data.sources: {label} has an environment, and {config.run.algorithm} plays no episodes.",
                "Leave it out.",
            )
        source_values = {key: value for key, value in source if key not in NOT_OF_DATA and value is not None}
        if not source.name.startswith(GYM_PREFIX):
            source_values.setdefault("params", {})  # `data.params` are for the tasks among the sources
        shared = config.data.model_dump(exclude={"sources", "name"})
        data = type(config.data).model_validate({**shared, "name": source.name or None, **source_values})
        reward, source_reward = shared_reward, source.reward
        if source_reward is not None:
            reward = RewardConfig(terms=source_reward.terms, extract=source_reward.extract, timeout_s=reward.timeout_s)
        weight = (source.weight or 1.0) if weighted else None
        settings.append(SourceSettings(label, weight, data, reward, environments.get(label, EnvironmentConfig())))
    return tuple(settings)


@contextmanager
def errors_of_source(label: str) -> Iterator[None]:
    """Add a source's label to the InputErrors of the block; empty: the run has one source."""
    try:
        yield
    except InputError as error:
        if not label:
            raise
        raise InputError(f"data.sources, {label}: {error.message}", error.hint) from error


class Mixing:
    """Turns of sources as a pure function of the position. With weights, a source with share p has p x n of the first n
    positions, rounded up or down, for every n. By their sizes, one pass has each row of all sources once."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._begin(whole_parts(weights))

    @classmethod
    def of(cls, weights: Sequence[float | None], sizes: Sequence[int]) -> Mixing:
        """Return the turns of sources with weights, or without any by their sizes."""
        if any(weight is None for weight in weights):
            mixture = cls.__new__(cls)
            mixture._begin([size // gcd(*sizes) for size in sizes])
            return mixture
        return cls([weight for weight in weights if weight is not None])

    def _begin(self, parts: list[int]) -> None:
        self.parts = parts
        """Turns of each source in a round; 0: it is paused."""
        self._owners = _by_quota(parts) if sum(parts) <= LONGEST_ROUND else _when_due(parts)
        self._turns = np.empty(len(self._owners), np.int64)
        for owner, part in enumerate(parts):
            self._turns[self._owners == owner] = np.arange(part)

    def at(self, position: int) -> tuple[int, int]:
        """Return the number of the source whose turn it is, and how many turns it has had before."""
        rounds, turn = divmod(position, len(self._owners))
        owner = int(self._owners[turn])
        return owner, rounds * self.parts[owner] + int(self._turns[turn])

    def turns(self, positions: int) -> list[int]:
        rounds, rest = divmod(positions, len(self._owners))
        begun = np.bincount(self._owners[:rest], minlength=len(self.parts))
        return [rounds * part + int(more) for part, more in zip(self.parts, begun, strict=True)]


class ChangedMixing(Mixing):
    """`before`, with another part of one source from a position on; 0: the others share its turns by their weights."""

    def __init__(self, before: Mixing, source: int, part: int, position: int) -> None:
        self._before, self._position, self._turns_before = before, position, before.turns(position)
        self._begin([part if number == source else other for number, other in enumerate(before.parts)])

    def at(self, position: int) -> tuple[int, int]:
        if position < self._position:
            return self._before.at(position)
        owner, turn = super().at(position - self._position)
        return owner, self._turns_before[owner] + turn

    def turns(self, positions: int) -> list[int]:
        if positions <= self._position:
            return self._before.turns(positions)
        since = super().turns(positions - self._position)
        return [before + turns for before, turns in zip(self._turns_before, since, strict=True)]


def _by_quota(parts: Sequence[int]) -> np.ndarray:
    """Return the source of each turn, by the quota method of Balinski and Young (1975): the next turn goes to the
    source due first without exceeding its share."""
    parts_S, total = np.array(parts, dtype=np.int64), sum(parts)
    counts_S, owners = np.zeros_like(parts_S), np.empty(total, np.int32)
    for turn in range(total):
        behind_S = counts_S * total < parts_S * (turn + 1)
        owners[turn] = owner = int(np.argmin(np.where(behind_S, (counts_S + 1) / np.maximum(parts_S, 1), np.inf)))
        counts_S[owner] += 1
    return owners


def _when_due(parts: Sequence[int]) -> np.ndarray:
    """Return the source of each turn of a round too long for quotas: each source's turns at even distances."""
    due = np.concatenate([(np.arange(part) + 0.5) / part for part in parts])
    return np.repeat(np.arange(len(parts), dtype=np.int32), parts)[np.argsort(due, kind="stable")]


def whole_parts(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the proportion of `weights`, each at least 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(part.denominator for part in exact))
    parts = [int(part * scale) for part in exact]
    if (total := sum(parts)) // gcd(*parts) > LONGEST_ROUND:
        parts = [max(1, round(Fraction(part * LONGEST_ROUND, total))) for part in parts]
    common = gcd(*parts)
    return [part // common for part in parts]
