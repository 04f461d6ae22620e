"""The processes of a run: policy, engines and scorers start and end together."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.backends.base import (
    Device,
    EngineSpec,
    EngineWorker,
    EpisodeWorker,
    PolicySpec,
    PolicyWorker,
)
from rlctl.backends.clients import EngineClient, PolicyClient
from rlctl.backends.messages import Sampling, Truncation
from rlctl.checkpoints.model_source import ModelSource
from rlctl.cluster import hangs
from rlctl.cluster.memory_files import MemoryFiles
from rlctl.cluster.placement import Bundle, Placement
from rlctl.cluster.ray_session import fetch
from rlctl.cluster.worker_host import EarlyHost, EarlyHosts
from rlctl.cluster.workers import PendingCall, WorkerGroup, WorkerSpec, failing_with, stop_together
from rlctl.data.chat import EncodedPrompt
from rlctl.errors import MachineError, RlctlError, WaitTimeoutError
from rlctl.models.quantized import quantized_matrices
from rlctl.preparation.worker_specs import EnginesSpec, RunWorkersSpec
from rlctl.refit.weight_sender import PolicyProcess, WeightSender
from rlctl.rewards.reward_plan import Rewards
from rlctl.rewards.reward_worker import RewardWorker
from rlctl.settings.generation import RefitConfig
from rlctl.settings.run import ClusterConfig
from rlctl.settings.training import TrainingConfig

if TYPE_CHECKING:
    from rlctl.refit.sync import WeightSync


POLICY_PROCESS = "rlctl.refit.weight_sender:policy_process"
ENGINE_PROCESS = "rlctl.rollouts.episodes:engine_process"
MEMORY_FILES = "rlctl.cluster.memory_files:MemoryFiles"
REWARD_WORKER = "rlctl.rewards.reward_worker:RewardWorker"
Scorers = tuple[WorkerGroup[RewardWorker] | None, WorkerGroup[RewardWorker] | None]
"""The scorer of training and the scorer of validation, where they exist."""
# Calls that an engine takes at a time where a refit may come into a generation: `generate`, `submit`, `collect`, the
# refit, and one that looks.
ENGINE_CALLS = 5
MEMORY_CALLS = 4
"""Calls that an owner of files in memory takes at a time: it may copy from a host that copies from it."""


@dataclass(frozen=True)
class RunWorkers:
    """The running processes."""

    spec: RunWorkersSpec
    policy: PolicyClient
    senders: WorkerGroup[WeightSender]
    """The senders of the policy's weights, one a rank."""
    engines: EngineClient | None
    reward: WorkerGroup[RewardWorker] | None
    validation: WorkerGroup[RewardWorker] | None = None
    """The scorer of validation."""
    teacher: PolicyClient | None = None
    """The teacher or the reward model."""
    again: Again | None = None
    """Starts the policy's processes again; None: these are not of a run."""

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        """The processes that compute, by the name of their kind."""
        clients = {"policy": self.policy, "engine": self.engines}
        if self.teacher is not None:
            clients[self.teacher.group.name] = self.teacher
        return {name: client.group for name, client in clients.items() if client is not None}

    def weight_sync(
        self,
        settings: RefitConfig,
        source: ModelSource | None,
        *,
        offload: bool | None = None,
        decode_limit: float | None = None,
        shown: EncodedPrompt | None = None,
        **options: Any,
    ) -> WeightSync:
        """Return the synchronization of weights, with further `options` of `WeightSync`.

        `source` is the model that the policy's weights are of; None: they are those of a checkpoint. The policy waits
        in host memory as `offload` says; None: where the engines can sleep. With `decode_limit` what the engines decode
        is compared too (`DecodeCheck`), also of `shown`, a prompt with an image.
        """
        from rlctl.checkpoints.conversion.prepared_model import fingerprints_of
        from rlctl.refit.decoding import NEW_TOKENS, DecodeCheck
        from rlctl.refit.sync import WeightSync

        assert self.engines is not None  # without engines there is no refit
        assert self.spec.engines is not None
        policy, engine = self.spec.policy, self.spec.engines.engine
        if source is not None:
            rounded = quantized_matrices(policy.facts, policy.quantization)
            fingerprints = fingerprints_of(source, policy.dtype).items()
            options["converted"] = {name: value for name, value in fingerprints if name not in rounded}
            options["converted_at"] = source.megatron and source.megatron.parent
        if decode_limit is not None:
            vocab, length = policy.facts.text_vocab, engine.max_length
            kept = policy.truncation or Truncation()
            sampling = Sampling(NEW_TOKENS, policy.temperature, kept.top_p, kept.top_k, kept.min_p, never=policy.never)
            graphs = self.spec.engines.backend.without_graphs
            options["decode_check"] = DecodeCheck(decode_limit, vocab, length, sampling, graphs, shown)
        options |= {"dtype": policy.dtype, "engines_sleep": engine.sleeps, "engines_discard": engine.discards}
        options["offload"] = engine.sleeps if offload is None else offload
        return WeightSync(self.policy, self.senders, self.engines, policy.facts, settings=settings, **options)


