"""Where the weights of this backend's ranks live: its layouts, as the models that `model` builds hold them."""

from __future__ import annotations

from rlctl.backends.base import ParallelSpec, PolicySpec
from rlctl.weights.megatron import MegatronParallel, MegatronWorld


def megatron_parallel(parallel: ParallelSpec) -> MegatronParallel:
    """The parallel sizes as layouts take them."""
    return MegatronParallel(
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp or parallel.tp,
        dp=parallel.dp,
    )


def weight_world(spec: PolicySpec) -> MegatronWorld:
    """The layouts of all ranks of a policy."""
    return MegatronWorld(spec.facts, megatron_parallel(spec.parallel), dtype=spec.dtype)
