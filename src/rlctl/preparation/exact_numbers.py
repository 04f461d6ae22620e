"""What `checks.exact` can be had for: runs whose engine and policy have the same operations, one by one."""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.backends.base import PolicySpec
from rlctl.errors import ConfigError
from rlctl.planner.result import Plan
from rlctl.settings.config import RlctlConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
ROPES = ("default", "linear", "llama3")


def require_exact(config: RlctlConfig, policy: PolicySpec, plan: Plan) -> None:
    """Raise ConfigError for the first setting, layer or layout whose numbers would differ."""
    for key, cause in (*_of_the_run(config, policy, plan), *_of_the_model(policy)):
        raise ConfigError(
            f"checks.exact = True does not go with {key}: {cause}.", "Change it, or leave checks.exact out."
        )


def _of_the_run(config: RlctlConfig, policy: PolicySpec, plan: Plan) -> Iterator[tuple[str, str]]:
    parallel, training, rollouts = policy.parallel, config.training, config.rollout_settings
    if policy.device != "cpu":
        yield "GPUs", "their kernels were not compared; it computes on CPUs"
    if policy.dtype == "float16":
        yield "model.dtype = float16", "float32 and bfloat16 were compared"
    if plan.backend not in ("megatron", "dtensor"):
        yield f"training.backend = {plan.backend}", "it is built for megatron and dtensor"
    if parallel.tp * parallel.cp > 1:
        yield f"training.tp = {parallel.tp}, training.cp = {parallel.cp}", "sums over ranks have another order"
    if plan.generation is not None and plan.generation.replica_gpus > 1:
        yield "an engine of several processes", "sums over ranks have another order (generation.tp, generation.pp)"
    if training.lora.rank:
        yield "training.lora", "adapters have products of their own"
    if policy.quantization.format != "none":
        yield "training.quantization", "the engine has kernels of its own for packed weights"
    if rollouts is None:
        return
    sampling = rollouts.generation
    if policy.truncation is not None:
        values = f"generation.top_p = {sampling.top_p}, top_k = {sampling.top_k}, min_p = {sampling.min_p}"
        yield values, "the probabilities that are left add up in another order"
    if sampling.backend not in ("auto", "vllm"):
        yield f"generation.backend = {sampling.backend}", "the operations were replaced in vLLM alone"
    if rollouts.rollouts.mode == "async":
        yield "rollouts.mode = async", "rollouts are of older weights than those that are trained"
    if rollouts.batch.optimizer_steps * rollouts.batch.epochs > 1:
        yield "batch.optimizer_steps and batch.epochs above 1", "later log-probs are of other weights"


def _of_the_model(policy: PolicySpec) -> Iterator[tuple[str, str]]:
    facts = policy.facts
    if facts.family not in FAMILIES:
        yield f"the model family {facts.family}", f"{', '.join(FAMILIES)} were compared"
    layers = {
        "packed weights": facts.quantized is not None,
        f"the activation {facts.activation}": facts.activation != "silu",
        f"rotary embeddings of kind {facts.rope.kind}": facts.rope.kind not in ROPES,
    }
    for layer, present in layers.items():
        if present:
            yield f"a model with {layer}", "engine and policy have different operations for it"
