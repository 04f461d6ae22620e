"""Learning rate and weight decay as pure functions of the step, so that a resumed run needs no scheduler state.

The shapes equal Megatron's OptimizerParamScheduler, counted from the first step of the run.
"""

from __future__ import annotations

import math

from rlctl.settings.training import SchedulerConfig


def learning_rate(step: int, total_steps: int, peak: float, scheduler: SchedulerConfig) -> float:
    """Return the learning rate of step `step` (from 0) of `total_steps`.

    Warm-up: from `init_lr` by (step + 1) / warmup_steps of the way to the peak, so that no step is spent at 0. Then the
    decay runs from `peak` at the first step after the warm-up towards `min_lr`, which would be reached at step
    `decay_steps` (by default the end of the run) and holds from there.
    """
    warmup, end = scheduler.warmup_steps, scheduler.decay_steps or total_steps
    if step < warmup:
        return scheduler.init_lr + (peak - scheduler.init_lr) * (step + 1) / warmup
    if scheduler.decay == "constant":
        return peak
    if step > end:
        return scheduler.min_lr
    if scheduler.decay == "inverse-square-root":
        return max(scheduler.min_lr, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
    if scheduler.decay == "wsd":
        final = scheduler.wsd_steps or max(1, end // 5)
        part, shape = max(0.0, 1.0 - (end - step) / final), scheduler.wsd_decay
    else:
        part, shape = (step - warmup) / max(end - warmup, 1), scheduler.decay
    left = {
        "linear": 1.0 - part,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * part)),
        "exponential": 2.0 * 0.5**part - 1.0,
        "minus-sqrt": 1.0 - math.sqrt(part),
    }[shape]
    return scheduler.min_lr + (peak - scheduler.min_lr) * left


def weight_decay(step: int, total_steps: int, constant: float, scheduler: SchedulerConfig) -> float:
    """Return the weight decay of step `step`: `constant`, or on the way from `start_weight_decay` to `end_weight_decay`
    over `weight_decay_steps` (by default the run)."""
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    if start is None or end is None:
        return constant
    progress = min(step / (scheduler.weight_decay_steps or total_steps), 1.0)
    if scheduler.weight_decay_style == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return start + (end - start) * progress
