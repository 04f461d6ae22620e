"""Files of users are read within bounds, and temporary folders end with their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.config.files import read_text, temporary_folder
from rlctl.errors import ConfigError

HOLDS = """
import sys, time
from rlctl.config.files import temporary_folder
with temporary_folder("test") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[subprocess.Popen[str], Path]:
    """A process in its temporary folder, which is older than the time in which folders are locked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    folder = Path(process.stdout.readline().strip())
    (folder / "log").touch()
    os.utime(folder, (0, 0))
    return process, folder


def test_a_temporary_folder_of_a_killed_process_is_removed_by_the_next(
    holder: tuple[subprocess.Popen[str], Path],
) -> None:
    process, left = holder
    with temporary_folder("other"), temporary_folder("test"):
        assert left.exists()  # it is in use
    process.send_signal(signal.SIGKILL)
    process.wait()
    with temporary_folder("other"):
        assert left.exists()
    with temporary_folder("test") as folder:
        assert not left.exists()
        assert folder.exists()
    assert not folder.exists()


def fail(error: BaseException, text: str, tell: Callable[[str], None]) -> None:
    with temporary_folder("test", tell) as folder:
        (folder / "engine-0.log").write_text(text)
        raise error


def test_the_logs_of_a_failure_are_kept_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    with pytest.raises(ValueError, match="no"):
        fail(ValueError("no"), "why", said.append)
    (folder,) = tmp_path.iterdir()
    assert said == [f"the logs of the processes are kept in {folder}"]
    assert (folder / "engine-0.log").read_text() == "why"
    for hours, there in ((23, True), (25, False)):
        os.utime(folder, (0, time.time() - 3600 * hours))
        with temporary_folder("test"):
            assert folder.exists() == there


@pytest.mark.parametrize(("end", "text"), [(KeyboardInterrupt(), "why"), (ValueError(), "")])
def test_no_folder_is_kept_after_an_interrupt_or_without_a_log(
    end: BaseException, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(type(end)):
        fail(end, text, pytest.fail)
    assert not list(tmp_path.iterdir())


def test_a_text_is_read_up_to_a_bound(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text(file, "--x", 7) == "a\nb"
    with pytest.raises(ConfigError, match=r"--x .*a\.txt cannot be read: it is larger than 6 bytes"):
        read_text(file, "--x", 6)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe")
    for name, said in (("absent", "No such file"), ("", "Is a directory"), ("image", "it is not a UTF-8 text")):
        with pytest.raises(ConfigError, match=f"--x .* cannot be read: {said}"):
            read_text(tmp_path / name, "--x")
