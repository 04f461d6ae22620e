"""A refit while samples are in flight: waited for, kept or ended, and every token knows the weights that chose it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlctl.backends.base import EngineSpec, EngineWorker, EpisodeWorker
from rlctl.backends.messages import VALUES_A_GROUP, SampledGroup, Sampling, attached
from rlctl.backends.vllm.inflight import AwakeClock, EngineLock
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.data.rollouts import ROUTED_EXPERTS
from rlctl.errors import WorkerError
from rlctl.models.facts import ModelFacts
from support.engine_host import PublishedPolicy, SwappingEngine
from support.engine_policies import PROMPTS, WholeTensorPolicy, choices, generate, largest_logprob_error, requests
from support.engines import CALL_TIMEOUT_S, START_TIMEOUT_S, HostedEngine, tiny_facts

TOLERANCE = 1e-4
LONG = Sampling(220, stop_token_ids=())
Start = Callable[..., "Direct"]


@pytest.fixture(scope="module")
def start(placement: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """An engine that takes several calls at a time, started again for each way of treating samples in flight."""
    from rlctl.backends.vllm.args import engine_spec
    from rlctl.cluster.workers import WorkerGroup, WorkerSpec
    from rlctl.methods.rl.rl_config import RlConfig
    from support.engine_host import PYTHONPATH, SwappingEngine

    def spec(model: Path, facts: ModelFacts, routing: bool = False, **sizes: int) -> EngineSpec:
        # Samples that are computed again after a refit have more tokens together than a step may have.
        generation = {"max_concurrent": 16, "kv_cache_bytes": 32 << 20, "max_batched_tokens": 256, **sizes}
        config = RlConfig.model_validate({"generation": generation, "training": {"router_replay": routing}})
        return engine_spec(config, facts, model, device="cpu", max_length=256, threads=1)

    plain = spec(tiny_llama, tiny_facts(tied=False))
    env = plain.environment | {"PYTHONPATH": PYTHONPATH}
    group = WorkerGroup(
        "in-flight",
        SwappingEngine,
        [WorkerSpec({}, (placement.bundles[0],), env, others=(placement.bundles[1],))],
        placement,
        tmp_path_factory.mktemp("in-flight"),
        start_timeout_s=START_TIMEOUT_S,
        call_timeout_s=CALL_TIMEOUT_S,
        concurrency=3,
    )

    def begin(in_flight: str, model: Path = tiny_llama, discards: bool = False, **sizes: int) -> Direct:
        own = spec(model, facts_in(model), **sizes) if sizes else plain
        group.within(START_TIMEOUT_S).call(SwappingEngine.swap, replace(own, in_flight=in_flight, discards=discards))
        return Direct(group, model)

    yield begin
    group.stop()


class Direct(HostedEngine):
    """Calls go through the host to the engine."""

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.group.call(SwappingEngine.call, method, *args, **kwargs)[0]

    def submit(self, method: Callable[..., Any], *args: Any) -> Any:
        return self.group.submit(SwappingEngine.call, method, *args)

    def wait(self, submitted: Any) -> Any:
        return submitted.results()[0]


def refit_in_flight(engine: Direct, policy: WholeTensorPolicy, version: int) -> list[SampledGroup]:
    """Results of a generation into whose middle a refit to `version` came."""
    policy.open(engine)
    # The waiting begins first: on a busy machine samples could be over before a later call arrives.
    begun = engine.group.submit(SwappingEngine.when_in_flight, 8 * len(PROMPTS) * 4, EngineWorker.refit_begin, version)
    asked = engine.submit(EpisodeWorker.generate, requests(), LONG, 100.0)
    begun.results()
    policy.transfer(engine, version)
    engine.call(EngineWorker.refit_finish, version)
    return engine.wait(asked)


def columns_of(results: list[SampledGroup]) -> Iterator[tuple[SampledGroup, Any, int, slice]]:
    for result in results:
        columns = result.columns
        for row in range(columns.rollouts):
            yield result, columns, row, columns.slice(row)


def test_weights_change_between_two_decode_steps_and_never_during_one() -> None:
    lock, order = EngineLock(), list[str]()
    decoding, enough = threading.Event(), threading.Event()

    def step() -> None:
        with lock.step():
            decoding.set()
            enough.wait(30)
            order.append("step")

    def refit() -> None:
        with lock.ask():
            order.append("refit")

    def begun(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    threads = [begun(step)]
    assert decoding.wait(30)
    threads.append(begun(refit))
    while not (lock._asked or order):
        time.sleep(0.001)
    threads.append(begun(step))  # the refit has asked before
    time.sleep(0.02)
    assert order == []
    enough.set()
    for thread in threads:
        thread.join(30)
    assert order == ["step", "refit", "step"]


def test_every_thread_is_prepared_before_it_uses_the_engine() -> None:
    lock, prepared, used = EngineLock(), list[int](), list[int]()
    lock.prepare = lambda: prepared.append(threading.get_ident())

    def use(context: contextlib.AbstractContextManager[None]) -> None:
        with context:
            assert prepared[-1] == threading.get_ident()
            used.append(threading.get_ident())

    for context in (lock.ask(), lock.step()):
        thread = threading.Thread(target=use, args=(context,))
        thread.start()
        thread.join(30)
        use(context=lock.ask())
    assert used == prepared
    assert len(used) == 4


@pytest.mark.gpu
def test_on_a_gpu_all_threads_compute_on_one_stream_and_sleep_frees_memory(
    placement: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    from rlctl.backends.vllm.args import engine_spec
    from rlctl.cluster.workers import WorkerGroup, WorkerSpec
    from rlctl.methods.rl.rl_config import RlConfig
    from support.engine_host import PYTHONPATH, SwappingEngine

    sections = {"generation": {"max_concurrent": 16, "memory_fraction": 0.1}, "vllm": {"enforce_eager": True}}
    config = RlConfig.model_validate(sections)
    spec = engine_spec(config, tiny_facts(tied=False), tiny_llama, device="cuda", max_length=256)
    env = spec.environment | {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "0"}
    worker = WorkerSpec({}, (placement.bundles[0],), env)
    group = WorkerGroup(
        "on-gpu", SwappingEngine, [worker], placement, tmp_path,
        start_timeout_s=START_TIMEOUT_S, call_timeout_s=CALL_TIMEOUT_S, concurrency=3,
    )  # fmt: skip
    engine = Direct(group, tiny_llama)
    group.within(START_TIMEOUT_S).call(SwappingEngine.swap, replace(spec, in_flight="keep"))
    streams = dict(group.call(SwappingEngine.thread_and_stream)[0] for _ in range(9))
    assert len(streams) > 1
    assert len(set(streams.values())) == 1
    first = engine.call(EpisodeWorker.generate, requests(), Sampling(8), 60.0)
    awake = group.call(SwappingEngine.free_device_bytes)[0]
    engine.call(EngineWorker.sleep)
    assert group.call(SwappingEngine.free_device_bytes)[0] > awake + (1 << 30)  # the cache is most of a tenth
    engine.call(EngineWorker.wake)
    again = engine.call(EpisodeWorker.generate, requests(), Sampling(8), 60.0)
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.columns.tokens_T, other.columns.tokens_T)
    group.stop()


def require_tokens_of_their_versions(
    results: list[SampledGroup], old: WholeTensorPolicy, new: WholeTensorPolicy
) -> None:
    """Each token's log-prob is that of the version that it carries, 1 or 2, and most samples have both."""
    mixed = 0
    for result, columns, row, part in columns_of(results):
        versions = columns.weight_version_T[part][result.prompt_tokens :]
        tokens = columns.tokens_T[part].tolist()
        prompt, response = tuple(tokens[: result.prompt_tokens]), tokens[result.prompt_tokens :]
        assert (np.diff(versions) >= 0).all()
        assert set(versions.tolist()) <= {1, 2}
        assert result.versions[row] == tuple((v, int((versions == v).sum())) for v in sorted(set(versions.tolist())))
        got = columns.logprobs_T[part][result.prompt_tokens :]
        by = {1: old.logprobs(prompt, response, LONG).numpy(), 2: new.logprobs(prompt, response, LONG).numpy()}
        mixed += len(set(versions.tolist())) == 2
        for version, expected in by.items():
            chosen = versions == version
            assert np.abs(got - expected)[chosen].max(initial=0.0) < TOLERANCE
        # The two policies disagree, so that a wrong version would show.
        assert np.abs(by[1] - by[2]).max() > 100 * TOLERANCE
    assert mixed >= len(PROMPTS)


