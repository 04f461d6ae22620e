"""gpt-oss 20B and 120B: attention sinks, biases, stacked experts with interleaved, transposed gate and up. Tensors are
the bfloat16 form, as transformers saves it. Published MXFP4 experts (`*_blocks`, `*_scales`) are read as these."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.models.hf_config import base_facts, refuse, required
from rlctl.models.matrices import MatrixInTensor, ModelWeights, Role, Weight

ARCHITECTURES = ("GptOssForCausalLM",)
DEFAULTS = {
    "head_dim": 64, "max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150_000.0, "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip
"""Values of transformers' GptOssConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    "swiglu_limit": 7.0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 256,
    },
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16, "rms_norm_eps": 1e-4,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""
ATTENTION, MLP = parts.LAYER + "self_attn.", parts.LAYER + "mlp."


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of a `GptOssForCausalLM` configuration."""
    moe = MoeFacts(
        experts=required(config, "num_local_experts", "num_experts"),
        experts_per_token=required(config, "num_experts_per_tok"),
        expert_intermediate=required(config, "intermediate_size"),
    )
    alpha = config["swiglu_alpha"]
    refuse(abs(alpha - 1.702) > 1e-6, f"swiglu_alpha: {alpha}", "every published gpt-oss has 1.702.")
    refuse(config.get("attention_bias") is False, "attention_bias: false", "every published gpt-oss has biases.")
    types = config.get("layer_types") or []
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    return base_facts(
        "gpt_oss",
        config,
        qkv_bias=True,
        moe=moe,
        activation="quick_gelu",
        glu_limit=float(config["swiglu_limit"]),
        glu_offset=1.0,
        sliding_window=config.get("sliding_window"),
        full_attention_layers=full if types else tuple(range(1, config["num_hidden_layers"], 2)),
    )


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    attention = (
        *parts.norms(),
        *parts.attention(facts),
        Weight(Role.O_BIAS, ATTENTION + "o_proj.bias", ("hidden",)),
        Weight(Role.SINKS, ATTENTION + "sinks", ("heads",)),
    )
    router = (
        Weight(Role.ROUTER, MLP + "router.weight", ("experts", "hidden")),
        Weight(Role.ROUTER_BIAS, MLP + "router.bias", ("experts",)),
    )
    return ModelWeights(facts, parts.outer(facts), ((*attention, *router, *experts()),) * facts.layers)


def experts() -> tuple[Weight, ...]:
    """Tensors [E, in, out]; column 2i is row i of the gate, column 2i + 1 row i of the up-projection."""
    up_dims, ffn_dims = ("experts", "hidden", "2*expert_ffn"), ("expert_ffn", "hidden")
    dims, bias_dims = ("expert_ffn",), ("experts", "2*expert_ffn")
    halves = ((Role.EXPERT_GATE, Role.EXPERT_GATE_BIAS, "0"), (Role.EXPERT_UP, Role.EXPERT_UP_BIAS, "1"))
    weights = [
        weight
        for role, bias, first in halves
        for weight in (
            Weight(role, MLP + "experts.gate_up_proj", ffn_dims, MatrixInTensor(up_dims, (2, 1), (first, "0"), (2, 1))),
            Weight(bias, MLP + "experts.gate_up_proj_bias", dims, MatrixInTensor(bias_dims, (1,), (first,), (2,))),
        )
    ]
    down = MatrixInTensor(("experts", "expert_ffn", "hidden"), (2, 1))
    return (
        *weights,
        Weight(Role.EXPERT_DOWN, MLP + "experts.down_proj", ("hidden", "expert_ffn"), down),
        Weight(
            Role.EXPERT_DOWN_BIAS,
            MLP + "experts.down_proj_bias",
            ("hidden",),
            MatrixInTensor(("experts", "hidden"), (1,)),
        ),
    )
