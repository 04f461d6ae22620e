"""The parity matrix under another version of Megatron-Core than the installed one, from its unpacked wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_S = 3600


@pytest.fixture(scope="module", params=["0.19.2"])
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(version, directory that holds its `megatron` package); skipped where the wheel cannot be fetched."""
    directory = tmp_path_factory.mktemp("megatron")
    wanted = f"megatron-core=={request.param}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(directory), wanted],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    wheels = list(directory.glob("*.whl"))
    if not wheels:
        pytest.skip(f"{wanted} cannot be fetched: {done.stderr.strip()[-200:]}")
    zipfile.ZipFile(wheels[0]).extractall(directory / "unpacked")
    return request.param, directory / "unpacked"


@pytest.mark.slow
def test_every_layout_equals_transformers_under_another_version(unpacked: tuple[str, Path]) -> None:
    version, directory = unpacked
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(HERE.parent)])}
    which = "import megatron.core; print(megatron.core.__version__)"
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", which],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert shown.stdout.split()[-1:] == [version], shown.stderr
    names = ("test_parity.py", "test_lora.py", "test_worker.py", "test_checkpoint.py", "test_host_states.py")
    cases = [str(HERE / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *cases],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=HERE.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
