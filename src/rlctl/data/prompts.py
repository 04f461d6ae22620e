"""Prompts of what `data.name` names: a task that makes its rows, a JSONL or parquet file, a Hugging Face dataset."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import re
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hub import UNREACHED, hub_answers
from rlctl.config.yaml_values import parse_value
from rlctl.data.drawn_shapes import DRAWN_SHAPES, open_shapes
from rlctl.data.image_rows import COLUMNS, holds_images
from rlctl.data.prompt_records import MESSAGES
from rlctl.data.prompt_rows import GYM_PREFIX, GymTask, PromptRow, PromptSource, instructions
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.errors import AbsentError, InputError, MachineError, first_line, suggest, suggest_file
from rlctl.settings.data import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset
    from reasoning_gym.dataset import ProceduralDataset

FILE_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
OTHER_SUFFIXES = {
    ".json": "A list of objects becomes one object a line with: jq -c '.[]' in.json > out.jsonl",
    ".csv": "A folder that holds only this file can be given as --data: Hugging Face datasets reads it.",
    ".gz": "Unpack it first: gunzip FILE",
}
"""How files of other kinds become data."""
ONE_OBJECT = "Each line must be one JSON object; jq -c '.' writes objects so, and jq -c '.[]' the objects of a list."
DEFAULT_SIZE = 10_000
"""Questions of a task whose size nobody gave. They are made when asked for; only their order is in memory."""
MOST_QUESTIONS = 10_000_000
LOOKED_AT = 16
"""Rows of a source that are looked at for images."""
CHECKED_ROWS = 1000
"""Rows of a dataset whose fields are checked when it is opened; the rest when they are drawn."""


def open_prompts(data: DataConfig, seed: int = 0, rows: RowType = PROMPTS) -> PromptSource:
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
    path, kind = Path(name), file_kind(name)
    if kind is None:
        return open_hub(name, data, rows)
    return (open_jsonl if kind == "jsonl" else open_parquet)(path, data, rows)


def file_kind(name: str) -> str | None:
    """Return the kind of a data file; None: a folder or a hub dataset. Raises InputError for a file of another kind and
    for one that does not exist."""
    path = Path(name)
    kind = FILE_SUFFIXES.get(path.suffix.lower())
    if kind is None and (path.is_file() or path.suffix.lower() in OTHER_SUFFIXES):
        way = OTHER_SUFFIXES.get(path.suffix.lower(), "")
        raise InputError(f"{name}: unknown kind of data file.", f"Known are {', '.join(FILE_SUFFIXES)}. {way}".strip())
    if kind is None and name.startswith((".", "/")) and not path.exists():
        raise InputError(f"--data {name}: there is no such file or directory.", "Check the path.")
    if kind is not None and not path.is_file():
        raise InputError(f"Data file {name} does not exist.", suggest_file(path, FILE_SUFFIXES) or "Check the path.")
    return kind


def open_episodes(environment: str, size: int | None) -> PromptSource:
    """Return the rows of an environment that makes its own tasks from the seeds of its episodes: they hold nothing."""

    def row(index: int) -> PromptRow:
        return PromptRow(index, f"episode {index} of {environment}", [], None)

    return PromptSource(environment, size or DEFAULT_SIZE, row, {"source": f"environment {environment}"})


def of_file(path: Path, rows: list[PromptRow], data: DataConfig) -> PromptSource:
    if not rows:
        raise InputError(f"{path} has no rows.", "Give a file with at least one prompt.")
    with path.open("rb") as file:
        identity = {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return PromptSource(str(path), len(rows), rows.__getitem__, identity, instructions(data), checked=len(rows))


def open_jsonl(path: Path, data: DataConfig, row_type: RowType = PROMPTS) -> PromptSource:
    """Return a row for each line that is not blank (the first `data.size`); InputError names the line that is wrong."""
    with path.open("rb") as file:
        filled = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        rows = [
            row_type.read(_record(line, path, number), index, f"{path}, line {number}", data)
            for index, (number, line) in enumerate(islice(filled, data.size))
        ]
    return of_file(path, rows, data)


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if re.search(rb"\\u[dD]", line):  # one half of a pair of these is no character
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        why = f"{path}, line {number}: not JSON in UTF-8 ({error.reason})."
        raise InputError(why, f"`file {path}` tells its encoding; iconv -f ENCODING -t UTF-8 changes it.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not JSON ({error}).", ONE_OBJECT) from error
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number}: not a JSON object.", ONE_OBJECT)
    return record


def _row_of_table(record: dict[str, Any], index: int, where: str, data: DataConfig, row_type: RowType) -> PromptRow:
    """Return the row of a table record without keys that only fill other rows' objects."""
    read = row_type.template_columns(record, data)
    cleaned = {key: _without_nulls(value) if key in read else value for key, value in record.items()}
    return row_type.read(cleaned, index, where, data)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def columns_of(path: Path) -> list[str]:
    """Return the columns of a .jsonl file, by its first line, or of a .parquet file."""
    if FILE_SUFFIXES[path.suffix.lower()] == "jsonl":
        with path.open("rb") as file:
            return [*_record(file.readline(), path, 1)]
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(path).names


