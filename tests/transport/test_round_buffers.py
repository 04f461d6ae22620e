"""The sending side of a channel."""

from __future__ import annotations

import torch

from rlctl.backends.base import WeightSource
from rlctl.refit.policy_side import RefitSender
from rlctl.weights.transfer_plan import World


class Gathering(WeightSource):
    """A rank that must gather its parameters together with all others."""

    rank, gathered = 0, 0

    def parameters(self) -> dict[str, torch.Tensor]:
        self.gathered += 1
        return {"weight": torch.zeros(4)}

    def layouts(self) -> World:
        raise NotImplementedError


def test_what_some_ranks_ask_of_themselves_does_not_gather_parameters() -> None:
    source = Gathering()
    sender = RefitSender(source)
    assert sender.refit_place().device == "cpu"
    gathered = source.gathered
    assert sender.refit_copy_gb_per_s(1 << 20) > 0  # of rank 0 alone
    assert source.gathered == gathered
