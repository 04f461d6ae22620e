"""Functions in a process of their own."""

from __future__ import annotations

import operator
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from rlctl.config.files import read_text
from rlctl.errors import InputError, RlctlError, WaitTimeoutError
from rlctl.processes.child import call_in_child


def test_the_result_and_the_error_of_a_function_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    assert call_in_child("adding", partial(operator.add, 1, 2)) == 3
    assert len(call_in_child("a large answer", partial(operator.mul, b"x", 1 << 20))) == 1 << 20
    call_in_child("printing", partial(print, "a line"))
    assert capfd.readouterr() == ("", "a line\n")
    with pytest.raises(InputError, match="The list absent cannot be read"):
        call_in_child("raising", partial(read_text, Path("absent"), "The list"))
    with pytest.raises(RlctlError, match=r"Dividing failed unexpectedly: ZeroDivisionError: .*by zero"):
        call_in_child("dividing", partial(operator.truediv, 1, 0), quiet=True)


def test_a_child_that_is_killed_ends_or_takes_too_long_is_named() -> None:
    with pytest.raises(RlctlError, match="The work was killed by signal 9"):
        call_in_child("the work", partial(signal.raise_signal, signal.SIGKILL))
    with pytest.raises(RlctlError, match="The work was stopped by a signal"):
        call_in_child("the work", partial(signal.raise_signal, signal.SIGTERM))
    with pytest.raises(RlctlError, match="The work ended with exit code 7"):
        call_in_child("the work", partial(os._exit, 7))
    with pytest.raises(WaitTimeoutError, match=re.escape("The work took longer than 0.5 s")):
        call_in_child("the work", partial(time.sleep, 600), limit_s=0.5)