def shows_images(data: DataConfig) -> bool:
    """Return whether a source's first rows have images. Unreadable rows are reported on opening."""
    name = data.name or ""
    if name == DRAWN_SHAPES:
        return True
    if not name or name.startswith(GYM_PREFIX):
        return False
    try:
        return any(map(holds_images, islice(_records(data, file_kind(name)), LOOKED_AT)))
    except (InputError, MachineError, OSError, ValueError):
        return False


def _records(data: DataConfig, kind: str | None) -> Iterator[dict[str, Any]]:
    """Yield the records of a source without reading them as rows."""
    path = Path(data.name or "")
    if kind == "jsonl":
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield _record(line, path, 0)
    elif kind == "parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=LOOKED_AT):
                yield from batch.to_pylist()
    else:
        dataset = _loaded(data.name or "", data)
        for index in range(min(len(dataset), LOOKED_AT)):
            yield dataset[index]


def open_parquet(path: Path, data: DataConfig, row_type: RowType = PROMPTS) -> PromptSource:
    """Return one row for every row of the table (the first `data.size`)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MachineError("Parquet files need pyarrow.", "Install rlctl with its cpu or cuda extra.") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            records = (record for batch in table.iter_batches() for record in batch.to_pylist())
            rows = [
                _row_of_table(record, index, f"{path}, row {index}", data, row_type)
                for index, record in enumerate(islice(records, data.size))
            ]
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} is not a parquet file that can be read: {error}") from error
    return of_file(path, rows, data)


def of_dataset(label: str, dataset: Dataset, data: DataConfig, row_type: RowType = PROMPTS) -> PromptSource:
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
    dataset = _undecoded(dataset)

    def row(index: int) -> PromptRow:
        return _row_of_table(dataset[index], index, f"dataset {label} ({data.split}), row {index}", data, row_type)

    # `datasets` hashes the files of the dataset and every operation on it into this.
    identity = {"source": label, "split": data.split, "fingerprint": dataset._fingerprint}
    size = len(dataset) if data.size is None else min(len(dataset), data.size)
    source = PromptSource(label, size, row, identity, instructions(data), checked=min(size, CHECKED_ROWS))
    for index in range(source.checked):
        row(index)
    return source


def _undecoded(dataset: Dataset) -> Dataset:
    import datasets

    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            dataset = dataset.cast_column(column, datasets.List(datasets.Image(decode=False)))
    return dataset


def open_hub(name: str, data: DataConfig, row_type: RowType = PROMPTS) -> PromptSource:
    """Return the split `data.split` of a dataset `name` or `name:configuration`; InputError where it cannot be had."""
    return of_dataset(name, _loaded(name, data), data, row_type)


def _loaded(name: str, data: DataConfig) -> Dataset:
    try:
        import datasets
        import datasets.exceptions
    except ModuleNotFoundError as error:
        raise MachineError(
            "Hugging Face datasets need the package datasets.", "Install it with `pip install datasets`."
        ) from error
    path, _, configuration = name.partition(":")
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
        return datasets.load_dataset(path, configuration or None, split=data.split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # `datasets` raises these for an unknown name, split or configuration, and for a hub out of reach
        if isinstance(error, ConnectionError):
            why = f"Dataset {name!r} (split {data.split!r}): no file or directory here, {UNREACHED}"
            raise AbsentError(why, f"{download_of(name)} fetches it where the hub can be reached; {LOCAL}") from error
        raise InputError(
            f"Dataset {name!r} (split {data.split!r}) could not be loaded: {first_line(error.__cause__ or error)}",
            "--data takes reasoning-gym:<task>, drawn-shapes, a .jsonl or .parquet file, or a Hugging Face dataset "
            "(name or name:configuration) that is in the local cache or that the hub can be reached for.",
        ) from error


LOCAL = "a copy in a directory DIR is --data DIR."


def download_of(name: str) -> str:
    """Return the command that fetches a dataset of the hub."""
    return f"`hf download {name.partition(':')[0]} --repo-type dataset`"


def open_gym(name: str, data: DataConfig, seed: int, row_type: RowType = PROMPTS) -> PromptSource:
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
    registry = _registry()
    if task_name not in registry:
        near = suggest(task_name, registry) or f"Some are {', '.join(sorted(registry)[:8])}."
        raise InputError(f"reasoning-gym has no task {task_name!r} (--data).", near)
    known = [field.name for field in dataclasses.fields(registry[task_name][1])]
    for key in params:
        if key not in known:
            near = suggest(key, known) or f"It has {', '.join(known)}."
            raise InputError(
                f"reasoning-gym task {task_name!r} has no parameter {key!r} (data.params).",
                f"{near} Parameters of a preset's task are cleared with --set data.params={{}}.",
            )
    defaults = {"seed": seed, "size": DEFAULT_SIZE if data.size is None else data.size}
    task = GymTask(task_name, {**defaults, **params})
    dataset = build_task(task)

    def row(index: int) -> PromptRow:
        entry, where = dataset[index], f"{name}, question {index}"
        answer = row_type.answer_of(dataset, index, where)
        return PromptRow(index, where, entry["question"], answer, {"metadata": entry["metadata"]})

    version = importlib.metadata.version("reasoning_gym")
    identity = {"source": f"{GYM_PREFIX}{task.name}", "params": task.params, "reasoning_gym": version}
    return PromptSource(name, len(dataset), row, identity, instructions(data), task)


def build_task(task: GymTask) -> ProceduralDataset:
    """Return reasoning-gym's own dataset of the task; InputError where the task refuses a value."""
    dataset_class, config_class = _registry()[task.name]
    try:
        config = config_class(**task.params)
        if hasattr(config, "validate"):
            config.validate()
        return dataset_class(config=config)
    except (AssertionError, ValueError, TypeError) as error:
        listed = ", ".join(f"{key}={json.dumps(value, default=str)}" for key, value in task.params.items())
        raise InputError(
            f"reasoning-gym task {task.name!r} refuses its parameters ({listed}): {error}.",
            "Change them with --set data.params.<name>=<value>.",
        ) from error


def _registry() -> dict[str, tuple[type, type]]:
    try:
        with warnings.catch_warnings():
            # One of its dependencies compares with `is`, which Python remarks on at every first import.
            warnings.simplefilter("ignore", SyntaxWarning)
            # It imports matplotlib, and two of the tasks use it.
            sys.modules.setdefault("cellpylib", _ImportedLater("cellpylib"))
            from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise MachineError(
            f"Tasks of reasoning-gym need a package that is not installed: {error.name}.",
            "Install rlctl with its cpu or cuda extra.",
        ) from error
    return DATASETS


class _ImportedLater(ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
