"""The share of float32 weight movement that reaches the rounded weights, from a fixed-size sample of each weight."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from rlctl.backends.batching.batch import Rounded
from rlctl.settings.training import Rounding
from rlctl.weights.rounding import narrowed

SAMPLE = 1024
"""Elements of a weight that are looked at, or a few more."""


class Movement:
    """Follows the weights of one rank through its optimizer steps, which it sees before and after."""

    def __init__(self, dtype: torch.dtype, rounding: Rounding) -> None:
        self._dtype = dtype
        self._rounding: Rounding = rounding
        self._first: dict[Hashable, Tensor] = {}
        self._before: dict[Hashable, Tensor] = {}
        self._sums: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def before(self, name: Hashable, master: Tensor) -> None:
        """See a float32 weight, or this rank's part of it, before a step."""
        self._before[name] = _sample(master)
        self._first.setdefault(name, self._before[name])

    @torch.no_grad()
    def after(self, name: Hashable, master: Tensor) -> None:
        """Measure the movement after a step."""
        if not master.numel() or name not in self._before:
            return
        now, first = _sample(master), self._first[name]
        first_narrow, before_narrow, now_narrow = (
            narrowed(tensor, self._dtype, self._rounding).double() for tensor in (first, self._before[name], now)
        )
        moved = (now - first).double()
        of_sample = torch.stack([
            torch.ones_like(moved).sum(),
            (now_narrow != before_narrow).double().sum(),
            (now_narrow != first_narrow).double().sum(),
            moved.abs().sum(),
            ((now_narrow - first_narrow) * moved.sign()).sum(),
        ])  # fmt: skip
        self._sums[name] = of_sample * (master.numel() / len(now))

    def total(self, device: torch.device) -> Rounded:
        """Return the shares after the last step, over all ranks. Collective."""
        sums = sum(self._sums.values(), torch.zeros(5, dtype=torch.float64, device=device))
        torch.distributed.all_reduce(sums)
        count, step, start, moved, carried = sums.tolist()
        return Rounded(step / count, start / count, carried / moved if moved else 1.0)


def _sample(values: Tensor) -> Tensor:
    """A copy. The distance is odd, so that the columns of a matrix take turns."""
    return values.detach().flatten()[:: (values.numel() // SAMPLE) | 1].clone()
