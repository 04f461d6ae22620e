"""The processes of a run: policy, teacher, engines and scorers start and stop together."""

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
from rlctl.checkpoints.model_files import ModelFiles
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
from rlctl.refit.weight_sender import AdapterSender, PolicyProcess, WeightSender
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
"""(scorer of training, scorer of validation); None: the run has none."""
ENGINE_CALLS = 5
"""Concurrent calls of an engine that a refit may interrupt: `generate`, `submit`, `collect`, the refit, and a status
call."""
MEMORY_CALLS = 4
"""Concurrent calls of an owner of memory files. More than one, because two hosts may copy from each other."""


@dataclass(frozen=True)
class RunWorkers:
    """The running processes."""

    spec: RunWorkersSpec
    policy: PolicyClient
    senders: WorkerGroup[WeightSender]
    """The senders of the policy's weights, one per rank."""
    adapter_senders: WorkerGroup[AdapterSender]
    """The senders of the policy's adapters, one per rank."""
    engines: EngineClient | None
    reward: WorkerGroup[RewardWorker] | None
    validation: WorkerGroup[RewardWorker] | None = None
    """The scorer of validation."""
    teacher: PolicyClient | None = None
    """The teacher or the reward model."""
    restarts: Restarts | None = None
    """Restarts the policy's processes; None: the processes were not started by `start_run_workers`."""

    def shares(self, runs: int) -> list[RunWorkers]:
        """Divide the engines among the runs of a sweep; return the processes of each, with its own refit session."""
        assert self.engines is not None  # the plan has engines for each run
        assert self.restarts is not None  # set by `start_run_workers`
        processes = self.restarts.policy
        return [
            replace(
                self,
                engines=engines,
                senders=processes.held(PolicyProcess.sender, number),
                adapter_senders=processes.held(PolicyProcess.adapter_sender, number),
            )
            for number, engines in enumerate(self.restarts.divided(self.engines, runs))
        ]

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        """The groups of policy, engines and teacher, by name."""
        clients = {"policy": self.policy, "engine": self.engines}
        if self.teacher is not None:
            clients[self.teacher.group.name] = self.teacher
        return {name: client.group for name, client in clients.items() if client is not None}

    def weight_sync(
        self,
        settings: RefitConfig,
        source: ModelFiles | None,
        *,
        offload: bool | None = None,
        decode_limit: float | None = None,
        shown: EncodedPrompt | None = None,
        **options: Any,
    ) -> WeightSync:
        """Return the weight sync from policy to engines; `options` go to `WeightSync`.

        `source`: the model whose weights the policy has; None: a checkpoint's. `offload`: move the policy to host
        memory during generation; None: if the engines can sleep. `decode_limit`: also compare log-probs of text that
        the engines decode (`DecodeCheck`); `shown`: a prompt with an image for this check.
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
        if policy.lora.rank and policy.lora.refit in ("delta", "adapters"):
            way = {"adds": policy.lora.adds, "rounding": policy.optimizer.rounding}
            options = {"adapters": self.adapter_senders} | way | options
        options |= {"dtype": policy.dtype, "engines_sleep": engine.sleeps, "engines_discard": engine.discards}
        options["offload"] = engine.sleeps if offload is None else offload
        return WeightSync(self.policy, self.senders, self.engines, policy.facts, settings=settings, **options)


def _start_alone(engines: WorkerGroup[EpisodeWorker], spec: RunWorkersSpec) -> None:
    """Start engines that are alone on their devices, and let them sleep where they share them later."""
    engines.within(spec.limits.start_timeout_s).call(EpisodeWorker.start)
    if spec.engines is not None and spec.engines.engine.sleeps:
        engines.held(EpisodeWorker.engine).call(EngineWorker.sleep)


@contextlib.contextmanager
def start_run_workers(
    spec: RunWorkersSpec,
    log_dir: Path,
    doing: Callable[[str], None] = lambda activity: None,
    load: Callable[[PolicyClient, PolicyClient | None], None] = lambda policy, teacher: None,
    early: EarlyHosts | None = None,
    tell: Callable[[str], None] = lambda note: None,
) -> Iterator[RunWorkers]:
    """Start all processes in parallel, and stop them at the end of the block; kill them after an error or an interrupt.

    `load` loads the weights of policy and teacher. Engines and scorers start at the same time, unless engines must be
    alone on their devices. `doing` receives the name of each phase. `early`: processes that already run. On an existing
    cluster, try the rewards on the scorers' node before the other processes start; `tell` receives notes of this trial.
    """
    with _starting(spec.policy.device, spec.limits, log_dir, early) as start:
        start.reserve_all(spec)
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
            # vLLM sizes its KV cache by the device's free memory, so it starts alone, and sleeps before the policy
            # allocates memory.
            alone = spec.engines.engine.sleeps or (start.of_engines is start.of_policy and spec.policy.device == "cuda")
            engines = start.engines(spec.engines, loads=not alone)
            if not alone:
                beside["starting engines"] = engines.starting
        if early is not None:
            early.drop()
        doing("starting processes")
        with failing_with(*beside.values()):
            start.ready(*([engines] if beside and engines else []))
        ranks, senders = processes.held(PolicyProcess.rank), processes.held(PolicyProcess.sender, 0)
        adapter_senders = processes.held(PolicyProcess.adapter_sender, 0)
        start_s = spec.limits.start_timeout_s
        if engines is not None and not beside:
            doing("starting engines")
            _start_alone(engines, spec)
        for scorer in filter(None, (reward, validation)):
            beside[f"starting {scorer.name} scorer"] = scorer.within(start_s).submit(RewardWorker.setup)
        with failing_with(*beside.values()):
            doing("starting policy")
            policy, teacher = _met(spec, ranks, spec.policy), None
            if teacher_ranks is not None and spec.teacher is not None:
                doing(f"starting {teacher_ranks.name}")
                teacher = _met(spec, teacher_ranks, spec.teacher)
            load(policy, teacher)
            for activity, call in beside.items():
                doing(activity)
                call.results()
            if engines is not None:
                engines.ready()
        client = EngineClient(engines, keeps=_on_several_nodes(start)) if engines is not None else None
        restarts = Restarts(start, spec, processes, teacher_ranks, [*filter(None, (reward, validation))])
        yield RunWorkers(spec, policy, senders, adapter_senders, client, reward, validation, teacher, restarts)


@contextlib.contextmanager
def start_engines(spec: EnginesSpec, limits: ClusterConfig, log_dir: Path) -> Iterator[EngineClient]:
    """Start engines without a policy, and stop them at the end of the block; kill them after an error or an
    interrupt."""
    with _starting(spec.engine.device, limits, log_dir) as start:
        start.of_engines = start.reserve(spec.devices)
        engines = start.engines(spec)
        start.ready()
        engines.within(limits.start_timeout_s).call(EpisodeWorker.start)
        yield EngineClient(engines)


def _on_several_nodes(start: _Start) -> bool:
    """Return whether the run spans several nodes, so that finished rollouts could be lost with a node."""
    return len({bundle.node_id for place in start.placements for bundle in place.bundles}) > 1


def _met(spec: RunWorkersSpec, ranks: WorkerGroup[PolicyWorker], policy: PolicySpec) -> PolicyClient:
    meet(ranks, spec.limits.start_timeout_s)
    rows = {"micro_batch_tokens": spec.micro_batch_tokens, "whole_groups": spec.whole_groups}
    return PolicyClient(ranks, policy, spec.training, **rows)


def meet(ranks: WorkerGroup[PolicyWorker], timeout_s: float) -> None:
    """Connect the ranks of a policy, and build their models."""
    [port] = ranks.part([0]).call(PolicyWorker.open_store)
    ranks.within(timeout_s).call(PolicyWorker.setup, port)


class Restarts:
    """Restarts lost processes. The clients' groups then refer to the new processes."""

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
        """Start the policy's processes again, after their end, on the current bundles."""
        self._put_in_place(self.policy, self._start.policy(self._spec))
        meet(self.policy.held(PolicyProcess.rank), self._spec.limits.start_timeout_s)

    def find_places(self, limit_s: float) -> None:
        """Update the policy's bundles after the loss of a host. Raises WaitTimeoutError if Ray places no replacement
        for a lost bundle within `limit_s`."""
        place = self._start.of_policy
        try:
            place.bundles = place.renewed(place.bundles, limit_s)
        except TimeoutError:  # also Ray's GetTimeoutError, a subclass
            raise WaitTimeoutError(
                f"Ray found no place for the policy in {limit_s:.0f} s.",
                "Bring its host back, or raise cluster.start_timeout_s.",
            ) from None

    @property
    def all_stand(self) -> bool:
        """Whether Ray reports all bundles' hosts as alive."""
        return len(self._start.of_policy.standing()) == len(self._start.of_policy.bundles)

    def standing(self) -> tuple[int, int]:
        """Return (number of remaining bundles, number of lost nodes)."""
        place = self._start.of_policy
        left = place.standing()
        return len(left), len({bundle.node_id for bundle in place.bundles} - {bundle.node_id for bundle in left})

    def use_layout(self, spec: RunWorkersSpec) -> None:
        """Use another layout on the remaining bundles from the next start on."""
        self._spec = replace(self._spec, policy=spec.policy, micro_batch_tokens=spec.micro_batch_tokens)
        self._start.of_policy.bundles = self._start.of_policy.standing()

    def start_scorers(self) -> None:
        """Restart the scorers whose host was lost."""
        for group in self.scorers:
            if group.gone():
                plan = self._spec.validation if group.name == "validation" else self._spec.reward
                assert plan is not None  # its scorer was started
                self._put_in_place(group, self._start.scorer(plan, group.name))
                group.within(self._spec.limits.start_timeout_s).call(RewardWorker.setup)

    def further_scorers(self, spec: RunWorkersSpec) -> Scorers:
        """Start the scorers of another run on the same processes."""
        scorers = self._start.scorers(spec)
        for scorer in filter(None, scorers):
            scorer.ready()
            scorer.within(spec.limits.start_timeout_s).call(RewardWorker.setup)
        return scorers

    def divided(self, engines: EngineClient, parts: int) -> list[EngineClient]:
        """Return the engines in `parts` clients of equal size, whose lost engines start again independently."""
        clients = engines.divided(parts)
        self._start.groups.remove(engines.group)
        self._start.groups += [client.group for client in clients]
        return clients

    def places(self) -> tuple[Bundle, ...]:
        """Return the current bundles of the policy's ranks."""
        return self._start.of_policy.bundles[: self._spec.policy.parallel.world_size]

    def start_memory(self, place: Bundle, folder: str) -> WorkerGroup[MemoryFiles]:
        """Start the process that owns `folder` in the memory of the host of bundle `place`."""
        group = self._start.memory(place, folder)
        group.ready()
        return group

    def start_teacher(self) -> None:
        assert self.teacher is not None  # only runs with a teacher call this
        assert self._spec.teacher is not None
        self._put_in_place(self.teacher, self._start.teacher(self._spec, self._spec.teacher))
        meet(self.teacher, self._spec.limits.start_timeout_s)

    def _put_in_place(self, group: WorkerGroup[Any], new: WorkerGroup[Any]) -> None:
        self._start.groups.remove(new)  # `group`, which takes over its processes, is in the list
        new.ready()
        group.become(new)


