"""A part of a source of prompts that training does not see, and the prompts of a run's validation."""

from __future__ import annotations

import numpy as np

from rlctl.data.drawn_shapes import DRAWN_SHAPES
from rlctl.data.prompt_rows import GYM_PREFIX, PromptSource
from rlctl.data.prompts import MOST_QUESTIONS, open_prompts
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.errors import ConfigError, InputError
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import DataConfig, ValidationData


def hold_out(source: PromptSource, count: int, seed: int) -> tuple[PromptSource, PromptSource | None]:
    """Return the prompts to train on, and `count` others that `seed` chooses. Raises InputError where none is left."""
    if not count:
        return source, None
    if count >= len(source):
        raise InputError(
            f"validation.holdout = {count} leaves nothing to train on: {source.label} has {len(source)} prompts.",
            "Lower it, or name other prompts with --set validation.data.name=...",
        )
    draws = np.random.PCG64(np.random.SeedSequence((seed, len(source)))).random_raw(len(source))
    rows_H = np.sort(np.argpartition(draws, count)[:count])
    rest = np.delete(np.arange(len(source)), rows_H)
    return source.only(rest, held_out=count), source.only(rows_H, held_out=count)


def validation_data(data: DataConfig, validation: ValidationData) -> DataConfig:
    """Return validation data settings, by default training's."""
    own = {name: value for name, value in validation.model_dump().items() if value is not None and name != "params"}
    names = ((name or "").split(":") for name in (data.name, validation.name or data.name))
    task, wanted = (name[1:2] if name[0] + ":" == GYM_PREFIX else None for name in names)
    trained = {key: value for key, value in data.params.items() if key not in ("seed", "size")}
    params = (trained if task == wanted else {}) | validation.params
    return data.model_copy(update={**own, "params": params, "size": None})


def open_validation(
    config: RlctlConfig, held_out: PromptSource | None, rows: RowType = PROMPTS
) -> tuple[PromptSource, DataConfig]:
    """Return the validation prompts and their encoder. Raises ConfigError without any. reasoning-gym questions and
    drawn pictures use seeds unused in training."""
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
        if config.data.name != DRAWN_SHAPES and not (config.data.name or "").startswith(GYM_PREFIX):
            raise ConfigError(
                f"`validation` has no prompts: training uses all of {config.data.name or 'the data'}.",
                "Name other prompts with --set validation.data.name=..., or take some away from training with "
                "--set validation.holdout=NUMBER.",
            )
        if config.data.name != DRAWN_SHAPES:
            data = data.model_copy(update={"name": _without_choice(config.data.name or "")})
    trained = config.data.params.get("seed", config.run.seed)
    seed = (trained if isinstance(trained, int) else 0) + MOST_QUESTIONS
    return open_prompts(data, seed, rows), data


def _without_choice(name: str) -> str:
    """Return the name of a reasoning-gym task without the parameters that say which questions there are."""
    task, _, inline = name.removeprefix(GYM_PREFIX).partition(":")
    left = [part for part in inline.split(",") if part and part.split("=")[0].strip() not in ("seed", "size")]
    return GYM_PREFIX + ":".join(filter(None, (task, ",".join(left))))
