"""The way in which adapters reach the engines (`training.lora.refit`): as pinned, or by rule, with the reason."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rlctl.config.facts import UNDECIDED
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.settings.config import EngineConfig, RlctlConfig


class Refit(NamedTuple):
    """The chosen way and its rule."""

    way: Literal["delta", "adapters", "merged"]
    why: str


def choose_refit(config: RlctlConfig, facts: ModelFacts, *, trains: bool, on_cpu: bool) -> Refit:
    """Return the way for a configuration. Raises ConfigError for a pinned one that cannot serve it."""
    lora, engines = config.training.lora, config.engine_settings
    pinned = None if lora.refit in UNDECIDED else lora.refit
    if not lora.rank or engines is None or not trains:
        if pinned:
            missing = "training.lora.rank = 0 trains no adapters" if not lora.rank else "no engine gets weights"
            raise ConfigError(f"training.lora.refit = {pinned} has no effect: {missing}.", "Leave it out.")
        return Refit("merged", "")
    why_not = why_no_delta(engines, facts)
    refused = why_not if pinned == "delta" else why_no_adapters(engines, facts, on_cpu) if pinned == "adapters" else ""
    if refused:
        hint = "Set training.lora.refit=merged." if why_not else "Set training.lora.refit=delta."
        raise ConfigError(f"training.lora.refit = {pinned} is refused: {refused}.", hint)
    if pinned == "adapters":
        return Refit("adapters", "")
    if pinned == "merged" or why_not:
        return Refit("merged", f"Engines cannot keep a base (delta): {why_not}." if why_not else "")
    return Refit("delta", "Engines keep the base and get adapters alone; they decode as fast as with merged weights.")


def why_no_delta(config: EngineConfig, facts: ModelFacts) -> str:
    """Return why engines cannot keep a base that adapters are added to; empty: they can."""
    if config.vllm.passed.get("quantization"):
        return f"vllm.quantization = {config.vllm.passed['quantization']} stores weights in another form than the sum"
    if config.generation.discard_weights:
        return "generation.discard_weights drops the base before each refit"
    if facts.mla is not None:
        return "engines make other matrices from kv_b_proj of latent attention, which rlctl adds no adapters to"
    if facts.vision is not None:
        return "engines of models that read images were not compared with a kept base"
    if facts.listed:
        return "where vLLM stores the matrices of this model family is known only once an engine runs"
    return ""


def why_no_adapters(config: EngineConfig, facts: ModelFacts, on_cpu: bool) -> str:
    """Return why engines cannot add adapters to their products; empty: they can."""
    if not on_cpu:
        return "on a GPU the products of an engine are compiled and captured"
    if config.model.dtype not in ("auto", "float32"):
        return (
            f"in model.dtype = {config.model.dtype} products plus adapters differ from the merged weights that the "
            "trainer computes with by more than rounding"
        )
    if facts.moe is not None:
        return "layers of experts do not compute with each matrix's product"
    return why_no_delta(config, facts)
