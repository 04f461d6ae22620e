"""The adapters of one policy rank as the source of a refit, beside its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from rlctl.backends.base import PolicySpec, WeightSource
from rlctl.backends.lora_adapter import Adapter
from rlctl.errors import ConfigError
from rlctl.weights.adapters import A, AdapterRow, AdapterWorld, B

if TYPE_CHECKING:
    from rlctl.weights.transfer_plan import World


class AdaptedPolicy(WeightSource, Protocol):
    """A policy rank with adapters (`PolicyRank`)."""

    spec: PolicySpec

    def adapters(self) -> Iterable[tuple[str, Adapter]]: ...


class AdapterSource(WeightSource):
    """A and B of the adapted layers, by the names `<parameter>.lora_a` and `.lora_b`. Parameters that share A send it
    once."""

    sends_copies = True  # FSDP2's shards are gathered anew

    def __init__(self, policy: AdaptedPolicy) -> None:
        self.policy, self.rank, self.rounding = policy, policy.rank, policy.rounding
        self._rows: tuple[AdapterRow, ...] = ()

    def rows(self) -> tuple[AdapterRow, ...]:
        """Return the adapters of all ranks. Collective. Raises ConfigError for adapters on stacked matrices."""
        by_rank: list[dict[str, AdapterRow]] = [{} for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(by_rank, self._here())
        self._rows = tuple({tensor: row for rows in by_rank for tensor, row in rows.items()}.values())
        return self._rows

    def _here(self) -> dict[str, AdapterRow]:
        pieces: dict[str, dict[str, None]] = {}
        for piece in self.policy.layouts().layout(self.rank).pieces:
            pieces.setdefault(piece.param, {})[piece.tensor] = None
        adapters = list(self.policy.adapters())  # all alive at once, so that addresses tell them apart
        rows, names = dict[str, AdapterRow](), dict[int, str]()
        for name, adapter in adapters:
            if adapter.weight.dim() != 2:
                raise ConfigError(
                    f"training.lora.refit = delta: {name} is a stack of matrices, whose adapters are not sent alone.",
                    "Set training.lora.refit=merged.",
                )
            for tensor in pieces.get(name, ()):
                a = names.setdefault(adapter.a.data_ptr(), tensor + A)
                rows[tensor] = AdapterRow(tensor, a, adapter.a.shape[0], adapter.scale)
        return rows

    def layouts(self) -> World:
        return AdapterWorld(self.policy.layouts(), self._rows, self.policy.spec.dtype)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, adapter in self.policy.adapters():
            tensors |= {name + A: adapter.a, name + B: adapter.b}
        return tensors
