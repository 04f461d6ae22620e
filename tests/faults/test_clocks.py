"""The clock of a machine that is set during a run changes nothing: limits of time count the seconds that passed."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from support.runs import LIMIT_S, command, finish, results, started, wait_for_step

SOURCES = Path(__file__).parents[2] / "src" / "rlctl"
READERS = {
    "config/files.py": "the age of a file",
    "doctor/calibrate.py": "the date of a measurement",
    "doctor/host.py": "the age of files",
    "doctor/network.py": "the clocks of nodes are compared",
    "telemetry/metrics.py": "the date of an event",
}
"""What may ask what time it is, and for what. Limits and durations are counted with time.monotonic and its like."""
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
NAMED = os.environ.get("LIBFAKETIME")  # where it is not installed
LIBRARIES = [Path(NAMED)] if NAMED else sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def test_only_what_is_about_dates_asks_what_time_it_is() -> None:
    found = set()
    for path in SOURCES.rglob("*.py"):
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        if any(name.removeprefix("datetime.") in CLOCKS for name in names):
            found.add(str(path.relative_to(SOURCES)))
    assert found <= set(READERS)


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARIES, reason="needs libfaketime (Debian's package of this name) to set a run's clock")
def test_a_clock_that_is_set_changes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """An hour forward, then two back, for every process of a run; no limit of time is as long as an hour."""
    clock, run_dir, log = tmp_path / "clock", tmp_path / "run", tmp_path / "log"
    limits = ("--set", "cluster.step_timeout_s=600", "--set", "refit.timeout_s=300", "--steps", "40")
    done = finish(command(tiny_llama, tmp_path / "undisturbed", *limits))
    assert done.returncode == 0, done.stderr
    clock.write_text("+0\n")
    faked = ["env", f"LD_PRELOAD={LIBRARIES[-1]}", f"FAKETIME_TIMESTAMP_FILE={clock}", "FAKETIME_CACHE_DURATION=1",
             "FAKETIME_DONT_RESET=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", "NO_FAKE_STAT=1"]  # fmt: skip
    with started([*faked, *command(tiny_llama, run_dir, *limits)], log) as run:
        for steps, offset in ((3, "+1h"), (8, "-1h")):
            wait_for_step(run, run_dir, steps, log)
            clock.write_text(f"{offset}\n")
        assert run.wait(LIMIT_S) == 0, log.read_text()
    assert results(run_dir) == results(tmp_path / "undisturbed")
