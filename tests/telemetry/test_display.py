"""What a run says, and where it is said when nobody can read it."""

from __future__ import annotations

import os
import pty
from pathlib import Path
from typing import TextIO

import pytest

from rlctl.telemetry.display import Display


def closed_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed_terminal() -> TextIO:
    ours, theirs = pty.openpty()
    os.close(ours)
    return os.fdopen(theirs, "w")


def full_disk() -> TextIO:
    return Path("/dev/full").open("w")


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (closed_pipe, "Broken pipe"),
        (closed_terminal, "Input/output error"),
        pytest.param(
            full_disk, "No space left", marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
        ),
    ],
)
def test_a_terminal_that_cannot_be_written_is_told_once_in_the_log(tmp_path: Path, stream: object, why: str) -> None:
    log = tmp_path / "logs" / "driver.log"
    with stream() as broken:  # type: ignore[operator]
        with Display(steps=3, stream=broken) as display:
            display.say("before the run has its directory")
            display.log_to(log)
            display.doing("step 1")
            display.say("after it")
            display.step(0, {"reward_mean": 0.5, "seconds": {"total": 1.0}})
        broken.flush()  # as Python does at its end
    lines = [line.split(" ", 2)[2] for line in log.read_text().splitlines()]
    assert lines[0] == "before the run has its directory"
    assert lines[2:] == ["after it"]
    assert lines[1].startswith(f"stderr cannot be written ({why}")


def test_every_message_is_in_the_log_and_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stream, Display(steps=3, stream=stream) as display:
        display.log_to(tmp_path / "driver.log")
        display.say("one é")
        display.log_to(tmp_path / "no" / "such" / "driver.log")
        if Path("/dev/full").exists():
            display.log_to(Path("/dev/full"))
        display.say("two")
    assert (tmp_path / "stderr").read_text() == "one é\ntwo\n"
    assert (tmp_path / "driver.log").read_text().endswith(" one é\ntwo\n") is False
    assert " one é\n" in (tmp_path / "driver.log").read_text()
