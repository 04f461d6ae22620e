"""What a run says, and where it is said when nobody can read it."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import time
from pathlib import Path
from typing import TextIO

import pytest

from rlctl.errors import InputError
from rlctl.telemetry import display as shown
from rlctl.telemetry.display import Display, WorkProgress, clock, heading_line, step_line
from rlctl.telemetry.metrics import Metric
from rlctl.telemetry.phases import Phase, StepTimer


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
            display.step(1, {"reward_mean": 0.5, "seconds": {"total": 1.0}})
        broken.flush()  # as Python does at its end
    lines = [line.split(" ", 2)[2] for line in log.read_text().splitlines()]
    assert lines[0] == "before the run has its directory"
    assert lines[2] == "after it"
    assert lines[3].startswith("step 1/3 reward 0.500")
    assert lines[4:] == []
    assert lines[1].startswith(f"stderr cannot be written ({why}")


def test_every_message_is_in_the_log_and_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stream, Display(steps=3, stream=stream) as display:
        display.log_to(tmp_path / "driver.log")
        display.say("one é")
        display.log_to(tmp_path / "no" / "such" / "driver.log")
        if Path("/dev/full").exists():
            display.log_to(Path("/dev/full"))
        display.say("two")
    assert [line.split(" ", 2)[2] for line in (tmp_path / "stderr").read_text().splitlines()] == ["one é", "two"]
    assert (tmp_path / "driver.log").read_text().endswith(" one é\ntwo\n") is False
    assert " one é\n" in (tmp_path / "driver.log").read_text()


STEP = {"reward_mean": 0.5, "accuracy": 0.25, "seconds": {"total": 60.0, "generation": 20.0, "training": 40.0}}


def in_log(path: Path) -> list[str]:
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


def test_the_start_is_one_line_and_the_run_s_log_has_its_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(float(second) for second in range(0, 10_000, 70))
    monkeypatch.setattr("rlctl.telemetry.display.time.monotonic", lambda: next(clock))
    with (tmp_path / "stderr").open("w") as stream, Display(steps=3, stream=stream) as display:
        display.log_to(tmp_path / "log")
        display.doing("starting Ray")
        display.doing("starting engines", own_bar=True)
        display.begin_step(1)
        display.phase(Phase.GENERATION)
        display.phase(Phase.OTHER)
        display.step(1, STEP)
    lines = in_log(tmp_path / "stderr")
    assert lines[0] == "started in 2:20: starting Ray 70 s, starting engines 70 s"
    assert lines[1].startswith("step 1/3 reward 0.500")
    assert len(lines) == 2
    assert in_log(tmp_path / "log")[:2] == ["starting Ray: 70.0 s", "starting engines: 70.0 s"]
    assert (tmp_path / "stderr").read_text()[:4].isdigit()


def test_a_phase_that_failed_is_not_shown_as_done(tmp_path: Path) -> None:
    def fails() -> None:
        with (tmp_path / "stderr").open("w") as stream, Display(steps=3, stream=stream) as display:
            display.doing("starting Ray")
            raise InputError("x")

    with pytest.raises(InputError):
        fails()
    assert (tmp_path / "stderr").read_text() == ""


def test_a_log_is_reminded_of_what_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "REMIND_S", 0.01)
    path = tmp_path / "stderr"
    with path.open("w", buffering=1) as stream, Display(steps=3, stream=stream) as display:
        display.progress = lambda phase: (18, 32) if phase is Phase.GENERATION else None
        display.begin_step(2)
        display.phase(Phase.GENERATION)
        for _ in range(1000):
            if path.stat().st_size:
                break
            time.sleep(0.01)
    assert in_log(path)[0].startswith("step 2/3 · generating 18/32 · 0:0")


def test_the_last_line_says_what_goes_on_how_long_and_how_much_is_left(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w") as stream, Display(steps=3, stream=stream, quiet=True) as display:
        timer = StepTimer()
        timer.watch = display.phase
        assert display.line() == ""
        display.doing("starting Ray")
        assert display.line() == "starting Ray · 0:00"
        display.begin_step(1)
        with timer(Phase.TRAINING):
            assert display.line() == "step 1/3 · training · 0:00"
            with timer(Phase.CHECKPOINT):
                assert display.line() == "step 1/3 · saving · 0:00"
            with timer(Phase.WAITING):
                assert display.line() == "step 1/3 · waiting for rollouts · 0:00"
            assert "training" in display.line()
        display.step(1, STEP)
        display.begin_step(2)
        assert display.line() in ("step 2/3 · 0:00 · 2:00 left", "step 2/3 · 0:00 · 1:59 left")
    assert (tmp_path / "stderr").read_text() == ""


def test_durations_are_clocks() -> None:
    assert [clock(seconds) for seconds in (7.9, 100, 3723)] == ["0:07", "1:40", "1:02:03"]


def test_columns_fit_the_width_and_the_less_important_go_first() -> None:
    declared = [Metric("kl", "mean", column="kl"), Metric("entropy", "mean", column="entropy")]
    for width in (200, 120, 100, 80, 60, 40, 20):
        heading = heading_line(declared, width)
        line = step_line(0, 3, STEP, declared, plain=False, width=width)
        assert max(len(heading), len(line)) <= width
        values = line.partition("gen 20.0")[0].split()
        assert len(heading.split()) - 2 * ("phases (s)" in heading) == len(values)
    assert heading_line(declared, 40).split() == ["step", "reward", "length", "total"]
    assert heading_line(declared, 20).split() == ["step", "reward"]
    assert "phases" in heading_line(declared, 200)


def test_a_run_without_rewards_has_no_column_for_them() -> None:
    without = ("reward_mean", "accuracy")
    assert {"reward", "acc"}.isdisjoint(heading_line([], 200, without).split())
    assert "reward" not in step_line(0, 3, STEP, plain=True, without=without).partition("|")[0]


def test_a_terminal_is_drawn_in_and_left_clean(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, Display(steps=3, stream=stream) as display:
        assert display.in_terminal
        display.doing("starting Ray")
        display.begin_step(1)
        display.step(1, STEP)
        assert display._live is not None
    text = ""
    with contextlib.suppress(OSError):  # the terminal is closed, and all is read
        while part := os.read(ours, 1 << 16):
            text += part.decode()
    os.close(ours)
    assert "starting Ray" in text
    assert "1/3" in text
    assert text.rpartition("\x1b[?25h")[1]  # the cursor is shown again
    assert "\x1b[2K" in text.rpartition("step 1/3")[2]  # the last line is taken away


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 10.0, 40.0, 50.0])
    monkeypatch.setattr(shown.time, "monotonic", lambda: next(now))
    with WorkProgress("samples", 100, done=20) as work:
        for count in (10, 50, 20):
            work.advance("model, task", count)
    assert capsys.readouterr().err.splitlines() == [
        "model, task: 80 of 100 samples, 1.5 a second, 13 s left",
        "model, task: 100 of 100 samples, 1.6 a second",
    ]


def test_a_terminal_gets_a_bar_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with WorkProgress("samples", 10) as work:
        work.advance("model, task", 4)
    assert "4/10" in out.getvalue()
    assert "samples/s" in out.getvalue()
    assert "left" in out.getvalue()