def test_kept_samples_go_on_under_the_new_weights(start: Start, tiny_llama: Path) -> None:
    engine, old, new = start("keep"), WholeTensorPolicy(tiny_llama), WholeTensorPolicy(tiny_llama)
    old.refit(engine, 1)
    new.perturb(5)
    require_tokens_of_their_versions(refit_in_flight(engine, new, 2), old, new)
    assert engine.call(EngineWorker.weight_version) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"dp": 2, "ep": 2}], ids=["pp2", "dp2-ep2"])
def test_stages_and_replicas_keep_samples_too(start: Start, tiny_qwen3_moe: Path, sizes: dict[str, int]) -> None:
    engine, old, new = start("keep", tiny_qwen3_moe, **sizes), *(PublishedPolicy(tiny_qwen3_moe) for _ in range(2))
    old.refit(engine, 1)
    new.perturb(5)
    require_tokens_of_their_versions(refit_in_flight(engine, new, 2), old, new)


@pytest.mark.slow
def test_tokens_that_new_weights_go_on_with_have_the_experts_of_these(start: Start, tiny_qwen3_moe: Path) -> None:
    engine, old, new = start("keep", tiny_qwen3_moe, routing=True), *(PublishedPolicy(tiny_qwen3_moe) for _ in range(2))
    old.refit(engine, 1)
    new.perturb(5)
    found = set[tuple[int, ...]]()
    for _, columns, _, part in columns_of(refit_in_flight(engine, new, 2)):
        tokens, versions = columns.tokens_T[part], np.unique(columns.weight_version_T[part])
        by = [np.sort(choices(policy.model, tokens)[:-1], axis=-1) for policy in (old, new)]
        assert not np.array_equal(*by)
        assert np.array_equal(np.sort(columns.extra_T[ROUTED_EXPERTS][part][:-1], axis=-1), by[2 in versions])
        found.add(tuple(versions[versions > 0]))
    assert (1, 2) in found


