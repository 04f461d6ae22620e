"""Reading a Hugging Face `config.json` (a dict): the keys that all families share, and errors that name them."""

from __future__ import annotations

from typing import Any, get_args

from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts, RopeFacts, RopeKind

ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_KEYS = ("rope_scaling", "rope_parameters")
ROPE_TEXT_KEYS = {"rope_type", "type", "rope_theta"}

# rlctl's activations; transformers' gpt-oss names silu and computes a sigmoid of 1.702 x.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "quick_gelu": ("silu", "quick_gelu"),
}
NULLABLE = (
    "head_dim", "n_group", "n_shared_experts", "num_key_value_heads", "num_nextn_predict_layers", "q_lora_rank",
    "sliding_window", "topk_group",
)  # fmt: skip
"""Keys of config.json whose null says something else than their absence, such as no window."""
OWN_FILE = "Take the model's own file."


def required(config: dict[str, Any], *keys: str) -> Any:
    """Return a required value (first spelling found). Raises InputError naming it."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    named = " or ".join(f"`{key}`" for key in keys)
    raise InputError(f"config.json has no {named}.", "Take the model's own config.json.")


def refuse(condition: bool, what: str, reason: str) -> None:
    """Raise InputError where the configuration asks for something that rlctl cannot express."""
    if condition:
        raise InputError(f"config.json says {what}: {reason}")


def completed(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json completed with `defaults`; null counts as missing unless it is a valid value."""
    values = {key: value for key, value in config.items() if value is not None or key in NULLABLE}
    return {key: value for key, value in (defaults | values).items() if value is not None}


def rope_kind(config: dict[str, Any]) -> str:
    """Return the type of the rotary embedding, of those without one for each kind of layer."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling.get("rope_type", scaling.get("type", "default"))


def rope_facts(config: dict[str, Any], *, partial: bool = False) -> RopeFacts:
    """Return the rotary embedding as transformers 5 reads it: `rope_scaling` replaces `rope_parameters`, and top-level
    keys fill gaps. `partial`: the model type may rotate a share of each head."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if kinds := [key for key, value in scaling.items() if isinstance(value, dict)]:
        raise InputError(
            f"config.json has rotary parameters for `{kinds[0]}` layers, but this model type has one set for all.",
            OWN_FILE,
        )
    if original := config.get("original_max_position_embeddings"):
        scaling = scaling | {"original_max_position_embeddings": original}
    if share := config.get("partial_rotary_factor"):
        scaling = {"partial_rotary_factor": share} | scaling
    return rope_of(scaling, config.get("rope_theta"), config.get("max_position_embeddings"), partial=partial)


def rope_of(
    given: dict[str, Any], theta: float | None, positions: int | None = None, *, partial: bool = False
) -> RopeFacts:
    """Return a rotary embedding; `theta`: default base, `positions`: default original length of scalings."""
    kind, legacy = given.get("rope_type", given.get("type", "default")), given.get("type")
    listed_kind: RopeKind | None = next((name for name in get_args(RopeKind) if name == kind), None)
    if listed_kind is None:
        raise InputError(f"config.json has rope type `{kind}`.", f"Known: {', '.join(sorted(get_args(RopeKind)))}.")
    if legacy not in (None, kind, "mrope"):
        reason = f"transformers reads `rope_type` ({kind}), vLLM refuses it next to another `type` ({legacy})"
        raise InputError(f"config.json has two rope types: {reason}.", "Remove the wrong one.")
    if listed_kind == "dynamic" and given.get("alpha"):
        raise InputError(
            "config.json has rope type `dynamic` with `alpha`.", "Models of HunYuan alone are known to have it."
        )
    if (share := given.get("partial_rotary_factor", 1)) != 1 and not partial:
        reason = "transformers rotates whole heads of this model type, and vLLM a part"
        raise InputError(f"config.json says partial_rotary_factor: {share}: {reason}.", OWN_FILE)
    given = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    if listed_kind in ("llama3", "yarn") and positions:
        given = {"original_max_position_embeddings": positions} | given
    theta = float(given.get("rope_theta") or theta or 10_000.0)
    scaling = {k: float(v) for k, v in given.items() if k not in ROPE_TEXT_KEYS and isinstance(v, int | float)}
    if lacking := [key for key in ROPE_NEEDS.get(listed_kind, ()) if key not in scaling]:
        raise InputError(f"config.json: rope type `{kind}` lacks `{lacking[0]}`.", OWN_FILE)
    scaling = scaling if kind != "default" else {}
    return RopeFacts(theta=theta, kind=listed_kind, scaling=scaling, share=float(share))


