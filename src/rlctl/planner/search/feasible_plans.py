"""Plans that fit: layouts of training and of generation combined, and why others do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.costs.checkpoint import save_of
from rlctl.planner.costs.engines import (
    generation_memory,
    generation_time,
    kept_base_bytes,
    steady_generation_time,
    weight_bytes,
)
from rlctl.planner.costs.time import change_time, refit_time
from rlctl.planner.inputs.cluster import GIB, ClusterFacts
from rlctl.planner.inputs.constants import RANGES, Constants
from rlctl.planner.inputs.request import Request
from rlctl.planner.result import Plan, Rejected
from rlctl.planner.search import policy_search as search
from rlctl.planner.search.engine_search import generation_candidates, generation_choices
from rlctl.planner.search.evidence import evidence, untried
from rlctl.planner.search.layout_rules import not_runnable
from rlctl.planner.search.teacher_search import with_teachers
from rlctl.telemetry.phases import Phase
from rlctl.transport.available import choose, transport_facts
from rlctl.transport.facts import Places

MEMORY_CHECKPOINT_SHARE = 0.03
"""Share of the time that checkpoints in memory take at most, where their interval is not set."""


def feasible_plans(request: Request) -> tuple[list[Plan], list[Rejected]]:
    """Return the best fitting plans, best first, and the reasons against others."""
    log = _RejectionLog()
    if not request.workload.trains:  # completions: all devices are the engines'
        devices, budget = request.cluster.devices, request.budget
        engines = generation_candidates(request, devices, False, 0.0, budget, log.add("generation"))
        able = _worth_combining(engines, lambda e: not not_runnable(None, e, request.cluster), _rank_engine(request))
        generating = sorted((assemble(request, None, engine, False) for engine in able), key=score)
        return believable(generating) if generating else generating, log.listed()
    plans: list[Plan] = []
    for colocated in _modes(request):
        # If the sides take turns, separate devices idle half the time: use them only if nothing else runs.
        if not any(plan.runnable for plan in plans):
            plans += _colocated(request, log) if colocated else _split(request, log)
    return sorted(plans, key=preference), log.listed()


def _modes(request: Request) -> list[bool]:
    colocated, cluster = request.pin("generation.colocated"), request.cluster
    if colocated is None and request.pin("generation.devices") is not None:
        colocated = False
    mover = request.pin("refit.mover")
    if not request.workload.engines or (mover is not None and transport_facts(mover).shares == "device"):
        return [True]
    if colocated is not None:
        return [bool(colocated)]
    if cluster.is_cpu or cluster.gpus < 2:
        return [True]
    return [False, True] if request.workload.staleness is not None else [True, False]


class _RejectionLog:
    """Collects why layouts were rejected; one line for each distinct layout."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[str, str, float]] = {}
        self.fitted: set[str] = set()
        """Halves of a plan that fit alone."""

    def add(self, half: str) -> search.Reject:
        def note(choice: Any, reason: str, over: float = math.inf) -> None:
            name = f"{half} {choice.name()}"
            if over < self.lines.get(name, (half, "", math.inf))[2] or name not in self.lines:
                self.lines[name] = (half, reason, over)

        return note

    def listed(self) -> list[Rejected]:
        order = sorted(
            self.lines.items(),
            key=lambda item: (item[1][2] == math.inf, item[1][0] in self.fitted, item[1][2], len(item[0])),
        )
        return [Rejected(plan, reason, over) for plan, (_, reason, over) in order]


KEEP, KEEP_SPLIT = 6, 2
"""Candidates of training and of generation that are combined; in each division of the devices fewer."""


def _colocated(request: Request, log: _RejectionLog) -> list[Plan]:
    cluster = request.cluster
    devices, budget = cluster.devices, request.budget
    if cluster.is_cpu and request.workload.engines:
        budget = cluster.nodes and budget - _least_cpu_engine(request)
    trainings = search.training_candidates(request, devices, True, budget, log.add("training"))
    trainings = with_teachers(request, trainings, devices, budget, log.add("training"))
    log.fitted |= {"training"} if trainings else set()
    if not request.workload.engines:
        alone = _worth_combining(
            trainings, lambda t: not not_runnable(t.choice, None, cluster), _rank_training(request)
        )
        return [plan for t in alone if _fits(plan := assemble(request, t, None, True), budget, log)]
    pairs, plans = _SharedDevices(request, log), list[Plan]()
    for training in pairs.trainings_worth_combining(trainings):
        for engine in pairs.engines(training):
            plan = assemble(request, training, engine, True)
            if _fits(plan, request.budget, log):
                plans.append(plan)
    return sorted(plans, key=score)