@contextlib.contextmanager
def start_run_workers(
    spec: RunWorkersSpec,
    log_dir: Path,
    doing: Callable[[str], None] = lambda activity: None,
    load: Callable[[PolicyClient, PolicyClient | None], None] = lambda policy, teacher: None,
    early: EarlyHosts | None = None,
    tell: Callable[[str], None] = lambda note: None,
) -> Iterator[RunWorkers]:
    """Start all processes at once and stop them at the end; on an error or an interrupt they are ended at once. `load`
    gives policy and teacher their weights. Engines and scorers start beside both, unless engines have to be alone on
    their devices. `doing` receives the name of each phase. `early`: processes that were started before. On a
    running cluster the rewards are tried where the scorers are, before the others start; `tell` receives what is
    different there."""
    with _starting(spec.policy.device, spec.limits, log_dir, early) as start:
        shared = spec.engines is None or spec.colocated
        engine_devices = spec.engines.devices if spec.engines is not None else 0
        start.of_policy = start.reserve(max(spec.policy_devices, engine_devices if shared else 0))
        away_from = start.of_policy.bundles if spec.own_nodes else ()
        start.of_engines = start.of_policy if shared else start.reserve(engine_devices, away_from)
        scorers = None
        if spec.limits.ray_address is not None:
            doing("trying the rewards where they run")
            scorers = start.scorers(spec)
            start.try_rewards(scorers, tell)
        processes = start.policy(spec)
        teacher_ranks = start.teacher(spec, spec.teacher) if spec.teacher is not None else None
        reward, validation = scorers or start.scorers(spec)
        engines, beside = None, dict[str, PendingCall[Any]]()
        if spec.engines is not None:
            # vLLM measures what is free on the device: alone, and gives it back before others come
            alone = spec.engines.engine.sleeps or (shared and spec.policy.device == "cuda")
            engines = start.engines(spec.engines, loads=not alone)
            if not alone:
                beside["starting engines"] = engines.starting
        if early is not None:
            early.drop()
        doing("starting processes")
        with failing_with(*beside.values()):
            start.ready(*([engines] if beside and engines else []))
        ranks, senders = processes.held(PolicyProcess.rank), processes.held(PolicyProcess.sender)
        start_s = spec.limits.start_timeout_s
        if engines is not None and spec.engines is not None and not beside:
            doing("starting engines")
            engines.within(start_s).call(EpisodeWorker.start)
            if spec.engines.engine.sleeps:
                engines.held(EpisodeWorker.engine).call(EngineWorker.sleep)
        for scorer in filter(None, (reward, validation)):
            beside[f"starting {scorer.name} scorer"] = scorer.within(start_s).submit(RewardWorker.setup)
        rows = {"micro_batch_tokens": spec.micro_batch_tokens, "whole_groups": spec.whole_groups}
        policy = PolicyClient(ranks, spec.policy, spec.training, **rows)
        teacher = None
        with failing_with(*beside.values()):
            doing("starting policy")
            meet(ranks, start_s)
            if teacher_ranks is not None and spec.teacher is not None:
                doing(f"starting {teacher_ranks.name}")
                meet(teacher_ranks, start_s)
                teacher = PolicyClient(teacher_ranks, spec.teacher, spec.training, **rows)
            load(policy, teacher)
            for activity, call in beside.items():
                doing(activity)
                call.results()
            if engines is not None:
                engines.ready()
        client = EngineClient(engines, keeps=_on_several_nodes(start)) if engines is not None else None
        again = Again(start, spec, processes, teacher_ranks, [*filter(None, (reward, validation))])
        yield RunWorkers(spec, policy, senders, client, reward, validation, teacher, again)


@contextlib.contextmanager
def start_engines(spec: EnginesSpec, limits: ClusterConfig, log_dir: Path) -> Iterator[EngineClient]:
    """Start engines without a policy and stop them at the end; on an error or an interrupt they are ended at once."""
    with _starting(spec.engine.device, limits, log_dir) as start:
        start.of_engines = start.reserve(spec.devices)
        engines = start.engines(spec)
        start.ready()
        engines.within(limits.start_timeout_s).call(EpisodeWorker.start)
        yield EngineClient(engines)


