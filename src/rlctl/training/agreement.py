"""Limits for the difference between the log-probs of engine and trainer, and what exceeding them leads to."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.errors import DivergenceError
from rlctl.settings.config import RlctlConfig, RolloutConfig

# (warning, error) for the mean absolute difference of a step. Two correct engines differ by rounding: a logit of size
# 10 to 20 is off by about 16 times the unit roundoff (2^-24 in float32, 2^-8 in bfloat16), so by 1e-6 and by 0.06 at
# worst, a tenth to a third of it on average. float32 warns at a hundred times that, bfloat16 where the average is the
# worst case. The error stands where token probabilities are wrong by 1% and by half: no rounding does that. float8
# rounds what products take 16 times as coarsely as bfloat16, and nothing else; its warning is four times as high, which
# was never measured.
LIMITS = {"float32": (1e-4, 1e-2), "bfloat16": (0.05, 0.5), "float16": (0.0125, 0.5), "float8": (0.2, 0.5)}


def precision_of(config: RlctlConfig, dtype: str) -> str:
    """Return the key of `LIMITS` for a policy with weights in `dtype`: the precision of its matrix products."""
    return "float8" if config.megatron.passed.get("fp8") else dtype


def error_limit(config: RlctlConfig, dtype: str) -> float:
    """Return the mean absolute difference that stops a run that samples from all tokens."""
    return config.checks.largest_difference or LIMITS[precision_of(config, dtype)][1]


@dataclass(frozen=True)
class Agreement:
    """The limits of one run."""

    precision: str
    """A key of `LIMITS`."""
    warning: float
    error: float
    note: str = ""
    """Note about them for the user before the first step."""
    exact: bool = False
    """Any difference stops the run."""

    @classmethod
    def from_config(cls, config: RolloutConfig, precision: str, needs: Collection[str]) -> Agreement:
        """Return the limits: the configured values, else the precision's.

        Where log-probs differ by more than rounding (see below), only limits that are set hold.
        """
        checks, reason = config.checks, ""
        if checks.exact:
            return cls(precision, 0.0, 0.0, exact=True)
        if config.rollouts.mode == "async" and config.rollouts.max_staleness > 0:
            reason = "rollouts may be of older weights than those that are trained"
        elif config.batch.optimizer_steps * config.batch.epochs > 1 and "old_logprobs" not in needs:
            reason = "log-probs are of after a batch's earlier optimizer steps"
        warning, error = (math.inf, math.inf) if reason else LIMITS[precision]
        error = checks.logprob_diff_error or error
        note = (
            f"{reason}: log-probs of engine and trainer differ by that, and have no limit but checks.logprob_diff_error"
        )
        return cls(precision, checks.logprob_diff_warning or min(warning, error), error, note if reason else "")

    def check(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Return what to warn about after `step`. Raises DivergenceError above the error limit, and for NaN."""
        measured = metrics.get("logprob_diff")
        if measured is None or measured["mean"] <= self.warning:  # also False where it is not a number
            return None
        summary = (
            f"step {step}: the engine's log-probs differ from the trainer's by {measured['mean']:.2g} on average, "
            f"{measured['max']:.2g} at most (KL {measured['kl']:.2g}, probability error "
            f"{measured['prob_error']:.4g})"
        )
        if measured["mean"] <= self.error:
            usual = f"below {self.warning:g} is usual in {self.precision} (checks.logprob_diff_warning)."
            return f"Warning, {summary}; {usual}"
        if self.exact:
            raise DivergenceError(
                f"Stopped after {summary}, and checks.exact demands equal bits.",
                "Report it with the run's manifest.json; without checks.exact the usual limits hold.",
            )
        raise DivergenceError(
            f"Stopped after {summary}: more than checks.logprob_diff_error = {self.error:g}, and more than rounding "
            f"in {self.precision} explains.",
            "`rlctl diverge` with the same model or run names the first sub-layer where they part, `rlctl refit-test` "
            "compares every tensor, and --set checks.logprob_diff_error=... continues anyway.",
        )
