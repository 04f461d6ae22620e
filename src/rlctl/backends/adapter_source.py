"""The adapters of one policy rank as the source of a refit, beside its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from rlctl.backends.base import PolicySpec, WeightSource
from rlctl.backends.lora_adapter import Adapter
from rlctl.weights.adapters import A, AdapterRow, AdapterWorld, B, a_param

if TYPE_CHECKING:
    from rlctl.weights.transfer_plan import World


class AdaptedPolicy(WeightSource, Protocol):
    """A policy rank with adapters (`PolicyRank`)."""

    spec: PolicySpec

    def adapters(self) -> Iterable[tuple[str, Adapter]]: ...


class AdapterSource(WeightSource):
    """A and B of the adapted layers, by the names of `AdapterWorld`."""

    sends_copies = True  # FSDP2's shards are gathered anew

    def __init__(self, policy: AdaptedPolicy) -> None:
        self.policy, self.rank, self.rounding = policy, policy.rank, policy.rounding
        self._rows: tuple[AdapterRow, ...] = ()

    def rows(self) -> tuple[AdapterRow, ...]:
        """Return the adapters of all ranks. Collective."""
        by_rank: list[dict[str, AdapterRow]] = [{} for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(by_rank, self._here())
        self._rows = tuple({tensor: row for rows in by_rank for tensor, row in rows.items()}.values())
        return self._rows

    def _here(self) -> dict[str, AdapterRow]:
        return {
            tensor: AdapterRow(tensor, tensors[0] + A, part.site.rank, part.site.scale)
            for _, adapter in self.policy.adapters()
            for part in adapter.parts
            for tensors in [part.site.place.tensors]
            for tensor in tensors
        }

    def layouts(self) -> World:
        return AdapterWorld(self.policy.layouts(), self._rows, self.policy.spec.dtype)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, adapter in self.policy.adapters():
            tensors[name + B] = adapter.b
            tensors |= {a_param(part.site.place.tensors[0] + A, name): part.a for part in adapter.parts}
        return tensors
