"""Usage of the machine by a run, sampled once a step: memory, processors, and NVIDIA GPUs by NVML."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import psutil

GIB = 2**30
GPU_INTERVAL_S = 1.0
"""Seconds between two GPU samples. NVML averages over about the last second."""


@dataclass(frozen=True)
class GpuUsage:
    """One GPU since the previous sample."""

    memory_bytes: int
    """Peak bytes in use by all processes."""
    busy_percent: float
    """Share of the time with a running kernel."""
    clock_mhz: float = 0.0
    """Clock of its processors while a kernel ran; 0: none ran."""


@dataclass(frozen=True)
class Usage:
    """One process and its node since the previous sample."""

    node: str
    process_bytes: int
    """Resident memory of the process without its children."""
    process_cpu_percent: float
    """100 is one processor."""
    node_cpu_percent: float
    """100 is all processors of the node."""
    node_bytes: int
    """Used memory of the node."""
    node_total_bytes: int
    gpus: dict[str, GpuUsage] = field(default_factory=dict)
    """The process's visible GPUs, by number on the node."""


class UsageSampler:
    """Samples this process and its node; the first sample is of the time since the sampler was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent(None)
        psutil.cpu_percent(None)
        self._gpus = GpuSampler.start()

    def sample(self) -> Usage:
        """Return current memory use, and CPU and GPU use since the last sample."""
        memory = psutil.virtual_memory()
        return Usage(
            node=os.uname().nodename,
            process_bytes=self._process.memory_info().rss,
            process_cpu_percent=self._process.cpu_percent(None),
            node_cpu_percent=psutil.cpu_percent(None),
            node_bytes=memory.total - memory.available,
            node_total_bytes=memory.total,
            gpus=self._gpus.sample() if self._gpus else {},
        )


class GpuSampler:
    """Sample this process's GPUs every second in a thread, to cover the whole step."""

    def __init__(self, nvml: Any, handles: dict[str, Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._lock = threading.Lock()
        self._seen: dict[str, list[GpuUsage]] = {name: [] for name in handles}
        self.look()
        threading.Thread(target=self._work, name="gpu usage", daemon=True).start()

    @classmethod
    def start(cls) -> GpuSampler | None:
        """Return a sampler of the GPUs that this process sees; None without GPUs, a driver or the package."""
        try:
            import pynvml  # pyright: ignore[reportMissingImports]  # of nvidia-ml-py, which machines without GPUs lack
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            handles = {}
            for name in visible_gpus(pynvml.nvmlDeviceGetCount()):
                if name.isdigit():
                    handles[name] = pynvml.nvmlDeviceGetHandleByIndex(int(name))
                else:
                    handles[name] = pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError:
            return None
        return cls(pynvml, handles) if handles else None

    def look(self) -> None:
        for name, handle in self._handles.items():
            with contextlib.suppress(self._nvml.NVMLError):
                used = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
                busy = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                clock = float(self._nvml.nvmlDeviceGetClockInfo(handle, self._nvml.NVML_CLOCK_SM)) if busy else 0.0
                with self._lock:
                    self._seen[name].append(GpuUsage(used, busy, clock))

    def sample(self) -> dict[str, GpuUsage]:
        self.look()
        with self._lock:
            seen, self._seen = self._seen, {name: [] for name in self._handles}
        return {name: _together(looks) for name, looks in seen.items() if looks}

    def _work(self) -> None:
        while True:
            time.sleep(GPU_INTERVAL_S)
            self.look()


def _together(looks: Sequence[GpuUsage]) -> GpuUsage:
    clocks = [look.clock_mhz for look in looks if look.clock_mhz]
    fullest = max(look.memory_bytes for look in looks)
    return GpuUsage(fullest, fmean(look.busy_percent for look in looks), fmean(clocks) if clocks else 0.0)


def visible_gpus(count: int) -> list[str]:
    """Return the numbers or UUIDs of the `count` GPUs of the node that CUDA_VISIBLE_DEVICES lets this process see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]


def system_metrics(driver: Usage, policy: Sequence[Usage], engines: Sequence[Usage]) -> dict[str, Any]:
    """Return `system` of a metrics line: maxima over nodes and processes, and means over processors. It names the GPU
    with the lowest clock and the node with the lowest mean clock, since all ranks wait for the slowest in each
    collective and seem busy."""
    everyone = [driver, *policy, *engines]
    nodes = {usage.node: usage for usage in everyone}.values()
    metrics: dict[str, Any] = {
        "cpu_percent": fmean(usage.node_cpu_percent for usage in nodes),
        "memory_gib": max(usage.node_bytes for usage in nodes) / GIB,
        "memory_percent": max(100 * usage.node_bytes / usage.node_total_bytes for usage in nodes),
    }
    for name, group in (("driver", [driver]), ("policy", policy), ("engine", engines)):
        if group:
            metrics[f"{name}_memory_gib"] = max(usage.process_bytes for usage in group) / GIB
            metrics[f"{name}_cpu_percent"] = fmean(usage.process_cpu_percent for usage in group)
    by_name = {(usage.node, name): gpu for usage in everyone for name, gpu in usage.gpus.items()}
    if gpus := by_name.values():
        metrics["gpu_memory_gib"] = max(gpu.memory_bytes for gpu in gpus) / GIB
        metrics["gpu_busy_percent"] = fmean(gpu.busy_percent for gpu in gpus)
        metrics["gpu_busy_percent_least"] = min(gpu.busy_percent for gpu in gpus)
        metrics |= _slowest({place: gpu.clock_mhz for place, gpu in by_name.items() if gpu.clock_mhz})
    return metrics


def _slowest(clocks: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """Return names and clocks (MHz) of the slowest GPU and node; `clocks` by node and GPU."""
    slowest: dict[str, Any] = {}
    if len(clocks) > 1:
        node, gpu = min(clocks, key=lambda place: clocks[place])
        slowest = {"slowest_gpu": f"{node} GPU {gpu}", "gpu_clock_mhz_least": clocks[node, gpu]}
        slowest["gpu_clock_mhz"] = fmean(clocks.values())
        nodes = {node for node, _ in clocks}
        means = {name: fmean(clock for (node, _), clock in clocks.items() if node == name) for name in nodes}
        if len(means) > 1:
            slowest["slowest_node"] = min(means, key=lambda name: means[name])
    return slowest
