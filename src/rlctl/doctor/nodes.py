"""Checks and rates of every node of a Ray cluster. A task on each node runs them; the worst nodes come first."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rlctl.cluster.usage import visible_gpus
from rlctl.doctor import gpus, host, network, software
from rlctl.doctor.deep import POLL_S, ProbeProcess, Runner
from rlctl.doctor.finding import Check, Status
from rlctl.doctor.gpus import Gpu
from rlctl.doctor.probes import CPU, GPU, LAYERS
from rlctl.errors import InputError, first_line

R = TypeVar("R")
CHECKS_LIMIT_S, RATES_LIMIT_S = 420.0, 900.0
SLOW = 0.9
"""A GPU or node is slow if its rate is below this share of the median."""
OF_NODES = ("rates", "collectives", "disk")
"""Probes that run on every node."""
WORSE: tuple[Status, ...] = ("ok", "warn", "fail")
"""Statuses from best to worst."""


def ask_nodes(work: Callable[..., R], *arguments: object, limit_s: float) -> dict[str, R | str]:
    """Call `work` on each living node, and return the results by node address. An error message replaces the result of
    a failed node or of one that takes longer than `limit_s`."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without this variable, Ray hides the GPUs from a task that requests none.
    environment = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    task: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=environment)(work)
    pending = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            pending[node["NodeManagerAddress"]] = task.options(scheduling_strategy=place).remote(*arguments)
    deadline, answers = time.monotonic() + limit_s, dict[str, R | str]()
    for address, ref in pending.items():
        try:
            answers[address] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except RayError as error:
            answers[address] = first_line(error)
    return answers


def gpu_checks(local_gpus: tuple[Gpu, ...], versions: Mapping[str, str], *, quick: bool) -> Iterator[Check]:
    """Yield the checks of a machine with GPUs; `quick` skips checks that start processes."""
    yield gpus.check_driver(local_gpus, versions)
    yield gpus.check_compiler()
    yield gpus.check_flashinfer(versions)
    if not quick:
        yield software.check_gpu_packages(versions, software.why_not_imported)
    yield gpus.check_ecc(gpus=local_gpus)
    yield gpus.check_sharing()
    yield gpus.check_other_programs()
    yield gpus.check_links(local_gpus)
    yield gpus.check_numa()


def checks_here(per_node: int, kind: str, quick: bool) -> list[Check]:
    """Return the checks of this node's GPUs, memory limits and NCCL (gloo without GPUs)."""
    local_gpus, versions = gpus.list_gpus(), software.installed_versions()
    checks = [gpus.check_whole(per_node, kind) or gpus.check_gpus(local_gpus, per_node, kind)]
    checks += gpu_checks(local_gpus, versions, quick=quick) if local_gpus else ()
    checks += [host.check_left_over(), host.check_locked_memory(len(local_gpus))]
    if not quick:
        checks.append(network.check_ranks(len(local_gpus)))
    return [replace(check, repair=None) for check in checks]


def checks_of_nodes(per_node: int, kind: str, *, quick: bool) -> Iterator[Check]:
    yield from compare_checks(ask_nodes(checks_here, per_node, kind, quick, limit_s=CHECKS_LIMIT_S))


def compare_checks(answers: Mapping[str, Sequence[Check] | str]) -> Iterator[Check]:
    """Yield one check per name, with the details of the nodes with its worst status."""
    if silent := {node: problem for node, problem in answers.items() if isinstance(problem, str)}:
        listing = "; ".join(f"{node}: {problem}" for node, problem in silent.items())
        yield Check("node-checks", "fail", f"no checks from {listing}", "See `ray status`, and the logs of Ray there.")
    by_name: dict[str, dict[str, Check]] = {}
    for node, checks in answers.items():
        for check in () if isinstance(checks, str) else checks:
            by_name.setdefault(check.name, {})[node] = check
    for name, by_node in by_name.items():
        worst = WORSE[max(WORSE.index(check.status) for check in by_node.values())]
        details: dict[str, list[str]] = {}
        for node, check in by_node.items():
            if check.status == worst:
                details.setdefault(check.detail, []).append(node)
        fix = next(check.fix for check in by_node.values() if check.status == worst)
        where = "; ".join(f"{', '.join(nodes)}: {detail}" for detail, nodes in details.items())
        if len(details) == 1 and len(by_node) == len(next(iter(details.values()))):
            where = f"{len(by_node)} node(s): {next(iter(details))}"
        yield Check(f"node-{name}", worst, where, fix)


