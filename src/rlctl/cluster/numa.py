"""Binding of a process to the CPUs and memory of its GPUs' NUMA node, like `numactl`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

SWITCH = "RLCTL_BIND_NUMA"
"""Environment variable; 0 turns the binding off."""
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call `set_mempolicy`, which the C library does not wrap."""
PREFERRED = 1
"""MPOL_PREFERRED of <linux/mempolicy.h>."""


@dataclass(frozen=True)
class Topology:
    """NUMA nodes of a host, and the node that each GPU is attached to."""

    processors: Mapping[int, frozenset[int]]
    gpus: Mapping[str, int]
    """NUMA node by the GPU's number in PCI bus order, and by its UUID. GPUs with an unknown node are absent."""


def topology(root: Path = Path("/")) -> Topology:
    """Read the topology from /sys and from /proc of NVIDIA's driver, below `root`."""
    processors = {}
    for place in (root / "sys/devices/system/node").glob("node[0-9]*"):
        numbers = numbers_of((place / "cpulist").read_text())
        if numbers:  # a node without CPUs is only memory, such as a GPU's memory on GH200
            processors[int(place.name.removeprefix("node"))] = numbers
    gpus = {}
    for index, place in enumerate(sorted((root / "proc/driver/nvidia/gpus").glob("*"))):
        with contextlib.suppress(OSError, ValueError):
            node = int((root / "sys/bus/pci/devices" / place.name.lower() / "numa_node").read_text())
            if node in processors:  # -1 in virtual machines that hide the topology
                gpus[str(index)] = node
                if uuid := re.search(r"GPU UUID:\s*(\S+)", (place / "information").read_text()):
                    gpus[uuid[1]] = node
    return Topology(processors, gpus)


def numbers_of(text: str) -> frozenset[int]:
    """Read the kernel's list of processors, such as `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def places(gpus: Sequence[str], topology: Topology, allowed: Set[int]) -> tuple[tuple[int, ...], frozenset[int]] | None:
    """Return the NUMA nodes of `gpus` and their CPUs among `allowed`; None if binding would not help, because these are
    all allowed CPUs or a GPU's node is unknown."""
    nodes = sorted({topology.gpus.get(name, -1) for name in gpus})
    if not nodes or nodes[0] < 0:
        return None
    cpus = frozenset().union(*(topology.processors[node] for node in nodes)) & allowed
    return (tuple(nodes), cpus) if cpus and cpus != allowed else None


def bind() -> str:
    """Bind this process and its threads to the NUMA nodes of its visible GPUs. Return a description; empty: not
    bound."""
    gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not gpus or os.environ.get(SWITCH) == "0":
        return ""
    try:
        binding = places(gpus, topology(), os.sched_getaffinity(0))
    except (OSError, ValueError):
        return ""
    if binding is None:
        return ""
    nodes, processors = binding
    for thread in os.listdir("/proc/self/task"):  # Ray's threads call the worker's methods
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), processors)
    if len(nodes) == 1 and (number := SET_MEMPOLICY.get(platform.machine())):
        # With MPOL_PREFERRED, memory of a full node comes from another node. Containers may forbid the call, so its
        # result is ignored.
        mask = ctypes.c_ulong(1 << nodes[0])
        ctypes.CDLL(None).syscall(number, PREFERRED, ctypes.byref(mask), 8 * ctypes.sizeof(mask))
    names = ", ".join(map(str, nodes))
    return f"bound to {len(processors)} processors and the memory of NUMA node {names}, next to GPU {', '.join(gpus)}"
