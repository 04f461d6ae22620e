"""Where the weights of this backend's ranks live: its layouts, as the models that `model` builds hold them."""

from __future__ import annotations

from dataclasses import replace

from rlctl.backends.base import ParallelSpec, PolicySpec
from rlctl.backends.megatron.args import groups_experts
from rlctl.models.registry import weights_of
from rlctl.weights.megatron import MegatronParallel, MegatronWorld, Spec
from rlctl.weights.megatron_parallel import Experts


def megatron_parallel(parallel: ParallelSpec) -> MegatronParallel:
    """The parallel sizes as layouts take them."""
    return MegatronParallel(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp if parallel.vpp > 1 else None,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp or parallel.tp,
        dp=parallel.dp,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
    )


def policy_world(spec: PolicySpec, layer_spec: Spec) -> MegatronWorld:
    """The layouts of all ranks of a policy whose layers are of `layer_spec`."""
    facts = replace(spec.facts, mtp_layers=0)  # the policy is built without its multi-token-prediction layers
    parallel, zero_centered = megatron_parallel(spec.parallel), weights_of(facts).zero_centered_norms
    experts: Experts = "grouped" if groups_experts(spec, layer_spec == "te") else "sequential"
    return MegatronWorld(facts, parallel, layer_spec, spec.dtype, experts, zero_centered)
