"""Conditions over the metrics of a step that a reader of a run's numbers should not miss.

The step line, the summary at the end and the report all read this list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl.telemetry.metrics import Metrics

LEAST_SHARE = 0.05
"""Share of the steps in which a condition must hold for the summary to mention it."""


@dataclass(frozen=True)
class Condition:
    """Something that keeps a step from teaching much."""

    share: Callable[[Metrics], float | None]
    """The share of the step's completions or groups that it holds for; None: the step does not say."""
    above: float
    """It holds for the step where its share is larger."""
    mark: str
    """The words of the step line."""
    said: str
    """The part of a sentence that follows `in 3 of 20 steps`."""
    advice: str

    def holds(self, metrics: Metrics) -> bool:
        """Return whether a reader of the step should see it."""
        return (self.share(metrics) or 0.0) > self.above


NO_SIGNAL = Condition(
    lambda metrics: metrics.get("groups_without_signal"),
    0.999,
    "nothing to learn",
    "all rollouts of each prompt had the same reward, so that there was nothing to learn from",
    "Choose easier or harder prompts, more --generations, a higher generation.temperature, or a --reward with partial "
    "credit.",
)
CONDITIONS = (
    Condition(
        lambda metrics: metrics.get("stop_reasons", {}).get("length", 0) / metrics.get("sampled_rollouts", math.inf),
        0.25,
        "{:.0%} cut off",
        "more than a quarter of the completions ended at the token limit ({:.0%} on average)",
        "Raise --max-new-tokens, and --max-length where that is the nearer limit.",
    ),
    Condition(
        lambda metrics: 1 - metrics.get("answered_fraction", 1),
        0.9,
        "{:.0%} without an answer",
        "nearly all completions ({:.0%}) had no answer that the reward could read",
        "Say in the prompt how to write the answer (data.system_prompt, data.prompt_suffix), or choose another "
        "reward.extract.",
    ),
    NO_SIGNAL,
)


def marks(metrics: Metrics) -> str:
    """Return what the line of a step shows of the conditions that hold; empty: none does."""
    found = [one.mark.format(one.share(metrics)) for one in CONDITIONS if one.holds(metrics)]
    return "! " + ", ".join(found) if found else ""


def findings(lines: Sequence[Metrics]) -> list[str]:
    """Return a sentence, with what to do, for each condition that held in some of the steps."""
    found = []
    for one in CONDITIONS:
        shares = [one.share(line) or 0.0 for line in lines if one.holds(line)]
        if shares and len(shares) >= LEAST_SHARE * len(lines):
            said = one.said.format(sum(shares) / len(shares))
            found.append(f"In {len(shares):,} of {len(lines):,} steps {said}. {one.advice}")
    return found
