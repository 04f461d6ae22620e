"""The sending side of a channel: what is packed is what the parameters hold now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rlctl.refit.policy_side import RefitSender
from rlctl.transport.round_buffers import Packer
from rlctl.transport.rounds import chunk_layout, cut_rounds, whole_tensors
from rlctl.weights.transfer_plan import SingleWorld, World, receive_plan

ROWS = [(f"layer.{number}", "float32", (8, 8)) for number in range(4)]


class Merged(Mapping[str, torch.Tensor]):
    """Weights that are made when they are asked for. An allocator hands out the memory of the one before where that is
    free: here whenever a name is asked for the first time."""

    computed = frozenset(name for name, _, _ in ROWS)
    free = torch.zeros(8, 8)

    def __init__(self, value: float) -> None:
        self.value, self.asked = value, set[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        again, _ = name in self.asked, self.asked.add(name)
        return (torch.zeros(8, 8) if again else self.free).fill_(self.value)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in ROWS)

    def __len__(self) -> int:
        return len(ROWS)


class Gathering(RefitSender):
    """A rank that must gather its parameters together with all others."""

    rank, gathered = 0, 0

    def parameters(self) -> dict[str, torch.Tensor]:
        self.gathered += 1
        return {"weight": torch.zeros(4)}

    def layouts(self) -> World:
        raise NotImplementedError


def test_what_some_ranks_ask_of_themselves_does_not_gather_parameters() -> None:
    source = Gathering()
    assert source.refit_place().device == "cpu"
    gathered = source.gathered
    assert source.refit_copy_gb_per_s(1 << 20) > 0  # of rank 0 alone
    assert source.gathered == gathered


def test_computed_parameters_are_asked_for_at_every_refit() -> None:
    layout = whole_tensors(ROWS)
    rounds = cut_rounds(layout, 1 << 12)
    plan = receive_plan(SingleWorld(layout), chunk_layout(layout, rounds))
    packer = Packer(rounds, plan.copies, message=False, who="policy rank 0")
    buffer = torch.zeros(1 << 12, dtype=torch.uint8)
    for version in range(1, 6):
        packer.look(Merged(float(version)))
        packer.pack(0, buffer)
        for chunk in rounds[0]:
            held = buffer[chunk.offset : chunk.offset + chunk.bytes].view(torch.float32)
            assert (held == version).all(), f"{chunk.param} of version {version}"
