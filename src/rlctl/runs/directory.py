"""A run on disk: manifest, metrics, rollouts, logs and checkpoints that are complete or absent."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.checkpoints.staging import is_full
from rlctl.config.files import flush, flush_one, json_line, lock_file, write_json
from rlctl.errors import InputError, RlctlError, listed
from rlctl.settings.run import VALIDATION_PREFIX
from rlctl.telemetry.metrics import LOSS, MetricsFile, finite, flatten, read_metrics

MANIFEST = "manifest.json"
DIGEST = "digest"
RESUMES = "resumes"
"""The manifest's number of resumes so far; absent: none."""
CHECKPOINTS = "checkpoints"
CHECKPOINT_NAME = re.compile(r"step_(\d+)")
PARTIAL_NAME = re.compile(r"\.step_(\d+)\.partial")
REMOVED = ".removed"
LOCK = ".lock"
FAULT = "fault-node"
LOGS = "logs"
DRIVER_LOG = "driver.log"
STATE = "state.json"
STATE_PARTS = {"step": int, "version": int, "source": dict, "metrics": dict, "files": dict}
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO})


class RunDirectory:
    """`runs/<name>`; one process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.name = self.path.name
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / LOGS
        self.log = self.logs / DRIVER_LOG
        self.report = self.path / "report.html"
        self.memory = self.path / "memory.json"
        """Most bytes that each process held."""
        self.damaged: set[int] = set()
        """Steps of damaged checkpoints, which no longer count."""
        self._lock: int | None = None
        self._lasting: Path | None = self.path
        """Exists unless somebody removed the run; later writes may recreate its directory."""

    def require_place(self) -> None:
        """Raise InputError where `create` cannot make the directory, without making anything."""
        with self._made():
            self._require_free()
            parent = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(
                f"--run-dir {self.path} cannot be made: {parent} cannot be written to.", "Name another directory."
            )

    @contextlib.contextmanager
    def _made(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"--run-dir {self.path} cannot be made: {error.strerror}.", "Name another.") from error

    def create(self) -> None:
        """Create and lock a run directory, clearing logs of a failed start. Raises InputError if taken or not
        writable."""
        with self._made():
            self._require_free()
            self.path.mkdir(parents=True, exist_ok=True)
        self._acquire()
        try:
            self._require_free()  # again: another process may have begun a run between the look and the lock
        except InputError:
            self.release()
            raise
        shutil.rmtree(self.logs, ignore_errors=True)

    def _require_free(self) -> None:
        problem, advice = None, "Name another directory."
        if self.path.is_file():
            problem, advice = "is a file", "Name a directory."
        elif (self.path / MANIFEST).exists():
            problem, advice = "holds a run already", "Add --resume to continue it, or name another directory."
        elif self.path.is_dir() and {entry.name for entry in self.path.iterdir()} - {LOCK, LOGS}:
            problem = "is not empty and holds no run"
        if problem:
            raise InputError(f"--run-dir {self.path} {problem}.", advice)

    def abandon(self, *, keep_logs: bool) -> None:
        """Undo `create` for a run without steps, keeping at most the workers' logs."""
        if not self.path.exists():
            return
        self._lasting = None
        logs = self.logs.iterdir() if keep_logs and self.logs.is_dir() else ()
        kept = {self.logs} if any(log.stat().st_size for log in logs if log != self.log) else set[Path]()
        for entry in {*self.path.iterdir()} - kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not kept:
            self.path.rmdir()

    def reopen(self) -> None:
        """Lock an existing run's directory. Raises InputError if missing or in use."""
        if not (self.path / MANIFEST).exists():
            raise InputError(
                f"--resume: {self.path} holds no run ({MANIFEST} is missing).",
                "Check --run-dir, or start the run without --resume.",
            )
        self._acquire()
        self._lasting = self.path / MANIFEST

    def _acquire(self) -> None:
        try:
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            reason = f"--run-dir {self.path} cannot be written to: {error.strerror}."
            raise InputError(reason, "Name another directory.") from error
        try:
            free = lock_file(self._lock)
        except OSError as error:
            self.release()
            reason = f"--run-dir {self.path} is on a file system that locks no files: {error.strerror}."
            raise InputError(reason, "Mount it with locks (Lustre: `flock`), or name a directory elsewhere.") from error
        if not free:
            self.release()
            reason = f"Another process is writing to the run {self.path}."
            raise InputError(reason, "Wait for it to end, or name another --run-dir.")

    def blame(self, node: str | None) -> None:
        """Keep the address of the node that ended the run in `fault-node`, for a script that queues the run again."""
        with contextlib.suppress(OSError):
            (self.path / FAULT).unlink(missing_ok=True)
            if node is not None:
                (self.path / FAULT).write_text(node + "\n")

    def is_locked(self) -> bool:
        with contextlib.suppress(OSError), (self.path / LOCK).open() as lock:
            return not lock_file(lock, shared=True)
        return False

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn errors of the block for lack of the directory, of space or of permission into one that names the run."""
        try:
            yield
        except Exception as error:
            if self._lasting is None:
                raise
            self._require_there(error)  # a worker's error may follow from that too
            if isinstance(error, RlctlError) or not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
                raise
            if error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(self.path):
                raise
            raise RlctlError(
                f"The run directory {self.path} cannot be written to: {os.strerror(error.errno)}.",
                "Free space on that disk.",
            ) from error

    def _require_there(self, cause: Exception | None = None) -> None:
        if self._lasting is not None and not self._lasting.exists():
            raise RlctlError(
                f"The run directory {self.path} is gone: it was removed or renamed while the run wrote to it.",
                "Everything that was not saved elsewhere is lost; start again with another --run-dir.",
            ) from cause

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace the manifest; it holds a digest of itself."""
        write_json(self.path / MANIFEST, {**manifest, DIGEST: _digest(manifest)})
        self._lasting = self.path / MANIFEST

    def manifest(self) -> dict[str, Any]:
        """Return the manifest. Raises InputError when it is unreadable."""
        path = self.path / MANIFEST
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8")))
            parts = [*(content.get(part, {}) for part in ("plan", "model", "data")), *content["config"].values()]
            if not all(isinstance(part, dict) for part in parts):
                raise ValueError("it is not the manifest of a run")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(f"{self.path} is not a run: it has no {MANIFEST}.", "Check the path.") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {error}.", "Start a new run.") from error
        return content

    @contextlib.contextmanager
    def opened_from_here(self) -> Iterator[None]:
        """Add the run's start directory to InputErrors, because relative paths may refer to it."""
        try:
            yield
        except InputError as error:
            there = self.manifest().get("working_directory", os.getcwd())
            if there == os.getcwd():
                raise
            here = f"The run was started in {there}: go on from there if files are named from it."
            raise type(error)(error.message, " ".join(filter(None, (error.hint, here)))) from error

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], folder: str = "rollouts") -> None:
        """Write sampled completions of one step to step_N.jsonl (N counts from 1) of rollouts/ or another folder."""
        directory = self.path / folder
        directory.mkdir(exist_ok=True)
        (directory / f"step_{step}.jsonl").write_bytes(b"".join(json_line(row, other=str) for row in rows))

    def new_checkpoint(self, step: int) -> NewCheckpoint:
        """Return a checkpoint to be written after `step` finished steps. Raises RlctlError where the run is gone."""
        self._require_there()
        return NewCheckpoint(self.path / CHECKPOINTS, step)

    def has_steps(self) -> bool:
        return bool(self.checkpoint_directories()) or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def checkpoints(self) -> list[Checkpoint]:
        """Return resumable checkpoints, oldest first: with readable state and no known damage."""
        return [
            checkpoint
            for checkpoint in self.checkpoint_directories()
            if checkpoint.step not in self.damaged and checkpoint.readable
        ]

    def checkpoint_directories(self) -> list[Checkpoint]:
        """Return what stands in the place of a checkpoint, damaged or not, oldest first."""
        directory = self.path / CHECKPOINTS
        entries = directory.iterdir() if directory.is_dir() else ()
        steps = [(CHECKPOINT_NAME.fullmatch(entry.name), entry) for entry in entries]
        return sorted((Checkpoint(int(m[1]), entry) for m, entry in steps if m), key=lambda checkpoint: checkpoint.step)

    def open_metrics(self, checkpoint: Checkpoint | None) -> MetricsFile:
        """Open metrics.jsonl after `checkpoint` (None: from the start), with its line, which a killed run may lack."""
        finished = 0 if checkpoint is None else checkpoint.step
        file = MetricsFile(self.metrics, finished=finished)
        if checkpoint is not None and finished not in file.steps:
            file.log(finished, checkpoint.state()["metrics"])
        return file

    def prune(self, keep_last: int | None, keep_best: int | None = None, by: str = "reward_mean") -> None:
        """Remove checkpoints outside the newest and the best by metric `by` (slash-separated); without limits none."""
        if keep_last is None and keep_best is None:
            return
        checkpoints = self.checkpoints()
        newest = checkpoints[-(keep_last or 1) :]  # a resume needs the newest
        newest += [checkpoint for checkpoint in checkpoints if checkpoint.good][
            -1:
        ]  # where training has gone wrong since, this is
        best = self._best(checkpoints, keep_best, by) if keep_best else []
        for checkpoint in checkpoints:
            if checkpoint not in (*newest, *best):
                aside = checkpoint.path.with_name(f".{checkpoint.path.name}{REMOVED}")
                checkpoint.path.rename(aside)  # at once: a part of it would be taken for a checkpoint
                shutil.rmtree(aside)

    def _best(self, checkpoints: Sequence[Checkpoint], count: int, by: str) -> list[Checkpoint]:
        """Return the best `count` checkpoints, and with `reward_mean` also checkpoints whose weights no step has
        rewards for yet."""
        earned = None if by.startswith(VALIDATION_PREFIX) else self._earned(checkpoints, by)
        goodness = {
            checkpoint.step: checkpoint.goodness(by) if earned is None else earned.get(checkpoint.version)
            for checkpoint in checkpoints
        }
        measured_checkpoints = [checkpoint for checkpoint in checkpoints if goodness[checkpoint.step] is not None]
        best = sorted(
            measured_checkpoints, key=lambda checkpoint: (-(goodness[checkpoint.step] or 0.0), -checkpoint.step)
        )[:count]
        measured = max(earned or {}, default=-1)
        return [
            *best,
            *(checkpoint for checkpoint in checkpoints if earned is not None and checkpoint.version > measured),
        ]

    def _earned(self, checkpoints: Sequence[Checkpoint], name: str) -> dict[int, float]:
        """Return the mean of a rollout metric over the tokens sampled by each weight version: a step measures the
        weights before its update, and older ones with asynchronous rollouts."""
        lines = {line["step"]: line for line in read_metrics(self.metrics)}
        lines |= {
            checkpoint.step: checkpoint.state()["metrics"] for checkpoint in checkpoints if checkpoint.readable
        }  # the newest has no line yet
        sums: dict[int, list[float]] = {}
        for line in lines.values():
            if isinstance(value := line.get(name), float | int):
                for version, tokens in line.get("tokens_by_version", ()):
                    total = sums.setdefault(version, [0.0, 0.0])
                    total[0] += tokens * value
                    total[1] += tokens
        return {version: total / tokens for version, (total, tokens) in sums.items() if tokens}

    def recover_partial(self, tell: Callable[[str], None]) -> None:
        """Complete saves that were killed after their last file, and remove the remains of other killed saves."""
        for removed in (self.path / CHECKPOINTS).glob(f".step_*{REMOVED}"):
            shutil.rmtree(removed, ignore_errors=True)
        for partial in (self.path / CHECKPOINTS).glob(".step_*.partial"):
            name = PARTIAL_NAME.fullmatch(partial.name)
            if name and Checkpoint(int(name[1]), partial).readable:  # its digests are compared before it is loaded
                self.new_checkpoint(int(name[1])).put_in_place()
                tell(f"the checkpoint of step {name[1]} was written when the run was killed: it is completed")
            else:
                shutil.rmtree(partial)


