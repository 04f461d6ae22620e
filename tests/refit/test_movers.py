"""Movers between processes that hold parameters in Megatron's and vLLM's layouts: every byte, every failure."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rlctl.backends.base import EngineWorker
from rlctl.cluster import workers
from rlctl.cluster.placement import Placement
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError, VerificationError, WaitTimeoutError, WorkerError
from rlctl.models.facts import MlaFacts, ModelFacts, MoeFacts
from rlctl.refit.session import RefitSession
from rlctl.refit.weight_sender import WeightSender
from rlctl.settings.generation import RefitConfig
from rlctl.transport.process_group import ServedStore
from rlctl.weights.vllm import VllmParallel
from support import refit_workers

cloudpickle.register_pickle_by_value(refit_workers)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SLOTS = 5
SIZES = {
    "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocab": 250,
    "max_length": 64,
}  # fmt: skip
MOE = MoeFacts(4, 2, 32)
LATENT = {"kv_heads": 4, "head_dim": 24, "mla": MlaFacts(32, 16, 16, 8, 16)}
DEEPSEEK_MOE = replace(MOE, shared_expert_intermediate=32, dense_layers=(0,), expert_bias=True, score="sigmoid")
FAMILIES = {
    "llama": ModelFacts("llama", **SIZES),
    "tied": ModelFacts("llama", **SIZES, tied_embeddings=True),
    "qwen2": ModelFacts("qwen2", **SIZES, qkv_bias=True),
    "qwen3_moe": ModelFacts("qwen3_moe", **SIZES, qk_norm=True, moe=MOE),
    "deepseek_v3": ModelFacts("deepseek_v3", **(SIZES | LATENT), moe=DEEPSEEK_MOE),
    "gemma3": ModelFacts("gemma3", **SIZES, qk_norm=True, tied_embeddings=True),
}
MIB = 1 << 20


class Stage:
    """Slots and what stands on them now."""

    def __init__(self, placement: Placement, logs: Path) -> None:
        self.placement, self.logs, self.serial = placement, logs, 0
        self.slots = self._start(SLOTS)

    def _start(self, count: int) -> WorkerGroup:
        self.serial += 1
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        specs = [WorkerSpec({}, (self.placement.bundles[0],), env) for _ in range(count)]
        return WorkerGroup(
            f"slot{self.serial}", refit_workers.Slot, specs, self.placement, self.logs,
            start_timeout_s=120, call_timeout_s=60,
        )  # fmt: skip

    def victims(self, count: int) -> WorkerGroup:
        """Processes of their own, to be killed."""
        return self._start(count)

    def policy(
        self,
        facts: ModelFacts,
        parallel: ParallelSpec,
        nodes: dict[int, str] | None = None,
        slots: Any = None,
        *,
        fsdp: bool = False,
    ) -> WorkerGroup:
        size, nodes = parallel.world_size, nodes or {}
        group = (slots or self.slots).part(range(size), "policy")
        group.call_each(
            refit_workers.Slot.become_source,
            [(rank, facts, parallel, "float32", nodes.get(rank), "cpu", fsdp) for rank in range(size)],
        )
        return group

    def engines(
        self,
        facts: ModelFacts,
        parallel: VllmParallel,
        nodes: dict[int, str] | None = None,
        *,
        first: int = 0,
        replicas: int = 1,
        slots: Any = None,
    ) -> WorkerGroup:
        """Engines on the last slots; `first`: the first rank to start."""
        nodes, ranks = nodes or {}, range(first, parallel.world_size * replicas)
        own = slots or self.slots
        group = own.part([len(own) - 1 - rank for rank in ranks], "engine")
        group.call_each(
            refit_workers.Slot.become_engine, [(rank, facts, parallel, "float32", nodes.get(rank)) for rank in ranks]
        )
        return group


@pytest.fixture(scope="module")
def stage(placement: Placement, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(placement, tmp_path_factory.mktemp("slots"))
    yield made
    made.slots.kill()


def open_session(
    policy: WorkerGroup,
    engines: WorkerGroup,
    facts: ModelFacts,
    members: int = 1,
    **settings: Any,
) -> RefitSession:
    session = RefitSession(
        policy, engines, facts, dtype="float32", members=members,
        settings=RefitConfig(**{"timeout_s": 60, "staging_mb": 1, **settings}),
    )  # fmt: skip
    session.open()
    return session


def one_to_one(stage: Stage, facts: ModelFacts = FAMILIES["llama"], **settings: Any) -> RefitSession:
    """A session between one policy rank and one engine."""
    return open_session(stage.policy(facts, ParallelSpec()), stage.engines(facts, VllmParallel()), facts, **settings)


def refit_twice(session: RefitSession) -> None:
    """Everything written, everything renewed: from poisoned parameters, and again after each weight has changed."""
    for version in (1, 2):
        session.engines.call(EngineWorker.poison)
        session.policy.call(WeightSender.refit_perturb, version, 0.1)
        report = session.refit(version, verify=True)
        assert report.verified == len(session.setup.table)
        assert set(session.engines.call(EngineWorker.weight_version)) == {version}


LAYOUTS = [
    ("llama", {"tp": 2}, {"tp": 2}),
    ("tied", {"pp": 2}, {"tp": 2}),
    ("gemma3", {"pp": 2}, {"tp": 1}),
    ("qwen2", {"tp": 2, "dp": 1}, {"tp": 2}),
    ("qwen3_moe", {"dp": 2, "ep": 2}, {"tp": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": True}),
    ("qwen3_moe", {"tp": 1}, {"tp": 1}),
]
MOVERS = ("shared-memory", "collective", "disk")
SHARDS = [
    ("shared-memory", "tied", {"dp": 2}, {"tp": 2}),
    ("collective", "qwen3_moe", {"dp": 2, "ep": 2}, {"tp": 2}),
    ("disk", "qwen2", {"tp": 2}, {"tp": 1}),
    ("shared-memory", "deepseek_v3", {"tp": 2}, {"tp": 2, "ep": True}),
]
SHARD_PRODUCT = [
    (mover, family, sizes, {"tp": 2})
    for mover in MOVERS
    for family in FAMILIES
    for sizes in ({"dp": 2}, {"tp": 2}, *([{"dp": 2, "ep": 2}] if FAMILIES[family].moe else []))
]


@pytest.mark.parametrize(
    ("fsdp", "mover", "family", "training", "generation"),
    [
        *(
            pytest.param(False, mover, *layout, marks=() if (first + second) % 3 == 0 else pytest.mark.slow)
            for first, layout in enumerate(LAYOUTS)
            for second, mover in enumerate(MOVERS)
        ),
        *((True, *case) for case in SHARDS),
        *(pytest.param(True, *case, marks=pytest.mark.slow) for case in SHARD_PRODUCT),
    ],
)
def test_every_byte_arrives(
    fsdp: bool, mover: str, family: str, training: dict[str, int], generation: dict[str, Any], stage: Stage,
    tmp_path: Path,
) -> None:  # fmt: skip
    """From Megatron's layouts, and from shards of the dtensor backend (`fsdp`)."""
    parallel, target = ParallelSpec(**training), VllmParallel(**generation)
    facts = replace(FAMILIES[family], mtp_layers=0) if fsdp else FAMILIES[family]
    session = open_session(
        stage.policy(facts, parallel, fsdp=fsdp), stage.engines(facts, target), facts,
        members=target.world_size, mover=mover, directory=str(tmp_path),
    )  # fmt: skip
    assert session.mover == mover
    refit_twice(session)
    session.close()
    assert not list(tmp_path.iterdir())


