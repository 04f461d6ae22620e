"""Layouts of published runs by model size and GPU, which decide between plans with equal predictions.

Sources: NVIDIA's performance summaries of RL and pretraining on H100 and GB200, with recipes; rows and addresses are in
`benchmarks/data/published_steps.csv`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs.parameters import count
from rlctl.planner.inputs.cluster import GIB, ClusterFacts

LARGE_MEMORY = 120 * GIB
"""Minimum GPU memory for GB200's published layouts."""
NEAR = 0.2
"""Maximum relative difference of a model's size from a published one."""


@dataclass(frozen=True)
class Published:
    """A layout that was run: parameters in billions, whether it has experts, and the sizes."""

    billions: float
    experts: bool
    large_memory: bool
    training: tuple[int, int, int, int]
    """TP, PP, CP, EP."""
    engine_tp: int


PUBLISHED = (
    Published(8.0, False, False, (1, 1, 1, 1), 1),
    Published(8.0, False, True, (1, 1, 1, 1), 1),
    Published(32.8, False, False, (4, 4, 1, 1), 4),
    Published(32.8, False, False, (4, 2, 1, 1), 4),
    Published(32.8, False, True, (2, 1, 1, 1), 1),
    Published(70.6, False, False, (4, 4, 1, 1), 4),
    Published(30.5, True, False, (1, 1, 1, 8), 2),
    Published(30.5, True, False, (2, 1, 1, 8), 4),
    Published(30.5, True, True, (1, 1, 1, 16), 1),
    Published(30.5, True, True, (1, 1, 1, 8), 1),
    Published(235.0, True, False, (2, 8, 2, 16), 16),
    Published(235.0, True, False, (4, 8, 1, 16), 8),
    Published(235.0, True, True, (2, 4, 2, 16), 8),
    Published(235.0, True, True, (4, 4, 1, 16), 8),
    Published(671.0, True, False, (1, 16, 1, 16), 32),
    Published(671.0, True, True, (1, 8, 1, 16), 32),
)


def published_for(facts: ModelFacts, cluster: ClusterFacts) -> list[Published]:
    """Return the published layouts of models of this kind and size on GPUs like these."""
    billions, large = count(facts).total / 1e9, cluster.device.memory > LARGE_MEMORY
    return [
        published
        for published in PUBLISHED
        if published.experts == (facts.moe is not None)
        and published.large_memory == large
        and abs(billions / published.billions - 1) <= NEAR
    ]


def evidence(
    facts: ModelFacts, cluster: ClusterFacts, training: TrainingChoice | None, generation: GenerationChoice | None
) -> int:
    """Score how much of a layout was published: one point for training sizes, one for engines, one for spread
    experts."""
    steps, score = published_for(facts, cluster), 0
    if training is not None:
        score += has_published_sizes(facts, cluster, training)
        score += facts.moe is not None and training.parallel.ep > 1
    if generation is not None:
        score += any(step.engine_tp == generation.tp for step in steps) and generation.pp == generation.dp == 1
    return score


def has_published_sizes(facts: ModelFacts, cluster: ClusterFacts, training: TrainingChoice) -> bool:
    p = training.parallel
    return any(published.training == (p.tp, p.pp, p.cp, p.ep) for published in published_for(facts, cluster))


def untried(
    facts: ModelFacts, cluster: ClusterFacts, training: TrainingChoice | None, generation: GenerationChoice | None
) -> list[str]:
    """Return a layout's kinds of parallelism for which no published step confirms a prediction: engines of several
    replicas, and experts that every rank holds although published runs of that size spread them."""
    kinds = ["engines of several replicas"] if generation is not None and generation.dp > 1 else []
    spread = any(published.training[-1] > 1 for published in published_for(facts, cluster))
    if training is not None and spread and training.parallel.ep == 1:
        kinds.append("experts that are not spread")
    return kinds
