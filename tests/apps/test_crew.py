"""Which devices the engines of a run get, and which variables the training processes."""

from __future__ import annotations

import pytest

from rlctl.apps.crew import engine_bundles, policy_environment
from rlctl.cluster.placement import Bundle
from rlctl.config.schema import TrainingConfig
from rlctl.errors import MachineError


def on_nodes(**devices: int) -> tuple[Bundle, ...]:
    places = [(node, str(gpu)) for node, count in devices.items() for gpu in range(count)]
    return tuple(Bundle(index, node, gpu) for index, (node, gpu) in enumerate(places))


def test_engines_take_devices_in_turn() -> None:
    shares = engine_bundles(on_nodes(one=4, two=4), 4, 2)
    assert [[(b.node, b.gpu) for b in share] for share in shares] == [
        [("one", "0"), ("one", "1")], [("one", "2"), ("one", "3")], [("two", "0"), ("two", "1")],
        [("two", "2"), ("two", "3")],
    ]  # fmt: skip


def test_an_engine_across_nodes_is_refused() -> None:
    with pytest.raises(MachineError, match=r"2 devices of engine 1 on 2 nodes \(one, two\)"):
        engine_bundles(on_nodes(one=3, two=5), 4, 2)


def test_variables_of_the_user_reach_training_processes_and_win() -> None:
    training = TrainingConfig(env={"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"})
    env = policy_environment(1, "cpu", training)
    assert env == {"OMP_NUM_THREADS": "2", "THP_MEM_ALLOC_ENABLE": "1", "NCCL_ALGO": "Ring"}
