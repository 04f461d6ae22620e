"""When a run saves, and which checkpoint it resumes: written during training, damaged ones skipped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlctl.backends.clients import PolicyClient
from rlctl.errors import DivergenceError, InputError, RlctlError, WaitTimeoutError, WorkerError, first_line, listed
from rlctl.runs.directory import Checkpoint, NewCheckpoint, RunDirectory
from rlctl.settings.config import RlctlConfig
from rlctl.settings.run import VALIDATION_PREFIX

LOOK_S = 0.2
"""Between two looks at whether a save is written."""
MOST_SHARE = 0.05
"""Share of the time of a run that saves by time may take."""
KEPT = 2
"""Checkpoints that are kept where they are saved by time."""
END_LIMIT_S = 120.0
"""Timeout for an unfinished save at the end of a run."""
AT_ONCE_S = 3.0
"""The same where the user asked twice to stop."""


@contextlib.contextmanager
def saved_if_it_fails(save: Callable[[], None] | None, step: int, say: Callable[[str], None]) -> Iterator[None]:
    """Save the last step, `step`, if the block fails (`save` None: this process has taken none). An InputError after a
    step, as from a user's reward function, becomes a runtime error."""
    try:
        yield
    except RlctlError as error:
        if save is None:
            raise
        try:
            save()
        except (RlctlError, OSError) as failure:
            say(f"Step {step} could not be saved: {first_line(failure)}")
        if isinstance(error, InputError):
            raise RlctlError(error.message, error.hint or "Fix it and continue with --allow-changes.") from error
        raise