def test_tensors_larger_than_a_buffer_are_split(stage: Stage) -> None:
    facts = replace(FAMILIES["llama"], vocab=20_000)
    session = open_session(stage.policy(facts, ParallelSpec(tp=2)), stage.engines(facts, VllmParallel()), facts)
    (channel,) = session.setup.channels
    assert max(row.bytes for row in session.setup.table) > 4 * channel.connection.capacity
    assert session.staging_bytes <= MIB
    refit_twice(session)
    session.close()


def test_each_worker_is_sent_its_own_boxes_alone(stage: Stage) -> None:
    facts, target = FAMILIES["llama"], VllmParallel(tp=2)
    session = open_session(stage.policy(facts, ParallelSpec()), stage.engines(facts, target), facts, members=2)
    report = session.refit(1)
    norms = sum(row.bytes for row in session.setup.table if len(row.shape) == 1)
    assert report.sent_bytes == session.payload_bytes + norms  # norms alone are held by both
    session.close()


@pytest.mark.parametrize("mover", ["shared-memory", "collective"])
def test_replicas_are_sent_to_once(mover: str, stage: Stage) -> None:
    facts = FAMILIES["qwen3_moe"]
    engines = stage.engines(facts, VllmParallel(), replicas=3)
    session = open_session(stage.policy(facts, ParallelSpec(tp=2)), engines, facts, mover=mover)
    refit_twice(session)
    assert session.refit(3).sent_bytes == session.payload_bytes
    session.close()


