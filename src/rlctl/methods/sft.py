"""Supervised fine-tuning: the negative log-likelihood of the tokens that a dataset has a loss for.

loss = - log pi(token)          averaged over the tokens of the batch (loss.level = token)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlctl.backends.batching.batch import TokenBatch
from rlctl.data.row_types import TextRows
from rlctl.methods.text_method import TextMethod
from rlctl.settings.config import TextConfig
from rlctl.settings.data import TextDataConfig
from rlctl.settings.run import TextLossConfig
from rlctl.telemetry.metrics import Metric
from rlctl.training.train_batch import token_weights

if TYPE_CHECKING:
    import torch


class SftConfig(TextConfig):
    """The configuration of `rlctl train sft`."""

    data: TextDataConfig = TextDataConfig()
    loss: TextLossConfig = TextLossConfig()


class Sft(TextMethod):
    """Supervised fine-tuning on texts: `prompt` and `completion`, chat `messages`, or `text`.

    The loss is on completions, on messages of the assistant, or on all tokens (data.train_on).
    """

    Config = SftConfig
    config: SftConfig
    defaults = {"optimizer.lr": 1e-5}
    command = "sft"
    flags = "answer_field"
    rows = TextRows()
    examples = (
        "rlctl train sft --preset laptop-sft",
        "rlctl train sft --model Qwen/Qwen3-1.7B --data texts.jsonl --epochs 2 --lr 1e-5 --preset 1gpu",
        "rlctl train sft --model ./my-model --data chats.jsonl --set data.train_on=last --lora",
        "rlctl train sft --resume --run-dir runs/my-run",
    )
    metrics = (Metric("likelihood", "mean", curve="mean probability of a token of the texts", form=".3f"),)

    def token_weights(self, response_tokens_N: np.ndarray) -> np.ndarray:
        return token_weights(response_tokens_N, self.config.loss.level, 1)

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        return -batch.logprobs_R

    def measure(self, batch: TokenBatch) -> Mapping[str, torch.Tensor]:
        return {"likelihood": batch.logprobs_R.exp()}
