"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from rlctl.config.schema import SchedulerConfig


def learning_rate(step: int, total_steps: int, peak: float, scheduler: SchedulerConfig) -> float:
    """Learning rate of step `step` (from 0) of `total_steps`.

    Warm-up: peak * (step + 1) / warmup_steps, so that no step is spent at 0. Then the decay runs from `peak` at the
    first step after the warm-up towards `min_lr`, which would be reached at step `total_steps` and holds from there.
    """
    if step < scheduler.warmup_steps:
        return peak * (step + 1) / scheduler.warmup_steps
    decay_steps = max(total_steps - scheduler.warmup_steps, 1)
    progress = min((step - scheduler.warmup_steps) / decay_steps, 1.0)
    return scheduler.min_lr + (peak - scheduler.min_lr) * _remaining(progress, scheduler.decay)


def _remaining(progress: float, decay: str) -> float:
    """Part of the way from `min_lr` to the peak that is left, from 1 at `progress` 0 to 0 at 1."""
    match decay:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"unknown decay {decay!r}: constant, linear or cosine")
