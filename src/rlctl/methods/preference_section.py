"""The section of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlctl.config.section import PositiveNumber, Section


class PreferenceConfig(Section):
    """The loss of `train dpo` and `train kto`."""

    loss: Literal["dpo", "ipo", "simpo", "orpo"] = "dpo"
    """The formula, by its name in the literature. simpo and orpo compare without a reference model."""
    beta: PositiveNumber = 0.1
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

    good_weight: PositiveNumber = 1.0
    """With `train kto`, weight of the loss of good completions."""
    bad_weight: PositiveNumber = 1.0
    """With `train kto`, weight of the loss of bad completions."""

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
