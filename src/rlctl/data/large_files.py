"""Rows of large JSON Lines and Parquet files. They stay on disk, and each is read when it is drawn."""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

from rlctl.data.records import (
    LINES,
    Choose,
    arrow_records,
    json_object,
    opened_parquet,
    parquet_batches,
    suffix_of,
)
from rlctl.errors import InputError, MachineError

WHOLE_BYTES = 64 * 2**20
"""Size of data files, for Parquet uncompressed, up to which all rows are read and checked before a run."""
BLOCK_BYTES = 2**14
"""Distance of the places of a JSON Lines file that are in memory: a row costs reading at most so much before it."""
BATCH_BYTES = 2**18
BLOCKS_KEPT = 2
"""Blocks of lines and batches in memory, for passes over all rows."""
MOST_BATCH_ROWS = 1024


class LargeFiles(Protocol):
    """Rows of files by their number."""

    size: int
    notes: tuple[str, ...]
    """Remarks for the user."""

    def at(self, index: int) -> tuple[Path, str, dict[str, Any]]:
        """Return a row's file, its name in a message, and its record. Raises InputError for a row that is wrong."""
        ...


def open_large(files: Sequence[Path], most: int | None, choose: Choose) -> LargeFiles | None:
    """Return the first `most` rows of large files; None for small ones, and for kinds that have to be read from their
    beginning: JSON lists, CSV, and compressed files. Raises InputError or MachineError."""
    if all(path.suffix.lower() in LINES for path in files):
        return LineFiles(files, most) if sum(path.stat().st_size for path in files) > WHOLE_BYTES else None
    if all(suffix_of(path) == ".parquet" for path in files):
        sizes = [_parquet_size(path) for path in files]
        return ParquetFiles(files, sizes, most, choose) if sum(size for _, size in sizes) > WHOLE_BYTES else None
    return None


class LineFiles:
    """JSON Lines. Of each block of some lines, memory holds the place, the line's number and the row's number."""

    notes = ()

    def __init__(self, files: Sequence[Path], most: int | None) -> None:
        self._files, self._states = files, [_state(path.stat()) for path in files]
        self._blocks = tuple(array("q") for _ in range(4))
        self._rows, self._lines, self._places, self._owners = self._blocks
        self._block = lru_cache(maxsize=BLOCKS_KEPT)(self._read)
        self.size = 0
        for owner, path in enumerate(files):
            with path.open("rb") as file:
                self._index(owner, file, most)

    def _index(self, owner: int, file: Any, most: int | None) -> None:
        place, following, size = 0, 0, self.size
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                if size == most:
                    break
                if place >= following:
                    for column, value in zip(self._blocks, (size, number, place, owner), strict=True):
                        column.append(value)
                    following = place + BLOCK_BYTES
                size += 1
            place += len(line)
        self.size = size

    def at(self, index: int) -> tuple[Path, str, dict[str, Any]]:
        block = bisect_right(self._rows, index) - 1
        path, (number, line) = self._files[self._owners[block]], self._block(block)[index - self._rows[block]]
        where = f"{path}, line {number}"
        return path, where, json_object(line, where)

    def _read(self, block: int) -> list[tuple[int, bytes]]:
        """Return the lines of a block that are not blank, with their numbers."""
        owner = self._owners[block]
        path = self._files[owner]
        with path.open("rb") as file:
            if _state(os.fstat(file.fileno())) != self._states[owner]:
                raise InputError(
                    f"{path} has changed since the run opened it.",
                    "Large files are read during a run: restore the file, or start a new run.",
                )
            file.seek(self._places[block])
            lines = ((n, line) for n, line in enumerate(file, start=self._lines[block]) if not line.isspace())
            end = self._rows[block + 1] if block + 1 < len(self._rows) else self.size
            return [*islice(lines, end - self._rows[block])]


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class ParquetFiles:
    """A copy of Parquet files in small Arrow batches, because Parquet decodes a group of rows, often a million, for one
    row. The copy has no name and goes with the process."""

    def __init__(
        self, files: Sequence[Path], sizes: Sequence[tuple[int, int]], most: int | None, choose: Choose
    ) -> None:
        """`sizes`: rows and uncompressed bytes of each file."""
        self._files, self._choose = files, choose
        self._firsts = [*accumulate((rows for rows, _ in sizes), initial=0)]
        self.size = self._firsts[-1] if most is None else min(most, self._firsts[-1])
        share = self.size / max(1, self._firsts[-1])
        self._copy = _temporary(share * sum(size for _, size in sizes))
        self._rows, self._places = array("q", [0]), array("q", [0])
        self._batch = lru_cache(maxsize=BLOCKS_KEPT)(self._read)
        self._copy_all(sizes)
        place, size = tempfile.gettempdir(), self._copy.tell()
        self.notes = (f"the rows are copied to an unnamed file in {place} ({size / 1e9:.1f} GB) during the run",)

    def _copy_all(self, sizes: Sequence[tuple[int, int]]) -> None:
        for path, (rows, size) in zip(self._files, sizes, strict=True):
            batch_rows = max(1, min(MOST_BATCH_ROWS, rows * BATCH_BYTES // max(1, size)))
            with opened_parquet(path) as table:
                for batch in parquet_batches(table, batch_rows):
                    if self._rows[-1] >= self.size:
                        return
                    self._write(batch)

    def _write(self, batch: Any) -> None:
        import pyarrow

        try:  # a stream for each batch, since dictionaries may differ between batches
            with pyarrow.ipc.new_stream(self._copy, batch.schema) as stream:
                stream.write_batch(batch)
            self._copy.flush()
        except OSError as error:
            raise _no_room(error.strerror or str(error)) from error
        self._places.append(self._copy.tell())
        self._rows.append(self._rows[-1] + batch.num_rows)

    def at(self, index: int) -> tuple[Path, str, dict[str, Any]]:
        import pyarrow

        block = bisect_right(self._rows, index) - 1
        owner = bisect_right(self._firsts, index) - 1
        path, where = self._files[owner], f"{self._files[owner]}, row {index - self._firsts[owner]}"
        try:
            (record,) = arrow_records(self._batch(block).slice(index - self._rows[block], 1), self._choose)
        except pyarrow.ArrowException as error:
            raise InputError(f"{where}: {error}", "Leave the row out.") from error
        return path, where, record

    def _read(self, block: int) -> Any:
        import pyarrow

        begin, end = self._places[block : block + 2]
        return pyarrow.ipc.open_stream(os.pread(self._copy.fileno(), end - begin, begin)).read_all()


def _parquet_size(path: Path) -> tuple[int, int]:
    """Return the rows of a Parquet file and their uncompressed bytes."""
    with opened_parquet(path) as table:
        facts = table.metadata
        return facts.num_rows, sum(facts.row_group(group).total_byte_size for group in range(facts.num_row_groups))


def _temporary(needed: float) -> Any:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free:
        raise _no_room(f"it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    return tempfile.TemporaryFile(prefix="rlctl-rows-")


def _no_room(reason: str) -> MachineError:
    return MachineError(
        f"The rows of the Parquet data cannot be copied to {tempfile.gettempdir()}: {reason}.",
        "Set TMPDIR to a directory with room, or use JSON Lines, which are read in place.",
    )