@contextlib.contextmanager
def _starting(
    device: Device, limits: ClusterConfig, log_dir: Path, early: EarlyHosts | None = None
) -> Iterator[_Start]:
    """Yield a `_Start`. At the end of the block, stop its groups (kill them after an error) and release the devices."""
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
    """Starts groups of workers on bundles; their slow imports run in parallel until `ready`."""

    of_policy: Placement
    of_engines: Placement

    def __init__(self, device: Device, limits: ClusterConfig, log_dir: Path, early: EarlyHosts | None) -> None:
        self.device, self.limits, self.log_dir, self.early = device, limits, log_dir, early
        self.placements: list[Placement] = []
        self.groups: list[WorkerGroup] = []

    def reserve(self, devices: int, away_from: Sequence[Bundle] = ()) -> Placement:
        """Reserve devices on nodes without a bundle of `away_from`."""
        gpus, limit_s = self.device == "cuda", self.limits.start_timeout_s
        self.placements.append(Placement(devices, gpus=gpus, timeout_s=limit_s, away_from=away_from))
        return self.placements[-1]

    def reserve_all(self, spec: RunWorkersSpec) -> None:
        """Reserve the devices of policy and engines, which are the same ones if the engines share the policy's."""
        shared = spec.engines is None or spec.colocated
        engine_devices = spec.engines.devices if spec.engines is not None else 0
        self.of_policy = self.reserve(max(spec.policy_devices, engine_devices if shared else 0))
        away_from = self.of_policy.bundles if spec.own_nodes else ()
        self.of_engines = self.of_policy if shared else self.reserve(engine_devices, away_from)

    def ready(self, *later: WorkerGroup[Any]) -> None:
        """Wait until all workers except `later` are constructed."""
        for group in self.groups:
            if group not in later:
                group.ready()

    def policy(self, spec: RunWorkersSpec) -> WorkerGroup[PolicyProcess]:
        ranks = self._ranks(spec, spec.policy, {"worker": spec.backend.worker})
        # A save without copies delays the next update until the files are written, so the durations of earlier updates
        # would not bound it.
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
        """`loads`: the engines load their models as soon as their processes run; otherwise the caller calls
        `start`."""
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
        # Scorers run user code, so they see no device.
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
    """Return the policy and engine processes that can start before the data is read. None on GPUs or several nodes,
    where processes need their devices first."""
    policy, engines = spec.policy, spec.engines
    if policy.device != "cpu" or spec.own_nodes:
        return []
    env = WorkerSpec({}, (), policy_environment(policy.threads, policy.device, spec.training)).environment()
    modules = (module_of(POLICY_PROCESS), "rlctl.refit.policy_side", module_of(spec.backend.worker))
    hosts = [EarlyHost("policy", env, 1, modules)] * policy.parallel.world_size
    if engines is not None and engines.engine.replicas == 1:
        env = WorkerSpec({}, (), engines.engine.environment).environment()
        modules = (module_of(ENGINE_PROCESS), module_of(engines.backend.worker), *engines.backend.libraries)
        # The engine starts first, because its imports take longest.
        hosts = [EarlyHost("engine", env, calls_at_a_time(engines.engine), modules)] * engines.count + hosts
    return hosts


