"""The program that becomes a worker does what Ray's own does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private.workers import setup_worker

from rlctl.cluster import worker_start

SHOWS = """
import json, os, sys
shown = {name: value for name, value in os.environ.items() if name.startswith("SHOWN")}
print(json.dumps([sys.argv, sys.flags.no_site, shown]))
"""


def become(program: str | None, worker: Path, language: str, **context: Any) -> list[Any]:
    words = [str(worker), "--one=a b", "--two", f"--language={language}"]
    words.append(f"--serialized-runtime-env-context={json.dumps(context)}")
    done = subprocess.run(
        [sys.executable, str(program), *words], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "SHOWN_BEFORE": "before"},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("python", [sys.executable, f"{sys.executable} -S", None])
def test_a_worker_has_the_variables_and_the_python_that_it_was_asked_with(tmp_path: Path, python: str | None) -> None:
    worker = tmp_path / "default worker.py"
    worker.write_text(SHOWS)
    variables = {"SHOWN_A": "x${SHOWN_BEFORE}y${NOT_THERE}", "SHOWN_B": "{plain} $", "SHOWN_C": ""}
    found = become(worker_start.__file__, worker, "PYTHON", env_vars=variables, py_executable=python, java_jars=[])
    assert found == become(setup_worker.__file__, worker, "PYTHON", env_vars=variables, py_executable=python)
    assert found[2]["SHOWN_A"] == "xbeforey"


@pytest.mark.parametrize(("language", "more"), [("JAVA", {}), ("PYTHON", {"command_prefix": ["nice"]})])
def test_what_rlctl_does_not_ask_for_is_left_to_rays_own(tmp_path: Path, language: str, more: dict[str, Any]) -> None:
    (tmp_path / "setup_worker.py").write_text(SHOWS)
    (words, *_) = become(worker_start.__file__, tmp_path / "default_worker.py", language, **more)
    assert words[1:4] == [str(tmp_path / "default_worker.py"), "--one=a b", "--two"]
    assert json.loads(words[-1].partition("=")[2]) == more