class _SharedDevices:
    """The best layouts on shared devices, where what the policy leaves to the engines, and the refit, depend on both
    halves."""

    def __init__(self, request: Request, log: _RejectionLog) -> None:
        self.request, self.log = request, log
        self.mover = request.pin("refit.mover") or choose(places_of(request.cluster, apart=False))
        self.by_room: dict[tuple[float, float], list[GenerationChoice]] = {}
        self.generated = cache(partial(_generation_seconds, request))
        self.rank_engine = cache(_rank_engine(request))

    def trainings_worth_combining(self, trainings: list[search.TrainingCandidate]) -> list[search.TrainingCandidate]:
        """Return the layouts with the best pairs: with any engines, with tried kinds, and with published sizes."""
        request = self.request
        scores = [
            [(self.rank_engine(engine)[:2], self.score(training, engine)) for engine in self.engines(training)]
            for training in trainings
        ]
        least = min((rank for pairs in scores for rank, _ in pairs), default=(0, 0))

        def ordered(kind: Callable[[tuple[int, int]], bool]) -> list[search.TrainingCandidate]:
            best = [min((score for rank, score in pairs if kind(rank)), default=math.inf) for pairs in scores]
            return [trainings[number] for number in sorted(range(len(trainings)), key=best.__getitem__)]

        return _worth_combining(
            ordered(lambda _: True),
            lambda training: not not_runnable(training.choice, None, request.cluster),
            _rank_training(request),
            others=(ordered(lambda rank: not rank[0]), ordered(lambda rank: rank == least)),
        )

    def engines(self, training: search.TrainingCandidate) -> list[GenerationChoice]:
        """Return the engines worth combining that fit next to a policy."""
        request, cluster = self.request, self.request.cluster
        asleep, left = policy_asleep(request, training), request.budget
        if cluster.is_cpu:
            left -= search.held_bytes(request, training) * max(1, training.choice.parallel.world_size // cluster.nodes)
            left -= _teacher_bytes(request, training)
        if (asleep, left) not in self.by_room:
            reject = self.log.add("generation")
            engines = generation_candidates(request, cluster.devices, True, asleep, left, reject)
            self.log.fitted |= {"generation"} if engines else set()
            self.by_room[asleep, left] = _worth_combining(
                engines, lambda e: not not_runnable(None, e, cluster), self.rank_engine
            )
        return self.by_room[asleep, left]

    def score(self, training: search.TrainingCandidate, engine: GenerationChoice) -> float:
        seconds = _seconds(self.request, training, engine, True, self.mover, self.generated(engine))
        total = sum(_calibrated(self.request, seconds).values())
        return total * (1 + search.SIMPLICITY * _dimensions(training.choice, engine))


def _worth_combining(
    candidates: list[Any],
    runnable: Callable[[Any], bool],
    rank: Callable[[Any], tuple[int, int, int]],
    keep: int = KEEP,
    others: Sequence[list[Any]] = (),
) -> list[Any]:
    """Return the best candidates, the best runnable ones of tried kinds, and the first two of these by `rank`:
    published runs show them most often, and their times may be within the prediction's error. `others`: the same
    candidates in the order of their best plans with other halves of tried kinds, and with published ones."""
    orders = [list(filter(runnable, order)) for order in (candidates, *others)]
    best, tried = candidates[:keep], [[c for c in order if not rank(c)[0]][:2] for order in orders]
    for candidate in chain(orders[0][:keep], *tried, sorted(orders[-1], key=rank)[:2]):
        if candidate not in best:
            best.append(candidate)
    return best


def _rank_training(request: Request) -> Callable[[search.TrainingCandidate], tuple[int, int, int]]:
    def rank(candidate: search.TrainingCandidate) -> tuple[int, int, int]:
        layout = (request.facts, request.cluster, candidate.choice, None)
        return len(untried(*layout)), -evidence(*layout), search.complexity(candidate.choice)

    return rank


def _rank_engine(request: Request) -> Callable[[GenerationChoice], tuple[int, int, int]]:
    def rank(engine: GenerationChoice) -> tuple[int, int, int]:
        kinds = sum(size > 1 for size in (engine.tp, engine.pp, engine.dp))
        layout = (request.facts, request.cluster, None, engine)
        return len(untried(*layout)), -evidence(*layout), kinds

    return rank


MOST_PARTS = 8
"""Parts that many devices are divided into; half as many if the sides take turns, which changes little."""


def _split(request: Request, log: _RejectionLog) -> list[Plan]:
    return sorted((plan for size in _division_sizes(request) for plan in _divided(request, size, log)), key=score)


def _division_sizes(request: Request) -> list[int]:
    """The numbers of devices of the engines to try: of one node any, of some nodes halves, of many whole nodes."""
    cluster, total = request.cluster, request.cluster.devices
    if total < 2 and not cluster.is_cpu:
        return []
    if (pinned := request.pin("generation.devices")) is not None:
        return [pinned] if pinned < max(2, total) else []
    node = max(1, total // cluster.nodes)
    parts = MOST_PARTS if request.workload.overlaps else MOST_PARTS // 2
    halves = 1 < cluster.nodes <= MOST_PARTS // 2 and node % 2 == 0 and not cluster.is_cpu
    unit = 1 if cluster.nodes == 1 else node // 2 if halves else node
    units = total // unit
    some = range(1, units) if units <= MOST_PARTS else [round(units * part / parts) for part in range(1, parts)]
    sizes = [unit * number for number in some] or [1]
    return sizes if cluster.is_cpu else sorted({*sizes, *_pinned_sizes(request, total)})


def _pinned_sizes(request: Request, total: int) -> set[int]:
    engines = [request.pin(f"generation.{key}") for key in ("engines", "tp")]
    ranks = [request.pin(f"training.{key}") for key in ("tp", "pp", "cp", "dp")]
    more = [request.pin(f"generation.{key}", 1) for key in ("pp", "dp")]
    products = {math.prod([*engines, *more])} if None not in engines else set()
    if None not in ranks:
        products.add(total - math.prod(ranks))
    return {size for size in products if 0 < size < total}


def _divided(request: Request, engine_devices: int, log: _RejectionLog) -> list[Plan]:
    """Return the best plans with separate engine devices."""
    cluster, budget, policy, engine = request.cluster, request.budget, request, request
    devices = max(1, cluster.devices - engine_devices)
    if cluster.is_cpu and cluster.nodes > 1:
        # One side owns a node's cores and memory; the policy has at least one node.
        nodes = min(cluster.nodes - 1, -(-engine_devices // cluster.device.cores))
        policy = replace(request, cluster=replace(cluster, nodes=cluster.nodes - nodes))
        engine = replace(request, cluster=replace(cluster, nodes=nodes))
        devices = policy.cluster.devices
    together = cluster.is_cpu and cluster.nodes == 1  # both sides share the node's memory
    room = budget - (_least_cpu_engine(engine) if together else 0.0)
    trainings = search.training_candidates(policy, devices, False, room, log.add("training"))
    trainings = with_teachers(policy, trainings, devices, room, log.add("training"))
    plans = []
    able = _worth_combining(
        trainings, lambda t: not not_runnable(t.choice, None, cluster), _rank_training(policy), KEEP_SPLIT
    )
    for training in able:
        left = budget
        if together:
            ranks = training.choice.parallel.world_size
            left -= search.held_bytes(policy, training) * ranks + _teacher_bytes(policy, training)
        engines = generation_candidates(engine, engine_devices, False, 0.0, left, log.add("generation"))
        for choice in _worth_combining(
            engines, lambda e: not not_runnable(None, e, cluster), _rank_engine(engine), KEEP_SPLIT
        ):
            plan = assemble(request, training, choice, False, engine_devices)
            if _fits(plan, cluster.device.memory, log):
                plans.append(plan)
    return plans


def _least_cpu_engine(request: Request) -> float:
    choices = generation_choices(request, request.cluster.devices)
    return min((generation_memory(request, choice, 0.0).total for choice in choices), default=0.0) + 256 * 1024**2


def _fits(plan: Plan, budget: float, log: _RejectionLog) -> bool:
    device = plan.cluster.device
    needs = [(plan.host_memory, device.host_memory, "offloaded and saved state needs", "of host memory a node")]
    if plan.generation is not None:
        refit = f"with {plan.generation.name()}: refit needs"
        needs.insert(0, (plan.memory["refit"].total, budget, refit, "of a device"))
    for need, have, subject, where in needs:
        if need > have and not device.is_cpu:
            log.add("training")(
                plan.training, f"{subject} {need / GIB:.0f} GiB of {have / GIB:.0f} {where}", need / have
            )
            return False
    return True


def device_seconds(plan: Plan) -> float:
    """Device seconds of a step."""
    return plan.total_s * max(1, plan.cluster.gpus)


def score(plan: Plan) -> float:
    aim = device_seconds(plan) if plan.workload.goal == "cheap" else plan.total_s
    return aim * (1 + search.SIMPLICITY * dimensions(plan))


def dimensions(plan: Plan) -> int:
    """Return a plan's parallel dimensions, recomputation and offloads, besides data parallelism."""
    return _dimensions(plan.training, plan.generation)


def _dimensions(training: TrainingChoice | None, engine: GenerationChoice | None) -> int:
    kinds = search.complexity(training) if training is not None else 0
    return kinds + (sum(size > 1 for size in (engine.tp, engine.pp, engine.dp)) if engine is not None else 0)


def believable(plans: list[Plan]) -> list[Plan]:
    """Put the plan first that engineers would choose among plans within prediction error: published sizes, then fewest
    dimensions, then most free memory, of each layout its fastest rows. A kind of layout that no published step has must
    be faster by more than the whole range of predictions. The goal `cheap` compares GPU seconds; measured CPUs compare
    seconds."""
    first = plans[0]
    if first.cluster.is_cpu or first.workload.goal == "cheap":
        return plans

    def kind(plan: Plan) -> tuple[bool, bool, int]:
        return plan.colocated, plan.runnable, plan.engine_devices if plan.workload.overlaps else 0

    tried = [plan for plan in plans if kind(plan)[:2] == kind(first)[:2] and not untried_kinds(plan)]
    if untried_kinds(first) and tried and tried[0].total_s <= first.total_s * RANGES["total"][1]:
        first = tried[0]
    few = len(untried_kinds(first))
    equal = [p for p in plans if p.equals(first) and kind(p) == kind(first) and len(untried_kinds(p)) <= few]
    fastest = {plan.name(): plan for plan in sorted(equal, key=lambda plan: -plan.total_s)}

    def rank(plan: Plan) -> tuple[int, int, float, float]:
        points = evidence(plan.facts, plan.cluster, plan.training, plan.generation)
        fullest = max(memory.total for memory in plan.memory.values())
        return -points, dimensions(plan), round(fullest / plan.cluster.device.memory, 1), plan.total_s

    chosen = min(fastest.values(), key=rank)
    return [chosen, *(plan for plan in plans if plan is not chosen)]


def places_of(cluster: ClusterFacts, *, apart: bool) -> Places:
    """Return where engines compute that share the policy's devices, or that have others (`apart`)."""
    sentence = "with generation.colocated = false engines have separate {}"
    several = apart and cluster.nodes > 1
    return Places(cluster.is_cpu, sentence.format("devices") * apart, sentence.format("nodes") * several)


def untried_kinds(plan: Plan) -> list[str]:
    return untried(plan.facts, plan.cluster, plan.training, plan.generation)


def preference(plan: Plan) -> tuple[bool, float]:
    """Order of plans: separate engine devices only if required for alternating sides."""
    return not plan.colocated and plan.workload.staleness is None, score(plan)


def assemble(
    request: Request,
    training: search.TrainingCandidate | None,
    generation: GenerationChoice | None,
    colocated: bool,
    engine_devices: int = 0,
) -> Plan:
    """Assemble a plan from layouts; one may be None."""
    cluster, mover, mfu = request.cluster, None, 0.0
    if training and generation:
        mover = request.pin("refit.mover") or choose(places_of(cluster, apart=not colocated))
    if training:
        flops = timing.model_flops(request, frozen=training.choice.adapters is not None)
        devices = cluster.nodes if cluster.is_cpu else training.choice.parallel.world_size
        mfu = flops / training.seconds / devices / cluster.device.flops(request.precision)
    copies = request.save_copies is not False
    host = _host_memory(request, training, generation, colocated, copies)
    if host > cluster.device.host_memory and request.save_copies is None and request.saves and not cluster.is_cpu:
        copies = False
        host = _host_memory(request, training, generation, colocated, copies)
    generated = _generation_seconds(request, generation) if generation else 0.0
    seconds = _calibrated(request, _seconds(request, training, generation, colocated, mover, generated))
    every, host = _memory_checkpoints(request, training, host, copies, sum(seconds.values()))
    return Plan(
        facts=request.facts, cluster=cluster, workload=request.workload, backend=request.backend,
        training=training.choice if training else None, generation=generation, colocated=colocated,
        micro_batches=timing.micro_batches(request, training.choice)[0] if training else 0,
        memory=_memory(request, training, generation, colocated),
        host_memory=host, save_copies=copies, memory_checkpoint_every=every,
        seconds=seconds,
        mfu=mfu, mover=mover, pins=request.pins, teacher=training.teacher if training else None,
        engine_devices=engine_devices, request=request,
        rollouts_s=generated + _reward_seconds(request, training) if generation else 0.0,
    )  # fmt: skip


def _memory_checkpoints(
    request: Request, training: search.TrainingCandidate | None, host: float, copies: bool, step_s: float
) -> tuple[int, float]:
    """Return the interval of checkpoints in memory, and a node's host memory with them. `step_s`: of a step, of which
    they take `MEMORY_CHECKPOINT_SHARE` at most where the interval is not set."""
    interval, cluster = request.memory_checkpoint_every, request.cluster
    if training is None or interval == 0:
        return 0, host
    with_them = host + mem.memory_checkpoint_bytes(request.facts, training.choice, cluster)
    if interval is not None:
        return interval, with_them
    if cluster.is_cpu or not copies or with_them > cluster.device.host_memory:
        return 0, host
    copy_s = save_of(request, training.choice).copy_s
    return max(1, math.ceil(copy_s / (MEMORY_CHECKPOINT_SHARE * step_s))), with_them


def _memory(
    request: Request, training: search.TrainingCandidate | None, generation: GenerationChoice | None, colocated: bool
) -> dict[str, mem.PhaseMemory]:
    if training is None:
        assert generation is not None
        return {"generation": generation_memory(request, generation, 0.0)}
    phases = {"training": training.peak}
    if snapshot := search.snapshot_parts(request, training.choice):
        phases["saving"] = mem.PhaseMemory(training.peak.parts | snapshot)
    if generation is None:
        return phases
    asleep = search.asleep_bytes(request, colocated)
    phases["logprobs"] = mem.logprobs_memory(request, training.choice, asleep)
    waits: dict[str, float] = {}
    if training.teacher is not None:
        # On a GPU it computes next to the policy's states, on a CPU in a separate process.
        kept = {} if request.cluster.is_cpu else phases["logprobs"].parts
        states = {name: size for name, size in kept.items() if name not in ("activations", "logits")}
        phases["scores" if training.teacher.choice.valued else "teacher"] = mem.PhaseMemory(
            states | training.teacher.memory.parts
        )
        waits = training.teacher.waits
        phases["logprobs"] = mem.PhaseMemory(phases["logprobs"].parts | waits)
    engine = generation_memory(request, generation, policy_asleep(request, training) if colocated else 0.0)
    if colocated:
        held = weight_bytes(request.facts, generation) + kept_base_bytes(request, generation)
        refit = mem.refit_memory(request, training.choice, held)
        phases["refit"] = mem.PhaseMemory(refit.parts | waits)
    else:
        workers = generation.tp * generation.pp
        phases["refit"] = mem.split_refit_memory(request, training.choice, engine, workers, waits)
    return phases | {"generation": engine}


def _host_memory(
    request: Request,
    training: search.TrainingCandidate | None,
    generation: GenerationChoice | None,
    colocated: bool,
    copies: bool,
) -> float:
    cluster, constants = request.cluster, request.constants
    if not cluster.is_cpu:
        ranks = max(1, cluster.gpus_per_node)
        if training is None:  # the engines' workers, and the object store
            return ranks * constants.engine_host_bytes + mem.node_bytes(cluster, constants)
        weights = weight_bytes(request.facts, generation) if generation and not request.discards else 0.0
        shared = colocated and generation is not None
        teacher = training.teacher.weights + training.teacher.other_weights if training.teacher else 0.0
        # Moments in a narrower format are unpacked into host memory at a save, whether or not training waits.
        saves = request.saves and (copies or training.choice.moment_bytes != 8)
        need = mem.host_memory(
            request.facts, training.choice, cluster, shared, weights, saves=saves, constants=constants
        )
        return need + ranks * teacher
    policy = engine = 0.0
    if generation is not None:
        engine = max(1, generation.gpus // cluster.nodes) * generation_memory(request, generation, 0.0).total
    if training is not None:
        ranks = max(1, training.choice.parallel.world_size // cluster.nodes)
        policy = ranks * search.held_bytes(request, training)
        policy += _teacher_bytes(request, training)
    return policy + engine


def _seconds(
    request: Request,
    training: search.TrainingCandidate | None,
    generation: GenerationChoice | None,
    colocated: bool,
    mover: str | None,
    generated: float,
) -> dict[Phase, float]:
    """Return the seconds of a step by phase. `generated`: of its rollouts, without rewards."""
    seconds, workload = dict.fromkeys(Phase, 0.0), request.workload
    if generation is not None and workload.rollouts and (training is None or workload.staleness is None):
        seconds[Phase.GENERATION] = generated
    if training is None:
        return seconds
    seconds |= {Phase.TRAINING: training.seconds, Phase.LOGPROBS: training.logprobs, Phase.CRITIC: training.critic}
    seconds[Phase.OTHER] = 0.01 if request.cluster.is_cpu else request.constants.other_s
    if generation is not None and workload.rollouts:
        if workload.staleness is None:
            seconds[Phase.REWARD] = _reward_seconds(request, training)
        else:
            # Parts on shared devices take turns; the other work of the rollouts continues while the policy trains.
            turn, scored = generated if colocated else 0.0, generated + _reward_seconds(request, training)
            meanwhile = sum(seconds.values()) if workload.overlaps else 0.0
            seconds[Phase.WAITING] = turn + max(0.0, scored - turn - meanwhile)
        refit_s = refit_time(request, training.choice, generation, colocated, mover)
        turns = training.choice.adapters is not None and training.choice.adapters.held > 1 and generation.runs == 1
        seconds[Phase.REFIT] = (1 + turns) * refit_s  # engines get the adapter of the run whose turn it is
    seconds[Phase.REFIT] += change_time(request, training.choice)
    if generation is not None and generation.runs > 1:
        # The run's engines sample while the policy trains the other runs, on a CPU with the same cores.
        sampled = seconds[Phase.GENERATION] + seconds[Phase.REWARD]
        trains = sum(seconds.values()) - sampled
        shared = request.cluster.is_cpu and colocated
        waits = sampled / generation.runs if shared else max(0.0, (sampled + trains) / generation.runs - trains)
        seconds |= {Phase.GENERATION: 0.0, Phase.REWARD: 0.0, Phase.WAITING: waits}
    return seconds


def _calibrated(request: Request, seconds: dict[Phase, float]) -> dict[Phase, float]:
    factors = dict(request.cluster.factors)
    return {phase: value * factors.get(phase.value, 1.0) for phase, value in seconds.items()}


def repriced(plan: Plan, constants: Constants) -> dict[Phase, float]:
    """Return the seconds of a plan's layouts under other constants; of a plan without a teacher."""
    assert plan.training is not None
    request = replace(plan.request, constants=constants)
    training = search.TrainingCandidate(
        plan.training,
        plan.memory["training"],
        timing.training_time(request, plan.training, plan.colocated).total,
        timing.logprobs_time(request, plan.training),
        timing.critic_time(request, plan.training, plan.colocated),
    )
    generated = _generation_seconds(request, plan.generation) if plan.generation else 0.0
    return _seconds(request, training, plan.generation, plan.colocated, plan.mover, generated)


def _generation_seconds(request: Request, generation: GenerationChoice) -> float:
    if request.workload.keeps_rollouts:
        return steady_generation_time(request, generation)
    return generation_time(request, generation).total


def _reward_seconds(request: Request, training: search.TrainingCandidate | None) -> float:
    model = training.teacher if training is not None else None
    of_model = model.seconds if model is not None and model.choice.valued else 0.0
    return of_model + (0.015 if request.cluster.is_cpu else request.constants.reward_s)


def policy_asleep(request: Request, training: search.TrainingCandidate) -> float:
    """Return bytes that offloaded policy and teacher processes keep on the device: context, communicators,
    allocator."""
    if request.cluster.is_cpu:
        return 0.0
    teacher = training.teacher.asleep if training.teacher is not None else 0.0
    return mem.runtime_bytes(request, training.choice) + 0.5 * GIB + teacher


def _teacher_bytes(request: Request, training: search.TrainingCandidate) -> float:
    if training.teacher is None:
        return 0.0
    ranks = max(1, training.teacher.choice.parallel.world_size // request.cluster.nodes)
    return ranks * training.teacher.memory.total
