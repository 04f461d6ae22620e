"""Refit sessions between processes: sharded policies into real engines, and everything that can go wrong on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rlctl.backends.base import EngineWorker, EpisodeWorker, PolicySpec
from rlctl.backends.batching.batch import LogprobStats
from rlctl.backends.clients import EngineClient, PolicyClient
from rlctl.backends.messages import Sampling
from rlctl.backends.vllm.engine import VllmEngine
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.cluster import workers
from rlctl.cluster.ray_session import fetch
from rlctl.cluster.workers import WorkerDiedError, WorkerGroup, WorkerSpec
from rlctl.errors import VerificationError, WorkerError
from rlctl.jobs.refit_report import LogprobLimit
from rlctl.refit.decoding import DecodeCheck
from rlctl.refit.session import RefitSession
from rlctl.refit.sync import WeightSync
from rlctl.refit.weight_sender import WeightSender
from rlctl.settings.generation import RefitConfig
from rlctl.settings.training import TrainingConfig
from rlctl.telemetry.phases import RefitPhase
from support import engine_policies, refit_sources
from support.engine_policies import WholeTensorPolicy, generate, largest_logprob_error, requests
from support.engines import HostedEngine, tiny_facts

# Workers cannot import the tests' modules: their classes travel by value.
cloudpickle.register_pickle_by_value(engine_policies)
cloudpickle.register_pickle_by_value(refit_sources)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MakeSource = Callable[..., WorkerGroup]
SLOTS = 4


def start_slots(placement: Any, logs: Path, count: int) -> WorkerGroup:
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    specs = [WorkerSpec({}, (placement.bundles[1],), env) for _ in range(count)]
    return WorkerGroup(
        "policy", refit_sources.SourceSlot, specs, placement, logs, start_timeout_s=120, call_timeout_s=60
    )


@pytest.fixture(scope="module")
def slots(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """The processes of all sources but those that are to die or to hang."""
    group = start_slots(placement, tmp_path_factory.mktemp("sources"), SLOTS)
    yield group
    group.kill()


@pytest.fixture
def make_source(slots: WorkerGroup, placement: Any, tmp_path: Path) -> Iterator[MakeSource]:
    """Makes groups of sharded sources, one at a time; with `victims` in processes of their own, which are ended."""
    victims_started: list[WorkerGroup] = []

    def make(model: Path, tp: int = 1, dp: int = 1, *, victims: bool = False, **faults: str) -> WorkerGroup:
        if victims:
            victims_started.append(start_slots(placement, tmp_path, tp * dp))
        group = victims_started[-1] if victims else slots.part(range(tp * dp))
        common = {"tp": tp, "dp": dp, "directory": model, **faults}
        group.call_each(refit_sources.SourceSlot.become, [({"rank": rank, **common},) for rank in range(tp * dp)])
        return group

    yield make
    for group in victims_started:
        group.kill()


def open_session(
    source: WorkerGroup, engine: HostedEngine, converted: dict[str, int] | None = None, **settings: Any
) -> RefitSession:
    tied = "tied" in engine.model.name
    session = RefitSession(
        source,
        engine.receivers,
        tiny_facts(tied=tied),
        settings=RefitConfig(**{"timeout_s": 60, **settings}),
        dtype="float32",
        converted=converted,
    )
    session.open()
    return session


def whole_policy(source: WorkerGroup, model: Path) -> WholeTensorPolicy:
    """The sharded policy's weights put together in a transformers model."""
    import torch

    policy = WholeTensorPolicy(model)
    with torch.no_grad():
        for name, tensor in policy.tensors().items():
            for box, values in source.call(refit_sources.ShardedSource.shard, name):
                tensor[tuple(slice(s.start, s.last + 1, s.step) for s in box)] = values
    return policy


@pytest.mark.parametrize(
    ("which", "tp", "dp"), [("engine", 1, 1), ("engine", 2, 1), ("engine", 2, 2), ("tied_engine", 2, 1)]
)
def test_shards_arrive_whole(
    which: str, tp: int, dp: int, make_source: MakeSource, request: pytest.FixtureRequest
) -> None:
    engine: HostedEngine = request.getfixturevalue(which)
    source = make_source(engine.model, tp, dp)
    session = open_session(source, engine, verify_every=1)
    sampling = Sampling(12)
    for version in (1, 2, 3):
        source.call(WeightSender.refit_perturb, version, 0.02)
        report = session.refit(version)
        assert report.verified == len(session.setup.table)
        assert report.bytes == sum(row.bytes for row in session.setup.table)
        assert set(report.seconds) == {RefitPhase.WAKE, RefitPhase.PACK, RefitPhase.LOAD, RefitPhase.CACHE_RESET}
        assert all(value >= 0 for value in report.seconds.values())
        policy = whole_policy(source, engine.model)
        assert largest_logprob_error(generate(engine, sampling), policy, sampling) < 1e-4
    session.close()


