"""The record of the PyTorch backend (transformers' modules, sharded by FSDP2), and its refusals. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from rlctl.backends.base import PolicySpec
from rlctl.backends.lookup import PolicyBackend, SectionArguments
from rlctl.errors import ConfigError
from rlctl.models.constraints import fsdp_problems
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file, weights_of
from rlctl.models.matrices import Role
from rlctl.models.quantized import quantization_problems
from rlctl.models.quantized_base import packed_problems
from rlctl.settings.data import VisionPart
from rlctl.weights.adapter_sites import dropout_problem, frozen_router_problem, saved_whole, sites
from rlctl.weights.dtensor import DTensorWorld

MATRIX = 2
"""The axes of a matrix; a tensor with more holds several."""


def layouts(spec: PolicySpec) -> DTensorWorld:
    """Weights are float32, because FSDP2 shards the optimizer's weights."""
    facts = replace(spec.facts, mtp_layers=0)  # transformers has no multi-token-prediction layers
    return DTensorWorld(facts, spec.parallel, "float32")


def optimizer_values(spec: PolicySpec) -> dict[str, Any]:
    """AdamW. The driver sets the learning rate of each step."""
    ours = spec.optimizer
    return {
        "lr": ours.lr,
        "betas": (ours.beta1, ours.beta2),
        "eps": ours.eps,
        "weight_decay": ours.weight_decay,
        "fused": True,
    }


def arguments(spec: PolicySpec) -> list[SectionArguments]:
    return [SectionArguments("optimizer", "AdamW", optimizer_values(spec), {})]


def refuse(spec: PolicySpec) -> None:
    """Raise ConfigError for the first key that this backend cannot do, with what does it."""
    has_other = has_file(spec.facts.family) and spec.facts.quantized is None
    other = ", or use --backend megatron" if has_other else ""
    for problem in fsdp_problems(spec.facts, spec.parallel):
        raise ConfigError(f"{problem.key}: {problem.message}.", f"Change it{other}.")
    for key, reason in _not_there(spec):
        raise ConfigError(f"{key} is refused: {reason}.", f"Remove it{other}.")
    for key, reason, hint in _on_no_backend(spec):
        raise ConfigError(f"{key} is refused: {reason}.", hint)


def _not_there(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    """Yield each key that this backend lacks, and why."""
    for section, passed, whose in (
        ("megatron", spec.megatron, "a field of Megatron's TransformerConfig"),
        ("ddp", spec.ddp, "a field of Megatron's DistributedDataParallelConfig"),
        ("optimizer", spec.optimizer.passed, "a field of Megatron's OptimizerConfig"),
    ):
        for key in passed:
            yield f"{section}.{key}", f"it is {whose}, and training.backend = dtensor has none"
    yield from _of_images(spec)
    if spec.router_replay and spec.facts.moe is not None and not has_file(spec.facts.family):
        yield "training.router_replay", f"how routers of {spec.facts.family} weigh experts is not known"
    if spec.lora.rank and not spec.facts.takes_adapters:
        reason = f"layers of {spec.facts.family} hold no linear layers of torch, which adapters are for"
        yield "training.lora.rank", reason
    if _has_unknown_routers(spec.facts):
        reason = f"which of its tensors routers of {spec.facts.family} are is not known"
        if spec.freeze_router:
            yield "training.freeze_router", reason
        if spec.lora.rank:
            yield "training.lora.rank", f"{reason}, and training.lora.targets tells them apart"


def _on_no_backend(spec: PolicySpec) -> Iterator[tuple[str, str, str]]:
    """Yield each key that Megatron-Core refuses too, why, and what to do."""
    for key, reason in quantization_problems(spec.facts, spec.quantization, spec.parallel, spec.dtype):
        yield f"training.quantization.{key}", reason, "Change it."
    for key, reason in _of_packed_layers(spec):
        yield key, reason, "Change it."
    if spec.router_replay and spec.facts.moe is None:
        yield "training.router_replay", "the model has no experts", "Remove it."
    yield from _of_adapters(spec)


def _of_adapters(spec: PolicySpec) -> Iterator[tuple[str, str, str]]:
    roles = {weights_of(spec.facts).by_tensor[t][0].role for t in saved_whole(spec.facts, spec.lora).values()}
    if spec.valued and Role.HEAD in roles:
        yield "training.lora.modules_to_save", "a value model has no output layer of the model's", "Leave lm_head out."
    if problem := dropout_problem(spec.facts, spec.lora):
        yield "training.lora.dropout", problem, "Remove it, or leave these layers out with training.lora.exclude."
    places = [site.place for site in sites(spec.facts, spec.lora).all] if spec.lora.rank else []
    if problem := frozen_router_problem(spec.freeze_router, places):
        yield "training.freeze_router", problem, "Turn it off, or leave routers out with training.lora.exclude."
    for place in places:
        leave_out = f"Leave it out with training.lora.exclude=[{place.module.rpartition('.')[2]}]."
        if place.is_expert and place.param.endswith(".weight"):
            reason = f"{place.module} is a module of stacked matrices, which adapters do not cover"
            yield "training.lora.targets", reason, leave_out
        if place.transposed and spec.parallel.tp > 1:
            reason = f"adapters on {place.module}, a stack with inputs before outputs, are not divided"
            hint = f"Set training.tp=1 (training.ep divides the experts). {leave_out[:-1]} otherwise."
            yield f"training.tp = {spec.parallel.tp}", reason, hint


def _of_packed_layers(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    if spec.facts.quantized is None:
        return
    yield from packed_problems(spec.facts, adapters=spec.lora.rank > 0 or spec.teaches is not None)
    if spec.dtype == "float32":
        yield "model.dtype = float32", "engines compute packed weights in bfloat16: set model.dtype=bfloat16"
    if spec.valued:
        yield "model.name", "a value model of packed layers is not trained"


def _of_images(spec: PolicySpec) -> Iterator[tuple[str, str]]:
    if len({*spec.freeze}) == len(get_args(VisionPart)):
        yield "model.freeze", "it leaves nothing to train"
    if spec.lora.rank and "language" in spec.freeze:
        yield "model.freeze = language", "adapters (training.lora) are on the language part"


def _has_unknown_routers(facts: ModelFacts) -> bool:
    stacks = (tensor.shape for tensor in facts.listed if len(tensor.shape) > MATRIX)
    experts = facts.moe is not None or any(min(shape[1:]) > 1 for shape in stacks)  # no convolution of each channel
    return bool(facts.listed) and facts.vision is None and experts and Role.ROUTER not in weights_of(facts).roles


BACKEND = PolicyBackend(
    "dtensor", "rlctl.backends.dtensor.worker:DTensorWorker", layouts, arguments, refuse, has_critic=True
)
