"""The record of the Megatron-Core backend, its layouts, and combinations that it refuses. Torch-free.

Megatron-Core accepts these combinations but computes them wrongly; each was found with megatron-core 0.16.1 against one
process, or follows from this backend's design.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlctl.backends.base import PolicySpec
from rlctl.backends.lookup import PolicyBackend, SectionArguments
from rlctl.backends.megatron.args import (
    AUXILIARY,
    auxiliary_losses,
    ddp_values,
    groups_experts,
    has_transformer_engine,
    optimizer_values,
    transformer_values,
)
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.quantized import quantization_problems
from rlctl.weights.adapter_sites import Site, dropout_problem, frozen_router_problem, sites
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.megatron_names import Experts, Spec

READS = frozenset((
    "family", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_length",
    "tied_embeddings", "norm_eps", "qkv_bias", "qk_norm", "wide_qk_norm", "activation", "glu_limit", "glu_offset",
    "attention_scale", "embedding_scale", "residual_scale", "logits_scale", "rope", "window_rope", "moe", "mla",
    "sliding_window", "full_attention_layers", "no_rope_layers", "mtp_layers",
))  # fmt: skip
"""Facts that the model is built from, without `mtp_layers`."""


def policy_world(spec: PolicySpec, layer_spec: Spec) -> MegatronWorld:
    """The layouts of all ranks of a policy whose layers are of `layer_spec`."""
    facts = replace(spec.facts, mtp_layers=0)  # the policy is built without its multi-token-prediction layers
    zero_centered = weights_of(facts).zero_centered_norms
    experts: Experts = "grouped" if groups_experts(spec, layer_spec == "te") else "sequential"
    return MegatronWorld(facts, spec.parallel, layer_spec, spec.dtype, experts, zero_centered)


def layouts(spec: PolicySpec) -> MegatronWorld:
    return policy_world(spec, "te" if has_transformer_engine(spec) else "local")


def arguments(spec: PolicySpec) -> list[SectionArguments]:
    transformer = "TransformerConfig" if spec.facts.mla is None else "MLATransformerConfig"
    values = transformer_values(spec, has_transformer_engine(spec))
    return [
        SectionArguments("megatron", transformer, values, spec.megatron),
        SectionArguments("ddp", "DistributedDataParallelConfig", ddp_values(spec), spec.ddp),
        SectionArguments("optimizer", "OptimizerConfig", optimizer_values(spec), spec.optimizer.passed),
    ]


ADAM_ALONE = {
    "use_precision_aware_optimizer": "TransformerEngine's Adam packs its states",
    "optimizer_cuda_graph": "Muon exchanges matrices within a step",
    "decoupled_weight_decay": "Muon's weight decay is decoupled",
}
"""Fields of OptimizerConfig for AdamW alone."""


def refuse_wrong_numbers(spec: PolicySpec) -> None:
    """Raise ConfigError for the first field of the `megatron` section that makes gradients wrong."""
    if spec.router_replay and spec.facts.moe is None:
        raise ConfigError("training.router_replay is on, but the model has no experts.", "Turn it off.")
    for key, cause in (
        ("use_precision_aware_optimizer", "packs its states"),
        ("optimizer_cuda_graph", "replays a step with the addresses that states had"),
    ):
        if spec.optimizer_offload and spec.optimizer.passed.get(key):
            raise ConfigError(
                f"optimizer.{key} = True {cause}, and training.optimizer_offload moves them.", "Remove one of the two."
            )
    for key, cause in ADAM_ALONE.items() if spec.optimizer.optimizer == "muon" else ():
        usual = key == "decoupled_weight_decay"
        if spec.optimizer.passed.get(key, usual) != usual:
            raise ConfigError(
                f"optimizer.{key} = {spec.optimizer.passed[key]} does not go with optimizer.optimizer = muon: {cause}.",
                "Remove one of the two.",
            )
    for key, cause in quantization_problems(spec.facts, spec.quantization, spec.parallel, spec.dtype):
        raise ConfigError(f"training.quantization.{key} is refused: {cause}.", "Change it.")
    if spec.facts.mla is not None and spec.facts.no_rope_layers:
        raise ConfigError(
            "model.name: Megatron-Core has rotary embeddings in all layers with latent attention.",
            "Train it with --backend dtensor.",
        )
    for key, cause in _adapter_problems(spec) if spec.lora.rank else ():
        raise ConfigError(f"training.lora.{key} is refused: {cause}.", "Change it, or use --backend dtensor.")
    adapted = [site.place for site in sites(spec.facts, spec.lora).all] if spec.lora.rank else []
    if cause := frozen_router_problem(spec.freeze_router, adapted):
        hint = "Turn it off, or leave routers out with training.lora.exclude."
        raise ConfigError(f"training.freeze_router is refused: {cause}.", hint)
    if cause := _attention_factor_problem(spec.facts):
        raise ConfigError(f"model.name: {cause}.", "Train it with --backend dtensor.")
    for key, reason in _wrong(spec):
        raise ConfigError(f"megatron.{key} = {spec.megatron[key]} is refused: {reason}.", "Remove it.")


def _adapter_problems(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    """Why Megatron's layers cannot have the adapters that settings name."""
    if spec.lora.modules_to_save:
        yield "modules_to_save", "Megatron-Core's embedding and output layer stay frozen beside adapters"
    if problem := dropout_problem(spec.facts, spec.lora):
        yield "dropout", problem
    if spec.lora.dropout and spec.parallel.pp > 1 and (spec.parallel.vpp > 1 or spec.recompute != "none"):
        yield "dropout", "recomputation and virtual stages mix the micro-batches of training.pp > 1 and their masks"
    fused: dict[str, Site] = {}
    for site in sites(spec.facts, spec.lora).all:
        if site.place.is_expert:
            if len(site.place.tensors) < site.place.shape[0]:
                yield (
                    "targets",
                    f"{site.module} is published in one tensor, which has no adapters on Megatron-Core",
                )
            if spec.parallel.etp > 1:
                yield "targets", f"{site.module} is of routed experts, which have no adapters with training.etp > 1"
            continue
        first = fused.setdefault(site.place.megatron, site)
        if first.rank != site.rank:
            yield (
                "rank_pattern",
                (
                    f"{first.module} has rank {first.rank} and {site.module} has rank {site.rank}, and Megatron-Core "
                    "computes both in one layer, whose adapters have one rank"
                ),
            )


