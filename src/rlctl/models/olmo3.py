"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary frequencies are not scaled."""

from __future__ import annotations

from typing import Any

from rlctl.models import olmo2
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import base_facts, full_layers, ropes_by_kind

ARCHITECTURES = ("Olmo3ForCausalLM",)
DEFAULTS = {
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096,
    "sliding_window_pattern": 4,
}  # fmt: skip
"""Values of transformers' Olmo3Config for keys that config.json leaves out; the pattern is that of `layer_types`."""
TINY = {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip
"""Keys of a tiny model's config.json beyond a tiny Llama's."""
FULL = {"sliding_window": 32, "rms_norm_eps": 1e-4}
"""Values that differ from the defaults, for tests."""
UNMAPPED = ("attention_bias",)
"""A key that no published OLMo 3 sets."""


def facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of an `Olmo3ForCausalLM` configuration."""
    full, windowed = ropes_by_kind(config, "OLMo 3", config["rope_theta"], DEFAULTS["rope_theta"])
    return base_facts(
        "olmo3",
        config,
        rope=full,
        window_rope=windowed,
        qk_norm=True,
        wide_qk_norm=True,
        sliding_window=config.get("sliding_window"),
        full_attention_layers=full_layers(config),
    )


weights = olmo2.weights
