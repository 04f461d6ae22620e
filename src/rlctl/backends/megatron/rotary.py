"""Rotary position embedding of packed rows: every token at the position that its row states, scaled as the model's
published configuration says."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    `windowed` are the facts of the layers with a sliding window where they have their own: the angles are then twice as
    wide, those of the other layers first, and `own_angles` is each layer's choice.
    """

    def __init__(
        self, facts: RopeFacts, width: int, interleaved: bool = False, windowed: RopeFacts | None = None
    ) -> None:
        super().__init__()
        self.frequencies = [inverse_frequencies(kind, width) for kind in (facts, windowed) if kind is not None]
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
        self.frequencies = [frequencies.to(positions.device) for frequencies in self.frequencies]
        return torch.cat([self._angles(positions.float(), f) for f in self.frequencies], -1)[:, None, None, :]

    def _angles(self, positions_T: Tensor, frequencies: Tensor) -> Tensor:
        angles = torch.outer(positions_T, frequencies)
        return angles.repeat_interleave(2, -1) if self.interleaved else torch.cat([angles, angles], -1)


def own_angles(windowed: bool) -> Callable[[nn.Module, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]]:
    """A forward pre-hook of self-attention that keeps the half of the angles that is the layer's."""

    def choose(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        halves = kwargs["rotary_pos_emb"].chunk(2, -1)
        return args, kwargs | {"rotary_pos_emb": halves[int(windowed)]}

    return choose


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
    if facts.kind == "yarn":
        return _yarn(base, facts)
    raise ConfigError(
        f"rope scaling `{facts.kind}` cannot be trained yet.", "Kinds that can: default, linear, llama3, yarn."
    )


def attention_factor(facts: RopeFacts) -> float:
    """What YaRN multiplies cosines and sines by (arXiv 2309.00071, section 3.4); 1 for every other kind."""
    if facts.kind != "yarn":
        return 1.0
    given, factor = facts.scaling, facts.scaling["factor"]
    if given.get("attention_factor"):
        return given["attention_factor"]
    if given.get("mscale") and given.get("mscale_all_dim"):
        return yarn_mscale(factor, given["mscale"]) / yarn_mscale(factor, given["mscale_all_dim"])
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """The logarithmic growth of attention with the extension `factor` of the context."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(base: Tensor, scaling: dict[str, float]) -> Tensor:
    """Long wavelengths slowed by `factor`, short ones kept, a smooth ramp between (Llama 3.1's published code)."""
    factor, old = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / base
    smooth = (old / wavelength - low) / (high - low)
    ramp = (1 - smooth) * base / factor + smooth * base
    slowed = torch.where(wavelength > old / low, base / factor, base)
    return torch.where((wavelength <= old / low) & (wavelength >= old / high), ramp, slowed)


def _yarn(base: Tensor, facts: RopeFacts) -> Tensor:
    """Slow dimensions interpolated by `factor`, fast ones kept, a linear ramp between (arXiv 2309.00071)."""
    scaling, width = facts.scaling, 2 * len(base)
    for key in ("factor", "original_max_position_embeddings"):
        if not scaling.get(key):
            raise ConfigError(f"the model's yarn scaling has no `{key}`.", "Take the model's own config.json.")

    def turning(rotations: float) -> float:
        """The dimension that turns so often over the original context."""
        length = scaling["original_max_position_embeddings"]
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(facts.theta))

    low, high = turning(scaling.get("beta_fast") or 32.0), turning(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(len(base), dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / scaling["factor"] * ramp + base * (1 - ramp)
