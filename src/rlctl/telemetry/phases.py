"""The phases of a step: the one enumeration that the terminal, the metrics, the report and the planner share."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Driver wall time, disjoint; the parts of a step add up to its total."""

    GENERATION = "generation"
    REWARD = "reward"
    LOGPROBS = "logprobs"
    TRAINING = "training"
    REFIT = "refit"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


class RefitPhase(StrEnum):
    """Parts of a refit, reported in `refit_seconds`."""

    OFFLOAD = "offload"
    """The policy's gradients and optimizer make room, where devices are shared."""
    WAKE = "wake"
    """Engines bring samples in flight to a stop and take their weights back from host memory."""
    EXCHANGE = "exchange"
    """Policy ranks wait for boxes of other nodes; only where there are some."""
    PACK = "pack"
    """Engines wait for policy ranks to fill memory that both see."""
    TRANSFER = "transfer"
    """The same with movers that send messages or files."""
    LOAD = "load"
    CACHE_RESET = "cache_reset"