def test_engines_on_other_nodes_get_the_collective_mover(stage: Stage) -> None:
    facts, parallel, target = FAMILIES["llama"], ParallelSpec(tp=2), VllmParallel(tp=2)
    policy = stage.policy(facts, parallel, {0: "one", 1: "one"})
    engines = stage.engines(facts, target, {0: "two", 1: "two"})
    with pytest.raises(ConfigError, match="no policy rank is on the node of engine 0 worker 0"):
        open_session(policy, engines, facts, mover="shared-memory")
    session = open_session(policy, engines, facts, members=2)
    assert session.mover == "collective"
    met = session.setup.channels[0].connection.group
    assert met is not None
    with pytest.raises(ConnectionRefusedError):  # all members have met, and no one else can join
        socket.create_connection((met.host, met.port), 5)
    refit_twice(session)
    session.close()


def test_ranks_with_nothing_to_send_stay_out_of_a_group(stage: Stage) -> None:
    facts, target = FAMILIES["llama"], VllmParallel(tp=2)
    policy = stage.policy(facts, ParallelSpec(dp=2), {0: "one", 1: "two"})
    session = open_session(policy, stage.engines(facts, target, {0: "one", 1: "two"}), facts, members=2,
                           mover="collective")  # fmt: skip
    groups = [channel.connection.group for channel in session.setup.channels]
    members = [group.names for group in groups if group is not None]
    assert members == [("policy rank 0", "engine 0 worker 0"), ("policy rank 1", "engine 1 worker 0")]
    assert [channel.senders for channel in session.setup.channels] == [(0,), (1,)]
    refit_twice(session)
    session.close()


def test_boxes_of_other_nodes_are_exchanged_between_policy_ranks(stage: Stage) -> None:
    """Each node's staging memory is opened by its own processes alone; a segment of another node would be refused."""
    facts, parallel, target = replace(FAMILIES["qwen3_moe"], vocab=20_000), ParallelSpec(tp=2), VllmParallel(tp=2)
    policy = stage.policy(facts, parallel, {0: "one", 1: "two"})
    store = ServedStore("127.0.0.1", 60.0)
    policy.call_each(refit_workers.Slot.meet, [(rank, 2, store.port) for rank in range(2)])
    engines = stage.engines(facts, target, {0: "two", 1: "one"})
    session = open_session(policy, engines, facts, members=2)
    assert session.mover == "shared-memory"
    assert {(channel.node, channel.senders) for channel in session.setup.channels} == {("one", (0,)), ("two", (1,))}
    refit_twice(session)
    for sent, exchanged in policy.call(refit_workers.FaultySource.last_sent):
        assert 0 < exchanged < sent.bytes
        assert sent.exchange_s > 0
    session.close()


def test_an_engine_leaves_and_another_joins_without_a_restart(stage: Stage) -> None:
    facts, parallel = FAMILIES["llama"], ParallelSpec(tp=2)
    policy, pids = stage.policy(facts, parallel), stage.slots.pids
    engines = stage.engines(facts, VllmParallel(), replicas=3)
    session = open_session(policy, engines.part([0, 1]), facts, mover="collective")
    refit_twice(session)
    session.reform(engines.part([1]))
    refit_twice(session)
    session.reform(engines.part([1, 2]))
    refit_twice(session)
    assert stage.slots.pids == pids
    session.close()


