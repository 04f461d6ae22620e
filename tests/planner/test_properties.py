"""What every plan keeps to, over random models of the catalog, machines, workloads and pins."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.errors import ConfigError, NoPlanError
from rlctl.models.catalog import entries
from rlctl.models.facts import ModelFacts
from rlctl.planner.inputs.cluster import DEVICES, GIB, ClusterFacts, cpu_device, make_cluster
from rlctl.planner.inputs.request import Workload
from rlctl.planner.result import Plan
from rlctl.planner.views.render import plan_json
from rlctl.telemetry.phases import Phase
from support.catalog_models import make_plan

MODELS = st.sampled_from([entry.facts for entry in entries() if entry.facts])
GPUS = st.builds(
    make_cluster,
    st.sampled_from(sorted(DEVICES)),
    st.sampled_from([1, 2, 3, 4, 8, 12, 16, 64, 128]),
    st.sampled_from([None, None, None, 1, 2, 4]),
)
CPUS = st.builds(
    lambda cores, gib: ClusterFacts(cpu_device(cores, gib * GIB), 1, 0), st.integers(1, 64), st.integers(2, 512)
)
MACHINES = st.one_of(GPUS, GPUS, CPUS)
SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])
PINS = st.fixed_dictionaries(
    {},
    optional={
        "training.tp": SIZES,
        "training.pp": SIZES,
        "training.cp": SIZES,
        "training.ep": SIZES,
        "training.recompute": st.sampled_from(["none", "selective", "full"]),
        "training.optimizer_offload": st.booleans(),
        "generation.tp": SIZES,
        "generation.engines": SIZES,
        "generation.colocated": st.booleans(),
        "generation.devices": SIZES,
    },
).filter(lambda pins: len(pins) <= 2)


@st.composite
def workloads(draw: Any) -> Workload:
    most = draw(st.sampled_from([512, 2048, 4096, 16384, 40960, 131072]))
    return Workload(
        prompts=draw(st.sampled_from([1, 3, 8, 32, 64, 256, 512])),
        generations=draw(st.sampled_from([1, 2, 8, 16, 32])),
        max_length=most,
        mean_new_tokens=draw(st.sampled_from([None, 200, 0.2 * most])),
        reference=draw(st.booleans()),
        critic=draw(st.booleans()),
        share_prompts=draw(st.booleans()),
        goal=draw(st.sampled_from(["fast", "safe", "cheap"])),
        staleness=draw(st.sampled_from([None, None, 0, 1])),
        in_flight=draw(st.sampled_from(["wait", "keep"])),
    )


def check(plan: Plan, pins: dict[str, Any]) -> None:
    """A plan uses the devices that there are, fits them, keeps the pins and accounts for its seconds."""
    cluster, training, generation = plan.cluster, plan.training, plan.generation
    assert training is not None
    assert generation is not None
    for phase, memory in plan.memory.items():
        assert 0 < memory.total <= cluster.device.memory, phase
    assert plan.host_memory <= cluster.device.host_memory * (1 + 1e-9)
    if cluster.gpus:
        assert generation.gpus <= cluster.gpus
        assert training.parallel.world_size + (0 if plan.colocated else generation.gpus) <= cluster.gpus
    parallel = training.parallel
    assert parallel.world_size == parallel.tp * parallel.pp * parallel.cp * parallel.dp
    values = plan.config_values()
    assert {key: values[key] for key in pins} == pins
    data = plan_json(plan)
    assert all(value >= 0 for value in data["seconds"].values())
    assert sum(data["seconds"][phase] for phase in Phase) == pytest.approx(data["seconds"]["total"], rel=1e-3, abs=0.02)
    assert 0 <= data["mfu"] < 1
    assert data["reasons"]
    assert data["fits"]
    assert data["runnable"] == (not data["not_runnable_because"])


def outcome(
    facts: ModelFacts, cluster: ClusterFacts, workload: Workload, pins: dict[str, Any]
) -> Plan | ConfigError | NoPlanError:
    try:
        return make_plan(facts, cluster, workload, pins)
    except (ConfigError, NoPlanError) as error:
        return error


def check_request(facts: ModelFacts, cluster: ClusterFacts, workload: Workload, pins: dict[str, Any]) -> None:
    found = outcome(facts, cluster, workload, pins)
    if isinstance(found, Plan):
        check(found, pins)
    elif isinstance(found, ConfigError):
        assert any(key in found.message for key in pins), found
        if nearest := re.search(r"The nearest value that works is ([\w.]+)=(\w+)\.", found.hint or ""):
            again = outcome(facts, cluster, workload, {**pins, nearest[1]: int(nearest[2])})
            # Valid, if perhaps too large for the memory; another pin may be wrong besides.
            assert not (isinstance(again, ConfigError) and again.message.startswith(nearest[1])), again
    elif not cluster.is_cpu and (
        smallest := re.search(r"smallest machine of this kind that fits is (\d+) x (\d+) ", found.hint or "")
    ):
        larger = replace(cluster, nodes=int(smallest[1]), gpus_per_node=int(smallest[2]))
        check(make_plan(facts, larger, workload, pins), pins)


@pytest.mark.long
@settings(deadline=None, max_examples=3)
@given(MODELS, MACHINES, workloads(), PINS)
def test_a_request_has_a_plan_that_holds_or_an_error_that_helps(
    facts: ModelFacts, cluster: ClusterFacts, workload: Workload, pins: dict[str, Any]
) -> None:
    check_request(facts, cluster, workload, pins)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(MODELS, MACHINES, workloads(), PINS)
def test_many_requests_have_a_plan_that_holds_or_an_error_that_helps(
    facts: ModelFacts, cluster: ClusterFacts, workload: Workload, pins: dict[str, Any]
) -> None:
    check_request(facts, cluster, workload, pins)


def check_larger_memory(facts: ModelFacts, cluster: ClusterFacts, workload: Workload) -> None:
    try:
        make_plan(facts, cluster, workload)
    except NoPlanError:
        return
    device = cluster.device
    more = replace(device, memory=1.5 * device.memory, host_memory=1.5 * device.host_memory)
    make_plan(facts, replace(cluster, device=more), workload)


@pytest.mark.slow
@pytest.mark.guard
@settings(deadline=None, max_examples=2)
@given(MODELS, GPUS, workloads())
def test_what_fits_a_machine_fits_one_with_more_memory(
    facts: ModelFacts, cluster: ClusterFacts, workload: Workload
) -> None:
    check_larger_memory(facts, cluster, workload)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(MODELS, GPUS, workloads())
def test_what_fits_many_machines_fits_those_with_more_memory(
    facts: ModelFacts, cluster: ClusterFacts, workload: Workload
) -> None:
    check_larger_memory(facts, cluster, workload)
