"""Predicted seconds of a refit: the bytes that each engine worker needs, over the links that they cross.

Trainers send boxes straight to the workers that need them, from the nearest replica; nobody gathers a tensor first.
"""

from __future__ import annotations

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.cluster import ClusterFacts
from rlctl.planner.constants import DEFAULTS, Constants
from rlctl.planner.generation import counted, weight_bytes
from rlctl.planner.time import offload_seconds


def tensor_count(facts: ModelFacts) -> int:
    """Tensors of the published checkpoint, about."""
    dense, moe = 9 + 3 * facts.qkv_bias + 2 * facts.qk_norm, 0
    if facts.moe is not None:
        moe = 3 * facts.moe.experts + 1
    moe_layers = sum(facts.is_moe_layer(layer) for layer in range(facts.layers))
    return facts.layers * dense + moe_layers * moe + 3


def remote_share(choice: TrainingChoice, cluster: ClusterFacts, colocated: bool) -> float:
    """Share of what a worker needs that no device of its node holds."""
    node = max(cluster.link_domain, cluster.gpus_per_node)
    if cluster.gpus <= node:
        return 0.0
    if not colocated:
        return 1.0
    spread = max(choice.tp * choice.pp, choice.ep * choice.etp * choice.pp)  # devices that hold the model once
    return max(0.0, 1 - node / spread)


def refit_time(
    facts: ModelFacts,
    choice: TrainingChoice,
    generation: GenerationChoice,
    cluster: ClusterFacts,
    colocated: bool,
    constants: Constants = DEFAULTS,
    *,
    mover: str | None = None,
) -> float:
    """Seconds to bring new weights into the engines, offloading before and waking after included. `mover` None: the
    fastest there is."""
    payload = counted(facts).total * (4 if choice.precision == "float32" else 2)
    detour = _detour_seconds(payload, cluster, mover, constants)
    if cluster.is_cpu:
        return detour + 0.05 + payload / 1.0e9  # measured: 0.8 to 1.6 GB/s through shared memory, 50 ms of handshakes
    received = weight_bytes(facts, generation)
    far = remote_share(choice, cluster, colocated) * received
    near = received - far
    moved = far / (cluster.device.network * constants.refit_link_efficiency)
    moved += near / (cluster.device.link * constants.refit_link_efficiency)
    pieces = constants.refit_handshake_s + tensor_count(facts) * constants.refit_piece_s
    around = constants.refit_fixed_s + offload_seconds(facts, choice, cluster, constants) if colocated else 0.0
    return detour + moved + pieces + around


def _detour_seconds(payload: float, cluster: ClusterFacts, mover: str | None, constants: Constants) -> float:
    """What a mover costs that does not hand weights over in the devices' memory: one copy written and read."""
    if mover == "disk":
        return 2 * payload / constants.disk_bytes_per_s
    if mover == "shared-memory" and not cluster.is_cpu:
        return 2 * payload / (cluster.device.host_link * constants.pageable_copy)
    return 0.0
