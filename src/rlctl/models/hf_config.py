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

SIZES = frozenset({
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "moe_intermediate_size", "num_experts", "n_routed_experts",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group",
    "decoder_sparse_step", "sliding_window_pattern",
})  # fmt: skip
COUNTS = frozenset({
    "first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers", "sliding_window", "num_local_experts",
    "num_experts_per_tok",
})  # fmt: skip
"""Whole numbers that may be 0: Granite 4 without experts says that it has none."""
NUMBERS = frozenset({
    "rope_theta", "rope_local_base_freq", "rms_norm_eps", "routed_scaling_factor", "swiglu_limit", "swiglu_alpha",
    "query_pre_attn_scalar",
})  # fmt: skip
OBJECTS = frozenset({"rope_scaling", "rope_parameters", "quantization_config"})
FLAGS = frozenset({"tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window"})
TEXTS = frozenset({"hidden_act", "hidden_activation", "model_type"})
# Those of our activations; transformers' gpt-oss says silu and computes a sigmoid of 1.702 x.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "quick_gelu": ("silu", "quick_gelu"),
}
LISTS = frozenset({"architectures", "layer_types", "mlp_only_layers"})
BY_LAYER = frozenset({"intermediate_size", "moe_intermediate_size", "num_experts"})
"""Sizes that some configurations list for each layer (HunYuan, Gemma 3n)."""
LARGEST, MOST = 1 << 31, 1 << 14
LARGEST_NUMBER = 1e30
OWN_FILE = "Take the model's own file."
ENUMERATED = frozenset({
    "num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts", "first_k_dense_replace",
    "num_nextn_predict_layers",
})  # fmt: skip


def require_kinds(config: dict[str, Any], *, by_layer: bool = False) -> None:
    """Raise InputError naming the first key whose value is of another kind than every published configuration's.
    `by_layer`: some sizes may be lists."""
    for key, value in config.items():
        entries = value if by_layer and key in BY_LAYER and isinstance(value, list) else [value]
        wrong = (_expected(key, entry) for entry in entries if entry is not None)
        if expected := next((why for why in wrong if why), None):
            raise InputError(f"config.json: `{key}` is {value!r}; expected {expected}.", OWN_FILE)


def _expected(key: str, value: Any) -> str | None:
    """Return what `key` ought to hold; None: it does."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    limit, below = (MOST, f" below {MOST}") if key in ENUMERATED else (LARGEST, "")
    if key in SIZES and not (whole and 0 < value < limit):
        return f"a positive whole number{below}"
    if key in COUNTS and not (whole and 0 <= value < limit):
        return f"a whole number{below}"
    if key in NUMBERS and not _positive(value):
        return "a positive number"
    if key in FLAGS and not isinstance(value, bool):
        return "true or false"
    if key in TEXTS and not isinstance(value, str):
        return "a name"
    if key in OBJECTS and not isinstance(value, dict):
        return "an object"
    if key in LISTS and not isinstance(value, list):
        return "a list"
    named = key in LISTS and key != "mlp_only_layers"
    if named and isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
        return "a list of names"
    return None


def _positive(value: Any) -> bool:
    """Return whether `value` is a number above 0 that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST_NUMBER


def required(config: dict[str, Any], *keys: str) -> Any:
    """The value of a key without which nothing can be built (the first of its spellings); InputError names it where
    it is not there or 0."""
    for key in keys:
        if config.get(key) is not None:
            if config[key] == 0:
                why = f"config.json: `{key}` is 0; expected a positive whole number."
                raise InputError(why, OWN_FILE)
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
    if not isinstance(given, dict):
        raise InputError(f"config.json: `rope_parameters` hold {given!r}; expected an object.", OWN_FILE)
    kind = given.get("rope_type", given.get("type", "default"))
    known: RopeKind | None = next((one for one in get_args(RopeKind) if one == kind), None)
    if known is None:
        raise InputError(f"config.json has rope type `{kind}`.", f"Known: {', '.join(sorted(get_args(RopeKind)))}.")
    for key in ("rope_theta", *ROPE_NEEDS.get(known, ())):
        if given.get(key) is not None and not _positive(given[key]):
            raise InputError(f"config.json: `{key}` is {given[key]!r}; expected a positive number.", OWN_FILE)
    theta = float(given.get("rope_theta") or theta or 10_000.0)
    if known == "dynamic" and given.get("alpha"):
        raise InputError(
            "config.json has rope type `dynamic` with `alpha`.", "Models of HunYuan alone are known to have it."
        )
    scaling = {k: float(v) for k, v in given.items() if k not in ROPE_TEXT_KEYS and isinstance(v, int | float)}
    if lacking := [key for key in ROPE_NEEDS.get(known, ()) if key not in scaling]:
        raise InputError(f"config.json: rope type `{kind}` lacks `{lacking[0]}`.", OWN_FILE)
    return RopeFacts(theta=theta, kind=known, scaling=scaling if kind != "default" else {})


def _require_activation(config: dict[str, Any], facts: ModelFacts) -> None:
    """Raise InputError where a configuration names another activation than the family's, which would be computed."""
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    known = ACTIVATIONS[facts.activation]
    if (config.get(key) or known[0]) not in known:
        why = f"config.json: `{key}` is {config[key]!r}, but rlctl computes a {facts.family} with {known[0]}."
        raise InputError(why, OWN_FILE)


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
    if values["head_dim"] % 2 and "qk_rope_head_dim" not in config:
        held = f"a head has {values['head_dim']} dimensions"
        raise InputError(f"config.json: {held}, which rotary embedding cannot pair.")
    facts = ModelFacts(family, **(values | more))
    _require_activation(config, facts)
    if facts.heads % facts.kv_heads:
        why = f"num_attention_heads {facts.heads} is no multiple of num_key_value_heads {facts.kv_heads}."
        raise InputError(f"config.json: {why}")
    return facts
