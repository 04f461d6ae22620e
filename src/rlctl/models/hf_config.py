"""Reading a Hugging Face `config.json` (a dict): the keys that all families share, and errors that name them."""

from __future__ import annotations

from typing import Any, get_args

from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts, RopeFacts, RopeKind

ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
ROPE_TEXT_KEYS = {"rope_type", "type", "rope_theta"}

# Those of our activations; transformers' gpt-oss says silu and computes a sigmoid of 1.702 x.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "quick_gelu": ("silu", "quick_gelu"),
}
OWN_FILE = "Take the model's own file."


def required(config: dict[str, Any], *keys: str) -> Any:
    """The value of a key without which nothing can be built (the first of its spellings); InputError names it where
    it is not there."""
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
    return rope_of(config.get("rope_parameters") or config.get("rope_scaling") or {}, config.get("rope_theta"))


def rope_of(given: dict[str, Any], theta: float | None) -> RopeFacts:
    """Rotary embedding of one set of published parameters; `theta` is the base where they name none."""
    kind = given.get("rope_type", given.get("type", "default"))
    known: RopeKind | None = next((one for one in get_args(RopeKind) if one == kind), None)
    if known is None:
        raise InputError(f"config.json has rope type `{kind}`.", f"Known: {', '.join(sorted(get_args(RopeKind)))}.")
    theta = float(given.get("rope_theta") or theta or 10_000.0)
    if known == "dynamic" and given.get("alpha"):
        raise InputError(
            "config.json has rope type `dynamic` with `alpha`.", "Models of HunYuan alone are known to have it."
        )
    scaling = {k: float(v) for k, v in given.items() if k not in ROPE_TEXT_KEYS and isinstance(v, int | float)}
    if lacking := [key for key in ROPE_NEEDS.get(known, ()) if key not in scaling]:
        raise InputError(f"config.json: rope type `{kind}` lacks `{lacking[0]}`.", OWN_FILE)
    return RopeFacts(theta=theta, kind=known, scaling=scaling if kind != "default" else {})


def replaced_positions(config: dict[str, Any], most: int | None, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with another number of positions, unless it is None, and another rotary embedding, unless
    `scaling` is empty."""
    own = {}
    if most := most_positions(most, scaling):
        own["max_position_embeddings"] = most
    if not scaling:
        return config | own
    theta = scaling.get("rope_theta") or rope_facts(config).theta
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    return kept | own | {"rope_theta": theta, "rope_scaling": scaling | {"rope_theta": theta}}


def most_positions(most: int | None, scaling: dict[str, Any]) -> int | None:
    """Return the positions that are asked for: those of yarn follow from its factor. None: the model's own."""
    original = scaling.get("original_max_position_embeddings")
    if most is None and scaling.get("rope_type") == "yarn" and original and scaling.get("factor"):
        return round(scaling["factor"] * original)
    return most


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
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    known = ACTIVATIONS[facts.activation]  # another one would not be computed
    if (config.get(key) or known[0]) not in known:
        why = f"config.json: `{key}` is {config[key]!r}, but rlctl computes a {facts.family} with {known[0]}."
        raise InputError(why, OWN_FILE)
    if facts.heads % facts.kv_heads:
        why = f"num_attention_heads {facts.heads} is not a multiple of num_key_value_heads {facts.kv_heads}."
        raise InputError(f"config.json: {why}")
    return facts
