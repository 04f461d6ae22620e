"""Machine profiles: kept, read back, and used in place of the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import InputError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.catalog import lookup
from rlctl.planner.from_config import cluster_from_config
from rlctl.planner.inputs.cluster import (
    GIB,
    REACHED,
    ClusterFacts,
    MachineProfile,
    cpu_device,
    load_profile,
    local_cpu,
    make_cluster,
    profile_path,
    save_profile,
    with_profile,
)
from rlctl.planner.inputs.request import Workload
from rlctl.settings.run import ClusterConfig
from rlctl.telemetry.phases import Phase
from support.catalog_models import make_plan


def profile(
    device: str = "cpu", devices: int = 2, matmul: float = 40e9, memory: float = 10e9, **more: float
) -> MachineProfile:
    return MachineProfile("host", device, "2026-01-01 00:00", devices, matmul, memory, **more)


def rates(**values: Any) -> str:
    return json.dumps(dataclasses.asdict(profile(**values)))


def test_a_profile_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "machine.json"
    save_profile(profile(all_reduce=1e9), path)
    assert load_profile(path) == profile(all_reduce=1e9)
    assert load_profile(tmp_path / "absent.json") is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"host": "a"}', "[" * 100_000, rates(matmul="x"), rates(memory=0), rates(all_reduce=-1)]
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"machine\.json"):
        load_profile(path)


def test_a_slower_machine_takes_longer() -> None:
    facts = lookup("SmolLM2-135M")
    assert facts is not None
    cluster = ClusterFacts(cpu_device(2, 24 * GIB), 1, 0)
    slow = with_profile(cluster, profile(matmul=cluster.device.bf16 / 2))
    times = [make_plan(facts, c, Workload(8, 4, 128)).seconds[Phase.TRAINING] for c in (cluster, slow)]
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)
    assert "measured" in slow.origin


def test_a_profile_of_another_machine_changes_nothing() -> None:
    cpu = ClusterFacts(cpu_device(4, 24 * GIB), 1, 0)
    assert with_profile(cpu, profile(devices=2)) is cpu
    assert with_profile(make_cluster("h100"), profile()) == make_cluster("h100")
    assert with_profile(cpu, None) is cpu


def test_a_gpu_that_reaches_what_it_should_keeps_its_peak() -> None:
    table = make_cluster("h200")
    measured = with_profile(table, profile("h200", 8, REACHED * table.device.bf16, 0.9 * table.device.memory_bandwidth))
    assert measured.device.bf16 == pytest.approx(table.device.bf16)
    assert measured.device.fp8 == pytest.approx(table.device.fp8)
    assert measured.device.memory_bandwidth == pytest.approx(table.device.memory_bandwidth)


def test_the_planner_takes_the_profile_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_MACHINE_PROFILE", str(tmp_path / "machine.json"))
    config = RlConfig(cluster=ClusterConfig(gpu="cpu"))
    assert cluster_from_config(config).origin == "table"
    save_profile(profile(devices=local_cpu().cores, matmul=12e9), profile_path())
    assert cluster_from_config(config).device.bf16 == 12e9