def _on_several_nodes(start: _Start) -> bool:
    """Whether what engines made may be lost with another host than the driver's."""
    return len({bundle.node_id for place in start.placements for bundle in place.bundles}) > 1


def meet(ranks: WorkerGroup[PolicyWorker], timeout_s: float) -> None:
    """Have the ranks of a policy find each other, and build their models."""
    [port] = ranks.part([0]).call(PolicyWorker.open_store)
    ranks.within(timeout_s).call(PolicyWorker.setup, port)


class Again:
    """Starts processes of a policy again; calls of its clients then reach the new ones."""

    def __init__(
        self,
        start: _Start,
        spec: RunWorkersSpec,
        policy: WorkerGroup[PolicyProcess],
        teacher: WorkerGroup[PolicyWorker] | None,
        scorers: Sequence[WorkerGroup[RewardWorker]],
    ) -> None:
        self._start, self._spec, self.policy, self.teacher = start, spec, policy, teacher
        self.scorers = scorers

    def start_policy(self) -> None:
        """Start the policy's processes, which were ended, where their devices are now."""
        self._put_in_place(self.policy, self._start.policy(self._spec))
        meet(self.policy.held(PolicyProcess.rank), self._spec.limits.start_timeout_s)

    def find_places(self, limit_s: float) -> None:
        """Learn where the policy's devices are now. Raises WaitTimeoutError where Ray has no other place for those of a
        lost host after a time."""
        place = self._start.of_policy
        try:
            place.bundles = place.renewed(place.bundles, limit_s)
        except TimeoutError:  # Ray's GetTimeoutError is one too
            raise WaitTimeoutError(
                f"Ray found no place for the policy in {limit_s:.0f} s.",
                "Bring its host back, or raise cluster.start_timeout_s.",
            ) from None

    @property
    def all_stand(self) -> bool:
        """Whether no host of the places is known to be lost."""
        return len(self._start.of_policy.standing()) == len(self._start.of_policy.bundles)

    def standing(self) -> tuple[int, int]:
        """Return the number of places that are left, and of the nodes that were lost."""
        place = self._start.of_policy
        left = place.standing()
        return len(left), len({one.node_id for one in place.bundles} - {one.node_id for one in left})

    def go_on_with(self, spec: RunWorkersSpec) -> None:
        """Start a policy of another layout from here on, on the places that are left."""
        self._spec = replace(self._spec, policy=spec.policy, micro_batch_tokens=spec.micro_batch_tokens)
        self._start.of_policy.bundles = self._start.of_policy.standing()

    def start_scorers(self) -> None:
        """Start scorers whose host was lost."""
        for group in self.scorers:
            if group.gone():
                plan = self._spec.validation if group.name == "validation" else self._spec.reward
                assert plan is not None  # its scorer was started
                self._put_in_place(group, self._start.scorer(plan, group.name))
                group.within(self._spec.limits.start_timeout_s).call(RewardWorker.setup)

    def places(self) -> tuple[Bundle, ...]:
        """Return the places of the policy's ranks of today."""
        return self._start.of_policy.bundles[: self._spec.policy.parallel.world_size]

    def start_memory(self, place: Bundle, folder: str) -> WorkerGroup[MemoryFiles]:
        """Start the process that owns a folder in the memory of the host of `place`."""
        group = self._start.memory(place, folder)
        group.ready()
        return group

    def start_teacher(self) -> None:
        assert self.teacher is not None  # a run with one asks
        assert self._spec.teacher is not None
        self._put_in_place(self.teacher, self._start.teacher(self._spec, self._spec.teacher))
        meet(self.teacher, self._spec.limits.start_timeout_s)

    def _put_in_place(self, group: WorkerGroup[Any], new: WorkerGroup[Any]) -> None:
        self._start.groups.remove(new)  # the one whose place it takes is there
        new.ready()
        group.become(new)


@contextlib.contextmanager
def _starting(
    device: Device, limits: ClusterConfig, log_dir: Path, early: EarlyHosts | None = None
) -> Iterator[_Start]:
    """Start what the block starts; at the end stop it (on an error end it), and give the devices back."""
    start = _Start(device, limits, log_dir, early)
    try:
        yield start
        stop_together(start.groups)
    except BaseException:
        for group in start.groups:
            group.kill()
        raise
    finally:
        for placement in reversed(start.placements):
            placement.release()


