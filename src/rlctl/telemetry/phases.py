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
    EXCHANGE = "exchange"
    PACK = "pack"
    TRANSFER = "transfer"
    LOAD = "load"
    WAKE = "wake"
    CACHE_RESET = "cache_reset"
