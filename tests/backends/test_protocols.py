"""Workers have every method that the driver may ask of them, with the parameters that it will be given."""

from __future__ import annotations

import inspect

import pytest

from rlctl.backends.base import EngineWorker, EpisodeWorker, PolicyWorker, WeightReceiver
from rlctl.backends.lookup import ENGINES, POLICIES, engine_backend, policy_backend
from rlctl.cluster.worker_host import imported
from rlctl.refit.policy_side import RefitSender
from rlctl.refit.synthetic import SyntheticEngine, SyntheticSender
from rlctl.refit.weight_sender import WeightSender
from rlctl.rollouts.episodes import EpisodeRunner

PAIRS = [
    *((policy_backend(name).worker, PolicyWorker) for name in POLICIES),
    *((engine_backend(name).worker, EngineWorker) for name in ENGINES),
    (EpisodeRunner, EpisodeWorker),
    (SyntheticEngine, WeightReceiver),
    (SyntheticSender, WeightSender),
    (RefitSender, WeightSender),
]


def parameters(function: object) -> list[tuple[str, object, object]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize(("worker", "protocol"), PAIRS)
def test_a_worker_is_what_its_protocol_says(worker: type | str, protocol: type) -> None:
    worker = imported(worker) if isinstance(worker, str) else worker
    asked = {name for base in protocol.__mro__ for name in vars(base) if not name.startswith("_")}
    assert asked
    for name in sorted(asked):
        mine, theirs = getattr(worker, name), getattr(protocol, name)
        assert callable(mine) == callable(theirs), name
        if callable(theirs):
            asked_for = parameters(theirs)
            assert parameters(mine)[: len(asked_for)] == asked_for, name
            more = parameters(mine)[len(asked_for) :]  # nobody who knows the protocol alone gives these
            assert all(default is not inspect.Parameter.empty for *_, default in more), name