def test_each_box_is_sent_by_one_replica(engine: HostedEngine, make_source: MakeSource) -> None:
    source = make_source(engine.model, 2, 2)
    session = open_session(source, engine)
    session.refit(1)
    sent = source.call(refit_sources.ShardedSource.last_sent)
    assert sum(one.bytes for one in sent) == session.payload_bytes
    assert all(one.bytes > 0 for one in sent)
    session.close()


def test_every_nth_refit_is_compared_and_a_sample_between(engine: HostedEngine, make_source: MakeSource) -> None:
    session = open_session(make_source(engine.model), engine, verify_every=2, verify_sample=3)
    assert [session.refit(version).verified for version in range(1, 6)] == [21, 3, 21, 3, 21]
    session.close()


def test_weights_that_changed_since_their_conversion_are_named(engine: HostedEngine, make_source: MakeSource) -> None:
    source = make_source(engine.model, 2)
    held = {name: fingerprint(t, t.shape) for name, t in WholeTensorPolicy(engine.model).tensors().items()}
    session = open_session(source, engine, converted=held | {"model.norm.weight": held["model.norm.weight"] ^ 1})
    with pytest.raises(VerificationError, match=r"1 of 21 .* that were converted: model\.norm\.weight") as why:
        session.refit(1)
    assert "remove it" in (why.value.hint or "")
    session.close()
    session = open_session(source, engine, converted=held, verify_every=1)
    session.refit(1)
    source.call(WeightSender.refit_perturb, 1, 0.02)
    assert session.refit(2).verified == 21  # trained by now
    session.close()


def test_corrupted_layout_is_caught_with_the_tensor_named(engine: HostedEngine, make_source: MakeSource) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    session = open_session(make_source(engine.model, transpose=name), engine)
    with pytest.raises(VerificationError, match=r"1 differ \(model\.layers\.1\.self_attn\.q_proj\.weight\)"):
        session.refit(1)
    with pytest.raises(WorkerError, match="half-updated"):
        engine.call(EpisodeWorker.generate, requests(), Sampling(4), 30.0)
    session.close()
    healthy = open_session(make_source(engine.model), engine)
    healthy.refit(2)
    assert generate(engine, Sampling(4))
    healthy.close()


