"""Prompts of what `data.name` names: a task that makes its rows, data files, a Hugging Face dataset."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hub import UNREACHED, hub_answers
from rlctl.config.yaml_values import parse_value
from rlctl.data.drawn_shapes import DRAWN_SHAPES, open_shapes
from rlctl.data.gym_questions import contents_digest, questions_of
from rlctl.data.gym_tasks import build_task, gym_registry
from rlctl.data.image_rows import COLUMNS, holds_images
from rlctl.data.large_files import LargeFiles, open_large
from rlctl.data.prompt_records import MESSAGES
from rlctl.data.prompt_rows import GYM_PREFIX, GymTask, PromptDataset, PromptRow, instructions
from rlctl.data.records import (
    arrow_records,
    digest_of,
    files_in,
    folder_in,
    is_file_name,
    records_of,
    with_file_names,
)
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.data.task_folders import open_tasks, task_folders
from rlctl.errors import AbsentError, InputError, MachineError, first_line, suggest
from rlctl.settings.data import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset

DEFAULT_SIZE = 10_000
"""Questions of a task whose size nobody gave. They are made when asked for; only their order is in memory."""
MOST_QUESTIONS = 10_000_000
LOOKED_AT = 16
"""Rows of a source that are looked at for images."""
CHECKED_ROWS = 1000
"""Rows of a dataset or of large files whose fields are checked when they are opened; the rest when they are drawn."""
LOOKED_AHEAD = 10_000
"""Rows of large files, in the order of the run, whose texts are checked before it; the rest when they are drawn."""


def open_prompts(data: DataConfig, seed: int = 0, rows: RowType = PROMPTS) -> PromptDataset:
    """Open and check the source of `data.name`; only Hugging Face datasets download. `seed` is for reasoning-gym tasks
    without one; `rows` reads a row. Raises InputError for a missing source, row or field."""
    name = data.name
    if not name:
        raise InputError("No data: data.name is not set.", "Give --data, for example reasoning-gym:chain_sum.")
    if name.startswith(GYM_PREFIX):
        return open_gym(name, data, seed, rows)
    if data.params:
        raise InputError(
            f"data.params ({', '.join(data.params)}) belong to a reasoning-gym task, but data.name is {name!r}.",
            "Remove them, or clear a preset's with --set data.params={}.",
        )
    if name == DRAWN_SHAPES:
        return open_shapes(data, seed, rows)
    if tasks := task_folders(name):
        return open_tasks(name, tasks, data, rows)
    files = _found(name, data)
    return of_files(name, files, data, rows) if isinstance(files, list) else of_dataset(name, files, data, rows)


def open_episodes(environment: str, size: int | None) -> PromptDataset:
    """Return the rows of an environment that makes its own tasks from the seeds of its episodes: they hold nothing."""

    def row(index: int) -> PromptRow:
        return PromptRow(index, f"episode {index} of {environment}", [], None)

    return PromptDataset(environment, size or DEFAULT_SIZE, row, {"source": f"environment {environment}"})


def of_files(label: str, files: list[Path], data: DataConfig, row_type: RowType = PROMPTS) -> PromptDataset:
    """Return the rows of data files (the first `data.size`). Raises InputError naming the file and the line."""
    choose = partial(row_type.template_columns, data=data)
    few = data.size is not None and data.size <= LOOKED_AHEAD
    if not few and (large := open_large(files, data.size, choose)) is not None:
        return _of_large(label, large, data, row_type, digest_of(files))
    records = islice(records_of(files, choose), data.size)
    rows = [row_type.read(record, index, where, data) for index, (where, record) in enumerate(records)]
    if not rows:
        raise _no_rows(label)
    identity = {"sha256": digest_of(files)}
    return PromptDataset(label, len(rows), rows.__getitem__, identity, instructions(data), checked=len(rows))


def _of_large(label: str, large: LargeFiles, data: DataConfig, row_type: RowType, digest: str) -> PromptDataset:
    """Return the rows of large files, each read when it is drawn."""
    if not large.size:
        raise _no_rows(label)

    def row(index: int) -> PromptRow:
        path, where, record = large.at(index)
        return row_type.read(with_file_names(record, path), index, where, data)

    opened = PromptDataset(
        label, large.size, row, {"sha256": digest}, instructions(data), checked=min(large.size, CHECKED_ROWS),
        ahead=LOOKED_AHEAD, notes=large.notes,
    )  # fmt: skip
    for index in range(opened.checked):
        row(index)
    return opened


def _no_rows(label: str) -> InputError:
    return InputError(f"{label} has no rows.", "Give a file with at least one prompt.")


def shows_images(data: DataConfig) -> bool:
    """Return whether a source's first rows have images. Unreadable rows are reported on opening."""
    name = data.name or ""
    if name == DRAWN_SHAPES:
        return True
    if not name or name.startswith(GYM_PREFIX) or task_folders(name):
        return False
    try:
        files = _found(name, data)
        first = islice(
            (record for _, record in records_of(files)) if isinstance(files, list) else _rows(files), LOOKED_AT
        )
        return any(map(holds_images, first))
    except (InputError, MachineError, OSError, ValueError):
        return False


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    arrow = dataset.with_format("arrow")  # images stay bytes
    return (record for index in range(len(dataset)) for record in arrow_records(arrow[index]))


