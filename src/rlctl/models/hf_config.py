"""Reading a Hugging Face `config.json` (a dict): the keys that all families share, and errors that name them."""

from __future__ import annotations

from typing import Any

from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts, RopeFacts

ROPE_KINDS = {"default", "llama3", "yarn", "linear"}
ROPE_TEXT_KEYS = {"rope_type", "type", "rope_theta"}


def required(config: dict[str, Any], *keys: str) -> Any:
    """The value of a key without which nothing can be built (the first of its spellings); InputError names it."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise InputError(f"config.json has no `{keys[0]}`.", "Take the model's own config.json.")


def refuse(condition: bool, what: str, why: str) -> None:
    """Raise InputError where the configuration asks for something that rlctl cannot express."""
    if condition:
        raise InputError(f"config.json says {what}: {why}")


def rope_facts(config: dict[str, Any]) -> RopeFacts:
    """Rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise InputError(f"config.json has rope type `{kind}`.", f"Known: {', '.join(sorted(ROPE_KINDS))}.")
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    scaling = {k: float(v) for k, v in given.items() if k not in ROPE_TEXT_KEYS and isinstance(v, int | float)}
    return RopeFacts(theta=theta, kind=kind, scaling=scaling if kind != "default" else {})


def base_facts(family: str, config: dict[str, Any], **more: Any) -> ModelFacts:
    """Facts from the keys that decoder-only models share; `more` overrides and adds."""
    heads, hidden = required(config, "num_attention_heads"), required(config, "hidden_size")
    values: dict[str, Any] = {
        "layers": required(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "intermediate": required(config, "intermediate_size"),
        "vocab": required(config, "vocab_size"),
        "max_length": config.get("max_position_embeddings", 2048),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": rope_facts(config),
    }
    facts = ModelFacts(family, **(values | more))
    if facts.heads % facts.kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {facts.heads} is no multiple of num_key_value_heads {facts.kv_heads}."
        )
    return facts
