"""Size of a checkpoint that training resumes from, and the time to save it."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.planner.choice import TrainingChoice
from rlctl.planner.costs.adapters import trained_parameters
from rlctl.planner.costs.memory import element_bytes, master_and_moments, optimizer_bytes, snapshot_bytes
from rlctl.planner.costs.parameters import stages
from rlctl.planner.inputs.request import Request


@dataclass(frozen=True)
class Save:
    """One checkpoint: weights and optimizer states of all trained models."""

    size: float
    """Bytes on the disk."""
    copy_s: float
    """Seconds that training stops while the states are copied to host memory, or written without copies."""
    write_s: float
    """Seconds that each node writes during training."""


def save_of(request: Request, choice: TrainingChoice, copies: bool = True) -> Save:
    """Return the checkpoint of a layout. A trained parameter has its weight, and an optimizer's master weight and
    moments: 14 bytes in bfloat16, 12 in float32 and with FSDP2, whose only weight is the float32 one."""
    facts, p, cluster, constants = request.facts, choice.parallel, request.cluster, request.constants
    models = 1 + choice.critic
    trained = [trained_parameters(facts, stage, choice) for stage in stages(facts, choice)]
    parameters = sum(counts.dense * p.tp + counts.experts * p.expert_size for counts in trained)
    full = choice.sharding == "full"
    weight = 4 if full else element_bytes(choice)
    each = weight + master_and_moments(choice)
    saved = (choice.moment_bytes - 4) * sum(c.hidden[0] * p.tp + c.hidden[1] * p.expert_size for c in trained)
    gpus = max(1, p.world_size // cluster.nodes if cluster.is_cpu else cluster.gpus_per_node)
    node = models * snapshot_bytes(facts, choice, gpus)
    write_s = node / constants.disk_bytes_per_s
    if not copies:
        copy_s = write_s
    elif cluster.is_cpu:
        copy_s = node / (cluster.device.memory_bandwidth / 2)  # read and written
    else:
        fullest = models * max(weight * counts.owned(p) + optimizer_bytes(counts, choice) for counts in trained)
        copy_s = fullest / (cluster.device.host_link * constants.pageable_copy)
    return Save(models * (each * parameters - saved * (choice.muon_steps > 0)), copy_s, write_s)
