"""Generation engines that tests share: each starts once, in a separate process, and is refitted as tests need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlctl.backends.base import EpisodeWorker
from rlctl.cluster.workers import PendingCall
from rlctl.preparation.run_workers import ENGINE_PROCESS

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0


@dataclass
class HostedEngine:
    """A worker group of one engine, and the model it was started from."""

    group: Any
    model: Path

    @property
    def receivers(self) -> Any:
        return self.group.held(EpisodeWorker.engine)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.submit(method, *args, **kwargs).results()[0]

    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> PendingCall[Any]:
        group = self.group if plays_episodes(method) else self.receivers
        return group.submit(method, *args, **kwargs)


def plays_episodes(method: Callable[..., Any]) -> bool:
    """Whether a method is one of the process that plays episodes, or of the engine that it holds."""
    return method.__qualname__.startswith(EpisodeWorker.__name__)


@pytest.fixture(scope="session")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ray on this machine, with room for a few workers and, by its account, two GPUs."""
    from rlctl.cluster.placement import Placement
    from rlctl.cluster.ray_session import ray_session
    from support.forked_workers import forked_workers

    with forked_workers(tmp_path_factory.mktemp("servers")), ray_session(gpus=2):
        yield Placement(4, gpus=False, timeout_s=START_TIMEOUT_S)


@pytest.fixture(scope="session")
def family_host(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process that holds one engine at a time, of any family (`engine_host.FamilyEngine`)."""
    from support.engine_host import hosted

    with hosted(placement, tmp_path_factory.mktemp("family-logs")) as group:
        yield group


def tiny_facts(*, tied: bool) -> Any:
    from rlctl.models.facts import ModelFacts

    return ModelFacts("llama", 2, 128, 4, 2, 32, 256, 512, 1024, tied_embeddings=tied, norm_eps=1e-5)


def start_engine(placement: Any, model: Path, logs: Path, *, tp: int = 1, name: str = "engine") -> HostedEngine:
    """A running engine for a tiny Llama."""
    from rlctl.backends.vllm.args import engine_spec
    from rlctl.cluster.workers import WorkerGroup, WorkerSpec
    from rlctl.methods.rl.rl_config import RlConfig
    from support.engine_host import VLLM

    # So few tokens a step that prompts are computed in parts, as long ones are.
    generation = {"max_concurrent": 16, "kv_cache_bytes": 32 << 20, "max_batched_tokens": 256}
    config = RlConfig.model_validate({"generation": generation})
    facts = tiny_facts(tied="tied" in model.name)
    spec = engine_spec(config, facts, model, device="cpu", max_length=256, tp=tp, threads=tp)
    worker = WorkerSpec({"worker": VLLM, "spec": spec}, (placement.bundles[0],), spec.environment)
    group = WorkerGroup(
        name, ENGINE_PROCESS, [worker], placement, logs, start_timeout_s=START_TIMEOUT_S, call_timeout_s=CALL_TIMEOUT_S
    )
    group.within(START_TIMEOUT_S).call(EpisodeWorker.start)
    return HostedEngine(group, model)


@pytest.fixture(scope="session")
def engine(placement: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedEngine]:
    """An engine of the tiny Llama. Tests may refit it, and must leave it able to generate."""
    hosted = start_engine(placement, tiny_llama, tmp_path_factory.mktemp("engine-logs"))
    yield hosted
    hosted.group.stop()


@pytest.fixture(scope="session")
def tied_engine(
    placement: Any, tiny_llama_tied: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostedEngine]:
    """An engine of the tiny Llama with tied embeddings."""
    hosted = start_engine(placement, tiny_llama_tied, tmp_path_factory.mktemp("engine-logs"), name="tied-engine")
    yield hosted
    hosted.group.stop()
