"""Kahneman-Tversky optimization: completions that are each labeled as good or bad, without pairs.

    r(y)  = log pi(y | x) - log pi_ref(y | x)                   summed over the tokens of a completion
    z0    = max(0, mean of r(y') over a batch)                  y': the completion of another prompt
    loss  = l_D (1 - sigmoid(beta (r(y) - z0)))                 where the label is good
            l_U (1 - sigmoid(beta (z0 - r(y))))                 where it is bad

Ethayarajh et al. 2024 (arXiv 2402.01306), equations 7 and 8. A loss is averaged over the completions of a batch. z0
estimates KL(pi || pi_ref) and has no gradient: it is computed before the step, over the whole batch, so that it does
not depend on how completions are packed. `preference.good_weight` is l_D and `preference.bad_weight` l_U.

A group has two texts: the completion, and the completion of the next row with another prompt, behind the same prompt,
for z0 alone. The reference is the model that the run began with. Suffix N: the completions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from rlctl.backends.batching.batch import LossOutput, MinibatchResult, TokenBatch, TrainBatch
from rlctl.config.facts import Flag
from rlctl.config.section import PositiveNumber, Section
from rlctl.data.chat import PromptEncoder
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.row_types import RowType
from rlctl.data.texts import TrainedText, text_from_record, trained_texts, without_field
from rlctl.errors import InputError
from rlctl.methods.text_method import TextMethod, per_text
from rlctl.settings.config import TextConfig
from rlctl.settings.data import DataConfig
from rlctl.telemetry.metrics import Metric
from rlctl.training.capabilities import PassBefore, PassBeforeStep

if TYPE_CHECKING:
    import torch

GOOD, BAD = "good", "bad"
LABEL = "label"
"""Field that says whether a completion is good, and column of its texts with 1 or 0."""
FORM = "A row has `prompt`, `completion` and a `label` that is true or false. Pairs are for `train dpo`."
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Values of that field, also as texts of a CSV file."""


