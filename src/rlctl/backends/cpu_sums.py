"""Sums of training on CPUs: equal for any number of threads, and not in bfloat16 over many tokens. Measured with torch
2.13.

Without `use_deterministic_algorithms`, the threads of `index_put_` with accumulate, and of the backward pass of
indexing, add to one place in order of arrival. The kernels behind the gradients of an embedding and of a layer norm add
narrow numbers in their own type: at 256, bfloat16 no longer grows by 1, and a frequent token's gradient, or a norm's
bias, stops there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
_usual_embedding, _usual_layer_norm = F.embedding, F.layer_norm


def install() -> None:
    """Make the sums of this process repeatable, and sum gradients of `F.embedding` and `F.layer_norm` in float32."""
    # Warnings only: operations without a repeatable form on a CPU (none is used here) still run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # which costs a pass over all new memory
    F.embedding, F.layer_norm = embedding, layer_norm


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`. The gradient of `index_select` adds up in float32."""
    if not _is_narrow(weight) or not weight.requires_grad or max_norm is not None or scale_grad_by_freq or sparse:
        return _usual_embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    looked_up = weight.index_select(0, input.flatten()).view(*input.shape, weight.shape[1])
    if padding_idx is None:
        return looked_up
    return torch.where((input == padding_idx % len(weight))[..., None], looked_up.detach(), looked_up)


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm`, in float32 with the result in the input's type. Used without a gradient too, so that log-probs
    are equal."""
    if not _is_narrow(input) or weight is None:
        return _usual_layer_norm(input, normalized_shape, weight, bias, eps)
    wide_bias = None if bias is None else bias.float()
    return _usual_layer_norm(input.float(), normalized_shape, weight.float(), wide_bias, eps).to(input.dtype)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in NARROW and tensor.device.type == "cpu"