def _attention_factor_problem(facts: ModelFacts) -> str:
    """Why Megatron-Core cannot compute with the attention factor of the model's yarn; empty: it can."""
    if facts.window_rope is not None:
        return ""  # a part of the scale of scores
    factor = facts.rope.attention_factor
    factor_problem = f"the yarn of config.json has an attention factor of {factor:g}"
    if factor < 1:
        return f"{factor_problem}, and Megatron-Core takes none below 1"
    if factor > 1 and facts.mla is not None:
        return f"{factor_problem}, and Megatron-Core has none in latent attention"
    return ""


def _wrong(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    options = spec.megatron
    yield from _not_there(spec)
    for key, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")):
        if spec.router_replay and options.get(key) == value:
            yield key, "it chooses experts without regard to the engine's choice (training.router_replay)"
    moe = spec.facts.moe
    grouped = moe is not None and moe.topk_groups < moe.groups and moe.experts_per_token // moe.topk_groups != 2
    if grouped and options.get("moe_router_fusion"):
        yield "moe_router_fusion", "it does not score a group of experts by its best two"
    if options.get("cross_entropy_loss_fusion"):
        yield "cross_entropy_loss_fusion", "it changes gradients by 2e-4"
    for key in ("hidden_dropout", "attention_dropout"):
        if options.get(key):
            yield key, DROPOUT
    for key, problem in OTHER_EXPERTS.items():
        if options.get(key):
            yield key, problem
    yield from _wrong_balance(spec)
    if spec.device == "cpu":
        freed = "gloo still reads what a stage has sent when it is freed or overwritten"
        if spec.parallel.pp > 1 and options.get("deallocate_pipeline_outputs"):
            yield "deallocate_pipeline_outputs", freed
        if spec.parallel.vpp > 1 and options.get("overlap_p2p_comm") is False:
            yield "overlap_p2p_comm", f"with virtual stages, {freed}"
        if spec.parallel.vpp > 1 and options.get("batch_p2p_comm"):
            yield "batch_p2p_comm", f"with virtual stages, {freed}"


DROPOUT = "log-probs under dropout differ from the sampling policy's, and a resumed run could not repeat its steps"
"""Reason for no dropout."""


OTHER_EXPERTS = {
    "moe_input_jitter_eps": "noise in front of the routers gives other log-probs than the engine's",
    "moe_expert_capacity_factor": "engines drop no tokens, so log-probs would not be theirs",
    "moe_router_force_load_balancing": "it replaces the routers by random choices, for benchmarks",
}
"""Fields that have tokens go to other experts than in the engine."""


def _wrong_balance(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    options, kind = spec.megatron, spec.megatron.get("moe_router_load_balancing_type", "aux_loss")
    for key in AUXILIARY:
        value = options.get(key)
        if isinstance(value, list | tuple) and len(value) != 1:
            yield key, "rlctl has one load-balance loss, aux_loss, and its coefficient is a number"
        elif any(number < 0 for number in auxiliary_losses({key: value})):
            yield key, "a coefficient is at least 0"
    kinds = list(kind) if isinstance(kind, list | tuple) else [kind]
    balance, z = auxiliary_losses(options)
    if balance and kinds != ["aux_loss"]:
        cause = "a packed row holds several sequences" if "seq_aux_loss" in kinds else (
            "it needs the load of micro-batches that come later" if "global_aux_loss" in kinds else
            "it has no loss for moe_aux_loss_coeff"
        )  # fmt: skip
        yield "moe_router_load_balancing_type", f"{cause}: set it to aux_loss"
    if (balance or z) and spec.freeze_router:
        key = AUXILIARY[0] if balance else AUXILIARY[1]
        yield key, "training.freeze_router keeps the routers that this loss is to change"


def _not_there(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    """Options that need a missing TransformerEngine, and unsupported TransformerEngine options."""
    options, layers = spec.megatron, spec.megatron.get("transformer_impl")
    cause = "rlctl uses TransformerEngine only on GPUs where it is installed"
    if spec.device == "cuda" and spec.lora.rank:
        cause = "adapters (training.lora) need Megatron's own layers"
    if layers not in (None, "local") and not (layers == "transformer_engine" and has_transformer_engine(spec)):
        yield "transformer_impl", cause
    for key in ("fp8", "moe_grouped_gemm"):
        if options.get(key) and not has_transformer_engine(spec):
            yield key, f"it needs TransformerEngine, and {cause}"
    if options.get("moe_grouped_gemm") and not groups_experts(spec, te=True):
        yield "moe_grouped_gemm", "the model has no experts, or experts with biases"
    if options.get("fp8") and spec.quantization.format != "none":
        yield "fp8", "float8 products would round the weights of training.quantization once more"
    if options.get("fp8") and spec.dtype != "bfloat16":
        yield "fp8", f"float8 products need model.dtype bfloat16, and it is {spec.dtype}"
    for key in (key for key in options if key.startswith("fp8_") and options[key] and not options.get("fp8")):
        yield key, "it does nothing without megatron.fp8"
    if options.get("fp8_param"):
        yield "fp8_param", "refits and checkpoints read weights in model.dtype"
    if options.get("fp4"):
        yield "fp4", "products are in float32, bfloat16 or float8"


BACKEND = PolicyBackend("megatron", "rlctl.backends.megatron.worker:MegatronWorker", layouts, arguments,
                        refuse_wrong_numbers, READS, has_critic=True, takes_conversion=True)  # fmt: skip
