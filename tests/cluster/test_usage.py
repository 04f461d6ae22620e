"""What processes and GPUs use, sampled; the GPUs are those of an NVML that tells what it is asked."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rlctl.cluster.usage import GIB, GpuSampler, GpuUsage, Usage, UsageSampler, system_metrics, visible_gpus


def usage(node: str, memory: int, **more: object) -> Usage:
    found = {"process_cpu_percent": 50.0, "node_cpu_percent": 20.0, "node_bytes": 8 * GIB, "node_total_bytes": 32 * GIB}
    return Usage(**{"node": node, "process_bytes": memory, **found, **more})  # type: ignore[arg-type]


def test_a_process_and_its_node_are_sampled() -> None:
    found = UsageSampler().sample()
    assert 2**20 < found.process_bytes < found.node_total_bytes
    assert 0 < found.node_bytes < found.node_total_bytes
    assert found.gpus == {}


def test_the_metrics_are_those_of_the_fullest_process_and_of_each_node_and_gpu_once() -> None:
    gpus = {"0": GpuUsage(4 * GIB, 90.0), "1": GpuUsage(6 * GIB, 30.0)}
    driver = usage("a", GIB)
    policy = [usage("a", 2 * GIB, gpus=gpus), usage("b", 3 * GIB, node_cpu_percent=40.0, node_bytes=16 * GIB)]
    engines = [usage("a", GIB, gpus=gpus, process_cpu_percent=0.0)]
    assert system_metrics(driver, policy, engines) == {
        "cpu_percent": 30.0, "memory_gib": 16.0, "memory_percent": 50.0,
        "driver_memory_gib": 1.0, "driver_cpu_percent": 50.0, "policy_memory_gib": 3.0, "policy_cpu_percent": 50.0,
        "engine_memory_gib": 1.0, "engine_cpu_percent": 0.0,
        "gpu_memory_gib": 6.0, "gpu_busy_percent": 60.0, "gpu_busy_percent_least": 30.0,
    }  # fmt: skip
    assert "gpu_memory_gib" not in system_metrics(driver, [], [])


def test_the_slowest_gpu_and_node_are_named_by_their_clocks() -> None:
    """Of two nodes: one GPU of a is throttled most, and those of b are slower on average."""
    of_a = {"0": GpuUsage(GIB, 99.0, 1980.0), "1": GpuUsage(GIB, 99.0, 1200.0), "2": GpuUsage(GIB, 0.0)}
    of_b = {"0": GpuUsage(GIB, 99.0, 1500.0), "1": GpuUsage(GIB, 99.0, 1500.0)}
    found = system_metrics(usage("a", GIB), [usage("a", GIB, gpus=of_a), usage("b", GIB, gpus=of_b)], [])
    assert (found["slowest_gpu"], found["slowest_node"]) == ("a GPU 1", "b")
    assert (found["gpu_clock_mhz_least"], found["gpu_clock_mhz"]) == (1200.0, (1980 + 1200 + 1500 + 1500) / 4)
    alone = system_metrics(usage("a", GIB), [usage("a", GIB, gpus={"0": of_a["0"]})], [])
    assert not [name for name in alone if "clock" in name or "slowest" in name]


def test_only_the_gpus_that_the_process_sees_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2) == ["0", "1"]
    for value, expected in (("1,3", ["1", "3"]), ("GPU-abc", ["GPU-abc"]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus(4) == expected


def test_gpus_show_their_fullest_moment_and_their_mean_use_since_the_sample_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, busy, clocks = [5, 9, 2, 3], [100, 50, 0, 30], [1900, 1700, 1500]

    class Nvml(ModuleType):
        NVMLError = OSError
        nvmlInit = staticmethod(lambda: None)
        nvmlDeviceGetCount = staticmethod(lambda: 1)
        nvmlDeviceGetHandleByIndex = staticmethod(int)
        nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(used=used.pop(0)))
        nvmlDeviceGetUtilizationRates = staticmethod(lambda handle: SimpleNamespace(gpu=busy.pop(0)))
        NVML_CLOCK_SM = 1
        nvmlDeviceGetClockInfo = staticmethod(lambda handle, kind: clocks.pop(0))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(GpuSampler, "_work", lambda self: None)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    sampler = GpuSampler.start()
    assert sampler is not None
    sampler.look()
    assert sampler.sample() == {"0": GpuUsage(9, 50.0, 1800.0)}
    assert sampler.sample() == {"0": GpuUsage(3, 30.0, 1500.0)}
    monkeypatch.setattr(Nvml, "nvmlInit", staticmethod(lambda: (_ for _ in ()).throw(OSError("no driver"))))
    assert GpuSampler.start() is None
