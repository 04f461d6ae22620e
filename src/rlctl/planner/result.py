"""The plan: layouts, memory by phase, predicted seconds, and for every value the rule that chose it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlctl.models.constraints import family_problem
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import GENERATION_CHOSEN, TEACHER_SIZES, GenerationChoice, TrainingChoice
from rlctl.planner.costs.memory import PhaseMemory
from rlctl.planner.inputs.cluster import ClusterFacts
from rlctl.planner.inputs.constants import CALIBRATED_RANGE, CPU_RANGE, DEFAULTS, RANGES, RESOLUTION
from rlctl.planner.inputs.request import Request, Workload
from rlctl.planner.search.layout_rules import not_runnable
from rlctl.planner.search.policy_search import TeacherPlan
from rlctl.telemetry.phases import Phase

LONGEST_WAIT = 0.1
"""Part of a step that engines may wait for the tools of the longest episodes."""


@dataclass(frozen=True)
class Reason:
    """A chosen value and the rule that chose it."""

    value: str
    rule: str


@dataclass(frozen=True)
class Rejected:
    """A plan that was not chosen and why."""

    plan: str
    why: str
    over: float = math.inf
    """Memory it needs over what there is; infinite where memory is not why."""


@dataclass(frozen=True)
class NextBest:
    """The best layout of training or of generation after the chosen one."""

    side: str
    """`training` or `generation`."""
    layout: str
    seconds: float | None
    """Seconds of a step with it; None: it does not fit."""
    memory_gib: float | None
    """Most memory of a device in the phases of that side; None: it does not fit."""
    why: str


@dataclass(frozen=True)
class Plan:
    """How a step runs on a cluster. Bytes and seconds."""

    facts: ModelFacts
    cluster: ClusterFacts
    workload: Workload
    backend: str
    training: TrainingChoice | None
    """None: generation only."""
    generation: GenerationChoice | None
    """None: training only."""
    colocated: bool
    micro_batches: int
    """Micro-batches of one optimizer step on one data-parallel rank; 0 without training."""
    memory: dict[str, PhaseMemory]
    """By phase, of one device; on a CPU of one process."""
    host_memory: float
    """Bytes of one node."""
    save_copies: bool
    """Saves copy states to host memory and are written beside training; else training waits."""
    memory_checkpoint_every: int
    """Interval of checkpoints in the memory of hosts, in steps; 0: none."""
    seconds: dict[Phase, float]
    mfu: float
    mover: str | None
    """The refit's mover; None: no refit."""
    request: Request = field(repr=False, compare=False)
    """The plan's inputs."""
    reasons: tuple[Reason, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    alternatives: tuple[Plan, ...] = field(default=(), repr=False)
    next_best: tuple[NextBest, ...] = ()
    """Up to three layouts of either side, the best first."""
    pins: Mapping[str, Any] = field(default_factory=dict)
    teacher: TeacherPlan | None = None
    """The teacher or the reward model; None: there is neither."""
    blocked: tuple[str, ...] = ()
    """Further obstacles: refusals of backends, keys of a recipe."""
    engine_devices: int = 0
    """Devices reserved for engines (GPUs or CPU cores); 0: shared with the policy."""
    rollouts_s: float = 0.0
    """Seconds of engines and scorers for a step's rollouts, also during training."""
    beside: Plan | None = field(default=None, repr=False)
    """The best plan with the engines on the policy's devices, where this one has them apart; None: none fits."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Seconds between which each phase and `total` are expected, by the residuals of earlier steps."""
        by_name = {phase.value: seconds for phase, seconds in self.seconds.items() if seconds} | {"total": self.total_s}
        measured = {"total", *dict(self.cluster.factors)} if self.cluster.factors else set()
        usual = dict.fromkeys(by_name, CPU_RANGE) if self.cluster.is_cpu else RANGES
        factors = {name: CALIBRATED_RANGE if name in measured else usual.get(name, RANGES["total"]) for name in by_name}
        return {name: (low * by_name[name], high * by_name[name]) for name, (low, high) in factors.items()}

    def equals(self, other: Plan) -> bool:
        """Whether the difference of two plans' seconds is within the prediction's error."""
        return abs(math.log(self.total_s / other.total_s)) <= math.log1p(RESOLUTION)

    @property
    def waits(self) -> dict[str, float] | None:
        """Seconds of a step that each side waits for the other; None: both use the same devices."""
        if self.training is None or self.generation is None or self.colocated:
            return None
        policy = sum(self.seconds[phase] for phase in (Phase.GENERATION, Phase.REWARD, Phase.WAITING))
        return {"policy": policy, "engines": max(0.0, self.total_s - self.seconds[Phase.REFIT] - self.rollouts_s)}

    @property
    def engines_have_nodes(self) -> bool:
        """Whether engines have separate nodes: a split over several nodes lies between two of them."""
        if self.colocated or self.training is None or self.cluster.nodes == 1:
            return False
        return self.cluster.is_cpu or self.training.parallel.world_size % self.cluster.gpus_per_node == 0

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Prompt and completion tokens of a step, by its seconds and devices (nodes, on a CPU)."""
        devices = self.cluster.gpus or self.cluster.nodes
        return self.workload.tokens(DEFAULTS.length_sigma) / self.total_s / devices

    @property
    def not_runnable_because(self) -> list[str]:
        """The parts of the plan that rlctl cannot run yet, each naming its key."""
        models = [self.facts, *([self.teacher.facts] if self.teacher else [])]
        backend = self.backend if self.training is not None else None
        family = next(filter(None, (family_problem(facts, backend) for facts in models)), None)
        layout = not_runnable(self.training, self.generation, self.cluster)
        return [*([family] if family else []), *self.blocked, *layout]

    @property
    def runnable(self) -> bool:
        return not self.not_runnable_because

    @property
    def in_flight(self) -> str:
        """The treatment of rollouts that are being sampled when new weights come."""
        work, waits = self.workload, self.workload.tools_s > LONGEST_WAIT * self.total_s
        pauses = self.colocated and not self.cluster.is_cpu
        return work.in_flight or ("turns" if work.overlaps and waits and not pauses else "wait")

    def name(self) -> str:
        halves = (("training", self.training), ("generation", self.generation))
        parts = [f"{name} {half.name()}" for name, half in halves if half is not None]
        return "; ".join(parts) + ("; split" if len(parts) > 1 and not self.colocated else "")

    def config_values(self) -> dict[str, Any]:
        """The configuration keys that the plan decides, with their values: what `train` fills in."""
        training, generation, values = self.training, self.generation, dict[str, Any]()
        if training is not None:
            values |= {f"training.{key}": value for key, value in training.chosen().items()}
            values["training.backend"] = self.backend
            if self.facts.unpacked:
                values |= {"training.packing": False, "training.dynamic_batching": self.workload.dynamic}
                values["training.share_prompts"] = False
            values |= {"training.threads": training.threads} if training.threads else {}
        if self.teacher is not None:
            values |= {
                f"{self.teacher.role}.{size}": getattr(self.teacher.choice.parallel, size) for size in TEACHER_SIZES
            }
        if generation is None:
            return values
        values |= {f"generation.{key}": getattr(generation, key) for key in GENERATION_CHOSEN}
        if self.cluster.is_cpu:
            values["generation.threads"] = generation.threads
            values["generation.kv_cache_bytes"] = int(generation.kv_cache_bytes)
        else:
            values["generation.memory_fraction"] = generation.memory_fraction
            values["generation.max_batched_tokens"] = generation.max_batched_tokens
        if training is not None:
            values["generation.colocated"] = self.colocated
            values |= {"training.lora.refit": training.adapters.refit} if training.adapters else {}
            values |= {"refit.in_flight": self.in_flight} if self.workload.staleness is not None else {}
            values |= {"generation.devices": self.engine_devices} if self.engine_devices else {}
        return values