def is_edited(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest is not what `write_manifest` wrote; one without a digest is not known to be edited."""
    return DIGEST in manifest and manifest[DIGEST] != _digest(manifest)


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def newest_run(root: Path) -> Path:
    """Return the most recently written run below `root`. Raises InputError if there is none."""
    runs = [RunDirectory(path.parent) for path in root.glob(f"*/{MANIFEST}")]
    if not runs:
        raise InputError(f"--resume: there is no run below {root.absolute()}.", "Name one with --run-dir.")
    return max(
        runs, key=lambda run: (run.metrics if run.metrics.exists() else run.path / MANIFEST).stat().st_mtime
    ).path


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step` finished steps."""

    step: int
    path: Path

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    def state(self) -> dict[str, Any]:
        """Return the loop's saved state."""
        path = self.path / STATE
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            problem = f"Checkpoint {self.path} has no readable {STATE}: {error}."
            raise InputError(problem, "Remove it to resume from the one before.") from error
        lacks = [name for name, kind in STATE_PARTS.items() if not isinstance(content.get(name), kind)]
        if lacks or not content["files"]:
            problem = f"{path} lacks {listed(lacks or ['the digests of its files'])}."
            raise InputError(problem, "Remove the checkpoint to resume from the one before.")
        return content

    @property
    def readable(self) -> bool:
        with contextlib.suppress(InputError):
            return bool(self.state())
        return False

    @property
    def version(self) -> int:
        """The version of its weights; -1 where it cannot be read."""
        with contextlib.suppress(InputError):
            return int(self.state()["version"])
        return -1

    def goodness(self, name: str) -> float | None:
        """Return a metric of the validation after its step, of a loss its negative; None where it is unknown."""
        with contextlib.suppress(InputError, KeyError, TypeError):
            value = dict(flatten(self.state()["metrics"]))[name]
            return -value if name.split("/")[-1] == LOSS else value
        return None

    @property
    def good(self) -> bool:
        """Whether the step it was saved after had a finite loss and skipped no optimizer step."""
        metrics = self.state()["metrics"]
        return isinstance(metrics.get("loss", 0.0), float | int) and not metrics.get("skipped_steps")


class NewCheckpoint:
    """A checkpoint being written, aside of its place."""

    def __init__(self, parent: Path, step: int) -> None:
        self.step = step
        self._final = parent / f"step_{step}"
        self.directory = self._aside = parent / f".step_{step}.partial"
        """Where it is written."""
        self.policy = self._aside / "policy"
        """Where the policy backend writes."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Guard all writing: an exception removes the unfinished checkpoint."""
        try:
            yield
        except BaseException as error:
            # That space was lacking arrives as text where a worker met it.
            disk_full = os.strerror(errno.ENOSPC) in str(error)
            full = isinstance(error, Exception) and (disk_full or is_full(self._final.parents[1], error))
            self.discard()
            # Some of rlctl's errors are OSErrors too.
            if not full and (isinstance(error, RlctlError) or not isinstance(error, OSError)):
                raise
            reason = os.strerror(errno.ENOSPC) if full else error
            raise RlctlError(
                f"Checkpoint of step {self.step} could not be written to {self._final}: {reason}.",
                "Free space on that disk." if full else "See that the directory can be written to.",
            ) from error

    def begin(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.parent.mkdir(exist_ok=True)  # and no run directory that was removed meanwhile
        self.policy.mkdir(parents=True)

    def commit(self, state: Mapping[str, Any]) -> Checkpoint:
        """Write `state`, flush, and move the checkpoint into place. From `state` on, `RunDirectory.recover_partial` can
        finish this."""
        write_json(self._aside / STATE, {**finite(state), "step": self.step})
        return self.put_in_place()

    def put_in_place(self) -> Checkpoint:
        """Flush to disk and rename."""
        flush(self._aside)
        if self._final.exists():
            shutil.rmtree(self._final)
        self._aside.rename(self._final)
        flush_one(self._final.parent)
        return Checkpoint(self.step, self._final)

    def discard(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