def of_dataset(label: str, dataset: Dataset, data: DataConfig, row_type: RowType = PROMPTS) -> PromptDataset:
    """Return the rows of one split, memory-mapped by `datasets`."""
    if len(dataset) == 0:
        raise InputError(f"Dataset {label} (split {data.split}) has no rows.")
    row_type.require_columns(dataset.column_names, data, f"Dataset {label}")
    for column, feature in dataset.features.items():
        if any(kind in repr(feature) for kind in ("Audio(", "Video(")):
            raise InputError(
                f"Dataset {label}: column {column!r} holds sound or video, and prompts are texts and images.",
                "rlctl does not train on them. To train on the text, save the dataset without that column.",
            )
        if "Image(" in repr(feature) and column not in (*COLUMNS, MESSAGES, data.prompt_field):
            raise InputError(
                f"Dataset {label}: column {column!r} holds images, and a row's images are in a column named 'image' or "
                "'images'.",
                "Rename it with dataset.rename_column, or save the dataset without it.",
            )
    arrow = dataset.with_format("arrow")  # values as in files, and images as bytes
    chosen = partial(row_type.template_columns, data=data)

    def row(index: int) -> PromptRow:
        (record,) = arrow_records(arrow[index], chosen)
        return row_type.read(record, index, f"dataset {label} ({data.split}), row {index}", data)

    # `datasets` hashes the files of the dataset and every operation on it into this.
    identity = {"source": label, "split": data.split, "fingerprint": dataset._fingerprint}
    size = len(dataset) if data.size is None else min(len(dataset), data.size)
    opened = PromptDataset(label, size, row, identity, instructions(data), checked=min(size, CHECKED_ROWS))
    for index in range(opened.checked):
        row(index)
    return opened


def _found(name: str, data: DataConfig) -> list[Path] | Dataset:
    """Return the data files of a name, or another kind of dataset. Raises InputError or AbsentError."""
    return [Path(name)] if is_file_name(name) else _loaded(name, data)


def _loaded(name: str, data: DataConfig) -> list[Path] | Dataset:
    """Return a folder's data files, a dataset written by `save_to_disk`, or one of the hub."""
    try:
        import datasets
        import datasets.exceptions
    except ModuleNotFoundError as error:
        raise MachineError(
            "Hugging Face datasets need the package datasets.", "Install it with `pip install datasets`."
        ) from error
    path, configuration = folder_in(name)
    if any((Path(path) / marker).is_file() for marker in ("dataset_dict.json", "state.json")):  # of `save_to_disk`
        saved = datasets.load_from_disk(path)
        if isinstance(saved, datasets.DatasetDict):
            if data.split not in saved:
                splits = [str(split) for split in saved]
                hint = suggest(data.split, splits) or f"It has {', '.join(splits)}; choose with --set data.split=..."
                raise InputError(f"Dataset {path} has no split {data.split!r}.", hint)
            saved = saved[data.split]
        return saved
    if not Path(path).exists():
        hub_answers()  # else `datasets` reads its cache
    try:
        if (files := files_in(path, configuration, data.split)) is not None:
            return files
        return datasets.load_dataset(path, configuration or None, split=data.split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # `datasets` raises these for an unknown name, split or configuration, and for a hub out of reach
        if isinstance(error, ConnectionError):
            reason = f"Dataset {name!r} (split {data.split!r}): no file or directory here, {UNREACHED}"
            raise AbsentError(
                reason, f"{download_of(name)} fetches it where the hub can be reached; {LOCAL}"
            ) from error
        raise InputError(
            f"Dataset {name!r} (split {data.split!r}) could not be loaded: {first_line(error.__cause__ or error)}",
            "--data takes reasoning-gym:<task>, drawn-shapes, a JSON, CSV or Parquet file, a folder, or a Hugging Face "
            "dataset (name or name:configuration) that is in the local cache or that the hub can be reached for.",
        ) from error


LOCAL = "a copy in a directory DIR is --data DIR."


def download_of(name: str) -> str:
    """Return the command that fetches a dataset of the hub."""
    return f"`hf download {name.partition(':')[0]} --repo-type dataset`"


def open_gym(name: str, data: DataConfig, seed: int, row_type: RowType = PROMPTS) -> PromptDataset:
    """Return the source of `reasoning-gym:<task>[:key=value,...]`; row i depends on task, parameters, seed and i.
    Parameters in the name override `data.params`. Raises InputError for an unknown task or parameter, or a refused
    value."""
    task_name, _, inline = name.removeprefix(GYM_PREFIX).partition(":")
    params = dict(data.params)
    for part in filter(None, inline.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise InputError(f"--data {name}: {part!r} is not key=value.", "Write reasoning-gym:<task>:key=value,...")
        params[key.strip()] = parse_value(value)
    registry = gym_registry()
    if task_name not in registry:
        near = suggest(task_name, registry) or f"Some are {', '.join(sorted(registry)[:8])}."
        raise InputError(f"reasoning-gym has no task {task_name!r} (--data).", near)
    fields = [field.name for field in dataclasses.fields(registry[task_name][1])]
    for key in params:
        if key not in fields:
            near = suggest(key, fields) or f"It has {', '.join(fields)}."
            raise InputError(
                f"reasoning-gym task {task_name!r} has no parameter {key!r} (data.params).",
                f"{near} Parameters of a preset's task are cleared with --set data.params={{}}.",
            )
    defaults = {"seed": seed, "size": DEFAULT_SIZE if data.size is None else data.size}
    task = GymTask(task_name, {**defaults, **params})
    dataset = questions_of(task, build_task(task))

    def row(index: int) -> PromptRow:
        entry, where = dataset[index], f"{name}, question {index}"
        answer = row_type.answer_of(dataset, index, where)
        return PromptRow(index, where, entry["question"], answer, {"metadata": entry["metadata"]})

    version = importlib.metadata.version("reasoning_gym")
    identity = {"source": f"{GYM_PREFIX}{task.name}", "params": task.params, "reasoning_gym": version}
    identity["contents"] = contents_digest(dataset)
    return PromptDataset(name, len(dataset), row, identity, instructions(data), task)
