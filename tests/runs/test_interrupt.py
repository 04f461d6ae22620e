"""Signals as requests to stop."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from rlctl.runs.interrupt import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_between_steps_the_first_is_a_request_and_the_second_ends_it(number: signal.Signals) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with StopRequest(said.append) as stop:
        with stop.between_steps():
            os.kill(os.getpid(), number)
            assert stop.requested
            assert said == ["Stopping after this step, then saving. Press Ctrl-C again to stop at once without saving."]
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the clean-up goes on
        assert said[1:] == ["Stopping; the processes are being ended."]
    assert signal.getsignal(number) == before


def test_one_that_an_import_swallows_is_raised_again() -> None:
    with StopRequest(print) as stop:
        stop.install()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.install()
        with pytest.raises(KeyboardInterrupt), stop.between_steps():
            pytest.fail("no step may run")