def test_a_comparison_that_breaks_off_leaves_the_engine_as_the_refit_did(
    engine: HostedEngine, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected samples would stay rejected in the engines that are not at fault, also after a full refit."""

    def lost(*_: Any, **__: Any) -> None:
        raise WorkerDiedError("another engine is gone")

    session = open_session(make_source(engine.model), engine)
    monkeypatch.setattr(session, "compare", lost)
    with pytest.raises(WorkerDiedError):
        session.refit(3)
    assert engine.call(EngineWorker.weight_version) == 3
    session.close()


def test_stale_engine_is_caught(engine: HostedEngine, make_source: MakeSource) -> None:
    source = make_source(engine.model)
    session = open_session(source, engine)
    session.refit(1)
    assert session.compare()[0].equal
    source.call(WeightSender.refit_perturb, 5, 0.01)
    assert set(session.compare()[0].mismatched) == {row.name for row in session.setup.table}
    session.refit(2)
    session.close()


def test_killed_sender_is_reported_and_the_engine_refuses(
    engine: HostedEngine, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SAME_CAUSE_S", 60.0)  # a busy Ray may be slow to tell of a death
    source = make_source(engine.model, tp=2, victims=True)
    session = open_session(source, engine)
    session.refit(1)
    source.call(refit_sources.ShardedSource.break_from_now_on, "die")
    with pytest.raises(WorkerError, match=r"phase transfer: policy rank [01] .*died"):
        session.refit(2)
    with pytest.raises(WorkerError, match="half-updated weights: the refit to version 2"):
        engine.call(EpisodeWorker.generate, requests(), Sampling(4), 30.0)
    session.close()
    again = open_session(make_source(engine.model), engine)
    again.refit(3)
    assert generate(engine, Sampling(4))
    again.close()


def test_segment_of_another_node_is_refused(
    engine: HostedEngine, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlctl.transport.staging import Segment

    segment = Segment.create(64)
    monkeypatch.setenv("RLCTL_NODE", "pretend-node-2")
    with pytest.raises(WorkerError, match="is on node"):
        Segment(segment.address)
    segment.close()


def test_nothing_is_left_in_shared_memory(engine: HostedEngine, make_source: MakeSource) -> None:
    session = open_session(make_source(engine.model), engine)
    (channel,) = session.setup.channels
    assert not Path(channel.connection.address.path).exists()
    session.refit(1)
    session.close()


def weight_sync(source: WorkerGroup, engine: HostedEngine, **options: Any) -> WeightSync:
    facts = tiny_facts(tied=False)
    policy = PolicyClient(source, PolicySpec(facts), TrainingConfig(), micro_batch_tokens=256)
    return WeightSync(
        policy, source, EngineClient(engine.group), facts, settings=RefitConfig(timeout_s=60), dtype="float32",
        offload=False, engines_sleep=False, **options,
    )  # fmt: skip


def decode_with_a_copy(worker: Any) -> None:
    """Have the model compute with a copy of a weight as it is now, as a graph that reads old memory would."""
    import copy

    norm = worker.model_runner.get_model().model.norm
    norm.forward = copy.deepcopy(norm).forward


def compute_otherwise(worker: Any) -> None:
    """Have the last norm give twice its output, as if config.json said something else to the engine."""
    norm = worker.model_runner.get_model().model.norm
    plain = norm.forward

    def forward(*args: Any, **given: Any) -> Any:
        found = plain(*args, **given)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

    norm.forward = forward


def decode_with_the_weight(worker: Any) -> None:
    del worker.model_runner.get_model().model.norm.forward


def test_an_engine_that_decodes_with_what_no_reading_sees_is_caught(
    engine: HostedEngine, make_source: MakeSource
) -> None:
    source = make_source(engine.model)
    check = DecodeCheck(1e-4, vocabulary=512, max_length=256, sampling=Sampling(8))
    with weight_sync(source, engine, decode_check=check) as sync:
        first = sync.refit(1)
        assert (first.verified, first.compared_all) == (21, True)
        assert first.decoding is not None
        assert first.decoding < 1e-5
        engine.call(VllmEngine._rpc, decode_with_a_copy)
        source.call(WeightSender.refit_perturb, 2, 0.5)
        with pytest.raises(VerificationError, match=r"version 2: the tensors are equal \(all 21 .*log-probs of") as why:
            sync.refit(2, verify=True)
        assert why.value.exit_code == 5
        assert "a graph or a cache that still has earlier weights" in (why.value.hint or "")
        assert "arithmetic" not in (why.value.hint or "")
        with pytest.raises(WorkerError, match="half-updated"):
            engine.call(EpisodeWorker.generate, requests(), Sampling(4), 30.0)
        engine.call(VllmEngine._rpc, decode_with_the_weight)
        assert sync.refit(3, verify=True).decoding < 1e-5
        assert sync.refit(4).decoding is None  # a sample of the tensors, and no look at what is decoded


def test_an_engine_that_computes_otherwise_from_the_start_is_said_to(
    engine: HostedEngine, make_source: MakeSource
) -> None:
    check = DecodeCheck(1e-4, vocabulary=512, max_length=256, sampling=Sampling(8))
    engine.call(VllmEngine._rpc, compute_otherwise)
    try:
        with (
            weight_sync(make_source(engine.model), engine, decode_check=check) as sync,
            pytest.raises(VerificationError, match=r"version 1: the tensors are equal") as why,
        ):
            sync.refit(1)
    finally:
        engine.call(VllmEngine._rpc, decode_with_the_weight)
    assert "by different arithmetic" in (why.value.hint or "")
    assert "It decodes with a graph" not in (why.value.hint or "")


def test_a_refit_test_names_the_tensor_and_the_cause(engine: HostedEngine, make_source: MakeSource) -> None:
    from rlctl.jobs import refit_report

    name = "model.layers.0.self_attn.o_proj.weight"
    source = make_source(engine.model, transpose=name)
    sync = weight_sync(source, engine)

    def difference(results: list[Any]) -> LogprobStats:
        groups = [(result, fetch(result.columns), None) for result in results]
        worst = largest_logprob_error(groups, whole_policy(source, engine.model), Sampling(8))
        return LogprobStats(1, worst, worst, worst)

    with sync:
        found = refit_report.run(
            sync,
            model="tiny",
            prompts=[request.prompt_tokens for request in requests()],
            compare_logprobs=difference,
            repeat=2,
            logprob_limit=LogprobLimit(1e-4, 1e-3),
            timeout_s=60,
            new_tokens=8,
            tell=lambda _: None,
        )
    assert not found.passed
    assert found.to_json()["mismatched"] == [{"name": name, "cause": "the right elements in another order"}]
    assert found.after.max_abs > 1e-3
    healthy = open_session(make_source(engine.model), engine)
    healthy.refit(9)
    healthy.close()
