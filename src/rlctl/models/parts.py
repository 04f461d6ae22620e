"""Building blocks that family files share: the usual names of embeddings, attention and MLP weights."""

from __future__ import annotations

from rlctl.models.facts import ModelFacts
from rlctl.models.matrices import MatrixInTensor, Role, Weight

LAYER = "model.layers.{layer}."


def outer(facts: ModelFacts) -> tuple[Weight, ...]:
    """Embedding, final norm and, unless tied, the head."""
    embedding = Weight(Role.EMBEDDING, "model.embed_tokens.weight", ("vocab", "hidden"))
    norm = Weight(Role.FINAL_NORM, "model.norm.weight", ("hidden",))
    head = Weight(Role.HEAD, "lm_head.weight", ("vocab", "hidden"))
    return (embedding, norm) if facts.tied_embeddings else (embedding, norm, head)


def attention(facts: ModelFacts) -> tuple[Weight, ...]:
    """Grouped-query attention: q, k, v and o, with optional biases and q/k norms."""
    prefix = LAYER + "self_attn."
    rows = ((Role.Q, Role.Q_BIAS, "q"), (Role.K, Role.K_BIAS, "kv"), (Role.V, Role.V_BIAS, "kv"))
    weights = [Weight(role, f"{prefix}{role.value}_proj.weight", (dim, "hidden")) for role, _, dim in rows]
    if facts.qkv_bias:
        weights += [Weight(bias, f"{prefix}{role.value}_proj.bias", (dim,)) for role, bias, dim in rows]
    if facts.qk_norm:
        of_q, of_k = ("q", "kv") if facts.wide_qk_norm else ("head_dim", "head_dim")
        weights += [Weight(Role.Q_NORM, prefix + "q_norm.weight", (of_q,))]
        weights += [Weight(Role.K_NORM, prefix + "k_norm.weight", (of_k,))]
    return (*weights, Weight(Role.O, prefix + "o_proj.weight", ("hidden", "o")))


def fused_attention() -> tuple[Weight, ...]:
    """Grouped-query attention whose q, k and v are rows of one tensor."""
    whole, prefix = ("q+2*kv", "hidden"), LAYER + "self_attn."
    rows = ((Role.Q, "q", "0"), (Role.K, "kv", "q"), (Role.V, "kv", "q+kv"))
    return (
        *(Weight(role, prefix + "qkv_proj.weight", (dim, "hidden"), _rows(whole, first)) for role, dim, first in rows),
        Weight(Role.O, prefix + "o_proj.weight", ("hidden", "o")),
    )


def _rows(whole: tuple[str, ...], first: str) -> MatrixInTensor:
    """The rows of a matrix from `first` on."""
    return MatrixInTensor(whole, (0, 1), (first, "0"))


def norms() -> tuple[Weight, ...]:
    return (
        Weight(Role.ATTENTION_NORM, LAYER + "input_layernorm.weight", ("hidden",)),
        Weight(Role.MLP_NORM, LAYER + "post_attention_layernorm.weight", ("hidden",)),
    )


def dense_mlp() -> tuple[Weight, ...]:
    """Gated MLP: gate, up, down."""
    return (
        Weight(Role.GATE, LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
        Weight(Role.UP, LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
        Weight(Role.DOWN, LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),
    )


def fused_mlp() -> tuple[Weight, ...]:
    """Gated MLP whose gate and up are rows of one tensor."""
    whole, name = ("2*ffn", "hidden"), LAYER + "mlp.gate_up_proj.weight"
    return (
        Weight(Role.GATE, name, ("ffn", "hidden"), _rows(whole, "0")),
        Weight(Role.UP, name, ("ffn", "hidden"), _rows(whole, "ffn")),
        Weight(Role.DOWN, LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),
    )


def router(block: str = LAYER + "mlp.") -> Weight:
    return Weight(Role.ROUTER, block + "gate.weight", ("experts", "hidden"))


def experts(
    prefix: str = LAYER + "mlp.experts.{expert}.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Weight, ...]:
    """Experts published one by one: gate, up, down of each."""
    return (
        Weight(Role.EXPERT_GATE, f"{prefix}{gate}.weight", ("expert_ffn", "hidden")),
        Weight(Role.EXPERT_UP, f"{prefix}{up}.weight", ("expert_ffn", "hidden")),
        Weight(Role.EXPERT_DOWN, f"{prefix}{down}.weight", ("hidden", "expert_ffn")),
    )


def shared_experts(prefix: str = LAYER + "mlp.shared_experts.") -> tuple[Weight, ...]:
    """The experts that every token passes, published as one MLP."""
    return (
        Weight(Role.SHARED_GATE, prefix + "gate_proj.weight", ("shared_ffn", "hidden")),
        Weight(Role.SHARED_UP, prefix + "up_proj.weight", ("shared_ffn", "hidden")),
        Weight(Role.SHARED_DOWN, prefix + "down_proj.weight", ("hidden", "shared_ffn")),
    )
