"""The ways in which adapters reach the engines (`training.lora.refit`): as pinned, or by rule, with the reason."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rlctl.config.facts import UNDECIDED
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file
from rlctl.planner.choice import LoraChoice
from rlctl.settings.config import EngineConfig, RlctlConfig

EXPERTS_REFUSED = "engines stack routed experts, which rlctl adds no adapters to"


class Refit(NamedTuple):
    """A way and its rule."""

    way: Literal["delta", "adapters", "merged"]
    why: str


def choose_refit(
    config: RlctlConfig, facts: ModelFacts, adapters: LoraChoice | None, *, refits: bool, on_cpu: bool
) -> list[Refit]:
    """Return the ways for a configuration, of which a plan takes the one with the shortest step. `refits`: engines get
    trained weights. Raises ConfigError for a pinned one that cannot serve it."""
    lora, engines = config.training.lora, config.engine_settings
    pinned = None if lora.refit in UNDECIDED else lora.refit
    if adapters is None or engines is None or not refits:
        if pinned:
            missing = "training.lora.rank = 0 trains no adapters" if not lora.rank else "no engine gets weights"
            raise ConfigError(f"training.lora.refit = {pinned} has no effect: {missing}.", "Leave it out.")
        return [Refit("adapters" if adapters is not None and lora.dropout else "merged", "")]
    if lora.dropout and (problem := why_no_dropout(config, engines, facts, adapters, on_cpu)):
        hint = "Leave it out, or train on a dataset without engines (sft, dpo, kto, rm)."
        raise ConfigError(f"training.lora.dropout = {lora.dropout:g} is refused: {problem}.", hint)
    if lora.dropout and not pinned:
        return [Refit("adapters", "Dropout acts on the inputs of adapters, so that nothing is merged.")]
    why_not = why_no_delta(engines, facts, adapters)
    refused = (
        why_not
        if pinned == "delta"
        else why_no_adapters(engines, facts, adapters, on_cpu)
        if pinned == "adapters"
        else ""
    )
    if refused:
        hint = "Set training.lora.refit=merged." if why_not else "Set training.lora.refit=delta."
        if why_not == EXPERTS_REFUSED:
            hint = "Set training.lora.refit=merged, or leave them out: training.lora.exclude=['*.experts.*']."
        raise ConfigError(f"training.lora.refit = {pinned} is refused: {refused}.", hint)
    if pinned == "adapters":
        return [Refit("adapters", "")]
    if pinned == "merged" or why_not:
        return [Refit("merged", f"Engines cannot keep a base (delta): {why_not}." if why_not else "")]
    ways = [Refit("delta", "Engines keep the base and get adapters alone; they decode as fast as with merged weights.")]
    if not pinned and not why_no_adapters(engines, facts, adapters, on_cpu):
        ways.append(Refit("adapters", "Trainer and engines add adapters to products: nothing is merged or packed."))
    return ways


def why_no_delta(config: EngineConfig, facts: ModelFacts, adapters: LoraChoice) -> str:
    """Return why engines cannot keep a base that adapters are added to; empty: they can."""
    if config.vllm.passed.get("quantization"):
        return f"vllm.quantization = {config.vllm.passed['quantization']} stores weights in another form than the sum"
    if config.generation.discard_weights:
        return "generation.discard_weights drops the base before each refit"
    if facts.mla is not None:
        return "engines make other matrices from kv_b_proj of latent attention, which rlctl adds no adapters to"
    if facts.vision is not None:
        return "engines of models that read images were not compared with a kept base"
    if any(adapters.tables):
        return "modules that are trained whole (training.lora.modules_to_save) are sent with all weights"
    if any(kind.split == "experts" for kind in adapters.kinds):
        return EXPERTS_REFUSED
    if not has_file(facts.family):
        return "where vLLM stores the matrices of this model family is known only once an engine runs"
    return ""


def why_no_dropout(
    config: RlctlConfig, engines: EngineConfig, facts: ModelFacts, adapters: LoraChoice, on_cpu: bool
) -> str:
    """Return why a run with engines cannot drop inputs of adapters; empty: it can."""
    if config.rollout_settings is not None:
        return (
            "log-probs of training passes would differ from the engines', so that importance ratios of fresh tokens "
            "would not be 1"
        )
    if config.training.lora.refit in ("delta", "merged"):
        return f"training.lora.refit = {config.training.lora.refit} merges adapters, whose inputs are dropped"
    problem = why_no_adapters(engines, facts, adapters, on_cpu)
    return f"engines would have to add adapters to products, and {problem}" if problem else ""


def why_no_adapters(config: EngineConfig, facts: ModelFacts, adapters: LoraChoice, on_cpu: bool) -> str:
    """Return why engines cannot add adapters to their products; empty: they can."""
    if not on_cpu:
        return "on a GPU the products of an engine are compiled and captured"
    if config.own_teacher is not None:
        return "the policy's own teacher averages merged weights"
    if facts.moe is not None:
        return "layers of experts do not compute with each matrix's product"
    return why_no_delta(config, facts, adapters)
