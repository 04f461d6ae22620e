"""Which devices the engines of a run get, and which variables the training processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.backends.vllm.cpu import has_triton
from rlctl.cluster.placement import Bundle
from rlctl.errors import MachineError
from rlctl.methods.available import method_from_config
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.catalog import lookup
from rlctl.preparation.run_workers import engine_bundles, policy_environment
from rlctl.preparation.worker_specs import RunWorkersSpec, planned_workers
from rlctl.settings.training import TrainingConfig
from support.plans import plan_of


def on_nodes(**devices: int) -> tuple[Bundle, ...]:
    places = [(node, str(gpu)) for node, count in devices.items() for gpu in range(count)]
    return tuple(Bundle(index, node, gpu) for index, (node, gpu) in enumerate(places))


def test_engines_take_devices_in_turn() -> None:
    shares = engine_bundles(on_nodes(one=4, two=4), 4, 1, 2, most=1)
    assert [[(b.node, b.gpu) for b in own] for own, others in shares if not others] == [
        [("one", "0"), ("one", "1")], [("one", "2"), ("one", "3")], [("two", "0"), ("two", "1")],
        [("two", "2"), ("two", "3")],
    ]  # fmt: skip


def test_an_engine_across_nodes_is_refused_where_the_plan_has_it_on_one() -> None:
    with pytest.raises(
        MachineError, match=r"2 devices of engine 1 on 2 nodes \(1 on one, 1 on two\); it takes 2 on one"
    ):
        engine_bundles(on_nodes(one=3, two=5), 4, 1, 2, most=1)


def test_each_process_of_an_engine_has_as_many_devices_of_one_node() -> None:
    ((own, others),) = engine_bundles(on_nodes(one=2, two=2), 1, 2, 2, most=1)
    assert [bundle.node for bundle in own + others] == ["one", "one", "two", "two"]
    with pytest.raises(MachineError, match=r"2 devices of a replica of engine 0 on 2 nodes"):
        engine_bundles(on_nodes(one=3, two=1), 1, 2, 2, most=1)
    shares = engine_bundles(on_nodes(one=4, two=4, six=4, ten=4), 2, 1, 8, most=2)
    assert [[{bundle.node for bundle in part} for part in share] for share in shares] == [
        [{"one"}, {"two"}],
        [{"six"}, {"ten"}],
    ]
    with pytest.raises(MachineError, match=r"engine 0 on 2 nodes \(3 on one, 5 on two\); it takes as many on each"):
        engine_bundles(on_nodes(one=3, two=5), 1, 1, 8, most=2)


def test_variables_of_the_user_reach_training_processes_and_win() -> None:
    training = TrainingConfig(env={"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"})
    env = policy_environment(1, "cpu", training)
    recorder = {"TORCH_FR_BUFFER_SIZE": "2000"}
    of_cpus = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
    assert env == {"OMP_NUM_THREADS": "2", "NCCL_ALGO": "Ring", **of_cpus, **recorder}
    on_gpus = policy_environment(None, "cuda", training)
    assert on_gpus == {
        "OMP_NUM_THREADS": "2",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_ALGO": "Ring",
        **recorder,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def workers_of(**generation: object) -> RunWorkersSpec:
    sections = {"model": {"name": "Qwen/Qwen3-8B"}, "cluster": {"gpu": "h100", "nodes": 2}, "generation": generation}
    config, facts = RlConfig.model_validate(sections), lookup("Qwen/Qwen3-8B")
    assert facts is not None
    return planned_workers(config, facts, plan_of(config, facts), Path("model"), None)


def test_nothing_sleeps_where_engines_have_devices_of_their_own() -> None:
    together, apart, near = workers_of(), workers_of(devices=8), workers_of(devices=4)
    assert [one.engines.engine.sleeps for one in (together, apart, near) if one.engines] == [True, False, False]
    assert [one.colocated for one in (together, apart, near)] == [True, False, False]
    assert [one.own_nodes for one in (together, apart, near)] == [False, True, False]
    assert [apart.policy.parallel.world_size, near.policy.parallel.world_size] == [8, 12]
    apart_engines, shared_engines = apart.engines, together.engines
    assert apart_engines is not None
    assert shared_engines is not None
    used = [one.engine.arguments["gpu_memory_utilization"] for one in (apart_engines, shared_engines)]
    assert used[0] > used[1]


def test_the_policy_counts_ties_of_top_k_as_the_engines_of_its_device() -> None:
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    facts = lookup(name)
    assert facts is not None

    def exact(machine: dict[str, object], **generation: object) -> bool | None:
        sections = {"model": {"name": name}, "cluster": machine, "generation": generation}
        config = RlConfig.model_validate(sections)
        method, plan = method_from_config(config, tries_loss=False), plan_of(config, facts)
        truncation = planned_workers(config, facts, plan, Path("model"), None, method).policy.truncation
        return truncation and truncation.exact_top_k

    gpu = {"gpu": "h100", "nodes": 1, "gpus_per_node": 1}
    assert exact(gpu, top_k=20) is True
    assert exact(gpu, top_p=0.9, top_k=20) is True
    assert exact({"gpu": "cpu"}, top_k=20, max_new_tokens=16) is has_triton()
    assert exact(gpu) is None
