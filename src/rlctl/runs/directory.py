"""A run on disk: manifest, metrics, rollouts, logs and checkpoints that are complete or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import InputError, RlctlError

MANIFEST = "manifest.json"
STATE = "state.json"
LOCK = ".lock"
LOGS = "logs"
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO})
_CHECKPOINT_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step` finished steps."""

    step: int
    path: Path

    @property
    def policy(self) -> Path:
        """Where the policy backend wrote its part."""
        return self.path / "policy"

    def state(self) -> dict[str, Any]:
        """What the loop saved besides the policy."""
        try:
            return json.loads((self.path / STATE).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise InputError(
                f"Checkpoint {self.path} has no readable {STATE}: {error}.", "Remove it to resume from the one before."
            ) from error


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
    def report(self) -> Path:
        return self.path / "report.html"

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
            if isinstance(error, RlctlError) or error.errno not in DISK_ERRORS:
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
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}.", "Start a new run.") from error
        if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
            raise InputError(f"{path} is not the manifest of a run: it has no `config`.", "Start a new run.")
        return found

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write sampled completions of one step to rollouts/step_N.jsonl (N counts from 1)."""
        directory = self.path / "rollouts"
        directory.mkdir(exist_ok=True)
        (directory / f"step_{step + 1}.jsonl").write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        )

    @contextlib.contextmanager
    def checkpoint(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """Write a checkpoint after `step` finished steps: the block fills the yielded directory.

        Then it is flushed to the disk and renamed into place. An exception in the block leaves no checkpoint and
        removes what was written.
        """
        final = self.path / "checkpoints" / f"step_{step}"
        aside = final.with_name(f".step_{step}.partial")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "policy").mkdir(parents=True)
            yield aside / "policy"
            write_json(aside / STATE, {**state, "step": step})
            _flush_tree(aside)
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            _flush(final.parent)
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            # A worker fails to write in the worker: what arrives here is text. Some of our own errors are OSErrors too.
            full = isinstance(error, RlctlError) and os.strerror(errno.ENOSPC) in str(error)
            if not full and (isinstance(error, RlctlError) or not isinstance(error, OSError)):
                raise
            reason = os.strerror(errno.ENOSPC) if full else error
            raise RlctlError(
                f"Checkpoint of step {step} could not be written to {final}: {reason}.", "Free space on that disk."
            ) from error

    def has_steps(self) -> bool:
        """Whether the run finished a step: there is something to look at or to go on from."""
        return bool(self.checkpoints()) or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        directory = self.path / "checkpoints"
        found = (
            [(_CHECKPOINT_NAME.fullmatch(entry.name), entry) for entry in directory.iterdir()]
            if directory.is_dir()
            else []
        )
        return sorted((Checkpoint(int(m[1]), entry) for m, entry in found if m), key=lambda checkpoint: checkpoint.step)

    def prune(self, keep_last: int | None) -> None:
        """Remove all but the newest `keep_last` checkpoints, and what killed saves left behind."""
        for partial in (self.path / "checkpoints").glob(".step_*.partial"):
            shutil.rmtree(partial)
        for checkpoint in self.checkpoints()[: -keep_last if keep_last else 0]:
            shutil.rmtree(checkpoint.path)


def newest_run(root: Path) -> Path:
    """The run below `root` that was written to last. Raises InputError when there is none."""
    manifests = sorted(root.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    if not manifests:
        raise InputError(f"--resume: there is no run below {root.absolute()}.", "Name one with --run-dir.")
    return manifests[-1].parent


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON: a reader sees the old or the new file, never a part."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    _flush(aside)
    aside.replace(path)
    _flush(path.parent)


def _flush_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            _flush(Path(directory) / name)
        _flush(Path(directory))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
