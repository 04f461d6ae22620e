"""A training method: supervised training with a focal loss (arXiv 1708.02002)."""

from rlctl.config.section import NonNegativeNumber, Section
from rlctl.data.row_types import TextRows
from rlctl.methods.sft import SftConfig
from rlctl.methods.text_method import TextMethod
from rlctl.telemetry.metrics import Metric


class FocalSection(Section):
    """The focal loss."""

    gamma: NonNegativeNumber = 2.0
    """Exponent of 1 - p; 0 is cross entropy."""


class FocalConfig(SftConfig):
    """The configuration of `train focal`."""

    focal: FocalSection = FocalSection()


class Focal(TextMethod):
    """Supervised fine-tuning with a focal loss: likely tokens count less."""

    Config = FocalConfig
    command = "focal"
    defaults = {"optimizer.lr": 1e-5}
    rows = TextRows()
    metrics = (Metric("focus", "mean", curve="mean weight of a token"),)

    def token_loss(self, batch):
        return -self._weights(batch) * batch.logprobs_R

    def measure(self, batch):
        return {"focus": self._weights(batch)}

    def _weights(self, batch):
        return (1 - batch.logprobs_R.detach().exp()) ** self.config.focal.gamma
