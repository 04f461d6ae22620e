"""Prompts of what `data.name` names: a reasoning-gym task, a JSONL or parquet file, a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.schema import DataConfig
from rlctl.data.gym import open_gym
from rlctl.data.prompt_rows import GYM_PREFIX, PromptRow, PromptSource, instructions, require_fields, row_from_record
from rlctl.data.texts import pair_from_record, text_from_record
from rlctl.errors import InputError, MachineError, first_line, suggest, suggest_file

if TYPE_CHECKING:
    from datasets import Dataset

FILE_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
OTHER_SUFFIXES = {
    ".json": "A list of objects becomes one object a line with: jq -c '.[]' in.json > out.jsonl",
    ".csv": "A folder that holds only this file can be given as --data: Hugging Face datasets reads it.",
    ".gz": "Unpack it first: gunzip FILE",
}
"""How files of other kinds become data."""
ONE_OBJECT = "Each line must be one JSON object; jq -c '.' writes objects so, and jq -c '.[]' the objects of a list."
ROWS = {"prompts": row_from_record, "texts": text_from_record, "pairs": pair_from_record}
"""Functions that make a row of a record, by `data.rows`."""
CHECKED_ROWS = 1000
"""Rows of a dataset whose fields are checked when it is opened; the rest when they are drawn."""


def open_prompts(data: DataConfig, seed: int = 0) -> PromptSource:
    """Read and check the source that `data.name` names, without a download except by Hugging Face datasets.

    `seed` makes the questions of a reasoning-gym task that is given no seed of its own. Raises InputError for a source
    that does not exist, has no rows, or lacks a field.
    """
    name = data.name
    if not name:
        raise InputError("No data: data.name is not set.", "Give --data, for example reasoning-gym:chain_sum.")
    if name.startswith(GYM_PREFIX):
        return open_gym(name, data, seed)
    if data.params:
        raise InputError(
            f"data.params ({', '.join(data.params)}) belong to a reasoning-gym task, but data.name is {name!r}.",
            "Remove them, or clear those of a preset with --set data.params={}.",
        )
    path = Path(name)
    kind = FILE_SUFFIXES.get(path.suffix.lower())
    if kind is None and (path.is_file() or path.suffix.lower() in OTHER_SUFFIXES):
        way = OTHER_SUFFIXES.get(path.suffix.lower(), "")
        raise InputError(f"{name}: unknown kind of data file.", f"Known are {', '.join(FILE_SUFFIXES)}. {way}".strip())
    if kind and path.is_dir():
        raise InputError(f"Data file {name} cannot be read: it is a directory, not a file.", "Give a file.")
    if kind is None and name.startswith((".", "/")) and not path.exists():
        raise InputError(f"--data {name}: there is no such file or directory.", "Check the path.")
    if kind is None:
        return open_hub(name, data)
    if not path.is_file():
        raise InputError(f"Data file {name} does not exist.", suggest_file(path, FILE_SUFFIXES) or "Check the path.")
    return open_jsonl(path, data) if kind == "jsonl" else open_parquet(path, data)


class FilePrompts:
    """Rows of one file, all in memory; checked row by row when it is opened."""

    task = None

    def __init__(self, path: Path, rows: list[PromptRow], data: DataConfig) -> None:
        if not rows:
            raise InputError(f"{path} has no rows.", "Give a file with at least one prompt.")
        self.label, self.instructions, self._rows = str(path), instructions(data), rows
        with path.open("rb") as file:
            self._sha256 = hashlib.file_digest(file, "sha256").hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": len(self), "sha256": self._sha256}


def open_jsonl(path: Path, data: DataConfig) -> FilePrompts:
    """Return a row for each line that is not blank (the first `data.size`); InputError names the line that is wrong."""
    with path.open("rb") as file:
        filled = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        rows = [
            ROWS[data.rows](_record(line, path, number), index, f"{path}, line {number}", data)
            for index, (number, line) in enumerate(islice(filled, data.size))
        ]
    return FilePrompts(path, rows, data)


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        why = f"{path}, line {number}: not JSON in UTF-8 ({error.reason})."
        raise InputError(why, f"`file {path}` tells its encoding; iconv -f ENCODING -t UTF-8 changes it.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not JSON ({error}).", ONE_OBJECT) from error
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number}: not a JSON object.", ONE_OBJECT)
    return record


def columns_of(path: Path) -> list[str]:
    """Return the columns of a .jsonl file, by its first line, or of a .parquet file."""
    if FILE_SUFFIXES[path.suffix.lower()] == "jsonl":
        with path.open("rb") as file:
            return [*_record(file.readline(), path, 1)]
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(path).names


def open_parquet(path: Path, data: DataConfig) -> FilePrompts:
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
                ROWS[data.rows](record, index, f"{path}, row {index}", data)
                for index, record in enumerate(islice(records, data.size))
            ]
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} is not a parquet file that can be read: {error}") from error
    return FilePrompts(path, rows, data)


class HubPrompts:
    """Rows of one split, memory-mapped by `datasets`."""

    task = None

    def __init__(self, label: str, dataset: Dataset, data: DataConfig) -> None:
        if len(dataset) == 0:
            raise InputError(f"Dataset {label} (split {data.split}) has no rows.")
        if data.rows == "prompts":
            require_fields(dataset.column_names, data, f"Dataset {label}")
        for column, feature in dataset.features.items():
            if any(kind in repr(feature) for kind in ("Image(", "Audio(", "Video(")):
                raise InputError(
                    f"Dataset {label}: column {column!r} holds images, sound or video, and prompts are texts.",
                    "rlctl does not train on them. If the text alone is meant, save the dataset without that column.",
                )
        self.label, self.instructions = label, instructions(data)
        self._dataset, self._data = dataset, data
        self._rows = len(dataset) if data.size is None else min(len(dataset), data.size)
        for index in range(min(self._rows, CHECKED_ROWS)):
            self[index]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"dataset {self.label} ({self._data.split}), row {index}"
        return ROWS[self._data.rows](self._dataset[index], index, where, self._data)

    def fingerprint(self) -> dict[str, Any]:
        # `datasets` hashes the files of the dataset and every operation on it into this.
        return {
            "source": self.label,
            "split": self._data.split,
            "rows": len(self),
            "fingerprint": self._dataset._fingerprint,
        }


def open_hub(name: str, data: DataConfig) -> HubPrompts:
    """Return the split `data.split` of a dataset `name`, or of its configuration c as `name:c`.

    Looks in the local cache and then on the hub. Raises InputError when it is in neither, or the hub cannot be reached.
    """
    try:
        import datasets
        import datasets.exceptions
    except ModuleNotFoundError as error:
        raise MachineError(
            "Hugging Face datasets need the package datasets.", "Install rlctl[cpu] or [cuda]."
        ) from error
    path, _, configuration = name.partition(":")
    if any((Path(path) / marker).is_file() for marker in ("dataset_dict.json", "state.json")):  # of `save_to_disk`
        return HubPrompts(name, _from_disk(path, data), data)
    try:
        loaded = datasets.load_dataset(path, configuration or None, split=data.split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # `datasets` raises these for an unknown name, split or configuration, and for a hub out of reach
        raise InputError(
            f"Dataset {name!r} (split {data.split!r}) could not be loaded: {first_line(error)}",
            "--data takes reasoning-gym:<task>, a .jsonl or .parquet file, or a Hugging Face dataset (name or "
            "name:configuration) that is in the local cache or that the hub can be reached for.",
        ) from error
    return HubPrompts(name, loaded, data)


def _from_disk(path: str, data: DataConfig) -> Dataset:
    """Return a directory written by `save_to_disk`: one split, or several by name."""
    import datasets

    loaded = datasets.load_from_disk(path)
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if data.split not in loaded:
        splits = [str(split) for split in loaded]
        hint = suggest(data.split, splits) or f"It has {', '.join(splits)}; choose with --set data.split=..."
        raise InputError(f"Dataset {path} has no split {data.split!r}.", hint)
    return loaded[data.split]