@pytest.mark.slow
def test_replicas_give_back_what_one_engine_does_and_one_that_dies_is_an_error(
    start: Start, tiny_qwen3_moe: Path
) -> None:
    """With groups that are ended in the middle between two calls."""
    policy, short, found = PublishedPolicy(tiny_qwen3_moe), Sampling(12), list[list[Any]]()
    for sizes in ({"tp": 1}, {"dp": 2, "ep": 2}):
        engine = start("abort", tiny_qwen3_moe, **sizes)
        policy.refit(engine, 1)
        groups = generate(engine, short)
        found.append([(columns.tokens_T.tolist(), texts, result.finish_reasons) for result, columns, texts in groups])
        refit_in_flight(engine, policy, 2)
        assert largest_logprob_error(generate(engine, short), policy, short) < TOLERANCE
    assert found[0] == found[1]
    (replica,) = engine.group.call(SwappingEngine.other_processes)[0]
    os.kill(replica, signal.SIGKILL)
    with pytest.raises(WorkerError):
        generate(engine, short)
    with pytest.raises(WorkerError):
        engine.call(EngineWorker.require_alive)


def test_submitted_samples_are_kept_while_the_engine_sleeps_and_go_on_under_the_new_weights(
    start: Start, tiny_llama: Path
) -> None:
    engine, old, new = start("keep"), WholeTensorPolicy(tiny_llama), WholeTensorPolicy(tiny_llama)
    engine.group.call(SwappingEngine.share_device)
    old.refit(engine, 1)
    new.perturb(5)
    new.open(engine)
    asleep = engine.group.submit(SwappingEngine.when_in_flight, 8 * len(PROMPTS) * 4, EngineWorker.sleep)
    engine.call(EpisodeWorker.submit, requests(), LONG)
    asked = engine.submit(EpisodeWorker.collect_by_handle, 100.0)
    asleep.results()
    assert engine.wait(asked) == ([], [None] * VALUES_A_GROUP)
    tokens = engine.group.call(SwappingEngine.tokens_in_flight)
    engine.call(EngineWorker.refit_begin, 2)
    new.transfer(engine, 2)
    engine.call(EngineWorker.refit_finish, 2)
    assert engine.call(EpisodeWorker.collect_by_handle, 0.05)[0] == []  # the device is still the policy's
    assert engine.group.call(SwappingEngine.tokens_in_flight) == tokens
    engine.call(EngineWorker.wake)
    results = list[SampledGroup]()
    while len(results) < len(requests()):
        results += attached(*engine.call(EpisodeWorker.collect_by_handle, 100.0))
    require_tokens_of_their_versions(results, old, new)


