"""A run on disk: manifest, metrics, rollouts, logs and checkpoints that are complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import InputError, RlctlError
from rlctl.runs.checkpoints import (
    DISK_ERRORS,
    Checkpoint,
    NewCheckpoint,
    checkpoints_in,
    clear_partial,
    superfluous,
    write_json,
)

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
LOGS = "logs"


class RunDirectory:
    """`runs/<name>`; one process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    @property
    def memory(self) -> Path:
        """Most bytes that each process held."""
        return self.path / "memory.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def require_place(self) -> None:
        """Raises InputError where `create` cannot make the directory, without making anything."""
        self._require_free()
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(
                f"--run-dir {self.path} cannot be made: {parent} cannot be written to.", "Name another directory."
            )

    def create(self) -> None:
        """Make a run directory and lock it; logs of a run that did not start are cleared away.

        Raises InputError when the place is taken or cannot be written to.
        """
        self._require_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--run-dir {self.path} cannot be made: {error.strerror}.", "Name another directory."
            ) from error
        self._acquire()
        try:
            self._require_free()  # again: another process may have begun a run between the look and the lock
        except InputError:
            self.release()
            raise
        shutil.rmtree(self.logs, ignore_errors=True)

    def _require_free(self) -> None:
        if self.path.is_file():
            raise InputError(f"--run-dir {self.path} is a file.", "Name a directory.")
        if (self.path / MANIFEST).exists():
            raise InputError(
                f"--run-dir {self.path} holds a run already.", "Add --resume to continue it, or name another directory."
            )
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} - {LOCK, LOGS}:
            raise InputError(f"--run-dir {self.path} is not empty and holds no run.", "Name another directory.")

    def abandon(self, *, keep_logs: bool) -> None:
        """Undo `create` for a run that finished no step: its place is free again, with at most the workers' logs."""
        for entry in list(self.path.iterdir()):
            if keep_logs and entry == self.logs and any(log.stat().st_size for log in entry.iterdir()):
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        with contextlib.suppress(OSError):  # logs are left in it
            self.path.rmdir()

    def reopen(self) -> None:
        """Lock the directory of an existing run. Raises InputError when there is none, or another process uses it."""
        if not (self.path / MANIFEST).exists():
            raise InputError(
                f"--resume: {self.path} holds no run ({MANIFEST} is missing).",
                "Check --run-dir, or start the run without --resume.",
            )
        self._acquire()

    def _acquire(self) -> None:
        try:
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"--run-dir {self.path} cannot be written to: {error.strerror}.", "Name another directory."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = None
            raise InputError(
                f"Another process is writing to the run {self.path}.", "Wait for it to end, or name another --run-dir."
            ) from error

    def release(self) -> None:
        """Let other processes write to the run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """What the block cannot write for want of space or permission is an error that names the run."""
        try:
            yield
        except OSError as error:
            if isinstance(error, RlctlError):
                raise
            if not self.path.exists():
                raise RlctlError(
                    f"The run directory {self.path} is gone: it was removed or renamed while the run wrote to it.",
                    "What was not saved elsewhere is lost; start again with another --run-dir.",
                ) from error
            if error.errno not in DISK_ERRORS:
                raise
            raise RlctlError(
                f"The run directory {self.path} cannot be written to: {os.strerror(error.errno)}.",
                "Free space on that disk.",
            ) from error

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace the manifest."""
        write_json(self.path / MANIFEST, manifest)

    def manifest(self) -> dict[str, Any]:
        """The manifest. Raises InputError when it is unreadable."""
        path = self.path / MANIFEST
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise InputError(f"--run-dir {self.path} is no run: it has no {MANIFEST}.", "Check the path.") from error
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {error}.", "Start a new run.") from error
        if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
            raise InputError(f"{path} is not the manifest of a run: it has no `config`.", "Start a new run.")
        odd = [part for part in ("plan", "model", "data") if not isinstance(found.get(part, {}), dict)]
        odd += [key for key, value in found["config"].items() if not {"value", "origin"} <= set(_keys(value))]
        if odd:
            raise InputError(
                f"{path} is not the manifest of a run: its `{odd[0]}` is no such thing.", "Start a new run."
            )
        return found

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write sampled completions of one step to rollouts/step_N.jsonl (N counts from 1)."""
        directory = self.path / "rollouts"
        directory.mkdir(exist_ok=True)
        (directory / f"step_{step + 1}.jsonl").write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        )

    def new_checkpoint(self, step: int) -> NewCheckpoint:
        """A checkpoint to be written after `step` finished steps."""
        return NewCheckpoint(self.path / CHECKPOINTS, step)

    def has_steps(self) -> bool:
        """Whether the run finished a step: there is something to look at or to go on from."""
        return bool(self.checkpoints()) or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        return checkpoints_in(self.path / CHECKPOINTS)

    def prune(self, keep_last: int | None, keep_best: int | None = None) -> None:
        """Remove checkpoints that are neither among the newest nor among the best; by default none."""
        for checkpoint in superfluous(self.checkpoints(), keep_last, keep_best):
            shutil.rmtree(checkpoint.path)

    def clear_partial(self) -> None:
        """Remove what killed saves left behind."""
        clear_partial(self.path / CHECKPOINTS)


def _keys(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, dict) else ()


def newest_run(root: Path) -> Path:
    """The run below `root` that was written to last. Raises InputError when there is none."""
    manifests = sorted(root.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    if not manifests:
        raise InputError(f"--resume: there is no run below {root.absolute()}.", "Name one with --run-dir.")
    return manifests[-1].parent
