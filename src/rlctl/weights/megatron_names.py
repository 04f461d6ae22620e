"""Names and kinds of GPTModel's parameters by role, for the local and TransformerEngine specs.

Sources: megatron/core/models/gpt/gpt_layer_specs.py, transformer/attention.py, multi_latent_attention.py, mlp.py,
moe/experts.py, moe/router.py, multi_token_prediction.py. Post-norms (Gemma) have Megatron-Bridge's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rlctl.models.matrices import Role

Spec = Literal["local", "te"]
Experts = Literal["sequential", "grouped"]


class Kind(Enum):
    """How a matrix is divided over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows, padded
    COLUMN = "column"  # rows (the out axis)
    ROW = "row"  # columns (the in axis)
    QKV = "qkv"  # rows of q, k and v interleaved by group
    GATED = "gated"  # rows of gate and up, one behind the other on each rank


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPTModel parameter: name in layer or model, division, and a role's part of it."""

    name: str
    kind: Kind
    part: int = 0
    norm: bool = False


REPLICATED, VOCAB, COLUMN, ROW, QKV, GATED = Kind

_ATTENTION = "self_attention."
_COMMON: dict[Role, Slot] = {
    Role.EMBEDDING: Slot("embedding.word_embeddings.weight", VOCAB),
    Role.HEAD: Slot("output_layer.weight", VOCAB),
    Role.FINAL_NORM: Slot("decoder.final_layernorm.weight", REPLICATED, norm=True),
    Role.ATTENTION_NORM: Slot("input_layernorm.weight", REPLICATED, norm=True),
    Role.Q: Slot(_ATTENTION + "linear_qkv.weight", QKV, 0),
    Role.K: Slot(_ATTENTION + "linear_qkv.weight", QKV, 1),
    Role.V: Slot(_ATTENTION + "linear_qkv.weight", QKV, 2),
    Role.Q_BIAS: Slot(_ATTENTION + "linear_qkv.bias", QKV, 0),
    Role.K_BIAS: Slot(_ATTENTION + "linear_qkv.bias", QKV, 1),
    Role.V_BIAS: Slot(_ATTENTION + "linear_qkv.bias", QKV, 2),
    Role.Q_NORM: Slot(_ATTENTION + "q_layernorm.weight", REPLICATED, norm=True),
    Role.K_NORM: Slot(_ATTENTION + "k_layernorm.weight", REPLICATED, norm=True),
    Role.O: Slot(_ATTENTION + "linear_proj.weight", ROW),
    Role.O_BIAS: Slot(_ATTENTION + "linear_proj.bias", REPLICATED),
    Role.SINKS: Slot(_ATTENTION + "core_attention.softmax_offset", COLUMN),
    Role.POST_ATTENTION_NORM: Slot(_ATTENTION + "linear_proj.post_layernorm.weight", REPLICATED, norm=True),
    Role.MLP_NORM: Slot("pre_mlp_layernorm.weight", REPLICATED, norm=True),
    Role.POST_MLP_NORM: Slot("mlp.linear_fc2.post_layernorm.weight", REPLICATED, norm=True),
    Role.GATE: Slot("mlp.linear_fc1.weight", GATED, 0),
    Role.UP: Slot("mlp.linear_fc1.weight", GATED, 1),
    Role.DOWN: Slot("mlp.linear_fc2.weight", ROW),
    Role.ROUTER: Slot("mlp.router.weight", REPLICATED),
    Role.ROUTER_BIAS: Slot("mlp.router.bias", REPLICATED),
    Role.EXPERT_BIAS: Slot("mlp.router.expert_bias", REPLICATED),
    Role.SHARED_GATE: Slot("mlp.shared_experts.linear_fc1.weight", GATED, 0),
    Role.SHARED_UP: Slot("mlp.shared_experts.linear_fc1.weight", GATED, 1),
    Role.SHARED_DOWN: Slot("mlp.shared_experts.linear_fc2.weight", ROW),
    Role.MLA_Q: Slot(_ATTENTION + "linear_q_proj.weight", COLUMN),
    Role.MLA_Q_DOWN: Slot(_ATTENTION + "linear_q_down_proj.weight", REPLICATED),
    Role.MLA_Q_NORM: Slot(_ATTENTION + "q_layernorm.weight", REPLICATED, norm=True),
    Role.MLA_Q_UP: Slot(_ATTENTION + "linear_q_up_proj.weight", COLUMN),
    Role.MLA_KV_DOWN: Slot(_ATTENTION + "linear_kv_down_proj.weight", REPLICATED),
    Role.MLA_KV_NORM: Slot(_ATTENTION + "kv_layernorm.weight", REPLICATED, norm=True),
    Role.MLA_KV_UP: Slot(_ATTENTION + "linear_kv_up_proj.weight", COLUMN),
    Role.MTP_EMBEDDING_NORM: Slot("enorm.weight", REPLICATED, norm=True),
    Role.MTP_HIDDEN_NORM: Slot("hnorm.weight", REPLICATED, norm=True),
    Role.MTP_PROJECTION: Slot("eh_proj.weight", COLUMN),
    Role.MTP_FINAL_NORM: Slot("final_layernorm.weight", REPLICATED, norm=True),
}
_TE_NORMS = {
    Role.ATTENTION_NORM: Slot(_ATTENTION + "linear_qkv.layer_norm_weight", REPLICATED, norm=True),
    Role.MLP_NORM: Slot("mlp.linear_fc1.layer_norm_weight", REPLICATED, norm=True),
    Role.MLA_Q_NORM: Slot(_ATTENTION + "linear_q_up_proj.layer_norm_weight", REPLICATED, norm=True),
    Role.MLA_KV_NORM: Slot(_ATTENTION + "linear_kv_up_proj.layer_norm_weight", REPLICATED, norm=True),
}
_EXPERT = {
    Role.EXPERT_GATE: ("linear_fc1", "weight", GATED, 0),
    Role.EXPERT_UP: ("linear_fc1", "weight", GATED, 1),
    Role.EXPERT_DOWN: ("linear_fc2", "weight", ROW, 0),
    Role.EXPERT_GATE_BIAS: ("linear_fc1", "bias", GATED, 0),
    Role.EXPERT_UP_BIAS: ("linear_fc1", "bias", GATED, 1),
    Role.EXPERT_DOWN_BIAS: ("linear_fc2", "bias", REPLICATED, 0),
}
MTP_OUTER = frozenset({Role.MTP_EMBEDDING_NORM, Role.MTP_HIDDEN_NORM, Role.MTP_PROJECTION, Role.MTP_FINAL_NORM})
"""Roles next to, and not inside, the transformer layer of a multi-token-prediction layer."""


def slot(role: Role, spec: Spec, experts: Experts, *, mla: bool, moe_layer: bool) -> Slot:
    """The parameter that holds `role`; names of experts have `{expert}` (the number on the rank)."""
    if role in _EXPERT:
        layer, name, kind, part = _EXPERT[role]
        if experts == "sequential":
            return Slot(f"mlp.experts.local_experts.{{expert}}.{layer}.{name}", kind, part)
        return Slot(f"mlp.experts.{layer}.{name}{{expert}}", kind, part)
    unfused = (role is Role.ATTENTION_NORM and mla) or (role is Role.MLP_NORM and moe_layer)
    if spec == "te" and role in _TE_NORMS and not unfused:
        return _TE_NORMS[role]
    return _COMMON[role]
