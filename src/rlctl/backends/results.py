"""From the model's output to losses and metrics, and their sums over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.batch import LogprobColumn, LogprobStats, MicroBatchLoss, MinibatchResult, TokenBatch
from rlctl.backends.rows import PackedRow


@dataclass(frozen=True)
class StepOutcome:
    """How one optimizer step ended."""

    grad_norm: float
    """Before clipping, over all ranks."""
    skipped: bool
    """The gradient was not finite, and nothing was changed."""


def micro_batch_loss(loss: MicroBatchLoss, row: PackedRow, out: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of one row, and its detached loss, sums and maxima. `out` is what `chunked_logprobs` returns."""
    if out.shape[1] == 0:  # takes part in the collectives of the backward pass with a gradient of 0
        return out.sum() * 0.0, {"loss": out.detach().sum(), "sums": {}, "maxima": {}}
    found = loss(_token_batch(row, out))
    detached: dict[str, Any] = {"loss": found.loss.detach().clone()}  # the schedule may scale the loss in place
    for kind in ("sums", "maxima"):
        detached[kind] = {name: value.detach() for name, value in getattr(found, kind).items()}
    return found.loss, detached


def _token_batch(row: PackedRow, out: Tensor) -> TokenBatch:
    columns = row.columns_R
    return TokenBatch(
        logprobs_R=out[0],
        entropy_R=out[1],
        rollout_logprobs_R=columns["rollout_logprobs"],
        advantages_R=columns["advantages"],
        token_weights_R=columns["token_weights"],
        counted_R=columns["token_weights"] != 0,
        rollout_R=columns["rollout"],
        old_logprobs_R=columns.get("old_logprobs"),
        reference_logprobs_R=columns.get("reference_logprobs"),
        teacher_logprobs_R=columns.get("teacher_logprobs"),
        teacher_top_RK=columns.get("teacher_top"),
        top_logprobs_RK=None if row.further_RK is None else out[2:].T,
    )


def minibatch_result(
    rows: list[PackedRow], found: list[dict], outcome: StepOutcome, lr: float, group: Any
) -> MinibatchResult:
    """Return sums and maxima over the micro-batches of all data-parallel ranks. Collective over them (`group`)."""
    local: dict[str, Any] = {"loss": 0.0, "tokens": sum(row.tokens for row in rows), "sums": {}, "maxima": {}}
    for micro in found:
        local["loss"] += float(micro["loss"])
        for name, value in micro["sums"].items():
            local["sums"][name] = local["sums"].get(name, 0.0) + float(value)
        for name, value in micro["maxima"].items():
            local["maxima"][name] = max(local["maxima"].get(name, 0.0), float(value))
    ranks = _all_ranks(local, group)
    names = {kind: sorted({name for rank in ranks for name in rank[kind]}) for kind in ("sums", "maxima")}
    return MinibatchResult(
        loss=sum(rank["loss"] for rank in ranks),
        sums={name: sum(rank["sums"].get(name, 0.0) for rank in ranks) for name in names["sums"]},
        maxima={name: max(rank["maxima"].get(name, 0.0) for rank in ranks) for name in names["maxima"]},
        grad_norm=outcome.grad_norm,
        lr=lr,
        skipped=outcome.skipped,
        tokens=sum(rank["tokens"] for rank in ranks),
    )


def logprob_stats(columns: list[dict[str, Tensor]], column: LogprobColumn, group: Any) -> LogprobStats:
    """The difference of `column` to the engine's log-probs over the response tokens of all data-parallel ranks."""
    parts = [c[column] - c["rollout_logprobs"] for c in columns]
    masks = [c["token_weights"] != 0 for c in columns]
    d = torch.cat([part[mask] for part, mask in zip(parts, masks, strict=True)]).double()
    size = d.abs()
    ranks = _all_ranks(
        (len(d), size.sum().item(), size.amax().item() if len(d) else 0.0, (d.exp() - 1 - d).sum().item()), group
    )
    tokens, sums, maxima, k3 = zip(*ranks, strict=True)
    return LogprobStats(sum(tokens), sum(sums), max(maxima), sum(k3))


def _all_ranks(value: Any, group: Any) -> list[Any]:
    """Return `value` of every rank of `group`, in their order. These are a few numbers a step, which are added up in
    float64, in the same way in each run."""
    if group.size() == 1:
        return [value]
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, value, group=group)
    return found
