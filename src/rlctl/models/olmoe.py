"""OLMoE: norms of queries and keys over all heads together, a softmax router and experts without a shared one."""

from __future__ import annotations

from typing import Any

from rlctl.models import parts
from rlctl.models.facts import ModelFacts, MoeFacts
from rlctl.models.hf_config import base_facts, required
from rlctl.models.matrices import ModelWeights

ARCHITECTURES = ("OlmoeForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 4096, "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
}  # fmt: skip
"""Values of transformers' OlmoeConfig for keys that config.json leaves out."""
TINY = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 64, "norm_topk_prob": False,
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's. vLLM's norms of queries and keys have epsilon 1e-5."""
FULL = {
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-4,
}  # fmt: skip
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias", "clip_qkv", "sliding_window")
"""Keys that no published OLMoE sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of an `OlmoeForCausalLM` configuration."""
    moe = MoeFacts(
        experts=required(config, "num_experts", "num_local_experts"),
        experts_per_token=required(config, "num_experts_per_tok"),
        expert_intermediate=required(config, "intermediate_size"),
        normalize_topk=bool(config["norm_topk_prob"]),
    )
    return base_facts("olmoe", config, qk_norm=True, wide_qk_norm=True, moe=moe)


def weights(facts: ModelFacts) -> ModelWeights:
    """Every matrix and the tensor that holds it."""
    layer = (*parts.norms(), *parts.attention(facts), parts.router(), *parts.experts())
    return ModelWeights(facts, parts.outer(facts), (layer,) * facts.layers)


def tiny_like(facts: ModelFacts) -> dict[str, Any]:
    """The tiny model weighs experts alike."""
    assert facts.moe is not None
    return {"norm_topk_prob": facts.moe.normalize_topk}
