"""The values that each algorithm sets, by the name that `--algorithm` takes.

They are a source of the configuration: stronger than the defaults of the schema and weaker than everything that a user
gives. A new algorithm that sets something has a line here, and one that sets nothing needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN_COMMANDS = ("sft", "dpo", "kto", "rm", "distill")
"""Algorithms that are a command of `train`; all others are a flag of `train grpo`."""

ALGORITHM_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dr-grpo": {"advantage.normalize_std": False, "loss.level": "constant"},
    "dapo": {
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.level": "token",
        "filter.groups": "replace",
        # 4,096 of 20,480 tokens in section 4.1 of the paper.
        "reward.overlong_buffer": 0.2,
        "reward.overlong_factor": 1.0,
    },
    "rloo": {
        "advantage.baseline": "leave-one-out",
        "advantage.normalize_std": False,
        "loss.level": "constant",
        "loss.length_divisor": 1,
    },
    "reinforce++": {
        "advantage.baseline": "none",
        "advantage.normalize_std": False,
        "advantage.whiten": True,
        "loss.kl_in": "reward",
        "loss.kl_estimator": "k1",
    },
    "reinforce++-baseline": {
        "advantage.normalize_std": False,
        "advantage.whiten": True,
        "loss.kl_in": "loss",
        "loss.kl_estimator": "k2",
    },
    "ppo": {
        "advantage.baseline": "critic",
        "advantage.normalize_std": False,
        "advantage.whiten": True,
        "loss.kl_in": "reward",
        "loss.kl_estimator": "k1",
    },
    "sft": {
        "optimizer.lr": 1e-5,
        "data.rows": "texts",
        "batch.generations": 1,
        "advantage.baseline": "none",
        "advantage.normalize_std": False,
        "loss.needs": (),
    },
    "dpo": {
        "data.rows": "pairs",
        "batch.generations": 2,
        "advantage.baseline": "none",
        "advantage.normalize_std": False,
        "loss.needs": ("reference_logprobs",),
    },
    "rm": {
        "optimizer.lr": 1e-5,
        "data.rows": "pairs",
        "batch.generations": 2,
        "advantage.baseline": "none",
        "advantage.normalize_std": False,
        "loss.needs": (),
    },
    "kto": {
        "data.rows": "labels",
        "batch.generations": 2,
        "advantage.baseline": "none",
        "advantage.normalize_std": False,
        "loss.needs": ("reference_logprobs",),
    },
    "distill": {
        "optimizer.lr": 1e-5,
        "data.rows": "texts",
        "batch.generations": 1,
        "advantage.baseline": "none",
        "advantage.normalize_std": False,
        "loss.needs": ("teacher_logprobs",),
        "distillation.loss": "top-k",
    },
    "gspo": {"loss.clip_low": 3e-4, "loss.clip_high": 4e-4, "loss.level": "sequence"},
    "cispo": {"loss.clip_low": 1.0, "loss.clip_high": 4.0},
    "dppo": {
        "loss.clip_low": 0.15,
        "loss.clip_high": 0.15,
        "loss.divergence": "tv",
        "loss.importance_correction": "untruncated",
    },
    "sapo": {
        "loss.sapo_temperature_positive": 1.0,
        "loss.sapo_temperature_negative": 1.05,
        "loss.level": "sequence",
    },
}


def command_of(algorithm: str) -> str:
    """Return the command that trains with an algorithm."""
    return f"train {algorithm}" if algorithm in OWN_COMMANDS else "train grpo"
