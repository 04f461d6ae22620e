"""Check of the free disk space in the run directory for a plan's checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from rlctl.errors import MachineError
from rlctl.planner.costs.checkpoint import save_of
from rlctl.planner.result import Plan
from rlctl.settings.config import RlctlConfig
from rlctl.settings.run import RunConfig

NO_SAVES = "--set run.checkpoint_every=0 --set run.save_final=false"


def require_disk(config: RlctlConfig, plan: Plan, run_directory: Path, tell: Callable[[str], None]) -> None:
    """Raise MachineError if not even one checkpoint fits; `tell` receives a warning if the run's checkpoints do not all
    fit."""
    if plan.training is None or not plan.request.saves:
        return
    place = run_directory.absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    size, free = save_of(plan.request, plan.training).size, shutil.disk_usage(there).free
    description = f"{there} has {_gb(free)} free, and a checkpoint of this run takes about {_gb(size)}"
    if free < size:
        raise MachineError(
            f"{description}.", f"Free some space, choose another place with --run-dir, or save nothing: {NO_SAVES}."
        )
    if free < (held_count := checkpoints_held(config.run)) * size:
        least = "keep fewer with --set run.keep_last=N" if config.run.keep_last is None else "lower run.keep_last"
        tell(f"warning: {description}; the run will hold {held_count} of them. Free some space, or {least}.")


def checkpoints_held(options: RunConfig) -> int:
    """Return the maximum number of checkpoints on disk at a time, including an unfinished one. If checkpoints are saved
    by time instead of steps, count only the last."""
    if not options.checkpoint_every:
        return int(options.save_final)
    saves = options.steps // options.checkpoint_every
    saves += options.save_final and options.steps % options.checkpoint_every != 0
    kept = (options.keep_last or int(options.keep_best is not None)) + (options.keep_best or 0)
    return min(saves, kept + 1) if kept else saves


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
