"""Rotary position embedding of packed rows: every token at the position that its row states, scaled as the model's
published configuration says."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.backends.megatron.attention import RowParams
from rlctl.errors import ConfigError
from rlctl.models.facts import RopeFacts


class RowRotary(nn.Module):
    """Stands in for Megatron's rotary module: its "sequence length" is the row itself.

    Returns angles [T, 1, 1, d] for the whole row; Megatron's thd path takes them as exact (one angle for each token of
    `cu_seqlens`) and slices them for context parallelism.
    """

    def __init__(self, facts: RopeFacts, width: int, interleaved: bool = False) -> None:
        super().__init__()
        self.frequencies = inverse_frequencies(facts, width)
        self.interleaved = interleaved

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> RowParams:
        """The row: Megatron passes it as `packed_seq_params`, by position or by name."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, RowParams):
                return value
        raise TypeError("RowRotary needs the RowParams of a packed row")

    def forward(self, params: RowParams, *args: Any, **kwargs: Any) -> Tensor:
        assert params.row is not None
        positions = params.row.positions_T
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = torch.outer(positions.float(), self.frequencies)
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat([angles, angles], -1)
        return angles[:, None, None, :]


def inverse_frequencies(facts: RopeFacts, width: int) -> Tensor:
    """float32 [width / 2], by the rules of transformers' modeling_rope_utils.

    Raises:
        ConfigError: a kind of scaling that is not implemented.
    """
    base = 1.0 / facts.theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    if facts.kind == "default":
        return base
    if facts.kind == "linear":
        return base / facts.scaling["factor"]
    if facts.kind == "llama3":
        return _llama3(base, facts.scaling)
    raise ConfigError(f"rope scaling `{facts.kind}` cannot be trained yet.", "Kinds that can: default, linear, llama3.")


def _llama3(base: Tensor, scaling: dict[str, float]) -> Tensor:
    """Long wavelengths slowed by `factor`, short ones kept, a smooth ramp between (Llama 3.1's published code)."""
    factor, old = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / base
    smooth = (old / wavelength - low) / (high - low)
    ramp = (1 - smooth) * base / factor + smooth * base
    slowed = torch.where(wavelength > old / low, base / factor, base)
    return torch.where((wavelength <= old / low) & (wavelength >= old / high), ramp, slowed)
