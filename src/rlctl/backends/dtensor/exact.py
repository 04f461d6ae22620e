"""A policy of transformers' modules on a CPU that computes with the operations of `backends.exact`, as the engine does
under `checks.exact`."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from rlctl.backends import exact


def install() -> None:
    """Replace the operations of this process. Norms and rotations of transformers compute each row alike already."""
    exact.install()
    nn.Linear.forward = _multiply  # type: ignore[method-assign]
    SiLUActivation.forward = _activate  # type: ignore[method-assign]


def _multiply(self: nn.Linear, x: Tensor) -> Tensor:
    return exact.product(x, self.weight, self.bias)


def _activate(self: SiLUActivation, x: Tensor) -> Tensor:
    return exact.silu(x)