class LabelRows(RowType):
    """Completions with a `label`, true or false; the completion of another prompt stands next to each."""

    needs_another = True
    numbers = (LABEL,)

    def read(self, record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
        if LABEL not in record:
            raise without_field(LABEL, "", record, where, FORM)
        good = TRUTH.get(str(record[LABEL]).lower())
        if good is None:
            raise InputError(f"{where}: the field {LABEL!r} is neither true nor false.", "It says whether it is good.")
        row = text_from_record({**record, LABEL: int(good)}, index, where, data)
        if len(row.answer) != 1:
            hint = "Give `prompt` and `completion`."
            raise InputError(f"{where}: a text without a prompt has no label to learn.", hint)
        return row

    def example(self, right: str, wrong: str, number: int, data: DataConfig) -> dict[str, Any]:
        good = number % 2 == 0
        return {LABEL: good} | super().example(right if good else wrong, wrong, number, data)

    def texts(
        self, row: PromptRow, other: PromptRow | None, encoder: PromptEncoder, data: DataConfig, scored: bool
    ) -> tuple[TrainedText, ...]:
        assert other is not None  # `needs_another`
        # one by one: a text does not depend on whether the other row's completion has a thought
        return tuple(trained_texts(encoder, replace(row, answer=text_row.answer[:1]))[0] for text_row in (row, other))


class KtoSettings(Section):
    """The loss of `train kto`."""

    beta: Annotated[PositiveNumber, Flag("beta", "Strength of the pull toward the reference model.")] = 0.1
    """Weight of the distance to the reference model."""
    good_weight: PositiveNumber = 1.0
    """Weight of the loss of good completions."""
    bad_weight: PositiveNumber = 1.0
    """Weight of the loss of bad completions."""


class KtoConfig(TextConfig):
    """The configuration of `rlctl train kto`."""

    preference: KtoSettings = KtoSettings()


class Kto(TextMethod, PassBeforeStep):
    """Kahneman-Tversky optimization on rows with `prompt`, `completion` and `label`, true for good and false for bad.

    The reference is the model that the run begins with.
    """

    Config = KtoConfig
    config: KtoConfig
    command = "kto"
    flags = "answer_field"
    examples = (
        "rlctl train kto --model Qwen/Qwen3-1.7B --data labels.jsonl --epochs 1 --lr 5e-7 --preset 1gpu",
        "rlctl train kto --resume --run-dir runs/my-run",
    )
    rows = LabelRows()
    requires = frozenset({"reference_logprobs"})
    metrics = (
        Metric(GOOD, "sum"),
        Metric(BAD, "sum"),
        Metric("rewards/chosen", "mean", curve="reward of good completions", per=GOOD, flat=True),
        Metric("rewards/rejected", "mean", curve="reward of bad completions", per=BAD, flat=True),
        Metric("logps/chosen", "mean", curve="log-prob of good completions", per=GOOD, flat=True),
        Metric("logps/rejected", "mean", curve="log-prob of bad completions", per=BAD, flat=True),
        Metric("kl", "max", curve="estimate of the divergence from the reference", column="kl"),
    )

    def __init__(self, config: KtoConfig, z0: float = 0.0) -> None:
        super().__init__(config)
        self.z0 = z0

    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        """Return the weight of a completion in the mean over completions; the texts next to them are not trained on."""
        weights_N = per_text(len(response_tokens_N), 2)
        weights_N[1::2] = 0.0
        return weights_N

    def before_training(self, batch: TrainBatch) -> PassBefore:
        texts = [*batch.skipped, *(text for minibatch in batch.minibatches for text in minibatch)]
        others = tuple(text._replace(token_weight=1.0) for text in texts if text.sample == 1)
        columns = {text.position: batch.columns[text.position] for text in others}
        return TrainBatch((others,), columns), _Divergence(), self._take_divergence

    def _take_divergence(self, results: Sequence[MinibatchResult]) -> None:
        total, count = (sum(result.sums.get(name, 0.0) for result in results) for name in ("ratio", "texts"))
        self.z0 = max(0.0, total / count) if count else 0.0

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        import torch

        options, ratio_N, good_N = self.config.preference, _ratios(batch), self._good(batch)
        moved_N = options.beta * (ratio_N - self.z0)
        loss_N = torch.where(
            good_N, options.good_weight * (1 - moved_N.sigmoid()), options.bad_weight * (1 - (-moved_N).sigmoid())
        )
        return _spread(loss_N, batch)

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        good_N, logps_N = self._good(batch), _summed(batch.logprobs_R, batch)
        rewards_N, present_N = self.config.preference.beta * _ratios(batch), _tokens(batch) > 0
        metrics = {
            GOOD: good_N & present_N,
            BAD: ~good_N & present_N,
            "rewards/chosen": rewards_N * good_N,
            "rewards/rejected": rewards_N * ~good_N,
            "logps/chosen": logps_N * good_N,
            "logps/rejected": logps_N * ~good_N,
        }
        spread = {name: _spread(values_N, batch) for name, values_N in metrics.items()}
        return spread | {"kl": batch.logprobs_R.new_tensor(self.z0)}

    def _good(self, batch: TokenBatch) -> torch.Tensor:
        return _summed(batch.extra_R[LABEL], batch) > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Kto, (self.config, self.z0)


@dataclass(frozen=True)
class _Divergence:
    """Sums of the log ratios of texts, and the number of texts."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        texts = (_tokens(batch) > 0).sum()
        return LossOutput(batch.logprobs_R.new_zeros(()), {"ratio": _ratios(batch).sum().detach(), "texts": texts})


def _summed(values_R: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    import torch

    sums = torch.zeros(int(batch.rollout_R.max()) + 1, dtype=values_R.dtype, device=values_R.device)
    return sums.index_add(0, batch.rollout_R, values_R)


def _tokens(batch: TokenBatch) -> torch.Tensor:
    import torch

    return _summed(torch.ones_like(batch.logprobs_R, requires_grad=False), batch)


def _ratios(batch: TokenBatch) -> torch.Tensor:
    assert batch.reference_logprobs_R is not None  # `requires` has them
    return _summed(batch.logprobs_R - batch.reference_logprobs_R, batch)


def _spread(values_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Spread `values_N` of texts over their tokens [R], with equal sums."""
    return (values_N / _tokens(batch).clamp(min=1))[batch.rollout_R]
