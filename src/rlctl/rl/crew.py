"""The processes of a run: policy ranks, generation engines and a scorer, started together and stopped together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlctl.backends.base import PolicySpec
from rlctl.backends.vllm.args import EngineSpec
from rlctl.cluster.objects import fetch
from rlctl.cluster.placement import Bundle, Placement
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.envs.plan import RewardPlan
from rlctl.errors import MachineError

POLICY_WORKER = "rlctl.refit.policy:RefitPolicyWorker"
ENGINE_WORKER = "rlctl.backends.vllm.engine:VllmEngine"
REWARD_WORKER = "rlctl.envs.worker:RewardWorker"
# Calls that an engine takes at a time where a refit may come into a generation: both, and one that looks.
ENGINE_CALLS = 3


@dataclass(frozen=True)
class CrewSpec:
    """What to start. Policy and engines share the devices: rank r is on device r, engine i on devices i * tp and up."""

    policy: PolicySpec
    engine: EngineSpec
    engines: int
    engine_tp: int
    reward: RewardPlan | None
    """What scores; None: no scorer."""
    start_timeout_s: float
    step_timeout_s: float

    @property
    def devices(self) -> int:
        return max(self.policy.parallel.world_size, self.engines * self.engine_tp)


@dataclass(frozen=True)
class Crew:
    """The running groups."""

    policy: WorkerGroup
    engines: WorkerGroup
    reward: WorkerGroup | None


@contextlib.contextmanager
def start_crew(spec: CrewSpec, log_dir: Path) -> Iterator[Crew]:
    """Start all processes at once and stop them at the end; on an error or an interrupt they are ended at once."""
    gpus = spec.policy.device == "cuda"
    placement = Placement(spec.devices, gpus=gpus, timeout_s=spec.start_timeout_s)
    groups: list[WorkerGroup] = []
    try:
        crew = Crew(
            _policy(spec, placement, log_dir, groups),
            _engines(spec, placement, log_dir, groups),
            _reward(spec, placement, log_dir, groups),
        )
        # The slow starts (imports, then weights and process groups) run side by side.
        for group in groups:
            group.ready()
        if spec.engine.sleeps:  # vLLM measures what is free on the device: alone, and gives it back before others come
            crew.engines.call("start", timeout_s=spec.start_timeout_s)
            crew.engines.call("sleep")
            crew.policy.call("setup", _meeting_port(crew), timeout_s=spec.start_timeout_s)
        else:
            setup, start = crew.policy.submit("setup", _meeting_port(crew)), crew.engines.submit("start")
            crew.policy.wait("setup", setup, spec.start_timeout_s)
            crew.engines.wait("start", start, spec.start_timeout_s)
        if crew.reward is not None:
            crew.reward.call("setup", timeout_s=spec.start_timeout_s)
        yield crew
        for group in groups:
            group.stop()
    except BaseException:
        for group in groups:
            group.kill()
        raise
    finally:
        placement.release()


def _meeting_port(crew: Crew) -> int:
    return crew.policy.part([0]).call("open_store")[0]


def _policy(spec: CrewSpec, placement: Placement, log_dir: Path, groups: list[WorkerGroup]) -> WorkerGroup:
    size, address = spec.policy.parallel.world_size, placement.bundles[0].node
    threads, gpus = spec.policy.threads, spec.policy.device == "cuda"
    env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if not gpus:
        env["THP_MEM_ALLOC_ENABLE"] = "1"  # torch asks for huge pages: fresh small ones cost more than what fills them
    specs = [
        WorkerSpec(
            {"rank": rank, "world_size": size, "master_addr": address, "spec": spec.policy},
            (placement.bundles[rank],),
            env,
        )
        for rank in range(size)
    ]
    return _start(spec, "policy", POLICY_WORKER, specs, placement, log_dir, groups)


def _engines(spec: CrewSpec, placement: Placement, log_dir: Path, groups: list[WorkerGroup]) -> WorkerGroup:
    specs = [
        WorkerSpec({"spec": spec.engine, "index": index}, bundles, spec.engine.environment)
        for index, bundles in enumerate(engine_bundles(placement.bundles, spec.engines, spec.engine_tp))
    ]
    calls = 1 if spec.engine.in_flight == "wait" else ENGINE_CALLS
    return _start(spec, "engine", ENGINE_WORKER, specs, placement, log_dir, groups, concurrency=calls)


def engine_bundles(bundles: tuple[Bundle, ...], engines: int, tp: int) -> list[tuple[Bundle, ...]]:
    """The devices of each engine. Raises MachineError where those of one are on several nodes: its processes are
    started by the first of them."""
    shares = [bundles[index * tp : (index + 1) * tp] for index in range(engines)]
    for index, share in enumerate(shares):
        if len(nodes := {bundle.node for bundle in share}) > 1:
            raise MachineError(
                f"Ray gave the {tp} devices of engine {index} on {len(nodes)} nodes ({', '.join(sorted(nodes))}).",
                "Free devices so that each node has a multiple of generation.tp, or set a smaller generation.tp.",
            )
    return shares


def _reward(spec: CrewSpec, placement: Placement, log_dir: Path, groups: list[WorkerGroup]) -> WorkerGroup | None:
    if spec.reward is None:
        return None
    # No device of its own, and none visible: scorers run user code.
    worker = WorkerSpec({"plan": spec.reward, "fetch": fetch}, (placement.bundles[0],), {"CUDA_VISIBLE_DEVICES": ""})
    return _start(spec, "reward", REWARD_WORKER, [worker], placement, log_dir, groups)


def _start(
    spec: CrewSpec,
    name: str,
    worker_class: str,
    specs: list[WorkerSpec],
    placement: Placement,
    log_dir: Path,
    groups: list[WorkerGroup],
    *,
    concurrency: int = 1,
) -> WorkerGroup:
    group = WorkerGroup(
        name,
        worker_class,
        specs,
        placement,
        log_dir,
        start_timeout_s=spec.start_timeout_s,
        call_timeout_s=spec.step_timeout_s,
        wait=False,
        concurrency=concurrency,
    )
    groups.append(group)
    return group
