"""The machine that starts a run: what its manifest and its report say about it."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from pathlib import Path

from rlctl.errors import MachineError
from rlctl.planner.from_config import gpu_driver, local_gpus

CPU_INFO = Path("/proc/cpuinfo")


def host_facts() -> dict[str, str]:
    """Return name, operating system, processor, and where there are any GPUs and their driver."""
    try:
        gpus, driver = Counter(local_gpus()), gpu_driver()
    except MachineError:  # the driver does not answer, which the run reports
        gpus, driver = Counter[str](), ""
    found = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": f"{len(os.sched_getaffinity(0))} cores, {processor_name()}",
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()),
        "driver": driver,
    }
    return {name: text for name, text in found.items() if text}


def processor_name(info: Path = CPU_INFO) -> str:
    """Return the processor's name, or its architecture if the kernel does not give the name."""
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
