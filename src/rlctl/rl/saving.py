"""When a run saves, and which checkpoint it goes on from: written while training goes on, damaged ones passed over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from rlctl.backends.clients import PolicyClient
from rlctl.config.schema import RunConfig
from rlctl.errors import InputError
from rlctl.runs.directory import Checkpoint, NewCheckpoint, RunDirectory


class Saver:
    """Saves of one run; at most one is under way."""

    def __init__(self, run: RunDirectory, policy: PolicyClient, config: RunConfig) -> None:
        self.run, self.policy, self.config = run, policy, config
        self._under_way: tuple[NewCheckpoint, dict[str, Any]] | None = None
        self._begun: int | None = None

    def due(self, step: int, ending: bool) -> bool:
        """Return whether to save after `step` (counted from 0), unless its save was begun already."""
        every = self.config.checkpoint_every
        wanted = (ending and self.config.save_final) or (every > 0 and (step + 1) % every == 0)
        return wanted and step != self._begun

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Take a snapshot after `step` and start writing it, once the save before it is complete.

        `state` goes into the checkpoint: `version`, `source`, and `metrics`, which a run that is killed before it wrote
        its metrics line finds there.
        """
        self.finish()
        self._begun = step
        new = self.run.new_checkpoint(step + 1)
        with new.writing():
            new.begin()
            self.policy.save_begin(new.policy)
        self._under_way = new, state

    def finish_if_written(self) -> None:
        """Complete the save under way unless that would have to wait."""
        if self._under_way is not None and self.policy.save_written():
            self.finish()

    def finish(self) -> None:
        """Complete the save under way, if there is one, and remove checkpoints that need not be kept."""
        if self._under_way is None:
            return
        (new, state), self._under_way = self._under_way, None
        with new.writing():
            digests = self.policy.save_finish()
            new.commit({**state, "files": digests})
        self.run.prune(self.config.keep_last, self.config.keep_best)

    def abandon(self) -> None:
        """Remove what a save that will not be completed has written; what cannot be removed is cleared at a resume."""
        if self._under_way is not None:
            with contextlib.suppress(OSError):
                self._under_way[0].discard()


def newest_intact(
    checkpoints: Sequence[Checkpoint], policy: PolicyClient, tell: Callable[[str], None]
) -> Checkpoint | None:
    """Return the newest checkpoint whose files are as they were written; `tell` hears which were passed over, and why.

    Raises InputError when there are checkpoints and all of them are damaged.
    """
    for checkpoint in reversed(checkpoints):
        problems = _damage(checkpoint, policy)
        if not problems:
            return checkpoint
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        tell(f"checkpoint {checkpoint.path.name} is damaged: {problems[0]}{more}; looking at the one before")
    if checkpoints:
        raise InputError(
            f"--resume: every checkpoint in {checkpoints[0].path.parent} is damaged.",
            "Restore one from a copy, or start a new run.",
        )
    return None


def _damage(checkpoint: Checkpoint, policy: PolicyClient) -> list[str]:
    try:
        digests = checkpoint.digests
    except InputError as error:
        return [error.message]
    return policy.damaged_files(checkpoint.policy, digests)
