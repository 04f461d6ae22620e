"""Reward models: a model with a scalar head, trained on which of two completions is preferred.

    score(y)   = head applied to the last hidden state of prompt and completion, at the token that ends the completion
    loss       = - log sigmoid(score(chosen) - score(rejected) - m)        averaged over the pairs of a batch

This is the likelihood of Bradley and Terry (1952) as Ouyang et al. 2022 use it (arXiv 2203.02155, equation 1). The
margin m is what a row holds in its field `margin`, or 0 (Touvron et al. 2023, arXiv 2307.09288, equation 2). Metrics
have the names that they have with dpo, and `rewards/margins` is the difference of the scores without m.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import model_validator

from rlctl.backends.batching.batch import TokenBatch
from rlctl.data.row_types import MarginPairRows
from rlctl.data.texts import MARGIN
from rlctl.errors import InputError
from rlctl.methods.preference import PAIRS, REWARDS, PairMethod, Pairs, measure_pairs, summed
from rlctl.settings.config import RlctlConfig
from rlctl.settings.run import OwnLossConfig
from rlctl.telemetry.metrics import Metric
from rlctl.training.capabilities import Refuses, ScalarHead

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rlctl.rollouts.dataset import TextStream


class RmConfig(RlctlConfig):
    """The configuration of `rlctl train rm`."""

    loss: OwnLossConfig = OwnLossConfig()

    @model_validator(mode="after")
    def validate_no_quantization(self) -> RmConfig:
        if self.training.quantization.format != "none":
            raise ValueError(
                f"training.quantization.format = {self.training.quantization.format} does not go with this: "
                "`train rm` trains a model of scores, which no engine computes"
            )
        return self


class RewardModel(PairMethod, ScalarHead, Refuses):
    """A reward model on rows with `prompt`, `chosen` and `rejected`: a scalar head, and the loss of Bradley and Terry.

    `rlctl convert megatron-to-hf RUN DIR` exports it, and `--reward model:DIR` of `train grpo` scores with it.
    """

    Config = RmConfig
    config: RmConfig
    defaults = {"optimizer.lr": 1e-5}
    command = "rm"
    examples = (
        "rlctl train rm --model Qwen/Qwen3-1.7B --data pairs.jsonl --epochs 1 --lr 2e-6 --preset 1gpu",
        "rlctl train rm --model ./my-model --data pairs.jsonl --val-data others.jsonl --gpu cpu",
        "rlctl train rm --resume --run-dir runs/my-run",
    )
    rows = MarginPairRows()
    metrics = (Metric(PAIRS, "sum"), *REWARDS)

    def refuse_model(self, directory: Path) -> None:
        from rlctl.checkpoints.hf.hf_files import read_config
        from rlctl.checkpoints.hf.reward_models import scorer_class

        if self.config.model.images:
            raise InputError(
                f"`train rm` trains reward models of texts, and {self.config.model.name} is to be trained on images.",
                "Give rows without images. A reward function can score images (--reward path/to/file.py:function).",
            )
        scorer_class(read_config(directory))  # refuses a model that could not be exported

    @property
    def stream(self) -> type[TextStream]:
        from rlctl.rollouts.dataset import ScoredTexts

        return ScoredTexts

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        return measure_pairs(self.pairs(batch), self.metrics)

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        pairs, margins_P = self.pairs(batch), 0.0
        if MARGIN in batch.extra_R:
            margins_P, _ = summed(batch.extra_R[MARGIN], batch.rollout_R)
        return pairs.spread(-logsigmoid(pairs.margins_P - margins_P))

    def pairs(self, batch: TokenBatch) -> Pairs:
        """Return the pairs of a micro-batch; each text has one token with a loss, whose value is its score."""
        import torch

        chosen, rejected = summed(batch.logprobs_R, batch.rollout_R)
        ones = torch.ones_like(chosen)
        return Pairs(batch.rollout_R // 2, 2 * ones, chosen, rejected, chosen, rejected, chosen, rejected)
