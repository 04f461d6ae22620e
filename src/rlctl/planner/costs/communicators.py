"""Process groups that a policy's ranks use. Each has an NCCL communicator from its first use on."""

from __future__ import annotations

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TrainingChoice


def communicators(facts: ModelFacts, choice: TrainingChoice, *, trains: bool = True) -> int:
    """Return how many groups of several ranks a rank uses in a step and a save, the group of all included; without
    `trains`, in forward passes alone."""
    sizes = _fsdp_sizes(choice) if choice.sharding == "full" else _megatron_sizes(facts, choice, trains)
    return (choice.parallel.world_size > 1) + sum(size > 1 for size in sizes)


def _megatron_sizes(facts: ModelFacts, choice: TrainingChoice, trains: bool) -> list[int]:
    """Return sizes of Megatron-Core's groups (0.16.1, `parallel_state`): each is its own, also where several hold the
    same ranks."""
    p = choice.parallel
    sizes = [p.tp, p.pp, p.cp, p.dp]
    if facts.tied_embeddings:
        sizes.append(min(p.pp, 2))  # first and last stage
    if p.pp == 2 and p.vpp > 1:
        sizes.append(2)  # single messages have a communicator for their two ranks
    if facts.moe is not None:
        sizes += [p.ep, p.etp, p.ep * p.etp]
    if not trains:
        return sizes
    if facts.moe is not None:
        sizes += [p.expert_dp if p.ep > 1 else 1, p.stage_size if facts.moe.expert_bias else 1]
    # gradients and parameters, and the distributed optimizer's instance for the norm
    return [*sizes, p.dp * p.cp, p.world_size]


def _fsdp_sizes(choice: TrainingChoice) -> list[int]:
    """Return sizes of groups of device meshes; torch (2.13) takes the group of all where a dimension has all ranks."""
    p = choice.parallel
    sizes = [p.replicate, p.fsdp_shards, p.tp, p.dp, p.cp, p.tp]
    if p.ep > 1:
        sizes += [p.replicate, p.fsdp_shards // p.ep, p.ep]
    return [size for size in sizes if size < p.world_size]
