"""Records of data files in JSON, JSON lines, CSV and Parquet, single or in a folder. A text stays a text: its spelling
never makes it a date, a number or a missing value."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from rlctl.errors import InputError, MachineError, first_line, suggest, suggest_file

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

Records = Iterator[tuple[str, dict[str, Any]]]
"""Records, each after the words that name it in a message."""
Choose = Callable[[Collection[str]], Collection[str]]
"""Chooses columns of a table whose objects lose their nulls: Arrow gives an object the keys of all rows."""
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ONE_OBJECT = "Each line must be one JSON object; jq -c '.' writes objects so, and jq -c '.[]' the objects of a list."
FOLDERS_OF_TABLES = ("csv", "json", "parquet", "pandas")
"""Kinds of folders, in the words of `datasets`, whose files rlctl reads."""
OF_IMAGES = ("image", "images", "bytes")
"""Fields whose bytes are no texts."""
METADATA = "metadata"
"""Name of the file with the rows of a folder of images."""
LARGEST_CELL = 2**31 - 1
BATCH_ROWS = 1024
_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


def no_columns(columns: Collection[str]) -> Collection[str]:
    return ()


def read_records(path: Path, choose: Choose = no_columns) -> Records:
    """Yield the records of a file. Raises InputError naming the file and the line or row that is wrong."""
    kind = suffix_of(path)
    try:
        if kind == ".parquet":
            yield from _parquet(path, choose)
            return
        with OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            yield from READERS[kind](path, file)
    except UnicodeDecodeError as error:
        reason = f"{path}: not text in UTF-8 ({error.reason})."
        raise InputError(reason, f"`file {path}` tells its encoding; iconv -f ENCODING -t UTF-8 changes it.") from error
    except _DAMAGED as error:
        raise InputError(f"{path} is damaged: {first_line(error)}.", "Copy it again.") from error


def records_of(files: Iterable[Path], choose: Choose = no_columns) -> Records:
    """Yield the records of several files in their order, with the images of a folder's metadata."""
    for path in files:
        for where, record in read_records(path, choose):
            yield where, with_file_names(record, path)


def columns_of(path: Path) -> list[str]:
    """Return the columns of a file, by its first record."""
    return [name for _, record in islice(read_records(path), 1) for name in record]


def suffix_of(path: Path) -> str:
    """Return a file's suffix without the suffix of its compression, in small letters; empty: no kind that is read."""
    *before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    kind = before[-1] if last in OPENERS and before[-1] != ".parquet" else last
    return kind if kind in FILE_SUFFIXES else ""


def is_file_name(name: str) -> bool:
    """Return whether `data.name` names a file. Raises InputError for a file of another kind, or that does not exist."""
    path = Path(name)
    kind = suffix_of(path)
    if not kind and path.is_file():
        formats = f"Known are {', '.join(FILE_SUFFIXES)}, also with {', '.join(OPENERS)}."
        raise InputError(f"{name}: unknown kind of data file.", formats)
    if not kind and name.startswith((".", "/")) and not Path(folder_in(name)[0]).exists():
        raise InputError(f"--data {name}: there is no such file or directory.", "Check the path.")
    if kind and path.is_dir():
        return False
    if kind and not path.is_file():
        raise InputError(f"Data file {name} does not exist.", suggest_file(path, FILE_SUFFIXES) or "Check the path.")
    return bool(kind)


def folder_in(name: str) -> tuple[str, str]:
    """Return the folder or hub name in `name:configuration`, and the configuration."""
    folder, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    return folder, configuration


def files_in(folder: str, configuration: str, split: str) -> list[Path] | None:
    """Return the data files in a folder's split, found by the rules of `datasets`; None: a dataset of another kind, or
    of the hub. Raises InputError where the folder has no such split."""
    import datasets

    if not Path(folder).is_dir():
        return None
    builder = datasets.load_dataset_builder(folder, configuration or None)
    data_files = {str(key): [Path(file) for file in files] for key, files in (builder.config.data_files or {}).items()}
    tables = builder.name in FOLDERS_OF_TABLES
    described = any(file.stem == METADATA and suffix_of(file) for files in data_files.values() for file in files)
    if not tables and not described:
        return None
    if split not in data_files:
        hint = suggest(split, data_files) or f"It has {', '.join(data_files)}; choose with --set data.split=..."
        raise InputError(f"The folder {folder} has no split {split!r}.", hint)
    files = [file for file in data_files[split] if tables or (file.stem == METADATA and suffix_of(file))]
    if unread := next((file for file in files if not suffix_of(file)), None):
        raise InputError(
            f"{unread}: files of this kind are not read.", "Unpack it, or save the dataset in another form."
        )
    return files


def digest_of(files: Collection[Path]) -> str:
    """Return the SHA-256 of a file, or of the names and digests of several."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return digests[0][1] if len(digests) == 1 else hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _json_lines(path: Path, file: IO[bytes]) -> Records:
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, json_object(line, where)


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a line. Raises InputError."""
    try:
        record = json.loads(line)
        if re.search(rb"\\u[dD]", line):  # one half of a pair of these is no character
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        reason = f"{where}: not JSON in UTF-8 ({error.reason})."
        raise InputError(reason, "`file FILE` tells its encoding; iconv -f ENCODING -t UTF-8 changes it.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}).", ONE_OBJECT) from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: not a JSON object.", ONE_OBJECT)
    return record


