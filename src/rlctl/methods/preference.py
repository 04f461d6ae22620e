"""Direct preference optimization, and losses of its kind; `preference.loss` chooses.

    reward(y)  = beta * (log pi(y | x) - log pi_ref(y | x))     of dpo and ipo, summed over the tokens of a completion
                 beta * log pi(y | x)                           of simpo and orpo, averaged over them
    margin     = reward(chosen) - reward(rejected)

    dpo        - log sigmoid(margin)                            Rafailov et al. 2023, arXiv 2305.18290, equation 7
    ipo        (margin / beta - 1 / (2 beta))^2                 Azar et al. 2023, arXiv 2310.12036, equation 17
    simpo      - log sigmoid(margin - gamma)                    Meng et al. 2024, arXiv 2405.14734, equation 6
    orpo       nll(chosen) - beta log sigmoid(log odds ratio)   Hong et al. 2024, arXiv 2403.07691, equations 6 and 7

A loss is averaged over the pairs of a batch. With `preference.label_smoothing` e, the labels of a part e of the pairs
are taken to be wrong (cDPO, Mitchell 2023): - (1 - e) log sigmoid(margin) - e log sigmoid(-margin). The reference is
the model that the run began with. The odds of orpo are p / (1 - p), where p is the exponential of the mean log-prob.

Both texts of a pair are in one micro-batch, the chosen one first (`RunWorkersSpec.whole_groups`). Suffix P: its pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from rlctl.backends.batching.batch import TokenBatch
from rlctl.config.facts import Flag
from rlctl.config.section import PositiveNumber, Section
from rlctl.data.row_types import PairRows
from rlctl.data.texts import REFERENCE
from rlctl.methods.text_method import TextMethod, per_text
from rlctl.settings.config import TextConfig
from rlctl.telemetry.metrics import Metric
from rlctl.training.capabilities import PacksWholeGroups, PrecomputesReference

if TYPE_CHECKING:
    import torch


class PreferenceConfig(Section):
    """The loss of `train dpo`."""

    loss: Literal["dpo", "ipo", "simpo", "orpo"] = "dpo"
    """The formula, by its name in the literature. simpo and orpo compare without a reference model."""
    beta: Annotated[PositiveNumber, Flag("beta", "Strength of the pull toward the reference model.")] = 0.1
    """Weight of the distance to the reference model: the reward of a completion is beta times the log-prob that it has
    more under the policy than under the model that the run began with. With orpo it is the weight of the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With dpo, the part of the pairs whose labels are taken to be wrong (cDPO)."""
    average: bool = False
    """With dpo and ipo, take the mean log-prob of a completion's tokens, not their sum; simpo and orpo always do."""
    target_margin: Annotated[float, Field(ge=0)] = 0.0
    """With simpo, the margin of the rewards that is aimed at (gamma)."""
    precompute: bool = False
    """With dpo and ipo, compute the log-probs of the reference once for all rows, before the first step, and hold no
    second copy of the weights. A row may bring them in the fields `ref_chosen_logps` and `ref_rejected_logps`."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the negative log-prob of the chosen completion, which is added to the loss."""

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with the model that the run began with."""
        return self.loss in ("dpo", "ipo")

    @property
    def holds_reference(self) -> bool:
        """Whether that model is held next to the policy."""
        return self.has_reference and not self.precompute

    @model_validator(mode="after")
    def validate_keys_of_the_loss(self) -> PreferenceConfig:
        of_reference = ["dpo", "ipo"]
        for key, losses in (
            ("label_smoothing", ["dpo"]),
            ("average", of_reference),
            ("precompute", of_reference),
            ("target_margin", ["simpo"]),
        ):
            if getattr(self, key) and self.loss not in losses:
                raise ValueError(f"{key} is for preference.loss = {' or '.join(losses)}, and it is {self.loss}")
        return self


class DpoConfig(TextConfig):
    """The configuration of `rlctl train dpo`."""

    preference: PreferenceConfig = PreferenceConfig()


PAIRS = "pairs"
LEAST_LOSS = 1e-7
"""Lower bound of the negative log-prob; probability 1 has infinite odds."""


def _mean(name: str, curve: str, column: str = "") -> Metric:
    return Metric(name, "mean", curve=curve, column=column, per=PAIRS, flat=True)


REWARDS = (
    _mean("rewards/chosen", "reward of chosen completions"),
    _mean("rewards/rejected", "reward of rejected completions"),
    _mean("rewards/margins", "margin of the rewards", "margin"),
    _mean("rewards/accuracies", "share of pairs with a positive margin", "acc"),
)


def summed(values_R: torch.Tensor, rollout_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums [P] over the tokens of chosen and of rejected texts."""
    import torch

    texts = 2 * (int(rollout_R.max()) // 2 + 1)
    sums = torch.zeros(texts, dtype=values_R.dtype, device=values_R.device).index_add(0, rollout_R, values_R)
    return sums[0::2], sums[1::2]


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch."""

    pair_R: torch.Tensor  # int64: the pair of each token
    tokens_P: torch.Tensor  # number of tokens of both texts
    chosen_logps_P: torch.Tensor
    rejected_logps_P: torch.Tensor
    chosen_rewards_P: torch.Tensor
    rejected_rewards_P: torch.Tensor
    chosen_means_P: torch.Tensor  # mean log-prob of a token
    rejected_means_P: torch.Tensor

    @property
    def margins_P(self) -> torch.Tensor:
        return self.chosen_rewards_P - self.rejected_rewards_P

    def spread(self, values_P: torch.Tensor) -> torch.Tensor:
        """Spread `values_P` of pairs over their tokens [R], with equal sums."""
        return (values_P / self.tokens_P.clamp(min=1))[self.pair_R]


def _dpo(pairs: Pairs, options: PreferenceConfig) -> torch.Tensor:
    from torch.nn.functional import logsigmoid

    wrong = options.label_smoothing
    return -(1 - wrong) * logsigmoid(pairs.margins_P) - wrong * logsigmoid(-pairs.margins_P)


def _ipo(pairs: Pairs, options: PreferenceConfig) -> torch.Tensor:
    return (pairs.margins_P / options.beta - 1 / (2 * options.beta)).square()


def _simpo(pairs: Pairs, options: PreferenceConfig) -> torch.Tensor:
    from torch.nn.functional import logsigmoid

    return -logsigmoid(pairs.margins_P - options.target_margin)


def _orpo(pairs: Pairs, options: PreferenceConfig) -> torch.Tensor:
    import torch
    from torch.nn.functional import logsigmoid

    def log_odds(means_P: torch.Tensor) -> torch.Tensor:
        means_P = means_P.clamp(max=-LEAST_LOSS)
        return means_P - torch.log(-torch.expm1(means_P))

    ratio_P = log_odds(pairs.chosen_means_P) - log_odds(pairs.rejected_means_P)
    return -pairs.chosen_means_P - options.beta * logsigmoid(ratio_P)


LOSSES: Mapping[str, Callable[[Pairs, PreferenceConfig], torch.Tensor]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""The loss of each pair [P], by the name of `preference.loss`."""


def measure_pairs(pairs: Pairs, metrics: Sequence[Metric]) -> dict[str, torch.Tensor]:
    """Return the values [R] of the metrics of pairs that are among `metrics`."""
    values = {
        PAIRS: pairs.tokens_P.clamp(max=1),
        "rewards/chosen": pairs.chosen_rewards_P,
        "rewards/rejected": pairs.rejected_rewards_P,
        "rewards/margins": pairs.margins_P,
        "rewards/accuracies": pairs.margins_P > 0,
        "logps/chosen": pairs.chosen_logps_P,
        "logps/rejected": pairs.rejected_logps_P,
    }
    declared = {metric.name for metric in metrics}
    return {name: pairs.spread(values_P) for name, values_P in values.items() if name in declared}


class PairMethod(TextMethod, PacksWholeGroups):
    """Compares the two completions of a pair."""

    rows = PairRows()
    packed_texts = 2

    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        """Return the weight of a pair in the mean over pairs."""
        return per_text(len(response_tokens_N), 2)


class Dpo(PairMethod, PrecomputesReference):
    """Direct preference optimization on rows with `prompt`, `chosen` and `rejected`.

    The reference is the model that the run begins with.
    """

    Config = DpoConfig
    config: DpoConfig
    command = "dpo"
    examples = (
        "rlctl train dpo --model Qwen/Qwen3-1.7B --data pairs.jsonl --epochs 1 --lr 5e-7 --preset 1gpu",
        "rlctl train dpo --model ./my-model --data pairs.jsonl --beta 0.3 --lora",
        "rlctl train dpo --resume --run-dir runs/my-run",
    )
    metrics = (
        Metric(PAIRS, "sum"),
        *REWARDS,
        _mean("logps/chosen", "log-prob of chosen completions"),
        _mean("logps/rejected", "log-prob of rejected completions"),
    )

    def __init__(self, config: DpoConfig) -> None:
        super().__init__(config)
        self.requires = frozenset({"reference_logprobs"} if config.preference.holds_reference else ())

    @property
    def reference_before_training(self) -> bool:
        return self.config.preference.precompute

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        pairs, options = self.pairs(batch), self.config.preference
        imitated_P = pairs.chosen_means_P if options.average or not options.has_reference else pairs.chosen_logps_P
        return pairs.spread(LOSSES[options.loss](pairs, options) - options.sft_weight * imitated_P)

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        return measure_pairs(self.pairs(batch), self.metrics)

    def pairs(self, batch: TokenBatch) -> Pairs:
        """Return the pairs of a micro-batch, with gradient."""
        import torch

        options = self.config.preference
        chosen, rejected = summed(batch.logprobs_R, batch.rollout_R)
        of_chosen, of_rejected = summed(torch.ones_like(batch.logprobs_R, requires_grad=False), batch.rollout_R)
        means = chosen / of_chosen.clamp(min=1), rejected / of_rejected.clamp(min=1)
        compared = means
        if options.has_reference:
            reference_R = batch.extra_R[REFERENCE] if options.precompute else batch.reference_logprobs_R
            assert reference_R is not None  # `requires` has them
            compared = summed(batch.logprobs_R - reference_R, batch.rollout_R)
        if options.has_reference and options.average:
            compared = compared[0] / of_chosen.clamp(min=1), compared[1] / of_rejected.clamp(min=1)
        rewards = options.beta * compared[0], options.beta * compared[1]
        return Pairs(batch.rollout_R // 2, of_chosen + of_rejected, chosen, rejected, *rewards, *means)
