"""A Megatron policy on a CPU that computes with the operations of `backends.exact`, as the engine does under
`checks.exact`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel import layers
from torch import Tensor

from rlctl.backends import exact
from rlctl.backends.megatron import modules


def install() -> None:
    """Replace the operations of this process; to be called when the model is built."""
    exact.install()
    modules.rms_norm = exact.rms_norm
    fused_bias_swiglu.swiglu = lambda y: exact.swiglu(*y.chunk(2, -1))
    _multiply_enough_rows()


@cache
def _multiply_enough_rows() -> None:
    def enough(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(self: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return exact.by_rows(lambda rows: usual(self, rows, weight, *args, **kwargs), input)

        return forward

    for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        linear._forward_impl = enough(linear._forward_impl)  # type: ignore[method-assign]
