"""A part of a source of prompts that training does not see, and the prompts of a run's validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlctl.config.schema import DataConfig, RlctlConfig, ValidationData
from rlctl.data.gym import MOST_QUESTIONS
from rlctl.data.prompt_rows import GYM_PREFIX, GymTask, PromptRow, PromptSource
from rlctl.data.prompts import open_prompts
from rlctl.errors import ConfigError, InputError


@dataclass(frozen=True)
class Part:
    """The rows of a source that are held out, or all others."""

    source: PromptSource
    rows_H: np.ndarray
    """The rows held out, sorted."""
    held: bool

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def task(self) -> GymTask | None:
        return self.source.task

    @property
    def instructions(self) -> str:
        return self.source.instructions

    def __len__(self) -> int:
        return len(self.rows_H) if self.held else len(self.source) - len(self.rows_H)

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.held:
            return self.source[int(self.rows_H[index])]
        # The rows below a held out one that are left are as many as its number less those held out before it.
        before = np.searchsorted(self.rows_H - np.arange(len(self.rows_H)), index, side="right")
        # An order by pass rates finds a prompt again by its number among those that are trained on.
        return replace(self.source[index + int(before)], index=index)

    def fingerprint(self) -> dict[str, Any]:
        return {**self.source.fingerprint(), "held_out": len(self.rows_H)}


def hold_out(source: PromptSource, count: int, seed: int) -> tuple[PromptSource, PromptSource | None]:
    """Return the prompts to train on, and `count` prompts that are none of them, which `seed` chooses.

    Raises InputError where none would be left to train on.
    """
    if not count:
        return source, None
    if count >= len(source):
        raise InputError(
            f"validation.holdout = {count} leaves nothing to train on: {source.label} has {len(source)} prompts.",
            "Lower it, or name other prompts with --set validation.data.name=...",
        )
    draws = np.random.PCG64(np.random.SeedSequence((seed, len(source)))).random_raw(len(source))
    rows_H = np.sort(np.argpartition(draws, count)[:count])
    return Part(source, rows_H, held=False), Part(source, rows_H, held=True)


def validation_data(data: DataConfig, validation: ValidationData) -> DataConfig:
    """Return how the prompts of validation are read and written: as those of training, where nothing else is set."""
    own = {name: value for name, value in validation.model_dump().items() if value is not None and name != "params"}
    names = ((name or "").split(":") for name in (data.name, validation.name or data.name))
    task, wanted = (name[1:2] if name[0] + ":" == GYM_PREFIX else None for name in names)
    trained = {key: value for key, value in data.params.items() if key not in ("seed", "size")}
    params = (trained if task == wanted else {}) | validation.params
    return data.model_copy(update={**own, "params": params, "size": None})


def open_validation(config: RlctlConfig, held_out: PromptSource | None) -> tuple[PromptSource, DataConfig]:
    """Return the prompts that a run validates on, and how they are written.

    Questions of reasoning-gym come from seeds that training does not use. Raises ConfigError where there is nothing to
    validate on.
    """
    data = validation_data(config.data, config.validation.data)
    if config.validation.data.name is None:
        if held_out is not None:
            for key in ("params", "split", "prompt_field", "answer_field"):  # the rows have been read already
                if value := getattr(config.validation.data, key):
                    raise ConfigError(
                        f"validation.data.{key} = {value!r} has no effect: the prompts of validation are held out of "
                        "the data (validation.holdout).",
                        "Leave it out, or name other prompts with --set validation.data.name=...",
                    )
            return held_out, data
        if not (config.data.name or "").startswith(GYM_PREFIX):
            raise ConfigError(
                "`validation` asks for validations, and there are no prompts for them: all of "
                f"{config.data.name or 'the data'} are trained on.",
                "Name other prompts with --set validation.data.name=..., or take some away from training with "
                "--set validation.holdout=NUMBER.",
            )
        data = data.model_copy(update={"name": _without_seed(config.data.name or "")})
    trained = config.data.params.get("seed", config.run.seed)
    return open_prompts(data, seed=(trained if isinstance(trained, int) else 0) + MOST_QUESTIONS), data


def _without_seed(name: str) -> str:
    """Return `reasoning-gym:<task>:key=value,...` without the parameters that say which questions there are."""
    *task, inline = name.split(":") if name.count(":") > 1 else [name, ""]
    left = [part for part in inline.split(",") if part and part.split("=")[0].strip() not in ("seed", "size")]
    return ":".join([*task, ",".join(left)] if left else task)
