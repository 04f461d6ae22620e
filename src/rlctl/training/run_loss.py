"""The loss that a policy trains on: a method's loss over response tokens, weighted and summed, with its metrics.

Suffix R: the response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlctl.backends.batching.batch import LossOutput, MinibatchResult, TokenBatch
from rlctl.errors import InputError
from rlctl.telemetry.metrics import TOKENS, Metric, nested
from rlctl.training.capabilities import SampledByEngines, ScalarHead
from rlctl.training.method import Method

if TYPE_CHECKING:
    import torch

ENTROPY = Metric("entropy", "mean", "entropy (nats)", "entropy")
SQUARES = "/squares"
"""Suffix of the name of a sum of squares."""


def declared(method: Method) -> tuple[Metric, ...]:
    """Return the metrics that training with `method` computes."""
    if isinstance(method, SampledByEngines):
        return (*method.always_measured, *method.metrics)
    return tuple(method.metrics) if isinstance(method, ScalarHead) else (ENTROPY, *method.metrics)


def finite(batch: TokenBatch) -> TokenBatch:
    """Return the batch with 0 for values of left-out tokens that are not finite: an infinite log-prob has weight 0 in
    the loss, but 0 times its gradient is NaN."""
    columns = ("logprobs_R", "full_logprobs_R", "entropy_R", "rollout_logprobs_R", "old_logprobs_R",
               "old_full_logprobs_R", "reference_logprobs_R", "teacher_logprobs_R", "teacher_top_RK",
               "top_logprobs_RK")  # fmt: skip
    columns_by_name = {name: getattr(batch, name) for name in columns}
    odd = {name: ~values.isfinite() for name, values in columns_by_name.items() if values is not None}
    left_out = {name: odd_R & ~(batch.counted_R if odd_R.ndim == 1 else batch.counted_R[:, None])
                for name, odd_R in odd.items()}  # fmt: skip
    return replace(batch, **{name: columns_by_name[name].masked_fill(here, 0.0) for name, here in left_out.items()})


@dataclass(frozen=True)
class RunLoss:
    """The `MicroBatchLoss` of a method."""

    method: Method

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss and metrics of one micro-batch."""
        import torch

        method, user_loss = self.method, self.method.user_loss
        batch = finite(batch)
        if isinstance(method, SampledByEngines):
            batch = method.adjusted(batch)
        output = method.token_loss(batch) if user_loss is None else user_loss(batch, method.config.loss)
        loss_R, measured = output if isinstance(output, tuple) else (output, None)
        # Left-out tokens have weight 0; where() also keeps an infinite value of theirs from becoming 0 * inf.
        loss = torch.where(batch.counted_R, batch.token_weights_R * loss_R, 0.0).sum()
        if batch.nll_weights_R is not None:
            loss = loss - (batch.nll_weights_R * batch.logprobs_R).sum()
        with torch.no_grad():
            measured = method.measure(batch) if measured is None else measured
            return self._reduced(loss, {**self._always(batch), **measured}, batch.counted_R)

    def _always(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        if isinstance(self.method, SampledByEngines):
            return self.method.measure_always(batch)
        return {} if isinstance(self.method, ScalarHead) else {"entropy": batch.entropy_R}

    def _reduced(self, loss: torch.Tensor, values: dict[str, torch.Tensor], mask_R: torch.Tensor) -> LossOutput:
        """Raise InputError where the method measures other metrics than it declares."""
        import torch

        reductions = {metric.name: metric.reduce for metric in declared(self.method)}
        if reductions.keys() != values.keys():
            name, odd = self.method.config.run.algorithm, sorted(reductions.keys() ^ values.keys())[0]
            if odd in values:
                declaration = f'metrics = (Metric("{odd}", "mean"),)'
                hint = f"Declare it in the class: {declaration}, from rlctl.telemetry.metrics."
                raise InputError(f"Algorithm {name} measures {odd!r}, which its `metrics` do not declare.", hint)
            raise InputError(
                f"Algorithm {name} declares the metric {odd!r} in `metrics`, and its `measure` does not return it.",
                "Return it for every batch, or leave it out of `metrics`.",
            )
        dtype = loss.dtype
        sums, maxima = {TOKENS: mask_R.to(dtype).sum()}, {}
        for name, value in values.items():
            kept = torch.where(mask_R, value.detach().to(dtype), 0.0) if value.ndim else value.detach()
            if reductions[name] == "max":
                maxima[name] = kept.max()
            else:
                sums[name] = kept.sum()
            if reductions[name] == "effective":
                sums[name + SQUARES] = kept.square().sum()
        return LossOutput(loss=loss, sums=sums, maxima=maxima)

    def metrics(self, results: Sequence[MinibatchResult]) -> dict[str, Any]:
        """Return the metrics over all optimizer steps of a batch; none where no token was computed."""
        tokens = sum(result.sums.get(TOKENS, 0.0) for result in results)
        if not tokens:
            return {}
        values, flat = {}, {}
        for metric in declared(self.method):
            if metric.reduce == "max":
                values[metric.name] = max(result.maxima.get(metric.name, 0.0) for result in results)
            else:
                total = sum(result.sums.get(metric.name, 0.0) for result in results)
                count = sum(result.sums.get(metric.per, 0.0) for result in results)
                values[metric.name] = total if metric.reduce != "mean" else total / count if count else 0.0
            if metric.reduce == "effective":
                squares = sum(result.sums.get(metric.name + SQUARES, 0.0) for result in results)
                values[metric.name] = values[metric.name] ** 2 / (tokens * squares) if squares else 0.0
            if metric.flat:
                flat[metric.name] = values.pop(metric.name)
        return nested(values) | flat
