"""The metrics of a step: facts of its batch, of its selection and of its optimizer steps, by name in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np

from rlctl.backends.batching.batch import MinibatchResult, TrainBatch, WeightedSequence
from rlctl.backends.batching.packing import PackingStats
from rlctl.rollouts.ledger import ranges
from rlctl.rollouts.source import Batch, Group, Lengths
from rlctl.telemetry.phases import ASIDE, StepTimer

NAMES_OF_A_STEP = frozenset({
    "accuracy", "answered_fraction", "critic", "dropped_groups", "dropped_rollouts", "dropped_rows", "entropy",
    "episode_seconds", "failed_episodes", "grad_norm", "groups_without_signal", "image_tokens_mean", "images",
    "imbalance", "importance", "length_penalty", "logprob_diff", "loss", "lost_engines", "lost_ranks", "lr",
    "micro_batches", "missing_groups", "offloaded_bytes", "optimizer_steps", "padding_fraction",
    "paused", "paused_sources",
    "policy_failure", "policy_restarts",
    "positions", "prompt_tokens_mean",
    "refit_bytes", "refit_seconds", "refit_verified", "response_tokens_max", "response_tokens_mean", "reward_by_source",
    "reward_error", "reward_mean", "reward_std", "reward_terms", "rollout_tokens", "sampled_rollouts",
    "sampling_rounds", "scorer_failures", "seconds", "skipped_fraction", "skipped_rollouts", "skipped_steps", "sources",
    "staleness", "step", "stop_reasons", "system", "tokens", "tokens_by_version", "tokens_per_s", "trained_tokens",
    "truncated_fraction", "unshared_tokens", "validation", "validation_at_start", "versions_since_admission",
    "weight_version",
})  # fmt: skip
"""Names in metrics.jsonl of steps of any method, which no method's metric may have."""


def selection_metrics(batch: Batch, trained: TrainBatch) -> dict[str, Any]:
    """Return the number of groups that are not trained on, and of sequences skipped because they have no gradient."""
    computed = sum(int(column(minibatch, "tokens").sum()) for minibatch in trained.minibatches)
    skipped = int(column(trained.skipped, "tokens").sum())
    return {
        "dropped_groups": len(batch.groups) - len(trained.columns),
        "skipped_rollouts": len(trained.skipped),
        "skipped_fraction": skipped / max(1, skipped + computed),
    }


def length_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Return lengths, images and positions of the sequences of a batch."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    if not sequences:  # all of them were dropped
        return {"tokens": 0, "positions": ranges(group.position for group in groups)}
    response_N = column(sequences, "response_tokens")
    images = {}
    if column(sequences, "images").any():  # images of a prompt are counted once for its group
        images = {
            "images": sum(max((sequence.images for sequence in group.sequences), default=0) for group in groups),
            "image_tokens_mean": float(column(sequences, "image_tokens").mean()),
        }
    return {
        "response_tokens_mean": float(response_N.mean()),
        "response_tokens_max": int(response_N.max()),
        "prompt_tokens_mean": float(column(sequences, "prompt_tokens").mean()),
        **images,
        "tokens": int(column(sequences, "tokens").sum()),
        "positions": ranges(group.position for group in groups),
    }


def column(sequences: Sequence[Lengths | WeightedSequence], name: str) -> np.ndarray:
    """Return the integers that sequences have as `name`; int64 [N]."""
    return np.fromiter(map(attrgetter(name), sequences), np.int64, len(sequences))


def optimizer_metrics(results: Sequence[MinibatchResult]) -> dict[str, Any]:
    """Return the metrics of a batch's optimizer steps, if any: mean loss of the steps, gradient norm of the last
    one."""
    if not results:
        return {}
    taken = [result for result in results if not result.skipped] or results[-1:]
    return {
        "loss": sum(result.loss for result in taken) / len(taken),
        "grad_norm": taken[-1].grad_norm,
        "skipped_steps": sum(result.skipped for result in results),
        "optimizer_steps": len(results),
        **({"loss_scale": results[-1].loss_scale} if results[-1].loss_scale is not None else {}),
        **({"rounding": asdict(taken[-1].rounded)} if taken[-1].rounded is not None else {}),
        **({"routers": asdict(taken[-1].routers)} if taken[-1].routers is not None else {}),
    }


def packing_metrics(packing: PackingStats) -> dict[str, Any]:
    """Return how tightly the rows of a batch are packed."""
    return {
        "padding_fraction": packing.padding_fraction,
        "trained_tokens": packing.tokens,
        "unshared_tokens": packing.unshared_tokens,
        "micro_batches": packing.micro_batches,
        "imbalance": packing.imbalance,
    }


def timed(metrics: dict[str, Any], timer: StepTimer) -> dict[str, Any]:
    """Return metrics with the seconds of the step's phases and its tokens per second; checkpoints and validations
    (`ASIDE`) do not count."""
    seconds = timer.seconds()
    working = seconds["total"] - sum(seconds[phase.value] for phase in ASIDE)
    return {**metrics, "tokens_per_s": metrics["tokens"] / working, "seconds": seconds}
