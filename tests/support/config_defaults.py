"""What transformers' configuration classes put in place of keys that a config.json leaves out."""

from __future__ import annotations

import json
from typing import Any

from rlctl.errors import InputError
from rlctl.models.families import Family
from rlctl.models.hf_config import completed

SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 512,
}  # fmt: skip


def written(made: Any) -> dict[str, Any]:
    """The config.json that transformers writes of a configuration, with every key."""
    title = type(made).__name__.removesuffix("Config").removesuffix("Text")
    return json.loads(made.to_json_string(use_diff=False)) | {"architectures": [f"{title}ForCausalLM"]}


def differences(family: Family) -> dict[str, Any]:
    """Each key without which the file reads other facts than transformers' class has, and does not name the key."""
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(family.tiny.get("model_type", family.name)))
    whole = written(kind(**(SIZES | family.full)))
    assert set(family.architectures) & set(whole["architectures"])
    different = {}
    for left_out in whole.keys() - {"architectures", "model_type"}:
        shorter = {key: value for key, value in whole.items() if key != left_out}
        try:
            facts: Any = family.facts(completed(shorter, family.defaults))
        except InputError as refusal:
            assert left_out in refusal.message, refusal  # noqa: PT017 - the others are compared
            continue
        if facts != (wanted := family.facts(completed(written(kind.from_dict(dict(shorter))), family.defaults))):
            different[left_out] = (facts, wanted)
    return different
