"""From a layout of the planner, or from pinned sizes alone, to the parallel sizes that a policy is started with."""

from __future__ import annotations

from rlctl.backends.base import ParallelSpec
from rlctl.backends.megatron.weights import megatron_parallel
from rlctl.config.schema import TrainingConfig
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.cluster import ClusterFacts, local_cpu
from rlctl.planner.rules import training_problems
from rlctl.planner.stages import stage_layers
from rlctl.planner.workload import Workload
from rlctl.weights.megatron_parallel import chunk_layers


def parallel_spec(choice: TrainingChoice, layers: int, training: TrainingConfig) -> ParallelSpec:
    """The sizes of `choice`, with the layers of the first and last stage where they are set or an even split is not
    possible.

    Raises ConfigError where the layers do not come out even.
    """
    first, last = training.first_stage_layers, training.last_stage_layers
    if (first or last) and choice.pp == 1:
        raise ConfigError("training.first_stage_layers and last_stage_layers need training.pp > 1.", "Remove them.")
    if first is None and last is None and layers % choice.pp:
        sizes = stage_layers(layers, choice.pp) or []
        first, last = (sizes[0], sizes[-1]) if sizes else (None, None)
    parallel = ParallelSpec(
        tp=choice.tp, pp=choice.pp, vpp=choice.vpp, cp=choice.cp, ep=choice.ep, etp=choice.etp, dp=choice.dp,
        sp=choice.sequence_parallel, first_stage_layers=first, last_stage_layers=last,
    )  # fmt: skip
    if any(len(chunk_layers(layers, megatron_parallel(parallel), stage, 0)) == 0 for stage in range(choice.pp)):
        raise ConfigError(
            f"training.first_stage_layers = {first} and last_stage_layers = {last} leave a stage of PP {choice.pp} "
            f"without any of the {layers} layers.",
            "Name fewer layers for the first and the last stage.",
        )
    return parallel


def checked_parallel(facts: ModelFacts, training: TrainingConfig) -> ParallelSpec:
    """The sizes set in the `training` section, 1 for those that are not.

    Raises ConfigError naming the first one that the model or Megatron-Core does not allow.
    """
    tp = training.tp or 1
    choice = TrainingChoice(
        tp=tp, pp=training.pp or 1, vpp=training.vpp or 1, cp=training.cp or 1, ep=training.ep or 1,
        etp=training.etp or (tp if facts.moe else 1), dp=training.dp or training.ep or 1,
        sequence_parallel=tp > 1 if training.sequence_parallel is None else training.sequence_parallel,
    )  # fmt: skip
    workload, cluster = Workload(rollouts=False), ClusterFacts(local_cpu(), 1, 0)
    for problem in training_problems(facts, choice, workload, cluster, choice.world_size):
        raise ConfigError(f"{problem.key}: {problem.message}.", "Change it, or leave it out.")
    return parallel_spec(choice, facts.layers, training)
