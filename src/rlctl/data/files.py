"""Prompts from JSONL and parquet files, checked row by row when they are opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rlctl.config.schema import DataConfig
from rlctl.data.rows import PromptRow, instructions, limited, row_from_record
from rlctl.errors import InputError, MachineError


class FilePrompts:
    """Rows of one file, all in memory."""

    task = None

    def __init__(self, label: str, rows: list[PromptRow], sha256: str, instructions: str = "") -> None:
        if not rows:
            raise InputError(f"{label} has no rows.", "Give a file with at least one prompt.")
        self.label, self.instructions = label, instructions
        self._rows, self._sha256 = rows, sha256

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def fingerprint(self) -> dict[str, Any]:
        return {"source": self.label, "rows": len(self), "sha256": self._sha256}


def open_jsonl(path: Path, data: DataConfig) -> FilePrompts:
    """One row for every line that is not blank (the first `data.size`); InputError naming the line that is wrong."""
    with path.open("rb") as lines:
        filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        rows = [
            row_from_record(_record(line, path, number), index, f"{path}, line {number}", data)
            for index, (number, line) in enumerate(islice(filled, data.size))
        ]
    return FilePrompts(str(path), rows, _sha256(path), instructions(data))


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The object on one line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise InputError(f"{path}, line {number}: not JSON ({error}).", "Each line must be one JSON object.") from error
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number}: not a JSON object.", "Each line must be one JSON object.")
    return record


def open_parquet(path: Path, data: DataConfig) -> FilePrompts:
    """One row for every row of the table (the first `data.size`)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MachineError("Parquet files need pyarrow.", "Install rlctl with its cpu or cuda extra.") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = [
                row_from_record(record, index, f"{path}, row {index}", data)
                for index, record in enumerate(islice(_records(table), limited(table.metadata.num_rows, data.size)))
            ]
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} is not a parquet file that can be read: {error}") from error
    return FilePrompts(str(path), rows, _sha256(path), instructions(data))


def _records(table: Any) -> Iterator[dict[str, Any]]:
    for batch in table.iter_batches():
        yield from batch.to_pylist()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