class _Start:
    """Starts groups of workers on their places; the slow starts (imports) run side by side until `ready`."""

    of_policy: Placement
    of_engines: Placement

    def __init__(self, device: Device, limits: ClusterConfig, log_dir: Path, early: EarlyHosts | None) -> None:
        self.device, self.limits, self.log_dir, self.early = device, limits, log_dir, early
        self.placements: list[Placement] = []
        self.groups: list[WorkerGroup] = []

    def reserve(self, devices: int, away_from: Sequence[Bundle] = ()) -> Placement:
        """Reserve devices, none of them on a node that holds one of `away_from`."""
        gpus, limit_s = self.device == "cuda", self.limits.start_timeout_s
        self.placements.append(Placement(devices, gpus=gpus, timeout_s=limit_s, away_from=away_from))
        return self.placements[-1]

    def ready(self, *later: WorkerGroup[Any]) -> None:
        """Wait until all workers but those of `later` are constructed."""
        for group in self.groups:
            if group not in later:
                group.ready()

    def policy(self, spec: RunWorkersSpec) -> WorkerGroup[PolicyProcess]:
        ranks = self._ranks(spec, spec.policy, {"worker": spec.backend.worker})
        # A save without copies holds up the update after it until it is written, whatever earlier ones took.
        measured = self.limits.step_timeout_s is None and spec.policy.save_copies
        return self._group("policy", POLICY_PROCESS, ranks, self.of_policy, measured=measured)

    def teacher(self, spec: RunWorkersSpec, teacher: PolicySpec) -> WorkerGroup[PolicyWorker]:
        name = "reward-model" if teacher.valued else "teacher"
        ranks, measured = self._ranks(spec, teacher, {}), self.limits.step_timeout_s is None
        return self._group(name, spec.backend.worker, ranks, self.of_policy, measured=measured)

    def _ranks(self, spec: RunWorkersSpec, policy: PolicySpec, more: dict[str, Any]) -> list[WorkerSpec]:
        places = self.of_policy.bundles
        size, address = policy.parallel.world_size, places[0].node
        env = policy_environment(policy.threads, policy.device, spec.training)
        if policy.device == "cuda":
            env = {hangs.TRACE_FILE: str(self.log_dir.absolute() / "nccl-"), **env}
        shared = {"world_size": size, "master_addr": address, "spec": policy, **more}
        return [WorkerSpec(shared | {"rank": rank}, (places[rank],), env) for rank in range(size)]

    def engines(self, spec: EnginesSpec, *, loads: bool = False) -> WorkerGroup[EpisodeWorker]:
        """`loads`: the engines load their models as soon as their processes are there; else call `start`."""
        places = engine_bundles(self.of_engines.bundles, spec.count, spec.engine.replicas, spec.ranks, spec.nodes)
        env = spec.engine.environment
        shared = {"worker": spec.backend.worker, "episode": spec.episode, "spec": spec.engine}
        engines = [
            WorkerSpec(shared | {"index": index}, first, env, others=others)
            for index, (first, others) in enumerate(places)
        ]
        calls = calls_at_a_time(spec.engine)
        then = EpisodeWorker.start if loads else None
        return self._group("engine", ENGINE_PROCESS, engines, self.of_engines, concurrency=calls, then=then)

    def memory(self, place: Bundle, folder: str) -> WorkerGroup[MemoryFiles]:
        number = sum(group.name.startswith("memory") for group in self.groups)
        owner = WorkerSpec({"folder": folder}, (place,), {"CUDA_VISIBLE_DEVICES": ""})
        return self._group(f"memory{number}", MEMORY_FILES, [owner], self.of_policy, concurrency=MEMORY_CALLS)

    def scorers(self, spec: RunWorkersSpec) -> Scorers:
        return (
            self.scorer(spec.reward, "reward") if spec.reward is not None else None,
            self.scorer(spec.validation, "validation") if spec.validation is not None else None,
        )

    def try_rewards(self, scorers: Scorers, tell: Callable[[str], None]) -> None:
        """Repeat the trial of the rewards in their workers, with errors that name the node."""
        place = f"node {self.of_policy.bundles[0].node}, where the rewards of the run are computed"
        messages = set[str]()
        for scorer in filter(None, scorers):
            scorer.ready()
            try:
                (notes,) = scorer.within(self.limits.start_timeout_s).call(RewardWorker.try_again)
            except RlctlError as error:
                raise type(error)(f"{error.message} The trial was on {place}.", error.hint) from error
            for note in notes:
                if note not in messages:
                    messages.add(note)
                    tell(f"note: on {place}: {note}")

    def scorer(self, plan: Rewards, name: str) -> WorkerGroup[RewardWorker]:
        # No device of its own, and none visible: scorers run user code.
        env = {"CUDA_VISIBLE_DEVICES": ""}
        worker = WorkerSpec({"plan": plan, "fetch": fetch, "apart": True}, (self.of_policy.bundles[0],), env)
        return self._group(name, REWARD_WORKER, [worker], self.of_policy)

    def _group(
        self,
        name: str,
        worker: str,
        specs: list[WorkerSpec],
        place: Placement,
        *,
        concurrency: int = 1,
        then: Callable[[Any], None] | None = None,
        measured: bool = False,
    ) -> WorkerGroup:
        group = WorkerGroup(
            name, worker, specs, place, self.log_dir, start_timeout_s=self.limits.start_timeout_s,
            call_timeout_s=self.limits.step_limit_s, wait=False, concurrency=concurrency, then=then, early=self.early,
            measured=measured,
        )  # fmt: skip
        self.groups.append(group)
        return group


