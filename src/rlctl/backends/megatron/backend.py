"""The record of the Megatron-Core backend, and the layouts of its ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlctl.backends.base import PolicySpec
from rlctl.backends.lookup import PolicyBackend, SectionArguments
from rlctl.backends.megatron.args import (
    ddp_values,
    groups_experts,
    has_transformer_engine,
    optimizer_values,
    transformer_values,
)
from rlctl.backends.megatron.refusals import refuse_wrong_numbers
from rlctl.models.families import weights_of
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.megatron_names import Experts, Spec


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


BACKEND = PolicyBackend("megatron", "rlctl.backends.megatron.worker:MegatronWorker", layouts, arguments,
                        refuse_wrong_numbers, has_critic=True, takes_conversion=True)  # fmt: skip


if TYPE_CHECKING:
    from rlctl.backends.base import CriticWorker, PolicyWorker
    from rlctl.backends.megatron.worker import MegatronWorker

    WORKER: type[PolicyWorker] = MegatronWorker
    CRITIC: type[CriticWorker] = MegatronWorker
