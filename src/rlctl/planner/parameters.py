"""Parameter counts and floating-point operations of a model, derived from its facts alone."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.models.facts import ModelFacts


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one transformer layer, split by how parallelism divides them."""

    attention: int
    """Projections that tensor parallelism splits."""
    attention_replicated: int
    """Latent down-projections of MLA, which every tensor rank holds whole."""
    dense_mlp: int
    """Dense MLP and shared experts."""
    experts: int
    """All routed experts together; expert parallelism splits them."""
    router: int
    norms: int

    @property
    def total(self) -> int:
        return self.attention + self.attention_replicated + self.dense_mlp + self.experts + self.router + self.norms

    @property
    def dense(self) -> int:
        """Everything but the routed experts."""
        return self.total - self.experts


def layer_parameters(facts: ModelFacts, moe: bool) -> LayerParameters:
    """Parameters of a layer with experts (`moe`) or with a dense MLP."""
    attention, replicated = _attention(facts)
    dense_mlp, experts, router = 3 * facts.hidden * facts.intermediate, 0, 0
    if moe:
        if facts.moe is None:
            raise ValueError("a model without experts has no layer with experts")
        dense_mlp = 3 * facts.hidden * facts.moe.shared_expert_intermediate
        experts = facts.moe.experts * expert_parameters(facts)
        router = facts.moe.experts * (facts.hidden + int(facts.moe.expert_bias or facts.family == "gpt_oss"))
    return LayerParameters(attention, replicated, dense_mlp, experts, router, _norms(facts))


def expert_parameters(facts: ModelFacts) -> int:
    """Parameters of one routed expert."""
    if facts.moe is None:
        return 0
    width = facts.moe.expert_intermediate
    bias = 2 * width + facts.hidden if facts.family == "gpt_oss" else 0
    return 3 * facts.hidden * width + bias


def _attention(facts: ModelFacts) -> tuple[int, int]:
    """(split by TP, held whole by every TP rank)."""
    h, heads = facts.hidden, facts.heads
    if facts.mla is not None:
        mla = facts.mla
        query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        down_q = h * mla.q_lora_rank if mla.q_lora_rank else 0
        up_q = (mla.q_lora_rank or h) * query
        up_kv = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        down_kv = h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        norms = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        return up_q + up_kv + heads * mla.v_head_dim * h, down_q + down_kv + norms
    query, kv = heads * facts.head_dim, facts.kv_heads * facts.head_dim
    bias = query + 2 * kv if facts.qkv_bias else 0
    extra = h + heads if facts.family == "gpt_oss" else 0  # output bias and attention sinks
    return h * query + 2 * h * kv + query * h + bias, extra


def _norms(facts: ModelFacts) -> int:
    per_layer = 4 if facts.family in ("gemma3", "glm4") else 2
    return per_layer * facts.hidden + (2 * facts.head_dim if facts.qk_norm else 0)


@dataclass(frozen=True)
class ParameterCount:
    """Totals of a model; multi-token-prediction layers are counted apart."""

    embedding: int
    head: int
    """Output projection; 0 where it is tied to the embedding."""
    layers: int
    experts: int
    """Part of `layers` that is routed experts."""
    active: int
    """Parameters that one token passes through, the embedding lookup left out."""
    mtp: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.layers


def count(facts: ModelFacts) -> ParameterCount:
    """Parameters of `facts` as its published total counts them."""
    kinds = [facts.is_moe_layer(layer) for layer in range(facts.layers)]
    dense, moe = layer_parameters(facts, False), layer_parameters(facts, True) if any(kinds) else None
    layers = kinds.count(False) * dense.total + (kinds.count(True) * moe.total if moe else 0) + facts.hidden
    experts = kinds.count(True) * moe.experts if moe else 0
    embedding = facts.vocab * facts.hidden
    active_experts = kinds.count(True) * facts.moe.experts_per_token * expert_parameters(facts) if facts.moe else 0
    mtp_layer = (moe or dense).total + 2 * facts.hidden**2 + 3 * facts.hidden
    return ParameterCount(
        embedding=embedding,
        head=0 if facts.tied_embeddings else embedding,
        layers=layers,
        experts=experts,
        active=layers - experts + active_experts + embedding,
        mtp=facts.mtp_layers * mtp_layer,
    )


def _attended(facts: ModelFacts, length: float) -> float:
    """Mean over the layers of the keys that a token at the end of `length` tokens attends to."""
    if facts.sliding_window is None:
        return length
    full = facts.layers if facts.full_attention_layers is None else len(facts.full_attention_layers)
    windowed = min(length, facts.sliding_window)
    return (full * length + (facts.layers - full) * windowed) / facts.layers


def score_width(facts: ModelFacts) -> int:
    """Per token and key: multiply-adds of the score and value products over all heads of one layer."""
    if facts.mla is not None:
        return facts.heads * (facts.mla.qk_nope_head_dim + facts.mla.qk_rope_head_dim + facts.mla.v_head_dim)
    return 2 * facts.heads * facts.head_dim


def forward_flops_per_token(facts: ModelFacts, mean_keys: float) -> float:
    """Forward floating-point operations of one token: 2 a parameter passed, plus attention over `mean_keys` keys.

    `mean_keys` of a causal sequence of S tokens is S / 2 (Narayanan et al. 2021, arXiv:2104.04473, appendix).
    """
    matmul = 2.0 * (count(facts).active)
    return matmul + 2.0 * facts.layers * score_width(facts) * _attended(facts, mean_keys)


def kv_bytes_per_token(facts: ModelFacts, element_bytes: float = 2) -> float:
    """KV cache of one token over all layers and heads, windowed layers counted whole, in bytes."""
    if facts.mla is not None:
        return facts.layers * (facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim) * element_bytes
    return 2 * facts.layers * facts.kv_heads * facts.head_dim * element_bytes