@pytest.mark.parametrize("discards", [True, False])
def test_an_engine_that_discards_its_weights_generates_after_the_next_refit_only(
    start: Start, tiny_llama: Path, discards: bool
) -> None:
    """vLLM's CPU platform discards nothing, so the weights are filled with NaN while the engine sleeps."""
    engine, policy = start("wait", discards=discards), WholeTensorPolicy(tiny_llama)
    engine.group.call(SwappingEngine.share_device)
    policy.refit(engine, 1)
    engine.call(EngineWorker.wake)
    short = Sampling(8, 0.0)
    before = [one.columns.tokens_T.tolist() for one in engine.call(EpisodeWorker.generate, requests(), short, 100.0)]
    engine.call(EngineWorker.sleep)  # as after a validation: the next generation has the same weights
    engine.call(EngineWorker.wake)
    again = [one.columns.tokens_T.tolist() for one in engine.call(EpisodeWorker.generate, requests(), short, 100.0)]
    assert again == before
    engine.call(EngineWorker.sleep, True)
    assert engine.group.call(SwappingEngine.sleep_levels) == [[1, 2] if discards else [1, 1]]
    if not discards:
        return
    assert engine.group.call(SwappingEngine.spoil)[0] > 0
    engine.call(EngineWorker.wake)
    with pytest.raises(WorkerError, match=r"Engine 0 has discarded its weights\."):
        engine.call(EpisodeWorker.generate, requests(), short, 100.0)
    engine.call(EngineWorker.sleep, True)
    policy.refit(engine, 2)
    engine.call(EngineWorker.wake)
    last = [one.columns.tokens_T.tolist() for one in engine.call(EpisodeWorker.generate, requests(), short, 100.0)]
    assert last == before


