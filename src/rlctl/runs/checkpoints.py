"""Checkpoints of a run: complete or absent, with what is needed to notice damage."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.checkpoints.staging import is_full
from rlctl.errors import InputError, RlctlError

STATE = "state.json"
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO})
_NAME = re.compile(r"step_(\d+)")


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
            found = json.loads((self.path / STATE).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"Checkpoint {self.path} has no readable {STATE}: {error}.", "Remove it to resume from the one before."
            ) from error
        if not isinstance(found, dict):
            raise InputError(f"{self.path / STATE} is not the state of a run.", "Remove the checkpoint.")
        return found

    @property
    def digests(self) -> dict[str, str]:
        """Of each file of the policy. Raises InputError where `state` does."""
        return self.state().get("files", {})

    @property
    def reward(self) -> float:
        """Mean reward of the step it was saved after; -inf where that is unknown."""
        with contextlib.suppress(InputError, KeyError, TypeError):
            return float(self.state()["metrics"]["reward_mean"])
        return -math.inf


class NewCheckpoint:
    """A checkpoint being written, aside of its place."""

    def __init__(self, parent: Path, step: int) -> None:
        self.step = step
        self._final = parent / f"step_{step}"
        self._aside = parent / f".step_{step}.partial"
        self.policy = self._aside / "policy"
        """Where the policy backend writes."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around everything that writes: an exception leaves no checkpoint and removes what was written."""
        try:
            yield
        except BaseException as error:
            full = isinstance(error, Exception) and self._is_full(error)
            self.discard()
            # Some of our own errors are OSErrors too.
            if not full and (isinstance(error, RlctlError) or not isinstance(error, OSError)):
                raise
            reason = os.strerror(errno.ENOSPC) if full else error
            raise RlctlError(
                f"Checkpoint of step {self.step} could not be written to {self._final}: {reason}.",
                "Free space on that disk.",
            ) from error

    def _is_full(self, error: Exception) -> bool:
        """Whether space was lacking. What a worker could not write arrives here as text."""
        return os.strerror(errno.ENOSPC) in str(error) or is_full(self._final.parents[1], error)

    def begin(self) -> None:
        """Make the empty place."""
        shutil.rmtree(self._aside, ignore_errors=True)
        self.policy.mkdir(parents=True)

    def commit(self, state: Mapping[str, Any]) -> Checkpoint:
        """Write `state`, flush everything to the disk, and put it in its place."""
        write_json(self._aside / STATE, {**state, "step": self.step})
        _flush_tree(self._aside)
        if self._final.exists():
            shutil.rmtree(self._final)
        self._aside.rename(self._final)
        _flush(self._final.parent)
        return Checkpoint(self.step, self._final)

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self._aside, ignore_errors=True)


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    entries = directory.iterdir() if directory.is_dir() else ()
    found = [(_NAME.fullmatch(entry.name), entry) for entry in entries]
    return sorted((Checkpoint(int(m[1]), entry) for m, entry in found if m), key=lambda checkpoint: checkpoint.step)


def superfluous(checkpoints: Sequence[Checkpoint], keep_last: int | None, keep_best: int | None) -> list[Checkpoint]:
    """Those that are neither among the newest nor among the best by reward; with neither limit set there are none."""
    if keep_last is None and keep_best is None:
        return []
    newest = checkpoints[-(keep_last or 1) :]  # the newest is what a resume needs
    best = sorted(checkpoints, key=lambda checkpoint: (-checkpoint.reward, -checkpoint.step))[: keep_best or 0]
    return [checkpoint for checkpoint in checkpoints if checkpoint not in (*newest, *best)]


def clear_partial(directory: Path) -> None:
    """Remove what killed saves left behind."""
    for partial in directory.glob(".step_*.partial"):
        shutil.rmtree(partial)


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