def module_of(path: str) -> str:
    return path.partition(":")[0]


ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Environment variables of torch's CUDA allocator."""


DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Make CUDA number GPUs by PCI bus, as nvidia-smi and Ray do. By default it numbers the fastest first."""


def policy_environment(threads: int | None, device: Device, training: TrainingConfig) -> dict[str, str]:
    """Return the environment variables of a training process. `training.env` takes precedence."""
    env = {**(hangs.RECORD if device == "cpu" else hangs.NCCL_RECORD)}
    env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if device == "cpu":
        env["OMP_WAIT_POLICY"] = "passive"  # as engines: spinning threads starve each other beside other programs
        env["THP_MEM_ALLOC_ENABLE"] = "1"  # page faults of small pages cost more than writing the tensor
    else:  # on Hopper torch prefers cuDNN attention, which builds and caches a plan per shape, and each row has another
        env["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
        env |= DEVICE_ORDER
        if not ALLOCATOR.intersection((*os.environ, *training.env)):  # rows of varying length would fragment memory
            env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return env | training.env


def engine_bundles(
    bundles: tuple[Bundle, ...], engines: int, replicas: int, ranks: int, most: int
) -> list[tuple[tuple[Bundle, ...], tuple[Bundle, ...]]]:
    """Return per engine (bundles of its first process, bundles of its other processes), with consecutive `ranks`
    bundles per replica. Raises MachineError if a replica spans more than `most` nodes or has different numbers of
    bundles on its nodes."""
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