def ropes_by_kind(config: dict[str, Any], title: str, theta: float, window_theta: float) -> tuple[RopeFacts, RopeFacts]:
    """Return the rotary embeddings of layers without and with a window, of models that have two: `rope_scaling` is of
    the former. `theta`, `window_theta`: default bases."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if other := given.keys() - {"full_attention", "sliding_attention"}:
        reason = f"{title} has `full_attention` and `sliding_attention` in it, and `{min(other)}` would not be read"
        raise InputError(f"config.json: rope_parameters: {reason}.", OWN_FILE)
    # transformers looks for the type of `rope_scaling` under its newer name alone
    full = (given.get("full_attention") or {"rope_type": "default"}) | scaling
    windowed = given.get("sliding_attention") or {}
    uncut = False in (full.get("truncate"), windowed.get("truncate"))
    refuse(uncut, "truncate: false", f"transformers does not read it in {title}.")
    positions = config["max_position_embeddings"]
    return rope_of(full, theta, positions), rope_of(windowed, window_theta, positions)


def full_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Layers without the window, from `layer_types` or the pattern that older configurations give."""
    types = config.get("layer_types")
    if types:
        return tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    every = config["sliding_window_pattern"]
    return tuple(i for i in range(config["num_hidden_layers"]) if (i + 1) % every == 0)


def replaced_positions(config: dict[str, Any], most: int | None, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with other positions (unless None) and rotary scaling (unless empty)."""
    positions = {}
    if most := most_positions(most, scaling):
        positions["max_position_embeddings"] = most
    if not scaling:
        return config | {key: _with_original(config, config[key]) for key in ROPE_KEYS if config.get(key)} | positions
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    given = given.get("full_attention") or given
    kept = {key: value for key, value in config.items() if key not in (*ROPE_KEYS, "original_max_position_embeddings")}
    theta = scaling.get("rope_theta") or given.get("rope_theta") or config.get("rope_theta")
    rope_base = {"rope_theta": theta} if theta else {}
    return kept | positions | rope_base | {"rope_scaling": scaling | rope_base}


def _with_original(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with an explicit original length, which transformers derives from the positions."""
    if any(isinstance(value, dict) for value in values.values()):
        return {
            key: _with_original(config, value) if isinstance(value, dict) else value for key, value in values.items()
        }
    depends = values.get("rope_type", values.get("type")) in ("llama3", "yarn") and config.get(
        "max_position_embeddings"
    )
    return {"original_max_position_embeddings": config["max_position_embeddings"]} | values if depends else values


def most_positions(most: int | None, scaling: dict[str, Any]) -> int | None:
    """Return the requested positions; yarn's follow from its factor. None: the model's."""
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
        "max_length": required(config, "max_position_embeddings"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": required(config, "rms_norm_eps"),
    }
    if "rope" not in more:
        values["rope"] = rope_facts(config)
    facts = ModelFacts(family, **(values | more))
    key = "hidden_activation" if facts.activation == "gelu_tanh" else "hidden_act"
    expected = ACTIVATIONS[facts.activation]  # another one would not be computed
    if (config.get(key) or expected[0]) not in expected:
        reason = f"config.json: `{key}` is {config[key]!r}, but rlctl computes a {facts.family} with {expected[0]}."
        raise InputError(reason, OWN_FILE)
    if facts.heads % facts.kv_heads:
        reason = f"num_attention_heads {facts.heads} is not a multiple of num_key_value_heads {facts.kv_heads}."
        raise InputError(f"config.json: {reason}")
    return facts