def _json(path: Path, file: IO[bytes]) -> Records:
    """Yield the objects of a list, or the only object; a .json file may also have one object a line."""
    text = file.read().strip()
    try:
        document = json.loads(text)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") != "Extra data":
            raise InputError(f"{path}: not JSON ({error}).", "It must hold a list of objects.") from error
        yield from _json_lines(path, io.BytesIO(text))
        return
    escaped = re.search(rb"\\u[dD]", text)
    for index, record in enumerate(document if isinstance(document, list) else [document]):
        where = f"{path}, row {index}"
        if not isinstance(record, dict):
            raise InputError(f"{where}: not a JSON object.", "The file must hold a list of objects.")
        yield where, json_object(json.dumps(record).encode(), where) if escaped else record


def _csv(path: Path, file: IO[bytes]) -> Records:
    """Yield the rows below the header. A cell is a text, an empty one too."""
    csv.field_size_limit(LARGEST_CELL)  # Python refuses cells of more than 131,072 characters by default
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:  # spreadsheets write a byte order mark
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        begun = 1
        try:
            header = next(rows, [])
            if twice := next((name for name in header if header.count(name) > 1), None):
                raise InputError(f"{path}, line 1: two columns are named {twice!r}.", "Rename one of them.")
            begun = rows.line_num + 1
            for cells in rows:
                where = f"{path}, line {begun}"
                begun = rows.line_num + 1
                if not cells:  # a blank line
                    continue
                if len(cells) != len(header):
                    raise InputError(
                        f"{where}: {len(cells)} cells, and the header has {len(header)} ({', '.join(header)}).",
                        f"Cells are separated by {delimiter!r}, and a cell with it stands in double quotes.",
                    )
                yield where, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            hint = 'A cell with quotes, separators or line ends stands in double quotes, and a quote in it is "".'
            raise InputError(f"{path}, line {begun}: not CSV ({error}).", hint) from error


def _parquet(path: Path, choose: Choose) -> Records:
    index = 0
    with opened_parquet(path) as table:
        for batch in parquet_batches(table, BATCH_ROWS):
            for record in arrow_records(batch, choose):
                yield f"{path}, row {index}", record
                index += 1


def parquet_batches(table: pyarrow.parquet.ParquetFile, rows: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield batches of at most `rows`. Arrow reads all that it is asked for into memory, so it is asked for one group
    of rows after the other."""
    for group in range(table.num_row_groups):
        yield from table.iter_batches(batch_size=rows, row_groups=[group])


@contextmanager
def opened_parquet(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a Parquet file. Raises InputError for what Arrow cannot read in the block."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MachineError("Parquet files need pyarrow.", "Install rlctl with its cpu or cuda extra.") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            yield table
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} is not a parquet file that can be read: {error}") from error


def arrow_records(table: pyarrow.Table | pyarrow.RecordBatch, choose: Choose = no_columns) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table as the same rows in JSON would be, at any depth. Arrow's JSON type becomes values, not
    JSON texts (`datasets` 5 writes objects with unlike keys so); bytes in UTF-8 become texts (Spark, Impala and others
    write texts without a type); a float32 becomes the shortest number that rounds to it. Chosen columns lose nulls."""
    chosen = choose(table.schema.names)
    readers = {field.name: _reader(field.type, field.name, field.name in chosen) for field in table.schema}
    changed = {name: read for name, read in readers.items() if read is not None}
    for record in table.to_pylist():
        yield record | {name: read(record[name]) for name, read in changed.items() if record[name] is not None}


def _reader(kind: Any, name: str, drops: bool) -> Callable[[Any], Any] | None:
    """Return the function of a type's values that are not null; None: they stay as they are. `name`: the field's."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads
    if (types.is_binary(kind) or types.is_large_binary(kind)) and name not in OF_IMAGES:
        return _text_of_bytes
    if types.is_float32(kind) or types.is_float16(kind):
        narrow = np.float32 if types.is_float32(kind) else np.float16
        return lambda value: float(str(narrow(value)))
    if types.is_map(kind):
        item = _reader(kind.item_type, name, drops)
        return lambda pairs: {key: value if item is None or value is None else item(value) for key, value in pairs}
    if types.is_struct(kind):
        fields = {field.name: _reader(field.type, field.name, drops) for field in kind}
        if not drops and not any(fields.values()):
            return None
        return lambda json_object: _object(json_object, fields, drops)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = _reader(kind.value_type, name, drops)
        return (
            None
            if item is None
            else lambda json_list: [None if element is None else item(element) for element in json_list]
        )
    return None


def _text_of_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _object(json_object: dict[str, Any], fields: dict[str, Callable[[Any], Any] | None], drops: bool) -> dict[str, Any]:
    kept = {key: value for key, value in json_object.items() if not drops or value is not None}
    return {
        key: value if value is None or (read := fields[key]) is None else read(value) for key, value in kept.items()
    }


def with_file_names(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a row of an image folder's metadata with its images: `file_name` is relative to the metadata."""
    if path.stem != METADATA:
        return record
    places = {"file_name": "image", "file_names": "images"}
    with_paths: dict[str, Any] = {}
    folder = path.parent.absolute()
    for name, column in places.items():
        if (cell := record.get(name)) and column not in record:
            with_paths[column] = (
                [str(folder / path) for path in cell] if isinstance(cell, list) else str(folder / str(cell))
            )
    return {**record, **with_paths}


LINES = (".jsonl", ".ndjson")
READERS = {**dict.fromkeys(LINES, _json_lines), ".json": _json, ".csv": _csv, ".tsv": _csv}
FILE_SUFFIXES = (*READERS, ".parquet")
"""Suffixes of data files."""