def test_seconds_in_which_an_engine_sleeps_are_not_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = AwakeClock(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    found = []
    for seconds, awake in [(1, True), (10, False), (100, False), (1000, True), (10000, True)]:
        now += seconds
        clock.run(awake)
        found.append(clock.now())
    assert found == [101, 111, 111, 111, 10111]


def test_a_refit_waits_for_samples_in_flight(start: Start, tiny_llama: Path) -> None:
    engine, policy = start("wait"), WholeTensorPolicy(tiny_llama)
    policy.refit(engine, 1)
    policy.perturb(5)
    for result, columns, row, part in columns_of(refit_in_flight(engine, policy, 2)):
        assert result.finish_reasons[row] in ("stop", "length")
        assert set(columns.weight_version_T[part][result.prompt_tokens :].tolist()) == {1}
    assert engine.call(EngineWorker.weight_version) == 2


def test_a_refit_ends_samples_in_flight(start: Start, tiny_llama: Path) -> None:
    engine, policy = start("abort"), WholeTensorPolicy(tiny_llama)
    policy.refit(engine, 1)
    ended = 0
    policy.perturb(5)
    for result, columns, row, part in columns_of(refit_in_flight(engine, policy, 2)):
        versions = columns.weight_version_T[part][result.prompt_tokens :]
        assert set(versions.tolist()) == {1}
        assert len(versions) == result.response_tokens[row]
        if result.finish_reasons[row] == "abort":
            ended += 1
            assert len(versions) < LONG.max_new_tokens
    assert ended >= len(PROMPTS)
    assert [of[0][0] for of in engine.call(EpisodeWorker.generate, requests(), Sampling(4), 60.0)[0].versions] == [
        2
    ] * 4


def test_samples_of_rejected_weights_are_not_returned(start: Start, tiny_llama: Path) -> None:
    engine, policy = start("keep"), WholeTensorPolicy(tiny_llama)
    policy.refit(engine, 1)
    asked = engine.submit(EpisodeWorker.generate, requests(), LONG, 100.0)
    engine.group.call(SwappingEngine.when_in_flight, 0, EngineWorker.refit_reject, 1)
    with pytest.raises(WorkerError, match="did not pass verification"):
        engine.wait(asked)
    policy.refit(engine, 2)
    assert engine.call(EpisodeWorker.generate, requests(), Sampling(4), 60.0)


def test_an_engine_leaves_its_device_to_the_policy_and_a_refit_wakes_the_weights_alone(
    start: Start, tiny_llama: Path
) -> None:
    engine, policy, short = start("wait"), WholeTensorPolicy(tiny_llama), Sampling(16)
    # The matrix is square: its shape gives nothing away.
    (quantized,) = engine.group.call(SwappingEngine.unreadable_if_quantized, "o_proj")
    assert quantized == {f"model.layers.{layer}.self_attn.o_proj.weight": "is quantized by Fp8LinearMethod"
                         for layer in range(2)}  # fmt: skip
    engine.group.call(SwappingEngine.share_device)
    policy.refit(engine, 1)
    assert largest_logprob_error(generate(engine, short), policy, short) < TOLERANCE
    for version in (2, 3):
        engine.call(EngineWorker.sleep)
        with pytest.raises(WorkerError, match="asleep"):
            engine.call(EpisodeWorker.generate, requests(), short, 60.0)
        policy.perturb(version)
        policy.refit(engine, version)
        with pytest.raises(WorkerError, match="asleep"):
            engine.call(EpisodeWorker.generate, requests(), short, 60.0)
        engine.call(EngineWorker.wake)
        assert largest_logprob_error(generate(engine, short), policy, short) < TOLERANCE
    engine.call(EngineWorker.sleep)
    policy.refit(engine, 4)
    for _ in range(2):  # as a save does after a refit; and what is asleep stays so
        engine.call(EngineWorker.sleep)
    engine.call(EngineWorker.wake)
    assert largest_logprob_error(generate(engine, short), policy, short) < TOLERANCE


def test_an_engine_whose_steps_fail_is_lost_although_its_process_lives(start: Start) -> None:
    """As after an illegal access of the GPU. `EngineClient.lost` asks `require_alive`."""
    engine = start("wait")
    engine.call(EngineWorker.require_alive)
    WholeTensorPolicy(engine.model).refit(engine, 1)
    message = "CUDA error: an illegal memory access was encountered"
    engine.group.call(SwappingEngine.fail_steps, message)
    with pytest.raises(WorkerError, match=message):
        engine.call(EpisodeWorker.generate, requests(), Sampling(4), 60.0)
    with pytest.raises(WorkerError, match=f"Engine 0 failed in a step: {message}"):
        engine.call(EngineWorker.require_alive)
