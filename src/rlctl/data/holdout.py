"""A part of a dataset of prompts that training does not see, and the prompts of a run's validation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlctl.data.drawn_shapes import DRAWN_SHAPES
from rlctl.data.image_sources import IMAGES
from rlctl.data.prompt_rows import GYM_PREFIX, PromptDataset
from rlctl.data.prompts import MOST_QUESTIONS, open_prompts
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.data.templates import template_of
from rlctl.errors import ConfigError, InputError
from rlctl.settings.config import RlctlConfig
from rlctl.settings.data import DataConfig, ValidationData

MOST_READ, MOST_MADE = 200_000, 2_000
"""Rows of a dataset whose prompts are compared; fewer where rows are made when asked for, which takes longer."""


def columns_of_prompts(config: RlctlConfig, data: DataConfig) -> Collection[str] | None:
    """Return the columns that the model reads besides a row's prompt; None: possibly all."""
    if (rollouts := config.rollout_settings) and rollouts.plays:
        return None
    return template.names if (template := template_of(data)) else ()


def hold_out(
    dataset: PromptDataset, count: int, seed: int, columns: Collection[str] | None = ()
) -> tuple[PromptDataset, PromptDataset | None]:
    """Return the prompts to train on, and `count` others that `seed` chooses. Rows with an equal prompt, up to white
    space, go together. Raises InputError where none is left."""
    if not count:
        return dataset, None
    size = len(dataset)
    if count >= size:
        raise InputError(
            f"validation.holdout = {count} leaves nothing to train on: {dataset.label} has {size} prompts.",
            "Lower it, or name other prompts with --set validation.data.name=...",
        )
    draws_N = np.random.PCG64(np.random.SeedSequence((seed, size))).random_raw(size)
    if size > (MOST_READ if dataset.checked > 1 else MOST_MADE):
        return _hold_out_uncompared(dataset, count, draws_N)
    prompts_N = _prompts(dataset, columns)
    _, first_G, of_N, sizes_G = np.unique(prompts_N, return_index=True, return_inverse=True, return_counts=True)
    order_G = np.argsort(draws_N[first_G], kind="stable")
    held_N = np.isin(of_N, _fitting(order_G, sizes_G, count))
    rest_N, notes, left_out = ~held_N, list[str](), 0
    if lacking := count - int(held_N.sum()):  # rows of one more prompt, whose others are then in neither part
        others = [group for group in order_G if not held_N[first_G[group]]]
        last_N = of_N == min(others, key=lambda group: sizes_G[group])
        held_N[np.flatnonzero(last_N)[:lacking]] = True
        left_out = int(last_N.sum()) - lacking
        if 2 * (size - count - left_out) >= size:
            rest_N &= ~last_N
            notes.append(f"{left_out:,} rows are left out: they have the prompt of held-out rows")
        else:
            rest_N, left_out = ~held_N, 0
            notes.append(f"{lacking:,} held-out rows have a prompt that is trained, because most rows have the same")
    identity = {"held_out": count, **({"prompts": len(first_G)} if len(first_G) < size else {})}
    train = dataset.only(np.flatnonzero(rest_N), **identity)
    return replace(train, notes=(*dataset.notes, *notes)), dataset.only(np.flatnonzero(held_N), **identity)


def _hold_out_uncompared(
    dataset: PromptDataset, count: int, draws_N: np.ndarray
) -> tuple[PromptDataset, PromptDataset]:
    """Hold out the rows with the smallest draws, of equal ones the first."""
    last = np.partition(draws_N, count - 1)[count - 1]
    held_N = draws_N < last
    held_N[np.flatnonzero(draws_N == last)[: count - int(held_N.sum())]] = True
    note = f"held-out rows may have prompts that are trained too: {len(dataset):,} rows were not compared"
    train = dataset.only(np.flatnonzero(~held_N), held_out=count)
    return replace(train, notes=(*dataset.notes, note)), dataset.only(np.flatnonzero(held_N), held_out=count)


def _prompts(dataset: PromptDataset, columns: Collection[str] | None) -> np.ndarray:
    """Return a number for each row [N], the same for rows whose prompts the model reads alike up to white space."""
    numbers: dict[Any, int] = {}
    keys = (_read(dataset, index, columns) for index in range(len(dataset)))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _read(dataset: PromptDataset, index: int, columns: Collection[str] | None) -> Any:
    try:
        row = dataset[index]
    except InputError:  # reported when the run draws it
        return index
    if not row.prompt:  # if the environment starts the conversation
        return index
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    stripped = [{key: value for key, value in message.items() if key != IMAGES} for message in messages]
    fields = {key: row.fields.get(key) for key in (row.fields if columns is None else columns)}
    images = [(image.place, hashlib.sha256(image.data or b"").digest()) for image in row.images]
    text = json.dumps(_squeezed([stripped, fields]), sort_keys=True, default=str)
    return hashlib.sha256(repr((text, images)).encode()).digest()


def _squeezed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _squeezed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_squeezed(item) for item in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def _fitting(order_G: np.ndarray, sizes_G: np.ndarray, count: int) -> list[int]:
    """Return prompts in the given order whose rows number at most `count`."""
    fitting, room = list[int](), count
    for group in order_G:
        if sizes_G[group] <= room:
            fitting.append(int(group))
            room -= int(sizes_G[group])
        if not room:
            break
    return fitting


def validation_data(data: DataConfig, validation: ValidationData) -> DataConfig:
    """Return validation data settings, by default training's."""
    overrides = {
        name: value for name, value in validation.model_dump().items() if value is not None and name != "params"
    }
    names = ((name or "").split(":") for name in (data.name, validation.name or data.name))
    task, wanted_task = (name[1:2] if name[0] + ":" == GYM_PREFIX else None for name in names)
    trained = {key: value for key, value in data.params.items() if key not in ("seed", "size")}
    params = (trained if task == wanted_task else {}) | validation.params
    return data.model_copy(update={**overrides, "params": params, "size": None})


def open_validation(
    config: RlctlConfig, held_out: PromptDataset | None, rows: RowType = PROMPTS
) -> tuple[PromptDataset, DataConfig]:
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


def open_apart(config: RlctlConfig, data: DataConfig) -> tuple[PromptDataset, str]:
    """Return the prompts of a source that training does not see: questions and pictures with other seeds, else the rows
    that `validation.holdout` holds out; without those all rows, and a remark. Raises InputError."""
    name = data.name or ""
    if name == DRAWN_SHAPES or name.startswith(GYM_PREFIX):
        params = {key: value for key, value in data.params.items() if key not in ("seed", "size")}
        task = name if name == DRAWN_SHAPES else _without_choice(name)
        made = data.model_copy(update={"name": task, "params": params, "size": None})
        return open_prompts(made, config.run.seed + MOST_QUESTIONS), ""
    dataset = open_prompts(data, config.run.seed)
    columns = columns_of_prompts(config, data)
    held_out = hold_out(dataset, config.validation.holdout, config.run.seed, columns)[1]
    if held_out is not None:
        return held_out, ""
    return dataset, f"{dataset.label}: a run with this configuration trains on these rows (validation.holdout = 0)"


def _without_choice(name: str) -> str:
    """Return the name of a reasoning-gym task without the parameters that say which questions there are."""
    task, _, inline = name.removeprefix(GYM_PREFIX).partition(":")
    left = [part for part in inline.split(",") if part and part.split("=")[0].strip() not in ("seed", "size")]
    return GYM_PREFIX + ":".join(filter(None, (task, ",".join(left))))
