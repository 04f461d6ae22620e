"""Ranks and engines run next to their GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.cluster import numa
from rlctl.cluster.numa import Topology, numbers_of, places, topology

FIRST = frozenset({*range(56), *range(112, 168)})
SECOND = frozenset({*range(56, 112), *range(168, 224)})
BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
"""A DGX H100: NUMA nodes 0 and 1 have four GPUs each."""


def recorded(root: Path, nodes: dict[int, str], gpus: dict[str, int]) -> Path:
    for node, processors in nodes.items():
        place = root / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(processors + "\n")
    for bus, node in gpus.items():
        device, driver = (
            root / f"sys/bus/pci/devices/0000:{bus}:00.0",
            root / f"proc/driver/nvidia/gpus/0000:{bus}:00.0",
        )
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        driver.mkdir(parents=True)
        (driver / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-{bus}-00\n")
    return root


@pytest.fixture
def dgx(tmp_path: Path) -> Topology:
    gpus = {bus: int(place >= 4) for place, bus in enumerate(BUSES)}
    return topology(recorded(tmp_path, {0: "0-55,112-167", 1: "56-111,168-223"}, gpus))


def test_a_recorded_topology_gives_each_gpu_its_processors(dgx: Topology) -> None:
    everything = FIRST | SECOND
    for number, bus in enumerate(BUSES):
        expected = ((int(number >= 4),), SECOND if number >= 4 else FIRST)
        assert places([str(number)], dgx, everything) == expected
        assert places([f"GPU-{bus}-00"], dgx, everything) == expected
    assert places(["4", "5", "6", "7"], dgx, everything) == ((1,), SECOND)
    # Slurm or a container may allow a part of the processors.
    assert places(["5"], dgx, frozenset(range(48, 64))) == ((1,), frozenset(range(56, 64)))


def test_no_process_is_bound_where_it_does_not_help(dgx: Topology, tmp_path: Path) -> None:
    everything = FIRST | SECOND
    assert places(["3", "4"], dgx, everything) is None  # both nodes
    assert places(["0"], dgx, FIRST) is None  # it may use no others
    assert places(["0"], dgx, SECOND) is None  # none of its processors is allowed
    assert places(["9"], dgx, everything) is None
    assert places([], dgx, everything) is None
    single = topology(recorded(tmp_path / "single", {0: "0-31"}, {"01": 0}))
    assert places(["0"], single, frozenset(range(32))) is None
    virtual = topology(recorded(tmp_path / "virtual", {0: "0-31", 1: "32-63"}, {"01": -1}))
    assert places(["0"], virtual, frozenset(range(64))) is None
    # The memory of a GH200's GPU is a NUMA node without processors.
    grace = topology(recorded(tmp_path / "grace", {0: "0-71", 1: "72-143", 2: ""}, {"01": 0, "02": 1}))
    assert places(["1"], grace, frozenset(range(144))) == ((1,), frozenset(range(72, 144)))


def test_lists_of_the_kernel() -> None:
    assert numbers_of("0-2,7,9-10\n") == {0, 1, 2, 7, 9, 10}
    assert numbers_of("\n") == frozenset()


PROGRAM = """
import os, sys, threading
from rlctl.cluster import numa
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
first = min(os.sched_getaffinity(0))
numa.topology = lambda: numa.Topology({0: frozenset({first})}, {"5": 0})
print(numa.bind())
print([os.sched_getaffinity(int(thread)) == {first} for thread in os.listdir("/proc/self/task")])
print(open("/proc/self/numa_maps").read().count(" prefer") > 0 if os.path.exists("/proc/self/numa_maps") else True)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be divided")
@pytest.mark.parametrize("switch", ["", "0"])
def test_a_process_and_its_threads_are_bound(switch: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "5", numa.SWITCH: switch}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    said, threads, preferred = done.stdout.splitlines()
    bound = switch == ""
    assert said == ("bound to 1 processors and the memory of NUMA node 0, next to GPU 5" if bound else "")
    assert threads == str([bound] * len(threads.split(",")))
    assert preferred in ("True", str(bound))
