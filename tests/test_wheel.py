"""The wheel is complete: the command works from it alone, in another environment and directory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlctl import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(place.glob("*.whl"))


@pytest.fixture(scope="module")
def rlctl(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `rlctl` of an environment that the wheel is installed into, in a directory that has nothing to do with it.
    The wheel's own dependencies are linked to those of the tests; no package of an extra is there."""
    place = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=300)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "--quiet", "install"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True, timeout=300)
    packages, here = next((place / "lib").glob("python*/site-packages")), Path(sysconfig.get_path("purelib"))
    for name in base_distributions():
        with contextlib.suppress(metadata.PackageNotFoundError):
            tops = {file.parts[0] for file in metadata.files(name) or []} - {"..", "__pycache__", "bin"}
            for top in tops:
                if not (packages / top).exists():
                    (packages / top).symlink_to(here / top)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(place / "bin" / "rlctl"), *arguments]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(place)}
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)

    return run


def test_the_wheel_holds_presets_types_and_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    presets = {path.name for path in (ROOT / "presets").glob("*.yaml")}
    assert {Path(name).name for name in names if name.startswith("rlctl/presets/")} == presets
    assert "rlctl/py.typed" in names
    assert f"rlctl-{__version__}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if not name.startswith(("rlctl/", "rlctl-"))]


def test_the_installed_command_knows_its_version_and_presets(rlctl: Callable) -> None:
    said = rlctl("--version").stdout.splitlines()
    assert said[0] == f"rlctl {__version__}"
    assert "torch" not in " ".join(said)
    assert "rlctl train grpo" in rlctl("--help").stdout
    listed = rlctl("presets", "ls")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.split()[0] == "laptop"


def test_the_installed_command_plans(rlctl: Callable) -> None:
    done = rlctl("plan", "--model", "meta-llama/Llama-3.1-8B", "--preset", "1node", "--gpu", "h100")
    assert done.returncode == 0, done.stderr
    assert "training    megatron" in done.stdout


def test_the_installed_command_says_what_recipes_need(rlctl: Callable) -> None:
    recipe = ROOT / "tests" / "recipes" / "nemo_rl" / "llama_megatron.yaml"
    done = rlctl("config", "show", "--config", str(recipe))
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs hydra-core and omegaconf: `pip install hydra-core omegaconf`" in done.stderr


def base_distributions() -> set[str]:
    """What a wheel installed without extras brings: the dependencies, and theirs."""
    found: set[str] = set()
    waiting = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in found:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.add(name)
                waiting += metadata.requires(name) or []
    return found


def test_a_plan_and_doctor_need_no_package_of_an_extra() -> None:
    plan = ["plan", "--model", "Qwen/Qwen3-8B", "--preset", "1node", "--gpu", "h100"]
    ran = f"from rlctl.cli import run; run({plan}); run(['doctor', '--quick'])"
    code = f"import sys; before = set(sys.modules); {ran}; print('LOADED', *set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    loaded = {name.partition(".")[0] for name in done.stdout.rpartition("LOADED")[2].split()}
    assert "rlctl" in loaded, done.stderr
    owners = metadata.packages_distributions()
    third_party = {canonicalize_name(owner) for name in loaded for owner in owners.get(name, ()) if name != "rlctl"}
    assert third_party - {"sniffio"} <= base_distributions()  # httpcore2 uses it where it is installed
