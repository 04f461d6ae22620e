"""rlctl's modules in a Megatron policy: attention over packed rows, rotary angles at given positions, and norms without
TransformerEngine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from rlctl.backends.batching.context_parallel import Gather, context_part
from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.batching.row_attention import RowAttention, attend
from rlctl.backends.megatron.compat import mlp_submodules
from rlctl.models.facts import RopeFacts


@dataclass
class RowParams(PackedSeqParams):
    """A row for Megatron's layers: to them one thd sequence, whose rotary positions and attention are ours."""

    row: PackedRow | None = None
    part: PackedRow | None = None
    """The row's tokens that this context-parallel rank holds."""
    attention: RowAttention | None = None

    @classmethod
    def of(cls, row: PackedRow, cp_size: int, cp_rank: int) -> RowParams:
        """The row as context-parallel rank `cp_rank` computes with it."""
        length, device = row.tokens_T.shape[0], row.tokens_T.device
        boundaries = torch.tensor([0, length], dtype=torch.int32, device=device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=length,
            max_seqlen_kv=length,
            row=row,
            part=context_part(row, cp_size, cp_rank),
            attention=RowAttention.of(row, cp_size, cp_rank),
        )


class PackedAttention(MegatronModule):
    """Megatron's core attention for rows (`RowParams`): grouped queries, narrow values (MLA), sliding windows and sinks
    (a learned logit per head that attends to nothing)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,  # attention_dropout, cp_comm_type, k_channels, v_channels, by version
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.scale = max(1, layer_number), softmax_scale or config.softmax_scale
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group, self.tp_group = groups.cp, groups.tp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """Tensors [T, h, d] (or [T, 1, h, d]); returns [T, h * d]."""
        if not isinstance(packed_seq_params, RowParams) or packed_seq_params.attention is None:
            raise TypeError("PackedAttention needs the RowParams of a packed row")
        query, key, value = (x.reshape(x.shape[0], *x.shape[-2:]) for x in (query, key, value))
        if self.cp_group.size() > 1:
            key, value = Gather.apply(key, self.cp_group), Gather.apply(value, self.cp_group)
        return attend(
            query,
            key,
            value,
            packed_seq_params.attention,
            scale=self.scale,
            window=self.window,
            sinks=self.softmax_offset,
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The sinks, divided over tensor-parallel ranks as the heads are."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )


class RowRotary(nn.Module):
    """Megatron's rotary module for packed rows; its "sequence length" is the row. Returns angles [T, 1, 1, d] of the
    whole row, which Megatron's thd path slices for context parallelism. `windowed`: separate facts of windowed layers;
    angles are then twice as wide, windowed ones last, and `own_angles` selects a layer's half."""

    def __init__(
        self, facts: RopeFacts, width: int, interleaved: bool = False, windowed: RopeFacts | None = None
    ) -> None:
        super().__init__()
        self.frequencies = [frequencies_of(kind, width) for kind in (facts, windowed) if kind is not None]
        self.interleaved = interleaved

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> RowParams:
        """The row: Megatron passes it as `packed_seq_params`, by position or by name."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, RowParams):
                return value
        raise TypeError("RowRotary needs the RowParams of a packed row")

    def forward(self, params: RowParams, *args: Any, **kwargs: Any) -> Tensor:
        assert params.row is not None
        positions = params.row.positions_kT[0]
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


def frequencies_of(facts: RopeFacts, width: int) -> Tensor:
    """Inverse frequencies, float32 [width / 2], as transformers computes them."""
    if facts.kind in ("default", "dynamic"):
        return 1.0 / facts.theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = SimpleNamespace(
        rope_parameters={"rope_theta": facts.theta, **facts.scaling},
        head_dim=width,
        hidden_size=width,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[facts.kind](config)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., H]."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        return LeanRMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class LeanRMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and a number a row.

    It rounds like transformers': BLAS's sums over rows and columns are twice as far from float64. With n = x / rms(x)
    and p = g * weight: d weight = sum of g n over rows, and d x = (p - n mean(p n)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        (grad,), normed = grads, x * inverse
        of_weight = (grad * normed).view(-1, x.shape[-1]).sum(0)
        scaled = grad * weight
        along = (scaled * normed).mean(-1, keepdim=True)
        return scaled.sub_(normed.mul_(along)).mul_(inverse), of_weight, None


class RMSNorm(nn.Module):
    """RMSNorm that supports sequence parallelism: it marks its weight, so finalize_model_grads sums its gradient over
    tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered:  # one more than a small number would lose its digits in bfloat16
            return rms_norm(x.float(), self.weight.float() + 1, self.eps).type_as(x)
        return rms_norm(x, self.weight, self.eps)


@cache
def normed_output(linear: type) -> type:
    """Add a norm after `linear` (row-parallel), as Gemma has after attention and MLP."""

    class NormedOutput(linear):  # type: ignore[misc, valid-type]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(x)
            return self.post_layernorm(output), bias

    return NormedOutput


@cache
def wide_norm(heads: int) -> type:
    """Return an RMSNorm of all heads of a token together, as OLMo 2 and MiniMax-M2 have for queries and keys.
    Tensor-parallel ranks hold the gains of their heads and add up squares."""

    class WideNorm(nn.Module):
        def __init__(self, hidden_size: int, config: Any, eps: float = 1e-5, **unused: Any) -> None:
            super().__init__()
            self.ranks, self.width, self.eps = get_tensor_model_parallel_world_size(), heads * hidden_size, eps
            self.weight = nn.Parameter(torch.ones(self.width // self.ranks, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

        def forward(self, x: Tensor) -> Tensor:
            """[..., h, d] -> [..., h, d], of this rank's heads."""
            wide = x.flatten(-2).float()
            squares = wide.square().sum(-1, keepdim=True)
            if self.ranks > 1:  # each rank's scores depend on the sum, so that gradients are added up as well
                squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
            normed = wide * torch.rsqrt(squares / self.width + self.eps)
            return (normed * self.weight).type_as(x).view_as(x)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
        ) -> dict:
            """The gains, divided over tensor-parallel ranks as the heads are."""
            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)

    return WideNorm


def leave_norms_out(layer: Any) -> None:
    """Have no norms before attention and MLP of a layer's spec, where TransformerEngine fuses them into the linear
    layers that follow."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    mlp_submodules(layer.submodules.mlp).linear_fc1 = TEColumnParallelLinear