@dataclass(frozen=True)
class Measured:
    """The result of a probe on a node or on one GPU."""

    node: str
    place: str
    """The GPU; empty: the whole node."""
    probe: str
    figures: dict[str, float | str] = field(default_factory=dict)
    problem: str = ""
    share: float = 1.0
    """The slowest rate as a share of the median over all nodes and GPUs."""

    @property
    def status(self) -> str:
        return "FAIL" if self.problem else "slow" if self.share < SLOW else "ok"

    def line(self) -> str:
        figures = ", ".join(f"{name} {value if isinstance(value, str) else f'{value:.3g}'}"
                            for name, value in self.figures.items())  # fmt: skip
        share = f" ({self.share:.0%} of the median)" if self.status == "slow" else ""
        where = f"{self.node} {self.place}".strip()
        return f"{self.status:<4}  {where:<24} {self.probe:<12} {self.problem or figures}{share}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status}


def rates_here(names: Sequence[str], directory: str, cpu: bool) -> list[Measured]:
    """Run probes on this node, `rates` on each of its GPUs at the same time."""
    local_gpus = () if cpu else gpus.list_gpus()
    device, every = (GPU, visible_gpus(len(local_gpus))) if local_gpus else (CPU, [""])
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="rlctl-deep-") as folder:
        runner = Runner(device, Path(folder), Path(folder), time.monotonic() + RATES_LIMIT_S, Path(directory))
        for name in names:
            live = []
            for gpu in every if name == "rates" else [""]:
                environment = runner.environment() | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
                place = Path(folder) / f"{name}-{gpu}"
                place.mkdir()
                probe = LAYERS[name]
                live.append((gpu, ProbeProcess(probe, runner.command(probe), place, probe.limit_s, environment)))
            try:
                # A list and not `any`, since `over` also ends a process at its limit and must run for each of them.
                while [1 for _, process in live if not process.over()]:
                    time.sleep(POLL_S)
            finally:
                for _, process in live:
                    if process.process.poll() is None:
                        process.stop()
            for gpu, process in live:
                outcome = process.outcome()
                problem = outcome.detail if outcome.status != "ok" else ""
                measured.append(Measured("", f"GPU {gpu}" if gpu else "", name, outcome.figures, problem))
    return measured


def rates_of_nodes(address: str, only: Sequence[str], directory: Path, *, cpu: bool) -> list[Measured]:
    """Measure every node of the cluster at `address`; the disk probe writes to `directory`. Return the slowest
    first."""
    from rlctl.cluster.ray_session import ray_session

    for name in only:
        if name not in OF_NODES:
            choices = ", ".join(OF_NODES)
            raise InputError(f"--only {name} does not run on the nodes of --ray-address.", f"Choose {choices}.")
    names = [name for name in OF_NODES if not only or name in only]
    with ray_session(address):
        answers = ask_nodes(rates_here, names, os.path.abspath(directory), cpu, limit_s=RATES_LIMIT_S)
    return slowest_first(answers)


def slowest_first(answers: Mapping[str, Sequence[Measured] | str]) -> list[Measured]:
    """Return failures first, then results in order of their slowest rate as a share of its median."""
    every: list[Measured] = []
    for node, answer in answers.items():
        if isinstance(answer, str):
            every.append(Measured(node, "", "task", problem=answer))
        else:
            every += [replace(rate, node=node) for rate in answer]
    rates: dict[tuple[str, str], list[float]] = {}
    for rate in every:
        for name, value in rate.figures.items():
            if name.endswith("/s") and not isinstance(value, str):
                rates.setdefault((rate.probe, name), []).append(value)

    def share(rate: Measured) -> float:
        middles = {name: median(rates[rate.probe, name]) for name in rate.figures if (rate.probe, name) in rates}
        return min((float(rate.figures[name]) / middle for name, middle in middles.items() if middle), default=1.0)

    shares = [replace(rate, share=share(rate)) for rate in every]
    return sorted(shares, key=lambda rate: (not rate.problem, rate.share))