def calls_at_a_time(engine: EngineSpec) -> int:
    return 1 if engine.in_flight == "wait" else ENGINE_CALLS


def early_hosts(spec: RunWorkersSpec) -> list[EarlyHost]:
    """Return the policy and engine processes that can start before data is read: none on GPUs and on several
    hosts, where devices are assigned first."""
    policy, engines = spec.policy, spec.engines
    if policy.device != "cpu" or spec.own_nodes:
        return []
    env = WorkerSpec({}, (), policy_environment(policy.threads, policy.device, spec.training)).environment()
    modules = (module_of(POLICY_PROCESS), "rlctl.refit.policy_side", module_of(spec.backend.worker))
    hosts = [EarlyHost("policy", env, 1, modules)] * policy.parallel.world_size
    if engines is not None and engines.engine.replicas == 1:
        env = WorkerSpec({}, (), engines.engine.environment).environment()
        modules = (module_of(ENGINE_PROCESS), module_of(engines.backend.worker), *engines.backend.libraries)
        # The engine first: its imports take longest.
        hosts = [EarlyHost("engine", env, calls_at_a_time(engines.engine), modules)] * engines.count + hosts
    return hosts


def module_of(path: str) -> str:
    return path.partition(":")[0]


ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Variables by which a user configures torch's allocator."""


DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""CUDA counts unlike GPUs by their speed otherwise, and nvidia-smi and Ray by their bus."""


def policy_environment(threads: int | None, device: Device, training: TrainingConfig) -> dict[str, str]:
    """The variables of a training process; the user's own win."""
    env = {**(hangs.RECORD if device == "cpu" else hangs.NCCL_RECORD)}
    env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if device == "cpu":  # torch asks for huge pages: fresh small ones cost more than what fills them
        env["THP_MEM_ALLOC_ENABLE"] = "1"
    else:  # on Hopper torch prefers cuDNN's attention, which builds and keeps a plan for each shape of a row
        env["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
        env |= DEVICE_ORDER
        if not ALLOCATOR.intersection((*os.environ, *training.env)):  # rows differ in length from step to step
            env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return env | training.env


def engine_bundles(
    bundles: tuple[Bundle, ...], engines: int, replicas: int, ranks: int, most: int
) -> list[tuple[tuple[Bundle, ...], tuple[Bundle, ...]]]:
    """The devices of each engine, those of a replica behind those of the other, in two parts: those of its first
    process, and those of the others, which have as many each. Raises MachineError where those of one replica are on
    more than `most` nodes, or not as many on each."""
    shares = [bundles[index * ranks : (index + 1) * ranks] for index in range(engines * replicas)]
    counts = [Counter(bundle.node for bundle in share) for share in shares]
    for index, nodes in enumerate(counts):
        if len(nodes) > most or len(set(nodes.values())) > 1 or len(nodes) != len(counts[0]):
            whose = f"engine {index // replicas}" if replicas == 1 else f"a replica of engine {index // replicas}"
            listing = ", ".join(f"{count} on {node}" for node, count in sorted(nodes.items()))
            requirement = f"{ranks} on one node" if most == 1 else f"as many on each of {most} nodes at most"
            raise MachineError(
                f"Ray gave the {ranks} devices of {whose} on {len(nodes)} nodes ({listing}); it takes {requirement}.",
                "Free devices so that each node has a multiple of generation.tp x generation.pp, or set smaller ones.",
            )
    of_engine = [sum(shares[first : first + replicas], ()) for first in range(0, len(shares), replicas)]
    size = next(iter(counts[0].values()))
    return [(devices[:size], devices[size:]) for devices in of_engine]
