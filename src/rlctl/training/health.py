"""Whether a policy still learns: steps whose gradients or losses are not finite, and rewards without a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlctl.data.rollouts import TIMEOUT
from rlctl.environments.gateway.exchange import UNENFORCED, without_effect
from rlctl.errors import DivergenceError
from rlctl.settings.run import ChecksConfig
from rlctl.telemetry.headline import NO_SIGNAL

LEAST_CARRIED = 0.5
"""Share of the optimizer's movement that the weights should have."""


class Health:
    """Counts consecutive steps without learning."""

    def __init__(self, checks: ChecksConfig) -> None:
        self.checks = checks
        self._signal_steps = checks.signal_steps
        self._skipped = self._without_signal = 0
        self._warned_of_rounding = False
        self._told_unenforced = set[str]()

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Return the sentences to tell the user after `step` (counted from 1).

        Raises DivergenceError where the weights were changed by a loss that is not finite, and after
        `checks.max_skipped_steps` steps in a row in which no optimizer step could be taken.
        """
        remarks = self._remarks(metrics)
        if "loss" not in metrics:
            if "critic" not in metrics:  # else the critic warms up
                remarks.append("nothing was trained on, the method dropped every group")
            return self._told(step, remarks)
        skipped, steps = metrics["skipped_steps"], metrics["optimizer_steps"]
        if skipped < steps and not math.isfinite(metrics["loss"]):
            raise DivergenceError(
                f"Stopped after step {step}: its loss is {metrics['loss']}, and the weights were changed by it.",
                "Look for the cause in the rewards, and in a custom loss function.",
            )
        self._skipped = self._skipped + 1 if skipped == steps else 0
        if skipped:
            remarks.append(f"{skipped} optimizer step(s) skipped, the gradient was not finite")
        if self._skipped >= self.checks.max_skipped_steps:
            raise DivergenceError(
                f"Stopped after step {step}: no gradient was finite in {self._skipped} step(s) in a row "
                "(checks.max_skipped_steps), and the weights stay as they are.",
                "Lower --lr, look for extreme rewards, or compute in float32 (--set model.dtype=float32).",
            )
        return self._told(step, remarks)

    @staticmethod
    def _told(step: int, remarks: list[str]) -> list[str]:
        return [f"step {step}: {text}" for text in remarks]

    def _remarks(self, metrics: Mapping[str, Any]) -> list[str]:
        remarks = []
        self._without_signal = self._without_signal + 1 if NO_SIGNAL.holds(metrics) else 0
        if self._without_signal and self._without_signal == self._signal_steps:
            reward = f"mean reward {metrics['reward_mean']:.3g}"
            remarks.append(
                f"in the last {self._without_signal} step(s) {NO_SIGNAL.said} ({reward}). {NO_SIGNAL.advice}"
            )
        carried = metrics.get("rounding", {}).get("carried", 1.0)
        if carried < LEAST_CARRIED and not self._warned_of_rounding:
            self._warned_of_rounding = True
            remarks.append(
                f"only {carried:.0%} of the optimizer's weight movement has reached the rounded weights of "
                "policy and engines; rounding loses the rest. optimizer.rounding=unbiased loses nothing "
                "on average."
            )
        if missing := metrics.get("missing_groups"):
            rounds = f"after {metrics['sampling_rounds']} round(s) of sampling (filter.max_rounds)"
            remarks.append(
                f"{rounds} {missing} group(s) are still missing from the batch, and the step trains on the others"
            )
        if ended := metrics.get("stop_reasons", {}).get(TIMEOUT):
            remarks.append(f"{ended} rollout(s) exceeded rollouts.timeout_s and ended with their tokens so far")
        if dropped := metrics.get("dropped_rollouts"):
            remarks.append(f"{dropped} rollout(s) are left out (reward.on_error). {metrics['reward_error']}")
        remarks += [
            f"{source} is paused, and the run continues with the other sources. {reason}"
            for source, reason in metrics.get("paused", {}).items()
        ]
        if not dropped and (error := metrics.get("reward_error")):
            remarks.append(
                f"the environments of some rollouts failed, and their rewards are 0 (reward.on_error). {error}"
            )
        unenforced = {
            name.removeprefix(UNENFORCED) for name in metrics.get("environment", {}) if name.startswith(UNENFORCED)
        }
        if new := unenforced - self._told_unenforced:
            self._told_unenforced |= new
            remarks.append(without_effect(sorted(new)))
        if skipped := metrics.get("critic", {}).get("skipped_steps"):
            remarks.append(f"{skipped} optimizer step(s) of the critic skipped, the gradient was not finite")
        return remarks
