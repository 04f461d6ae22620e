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
    """Measures the change of one rank's weights over its optimizer steps."""

    def __init__(self, dtype: torch.dtype, rounding: Rounding) -> None:
        self._dtype = dtype
        self._rounding: Rounding = rounding
        self._first: dict[Hashable, Tensor] = {}
        self._before: dict[Hashable, Tensor] = {}
        self._seen: dict[Hashable, tuple[Tensor, Tensor, Tensor, float]] = {}
        """Samples at first, before and after the last step, and the number of elements for each sampled one."""

    def before(self, name: Hashable, master: Tensor) -> None:
        """See a float32 weight, or this rank's part of it, before a step."""
        self._before[name] = _sample(master)
        self._first.setdefault(name, self._before[name])

    def after(self, name: Hashable, master: Tensor) -> None:
        """See it after the step."""
        if master.numel() and name in self._before:
            now = _sample(master)
            self._seen[name] = self._first[name], self._before[name], now, master.numel() / len(now)

    @torch.no_grad()
    def total(self, device: torch.device) -> Rounded:
        """Return the shares after the last step, over all ranks. Collective."""
        sums = torch.zeros(5, dtype=torch.float64, device=device)
        if self._seen:
            # One pass over the samples of all weights: a GPU would start thirty small kernels for each otherwise.
            firsts, befores, nows, elements = zip(*self._seen.values(), strict=True)
            first, before, now = torch.cat(firsts), torch.cat(befores), torch.cat(nows)
            lengths = torch.tensor([len(samples) for samples in nows], device=now.device)
            each = torch.tensor(elements, dtype=torch.float64, device=now.device)
            first_narrow, before_narrow, now_narrow = (
                narrowed(samples, self._dtype, self._rounding).double() for samples in (first, before, now)
            )
            moved = (now - first).double()
            of_elements = torch.stack([
                torch.ones_like(moved),
                (now_narrow != before_narrow).double(),
                (now_narrow != first_narrow).double(),
                moved.abs(),
                (now_narrow - first_narrow) * moved.sign(),
            ])  # fmt: skip
            sums += of_elements @ each.repeat_interleave(lengths, output_size=len(now))
        torch.distributed.all_reduce(sums)
        count, step, start, moved_sum, carried = sums.tolist()
        return Rounded(step / count, start / count, carried / moved_sum if moved_sum else 1.0)


def _sample(values: Tensor) -> Tensor:
    """A copy. The distance is odd, so that the columns of a matrix take turns."""
    return values.detach().flatten()[:: (values.numel() // SAMPLE) | 1].clone()
