"""`rlctl doctor --ray-address`: checks and rates of every node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import run
from rlctl.doctor import gpus
from rlctl.doctor.finding import Check
from rlctl.doctor.nodes import Measured, ask_nodes, checks_here, compare_checks, rates_here, slowest_first


def test_the_worst_node_gives_the_check_of_all() -> None:
    fine, many = Check("gpus", "ok", "8 x H100"), Check("gpu-programs", "warn", "python (pid 7)", "End them.")
    broken = Check("gpu-memory-errors", "fail", "uncorrected memory errors on GPU 3", "Replace it.")
    answers: dict[str, list[Check] | str] = {
        "a": [fine, many, Check("gpu-memory-errors", "ok", "none")],
        "b": [fine, Check("gpu-programs", "ok", "nothing"), broken],
        "c": [fine, many, broken],
        "d": "it died",
    }
    assert [(one.name, one.status, one.detail, one.fix) for one in compare_checks(answers)] == [
        ("node-checks", "fail", "no checks from d: it died", "See `ray status`, and the logs of Ray there."),
        ("node-gpus", "ok", "3 node(s): 8 x H100", None),
        ("node-gpu-programs", "warn", "a, c: python (pid 7)", "End them."),
        ("node-gpu-memory-errors", "fail", "b, c: uncorrected memory errors on GPU 3", "Replace it."),
    ]


def test_the_slowest_gpu_comes_first_and_is_named() -> None:
    """Medians by hand: 600 TFLOP/s of (600, 610, 480, 600), 40 GB/s of (40, 40); 480 / 600 = 80%."""

    def rates(tflops: float) -> dict[str, Any]:
        return {"bfloat16 TFLOP/s": tflops, "memory GB/s": 3000.0}

    group = {"processes": 2.0, "all-reduce GB/s": 40.0}
    found = slowest_first({
        "a": [Measured("", "GPU 0", "rates", rates(600)), Measured("", "GPU 1", "rates", rates(610)),
              Measured("", "", "collectives", group)],
        "b": [Measured("", "GPU 0", "rates", rates(480)), Measured("", "GPU 1", "rates", rates(600)),
              Measured("", "", "collectives", group | {"processes": 1.0})],
        "c": "RayTaskError: no disk",
        "d": [Measured("", "", "disk", problem="OSError: full")],
    })  # fmt: skip
    first = [(one.status, one.node, one.place) for one in found[:3]]
    assert first == [("FAIL", "c", ""), ("FAIL", "d", ""), ("slow", "b", "GPU 0")]
    assert {one.status for one in found[3:]} == {"ok"}
    assert "480 bfloat16" not in found[2].line()
    assert found[2].line().endswith("bfloat16 TFLOP/s 480, memory GB/s 3e+03 (80% of the median)")
    assert [one.line().split()[0] for one in found[:3]] == ["FAIL", "FAIL", "slow"]


def test_the_nodes_of_a_session_are_checked_and_measured(placement: Any, tmp_path: Path) -> None:
    """A real session with one node, which has no GPU driver."""
    (address,) = {bundle.node for bundle in placement.bundles}
    answers = ask_nodes(checks_here, 2, "auto", True, limit_s=120)
    assert [*answers] == [address]
    (first, *others) = compare_checks(answers)
    assert (first.name, first.status) == ("node-gpus", "fail")
    assert "no NVIDIA GPU was found, but each node needs 2" in first.detail
    assert [one.name for one in others] == ["node-left-over-memory", "node-locked-memory"]
    (measured,) = slowest_first(ask_nodes(rates_here, ["disk"], str(tmp_path / "runs"), True, limit_s=240))
    assert (measured.node, measured.status, measured.figures["directory"]) == (address, "ok", str(tmp_path))
    assert set(measured.figures) == {"directory", "checkpoint GB/s", "page cache GB/s"}
    assert [*tmp_path.iterdir()] == []
    late = ask_nodes(checks_here, 0, "auto", True, limit_s=0.0)
    assert isinstance(late[address], str)


def test_probes_that_do_not_run_on_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--deep", "--ray-address", "10.0.0.9:1", "--only", "grpo"]) == 2
    assert "--only grpo does not run on the nodes of --ray-address" in capsys.readouterr().err


def test_the_binding_to_numa_nodes_is_told(tmp_path: Path) -> None:
    assert "nothing to bind" in gpus.check_numa(tmp_path).detail
    for node in (0, 1):
        place = tmp_path / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{8 * node}-{8 * node + 7}\n")
    assert "does not know which one each GPU is next to: nothing is bound" in gpus.check_numa(tmp_path).detail
    (tmp_path / "proc/driver/nvidia/gpus/0000:1B:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:1B:00.0/information").write_text("GPU UUID: \t GPU-1\n")
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert gpus.check_numa(tmp_path).detail == "each process is bound to the NUMA node of its GPU (1)"
