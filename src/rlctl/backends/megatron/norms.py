"""Norms of the policy's layers where TransformerEngine's are not used."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Megatron's torch RMSNorm refuses sequence parallelism; this one marks its weight, so that finalize_model_grads
    sums its gradient over the tensor parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered:  # one more than a small number would lose its digits in bfloat16
            return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float() + 1, self.eps).type_as(x)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@cache
def normed_output(linear: type) -> type:
    """`linear` (row-parallel) with a norm behind it, as Gemma has behind attention and MLP."""

    class NormedOutput(linear):  # type: ignore[misc, valid-type]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(x)
            return self.post_layernorm(output), bias

    return NormedOutput