class Saver:
    """Saves of one run; at most one is under way. A thread asks the policy between its other calls and completes a save
    as soon as it is written."""

    def __init__(
        self,
        run: RunDirectory,
        policy: PolicyClient,
        config: RlctlConfig,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` receives checkpoints that cannot be removed."""
        options = config.run
        self.run, self.policy, self.config = run, policy, options
        self._limit_s, self._tell = config.cluster.step_limit_s, tell
        by_validation = options.keep_best_by.startswith(VALIDATION_PREFIX)
        self._validated_every = config.validation.every if by_validation else 1
        self._since, self._cost_s = time.monotonic(), 0.0
        """When the last save ended for the steps, and how long they stood still for it."""
        self._under_way: Future[None] | None = None
        self._given_up = threading.Event()
        self._begun = 0
        self.saved = 0
        """The step after which the last complete save of this process was begun."""

    def due(self, step: int, ending: bool) -> bool:
        """Return whether to save after `step` (counted from 1), unless its save was begun already."""
        every = self.config.checkpoint_every
        if every is None:  # by time; one that is judged by a validation comes with the next validation
            pause_s = max(60.0 * self.config.checkpoint_minutes, self._cost_s / MOST_SHARE)
            due = time.monotonic() - self._since >= pause_s and step % self._validated_every == 0
        else:
            due = every > 0 and step % every == 0
        return step != self._begun and (due or (ending and self.config.save_final))

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure how long the block stops training."""
        started = time.monotonic()
        yield
        self._since = time.monotonic()
        self._cost_s = self._since - started

    def begin(self, step: int, state: dict[str, Any], write: Callable[[Path], None] = lambda _: None) -> None:
        """Take a snapshot after `step` and start writing it, once the save before it is complete.

        `state` goes into the checkpoint: `version`, `source`, and `metrics`, from which a resume restores the metrics
        line if the run was killed before it wrote it. `write` adds files. Raises DivergenceError, and saves nothing, if
        parameters are not finite.
        """
        self.finish()
        if odd := self.policy.parameters_not_finite():
            raise DivergenceError(
                f"Stopped after step {step}, which is not saved: {len(odd)} parameters have values that are not "
                f"finite ({listed(odd)}).",
                "Lower --lr, or set optimizer.clip_grad lower.",
            )
        self._begun = step
        new = self.run.new_checkpoint(step)
        with new.writing():
            new.begin()
            write(new.directory)
            self.policy.save_begin(new.policy)
        done = self._under_way = Future()
        threading.Thread(target=self._complete, args=(new, state, done), name="saver", daemon=True).start()

    def _complete(self, new: NewCheckpoint, state: dict[str, Any], done: Future[None]) -> None:
        deadline = time.monotonic() + self._limit_s
        try:
            with new.writing():
                while not self.policy.save_written():
                    if time.monotonic() > deadline:
                        raise WaitTimeoutError(
                            f"The checkpoint of step {new.step} was not written to {new.policy.parent} in "
                            f"{self._limit_s:.0f} s.",
                            "See whether that disk hangs; if it is only slow, raise cluster.step_timeout_s.",
                        )
                    if self._given_up.wait(LOOK_S):
                        raise WorkerError("The run ended before the save was written.")
                new.commit({**state, "files": self.policy.save_finish()})
            self.run.damaged.discard(new.step)
            self.saved = new.step
            by_time = self.config.checkpoint_every is None and self.config.keep_best is None
            keep_last = self.config.keep_last or (KEPT if by_time else None)
            try:
                self.run.prune(keep_last, self.config.keep_best, self.config.keep_best_by)
            except (OSError, RlctlError) as error:
                self._tell(f"A checkpoint that is not to be kept could not be removed: {error}")
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            done.set_exception(error)

    def finish_if_written(self) -> None:
        """Raise the error of the current save, if it has ended with one."""
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish(self, limit_s: float | None = None) -> None:
        """Wait for the current save, if there is one. Raises its error, or TimeoutError after `limit_s`."""
        under_way = self._under_way
        if under_way is None:
            return
        try:
            under_way.result(limit_s)
        finally:
            if under_way.done():  # else an interrupt or the limit ended the wait
                self._under_way = None

    def lose(self) -> None:
        """Drop the current save after the end of the policy's processes. Its step can be saved again."""
        try:
            self.finish()
        except (RlctlError, OSError) as error:
            self._tell(f"The checkpoint of step {self._begun} is lost: {first_line(error)}")
        if self._begun != self.saved:
            self._begun = 0

    def close(self, tell: Callable[[str], None], *, at_once: bool = False) -> None:
        """Wait for the current save at the end of a run (`at_once`: only AT_ONCE_S seconds); `tell` receives a loss."""
        if self._under_way is None:
            return
        checkpoint = f"checkpoint of step {self._begun}"
        limit_s = AT_ONCE_S if at_once else END_LIMIT_S
        if not self._under_way.done():
            tell(f"completing the {checkpoint} (at most {limit_s:.0f} s)")
        try:
            self.finish(limit_s)
        except (RlctlError, OSError) as error:
            reason = error.message if isinstance(error, RlctlError) else str(error)
            tell(f"The {checkpoint} is lost: {reason or f'it was not written in {limit_s:.0f} s.'}")
        finally:
            self._given_up.set()


def newest_intact(run: RunDirectory, policy: PolicyClient, tell: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint with undamaged files; `tell` receives each skipped checkpoint with the reason.

    `run` no longer lists the skipped checkpoints. Raises InputError if all checkpoints are damaged.
    """
    checkpoints = run.checkpoint_directories()
    if (checkpoint := intact(checkpoints, run, policy, tell)) is not None:
        return checkpoint
    if checkpoints:
        raise InputError(
            f"--resume: every checkpoint in {checkpoints[0].path.parent} is damaged.",
            "Restore one from a copy, or start a new run.",
        )
    return None


def intact(
    checkpoints: Sequence[Checkpoint], run: RunDirectory, policy: PolicyClient, tell: Callable[[str], None]
) -> Checkpoint | None:
    """Return the last one of `found` whose files are as they were written; None: there is none."""
    for checkpoint in reversed(checkpoints):
        try:
            problems = policy.damaged_files(checkpoint.policy, checkpoint.state()["files"])
        except InputError as error:
            problems = [error.message]
        if not problems:
            return checkpoint
        run.damaged.add(checkpoint.step)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        tell(f"checkpoint {checkpoint.path.name} is damaged: {problems[0]}{more}; looking at the one before")
    return None
