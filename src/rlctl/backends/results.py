"""Losses and metrics of micro-batches, and their sums over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.batching.batch import (
    AdvantageEstimate,
    LogprobColumn,
    LogprobStats,
    LossOutput,
    MinibatchResult,
    Rounded,
    RouterLoad,
    equal_up_to_rounding,
)
from rlctl.backends.batching.packed_rows import PackedRow


@dataclass(frozen=True)
class StepOutcome:
    """How one optimizer step ended."""

    grad_norm: float
    """Before clipping, over all ranks."""
    skipped: bool
    """The gradient was not finite, and the weights did not change."""
    loss_scale: float | None = None
    """The factor of the loss, in float16."""
    rounded: Rounded | None = None
    routers: RouterLoad | None = None


class LossScale:
    """The loss scale of float16, like torch's GradScaler but consistent over ranks: halved after a skipped step,
    doubled after 2000 others."""

    def __init__(self) -> None:
        self.value, self._taken = 2.0**16, 0

    def update(self, *, skipped: bool) -> None:
        """Hear how a step ended."""
        self._taken = 0 if skipped else self._taken + 1
        if skipped or self._taken == 2000:
            self.value, self._taken = self.value * (0.5 if skipped else 2.0), 0


NORM_CHUNK = 1 << 16
"""Block size of float32 sums of squares on CPUs: torch's sequential sum loses a thousandth of the norm of 28 million
elements."""


def squared_norm(tensor: Tensor) -> Tensor:
    parts = tensor.flatten().split(NORM_CHUNK) if tensor.device.type == "cpu" else (tensor,)
    return torch.stack(torch._foreach_norm(list(parts), dtype=torch.float32)).double().square().sum()


WHITENING_EPSILON = 1e-6
"""Added to the standard deviation of advantages, as in `methods/rl/advantages.py`."""


def micro_batch_loss(
    loss: Callable[[Any], LossOutput], batch_of: Callable[[PackedRow, Tensor], Any], row: PackedRow, out: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of one row, and its detached loss, sums and maxima. `batch_of`: `PackedRow.token_batch` or
    `value_batch`."""
    if out.shape[1] == 0:  # takes part in the collectives of the backward pass with a gradient of 0
        return out.sum() * 0.0, {"loss": out.detach().sum(), "sums": {}, "maxima": {}}
    loss_sums = loss(batch_of(row, out))
    detached: dict[str, Any] = {"loss": loss_sums.loss.detach().clone()}  # the schedule may scale the loss in place
    for kind in ("sums", "maxima"):
        detached[kind] = {name: value.detach() for name, value in getattr(loss_sums, kind).items()}
    return loss_sums.loss, detached


def add_advantages(rows: list[PackedRow], estimate: AdvantageEstimate, group: Any) -> None:
    """Replace rollout rewards or advantages by token advantages, keep rewards as a column, and add returns. Collective
    over `group` (data parallel)."""
    for row in rows:
        columns = row.columns_R
        batch_values = row.value_batch(columns.get("values", torch.zeros_like(columns["advantages"]))[None])
        columns["rewards"] = batch_values.rewards_R
        returns_R, columns["advantages"] = estimate(batch_values)
        if returns_R is not None:
            columns["returns"] = returns_R
    if estimate.whitens:
        _whiten(rows, group)
    low, high = estimate.bounds
    if not low is high is None:
        for row in rows:
            row.columns_R["advantages"] = row.columns_R["advantages"].clamp(low, high)


def _whiten(rows: list[PackedRow], group: Any) -> None:
    """Whiten the advantages of all counted tokens over all ranks; equal ones become 0."""
    counted = [row.columns_R["advantages"][row.columns_R["token_weights"] != 0].double() for row in rows]
    counted_values = torch.cat(counted) if counted else torch.zeros(0)
    moments = (0, 0.0, 0.0, 0.0, 0.0)  # number, mean, sum of squares around it, smallest and largest value
    if len(counted_values):
        square = (counted_values - counted_values.mean()).square().sum()
        moments = (
            len(counted_values),
            float(counted_values.mean()),
            float(square),
            float(counted_values.min()),
            float(counted_values.max()),
        )
    parts = [part for part in _all_ranks(moments, group) if part[0]]
    if not parts:
        return
    tokens = sum(count for count, *_ in parts)
    mean = sum(count * average for count, average, *_ in parts) / tokens
    variance = sum(square + count * (average - mean) ** 2 for count, average, square, *_ in parts) / tokens
    equal = equal_up_to_rounding(min(low for *_, low, _ in parts), max(top for *_, top in parts))
    scale = 0.0 if equal else 1 / (variance**0.5 + WHITENING_EPSILON)
    for row in rows:
        row.columns_R["advantages"] = (row.columns_R["advantages"] - mean) * scale


def minibatch_result(results: list[dict], outcome: StepOutcome, group: Any) -> MinibatchResult:
    """Return sums and maxima over the micro-batches of all data-parallel ranks. Collective over them (`group`)."""
    local: dict[str, Any] = {"loss": sum(float(micro["loss"]) for micro in results), "sums": {}, "maxima": {}}
    for micro in results:
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
        skipped=outcome.skipped,
        loss_scale=outcome.loss_scale,
        rounded=outcome.rounded,
        routers=outcome.routers,
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
    """Return `value` of every rank of `group` in order, for reproducible float64 sums."""
    if group.size() == 1:
        return [value]
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, value, group=group)
    return gathered
