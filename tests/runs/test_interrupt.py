"""Signals as requests to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from rlctl.runs.interrupt import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_between_steps_the_first_is_a_request_and_the_second_ends_it(number: signal.Signals) -> None:
    said: list[str] = []
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    before = [signal.getsignal(one) for one in SIGNALS]
    with StopRequest(said.append) as stop:
        with stop.between_steps():
            os.kill(os.getpid(), number)
            assert stop.requested
            assert said[-1].startswith("Stopping after this step")
            assert ("Press Ctrl-C again" in said[-1]) == (number == signal.SIGINT)
            assert stop.by == ("Ctrl-C" if number == signal.SIGINT else number.name)
            if number != signal.SIGINT:  # `timeout` and the shell signal a run twice for one reason
                os.kill(os.getpid(), number)
                assert said.count("The terminal was closed (SIGHUP).") == 2 * (number == signal.SIGHUP)
                number = signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the clean-up goes on
        assert said[-1] == "Stopping; the processes are being ended."
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(print) as stop, stop.between_steps():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_that_an_import_swallows_is_raised_again() -> None:
    with StopRequest(print) as stop:
        stop.install()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.install()
        with pytest.raises(KeyboardInterrupt), stop.between_steps():
            pytest.fail("no step may run")


def test_one_that_no_code_can_raise_is_raised_later_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)

    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    with StopRequest(print) as stop:
        Owner()
        with pytest.raises(KeyboardInterrupt):
            stop.install()
    assert not heard
    assert sys.unraisablehook == heard.append


def test_a_step_that_takes_longer_than_a_program_waits_is_abandoned() -> None:
    said: list[str] = []
    with StopRequest(said.append) as stop:
        stop.limit_s = 0.1
        with stop.between_steps():
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                time.sleep(60)
        assert said[0] == "Stopping after this step (SIGTERM), or in 0 s without it (run.stop_within_s)."
        assert "is abandoned" in said[1]
        os.kill(os.getpid(), signal.SIGTERM)  # the clean-up goes on


def test_a_run_that_cannot_end_shows_where_it_waits_and_is_ended() -> None:
    code = (
        "import os, signal, threading\nfrom rlctl.runs import interrupt\ninterrupt.CLEANUP_LIMIT_S = 0.2\n"
        "def waits_for_ever():\n    threading.Lock().acquire() and threading.Event().wait()\n"
        "with interrupt.StopRequest(print):\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally:\n        waits_for_ever()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "in waits_for_ever" in done.stderr
