"""Whether a policy still learns: steps whose gradients or losses are not finite, and rewards without a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlctl.config.schema import ChecksConfig
from rlctl.data.rollouts import TIMEOUT
from rlctl.errors import DivergenceError
from rlctl.telemetry.conditions import NO_SIGNAL

MOST_HIDDEN = 0.5
"""Share of the optimizer's movement below which the weights do not have enough of it."""


class Health:
    """Counts steps in a row in which nothing was learned."""

    def __init__(self, checks: ChecksConfig) -> None:
        self.checks = checks
        self._skipped = self._without_signal = 0
        self._hides = False

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Return the sentences to tell the user after `step` (counted from 1).

        Raises DivergenceError where the weights were changed by a loss that is not finite, and after
        `checks.max_skipped_steps` steps in a row in which no optimizer step could be taken.
        """
        said = [
            text for told in (self._signal, self._hidden, _not_full, _cut_off, _dropped) for text in told(step, metrics)
        ]
        if critic := metrics.get("critic", {}):
            said += _critic(step, critic)
        if "loss" not in metrics and critic:  # it warms up
            return said
        if "loss" not in metrics:
            return [*said, f"step {step}: nothing was trained on, the algorithm dropped every group"]
        skipped, steps = metrics["skipped_steps"], metrics["optimizer_steps"]
        if skipped < steps and not math.isfinite(metrics["loss"]):
            raise DivergenceError(
                f"Stopped after step {step}: its loss is {metrics['loss']}, and the weights were changed by it.",
                "Look for the cause in the rewards and, if it is one of your own, in the loss function.",
            )
        self._skipped = self._skipped + 1 if skipped == steps else 0
        if skipped:
            said.append(f"step {step}: {skipped} optimizer step(s) skipped, the gradient was not finite")
        if self._skipped >= self.checks.max_skipped_steps:
            raise DivergenceError(
                f"Stopped after step {step}: no gradient was finite in {self._skipped} step(s) in a row "
                "(checks.max_skipped_steps), and the weights stay as they are.",
                "Lower --lr, look for extreme rewards, or compute in float32 (--set model.dtype=float32).",
            )
        return said

    def _signal(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        self._without_signal = self._without_signal + 1 if NO_SIGNAL.holds(metrics) else 0
        if self._without_signal != self.checks.max_steps_without_signal:
            return []
        return [
            f"step {step}: in the last {self._without_signal} step(s) {NO_SIGNAL.said} (mean reward "
            f"{metrics['reward_mean']:.3g}). {NO_SIGNAL.advice}"
        ]

    def _hidden(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        carried = metrics.get("rounding", {}).get("carried", 1.0)
        if self._hides or carried >= MOST_HIDDEN:
            return []
        self._hides = True
        return [
            f"Warning, step {step}: only {carried:.0%} of what the optimizer has moved its weights by has reached the "
            "weights that the policy and the engines compute with; rounding hides the rest. "
            "optimizer.rounding=unbiased hides nothing on average."
        ]


def _cut_off(step: int, metrics: Mapping[str, Any]) -> list[str]:
    if not (ended := metrics.get("stop_reasons", {}).get(TIMEOUT)):
        return []
    return [f"step {step}: {ended} rollout(s) took longer than rollouts.timeout_s and were ended with what they had"]


def _dropped(step: int, metrics: Mapping[str, Any]) -> list[str]:
    if not (dropped := metrics.get("dropped_rollouts")):
        return []
    return [f"step {step}: {dropped} rollout(s) are left out (reward.on_error). {metrics['reward_error']}"]


def _critic(step: int, metrics: Mapping[str, Any]) -> list[str]:
    skipped = metrics["skipped_steps"]
    return [f"step {step}: {skipped} optimizer step(s) of the critic skipped, the gradient was not finite"] * bool(
        skipped
    )


def _not_full(step: int, metrics: Mapping[str, Any]) -> list[str]:
    if not (missing := metrics.get("missing_groups")):
        return []
    return [
        f"step {step}: after {metrics['sampling_rounds']} round(s) of sampling (filter.max_rounds) {missing} "
        "group(s) are still missing from the batch, and the step trains on the others"
    ]