def open_with_fault(
    stage: Stage, mover: str, side: str, fault: str, **settings: Any
) -> tuple[RefitSession, WorkerGroup]:
    """A session after its first refit, in which `side` runs in a process of its own that will `fault` in the next."""
    facts, parallel = replace(FAMILIES["llama"], vocab=20_000), ParallelSpec()
    victim = stage.victims(1)
    policy = stage.policy(facts, parallel, slots=victim if side == "policy" else None)
    engines = stage.engines(facts, VllmParallel(), slots=victim if side == "engine" else None)
    session = open_session(policy, engines, facts, mover=mover, **settings)
    session.refit(1)
    victim.call(refit_workers.Slot.set_fault, fault)
    return session, victim


def each_side_of_each_mover(*quick: tuple[str, str]) -> Any:
    """Every pair as a case of a test; those that are not `quick` are slow."""
    pairs = [(side, mover) for side in ("policy", "engine") for mover in ("shared-memory", "collective")]
    marked = [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]
    return pytest.mark.parametrize(("side", "mover"), marked)


@each_side_of_each_mover(("policy", "shared-memory"), ("engine", "collective"))
def test_a_killed_process_is_named_at_once_and_the_rest_goes_on(
    mover: str, side: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SAME_CAUSE_S", 60.0)  # a busy Ray may be slow to tell of a death
    session, victim = open_with_fault(stage, mover, side, "die")
    with pytest.raises(WorkerError, match=rf"phase transfer: {side} rank 0 \(process \d+\) died"):
        session.refit(2)
    survivor = session.engines if side == "policy" else session.policy
    if side == "policy":
        with pytest.raises(WorkerError, match="half-updated"):
            session.engines.call(EngineWorker.weight_version)
    session.close()
    assert survivor.call(WeightSender.refit_close) == [None]  # it is not stuck in a wait
    victim.kill()


@each_side_of_each_mover(("policy", "collective"), ("engine", "shared-memory"))
def test_a_process_that_hangs_is_a_timeout_with_rank_and_phase(mover: str, side: str, stage: Stage) -> None:
    session, victim = open_with_fault(stage, mover, side, "hang", timeout_s=60)
    (session.engines if side == "policy" else session.policy).call(refit_workers.FaultySource.be_impatient, 3.0)
    late = "policy rank 0 did not (pack|send) round 2" if side == "policy" else "engine 0 worker 0 did not (load|take)"
    with pytest.raises(WaitTimeoutError, match=rf"phase transfer: {late}"):
        session.refit(2)
    victim.kill()


@pytest.mark.parametrize("mover", ["shared-memory", "collective", "disk"])
def test_a_side_that_raises_is_reported_and_the_next_refit_succeeds(mover: str, stage: Stage, tmp_path: Path) -> None:
    session = one_to_one(stage, replace(FAMILIES["llama"], vocab=20_000), mover=mover, directory=str(tmp_path))
    for side in (session.policy, session.engines):
        session.refit(1)
        side.call(refit_workers.Slot.set_fault, "raise")
        with pytest.raises(WorkerError, match="asked for"):
            session.refit(2)
        with pytest.raises(WorkerError, match="half-updated"):
            session.engines.call(EngineWorker.weight_version)
        side.call(refit_workers.Slot.set_fault, "")
        refit_twice(session)
    session.close()


@pytest.mark.parametrize("mover", ["shared-memory", "collective", "disk"])
def test_the_wrong_version_is_refused(mover: str, stage: Stage, tmp_path: Path) -> None:
    session = one_to_one(stage, mover=mover, directory=str(tmp_path))
    session.refit(1)
    sending = session.policy.submit(WeightSender.refit_send, 2, 2)
    if mover == "disk":
        sending.results()
        session.policy.call(WeightSender.refit_publish, 2)
    receiving = session.engines.submit(EngineWorker.refit_receive, {"version": 3, "attempt": 2})
    with pytest.raises(VerificationError, match="version"):
        receiving.results()
    session.close()


@pytest.mark.gpu
def test_buffers_on_the_device_that_both_share(stage: Stage) -> None:
    import torch

    visible = WorkerSpec({}, (stage.placement.bundles[0],), {"CUDA_VISIBLE_DEVICES": "0"})
    pair = WorkerGroup(
        "gpu", refit_workers.Slot, [visible, visible], stage.placement, stage.logs, start_timeout_s=120,
        call_timeout_s=60,
    )  # fmt: skip
    assert torch.cuda.is_available()
    facts, parallel = FAMILIES["qwen3_moe"], ParallelSpec()
    policy, engines = pair.part([0], "policy"), pair.part([1], "engine")
    policy.call(refit_workers.Slot.become_source, 0, facts, parallel, "bfloat16", None, "cuda")
    engines.call(refit_workers.Slot.become_engine, 0, facts, VllmParallel(), "bfloat16", None, "cuda")
    session = RefitSession(policy, engines, facts, dtype="bfloat16", settings=RefitConfig(timeout_s=60, staging_mb=1))
    session.open()
    assert session.mover == "cuda-ipc"
    refit_twice(session)
    session.close()
    pair.kill()


def test_a_full_shared_memory_says_so(stage: Stage) -> None:
    from rlctl.errors import MachineError
    from rlctl.transport.staging import Segment

    with pytest.raises(MachineError, match="shared memory"):
        Segment.create(1 << 50)


@pytest.mark.parametrize(
    ("mover", "tp", "replicas"), [("shared-memory", 2, 1), ("collective", 2, 1), ("collective", 1, 3)]
)
def test_changed_elements_alone_are_sent(mover: str, tp: int, replicas: int, stage: Stage) -> None:
    facts, parallel, target = replace(FAMILIES["qwen3_moe"], vocab=2000), ParallelSpec(tp=2), VllmParallel(tp=tp)
    policy, engines = stage.policy(facts, parallel), stage.engines(facts, target, replicas=replicas)
    session = open_session(policy, engines, facts, members=tp, mover=mover, sparse=True, full_every=4)
    engines.call(EngineWorker.poison)
    first = session.refit(1, verify=True)
    assert first.sparse == "everything: no version before to compare with"
    for version in (2, 3):
        policy.call(WeightSender.refit_perturb, version, 0.1, 0.02)
        report = session.refit(version, verify=True)
        assert report.verified == len(session.setup.table)
        assert report.sparse == "2.0% of the elements have changed"
        assert report.sent_bytes < 0.1 * first.sent_bytes
    assert session.refit(4, verify=True).sparse == "0.0% of the elements have changed"
    assert session.refit(5, verify=True).sparse == "everything: every 4 refits"
    policy.call(WeightSender.refit_perturb, 6, 0.1)
    assert session.refit(6, verify=True).sparse == "everything: 100.0% of the elements have changed"
    session.close()


def test_changes_to_another_version_are_refused_and_everything_follows(stage: Stage) -> None:
    session = one_to_one(stage, sparse=True)
    session.refit(1)
    session.engines.call(EngineWorker.poison)
    session.policy.call(WeightSender.refit_perturb, 2, 0.1, 0.02)
    with pytest.raises(VerificationError, match=r"Changes since version 1 .* holds no whole version"):
        session.refit(2)
    with pytest.raises(WorkerError, match="half-updated"):
        session.engines.call(EngineWorker.weight_version)
    assert session.refit(3, verify=True).sparse == "everything: no version before to compare with"
    session.close()


def test_sparse_falls_back_to_everything_where_boxes_go_whole(stage: Stage, tmp_path: Path) -> None:
    session = one_to_one(stage, sparse=True, mover="disk", directory=str(tmp_path))
    for version in (1, 2):
        assert session.refit(version, verify=True).sparse == "everything: the disk mover sends whole boxes"
    session.abandon()  # as where a run fails
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    session.close()
