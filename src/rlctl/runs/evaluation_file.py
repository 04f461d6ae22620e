"""The file of an evaluation: one JSON line per sample, for continuing. A line without `sample` precedes a task's and
model's samples with their settings, so settings are never mixed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rlctl.config.files import json_line, lock_file
from rlctl.errors import InputError, RlctlError

JUDGED = {"right", "score", "answer_given"}
"""Sample fields used by metrics."""
ANOTHER = "Name another file."
Pair = tuple[str, str]
"""A task and a model, by their labels."""


def require_place(path: Path) -> None:
    """Raise InputError if no file of samples can be written there, without creating one."""
    problem = "it is not a file" if path.exists() and not path.is_file() else None
    if not path.parent.is_dir():
        problem = f"there is no directory {path.parent}"
    elif problem is None and not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = os.strerror(errno.EACCES)
    if problem:
        raise InputError(f"--output {path} cannot be written: {problem}.", ANOTHER)


class SampleFile:
    """Samples of tasks and models, in a file or (without a path) in memory. Use it in a `with` block."""

    def __init__(self, path: Path | None) -> None:
        """Read an existing file. Raises InputError for a foreign file or another writer."""
        self.path = path
        self._settings: dict[Pair, Any] = {}
        self._samples: dict[Pair, dict[tuple[int, int], dict[str, Any]]] = {}
        self._file = None
        if path is None:
            return
        require_place(path)
        try:
            self._file = path.open("a+b")
            free = lock_file(self._file)
        except OSError as error:
            raise InputError(f"--output {path} cannot be written: {error.strerror}.", ANOTHER) from error
        if not free:
            raise InputError(f"--output {path}: another process is writing it.", ANOTHER)
        self._read(path)

    def _read(self, path: Path) -> None:
        """Read the file's samples and remove an incomplete last line."""
        assert self._file is not None  # it was just opened
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        # A file without any whole line is not of ours, and left as it is.
        for number, line in enumerate((content[:whole] or content).splitlines(), 1):
            try:
                record = json.loads(line)
                pair = (record["task"], record["model"])
                if "sample" in record:
                    self._samples.setdefault(pair, {})[int(record["row"]), int(record["sample"])] = record
                    if not record.keys() >= JUDGED:
                        raise ValueError("it was not judged")
                else:
                    self._settings[pair] = record["settings"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(
                    f"--output {path}, line {number} is not a sample of an evaluation.", ANOTHER
                ) from error
        for pair in self._samples.keys() - self._settings.keys():
            raise InputError(f"--output {path} does not say how {pair[0]} was sampled.", ANOTHER)
        self._file.truncate(whole)

    def begin(self, task: str, model: str, settings: Mapping[str, Any]) -> None:
        """Bind a task's and model's samples to `settings`. Raises InputError naming the first different setting in the
        file."""
        pair, settings = (task, model), json.loads(json.dumps(settings))
        then = self._settings.get(pair)
        if then is None:
            self._settings[pair] = settings
            self._write([{"task": task, "model": model, "settings": settings}])
        elif then != settings:
            key = next(key for key in (*settings, *then) if settings.get(key, ...) != then.get(key, ...))
            raise InputError(
                f"--output {self.path} has samples of {task} by {model} with another `{key}`: "
                f"{then.get(key)!r} then, {settings.get(key)!r} now.",
                "Name another file, or restore the setting.",
            )

    def setting(self, key: str) -> Any:
        """Return the value of a setting that the file's samples have; None: they have none."""
        return next((settings[key] for settings in self._settings.values() if key in settings), None)

    def samples(self, task: str, model: str) -> dict[tuple[int, int], dict[str, Any]]:
        return self._samples.setdefault((task, model), {})

    def add(self, records: list[dict[str, Any]]) -> None:
        """Append samples; they are on the disk when this returns."""
        for record in records:
            self.samples(record["task"], record["model"])[record["row"], record["sample"]] = record
        self._write(records)

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(b"".join(json_line(record, other=str) for record in records))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RlctlError(
                f"--output {self.path} cannot be written to: {error.strerror}.",
                "Free space on that disk; the same command then continues from the samples in the file.",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
