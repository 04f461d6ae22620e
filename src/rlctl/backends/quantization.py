"""Quantization-aware training: weights on the grid of `training.quantization`.

float32 weights are rounded to model.dtype and then to the grid. Policy and engines compute with the rounded weights;
gradients go to the float32 weights (straight-through). Matrix scales follow the weights at each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from rlctl.backends.base import PolicySpec
from rlctl.checkpoints.nvfp4 import rounded
from rlctl.errors import ConfigError
from rlctl.models.quantized import quantized_matrices, scale_groups
from rlctl.weights.layout import Layout, Piece, View, view_of
from rlctl.weights.plan_execution import strided


class WeightGrid:
    """The parts of matrices that a rank holds and rounds."""

    def __init__(self, spec: PolicySpec, layout: Layout) -> None:
        """Raise ConfigError where the rank has no whole blocks of a matrix."""
        matrices = quantized_matrices(spec.facts, spec.quantization)
        self._groups = scale_groups(matrices)
        self._block = spec.quantization.block
        self._largest = torch.zeros(0)
        self._lifted = False
        self.parts: dict[str, list[tuple[View, int]]] = {}
        """By param, the places of matrices in it and the numbers of their scales."""
        for piece in (piece for piece in layout.pieces if piece.tensor in matrices):
            self._require_whole_blocks(piece)
            place = view_of(layout.params[piece.param], piece.param_box), self._groups[piece.tensor]
            self.parts.setdefault(piece.param, []).append(place)

    def _require_whole_blocks(self, piece: Piece) -> None:
        inputs = piece.tensor_box[1]
        if piece.axes[-1] != 1 or inputs.step != 1 or inputs.start % self._block or inputs.count % self._block:
            raise ConfigError(
                f"training.quantization: a rank has no whole blocks of {self._block} inputs of {piece.tensor}.",
                "Leave it out with training.quantization.exclude, or lower training.tp.",
            )

    @torch.no_grad()
    def measure(self, parameters: Mapping[str, Tensor], narrowed: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
        """Take the scales of the weights that `narrowed` makes of the parameters; collective over all ranks."""
        device = next(iter(parameters.values())).device
        sizes = torch.zeros(max(self._groups.values()) + 1, device=device)
        for param, parts in self.parts.items():
            for view, group in parts:
                part = strided(parameters[param].detach(), view)
                if part.numel():
                    sizes[group] = torch.maximum(sizes[group], narrowed(part).abs().amax().float())
        torch.distributed.all_reduce(sizes, torch.distributed.ReduceOp.MAX)
        self._largest = sizes

    @torch.no_grad()
    def round(self, param: str, values: Tensor) -> None:
        """Round a param's values in place, in element order; `values` may be longer."""
        for view, group in () if self._lifted else self.parts.get(param, ()):
            part = strided(values, view)
            part.copy_(rounded(part, self._largest[group], self._block))

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Suspend rounding in the block."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False
