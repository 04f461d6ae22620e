"""The clock of a machine that is set during a run changes nothing: limits of time count the seconds that passed."""

from __future__ import annotations

import ast
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.runs import LIMIT_S, command, finish, results, started, wait_for_step

SOURCES = Path(__file__).parents[2] / "src" / "rlctl"
READERS = {
    "config/files.py": "the age of a file",
    "doctor/calibrate.py": "the date of a measurement",
    "doctor/host.py": "the age of files",
    "doctor/network.py": "the clocks of nodes are compared",
    "environments/gateway/server.py": "the date of a reply",
    "telemetry/loggers/mlflow.py": "the date of an event",
    "telemetry/loggers/tensorboard.py": "the date of an event",
}
"""What may ask what time it is, and for what. Limits and durations are counted with time.monotonic and its like."""
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
SET_CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset;

static long ahead(void) {
    if (!offset) {
        int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
        offset = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return *offset;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int code = syscall(SYS_gettimeofday, now, zone);
    if (!code) now->tv_sec += ahead();
    return code;
}
time_t time(time_t *stored) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (stored) *stored = now.tv_sec;
    return now.tv_sec;
}
"""
"""A library that sets the clock of the processes that it is preloaded in, by the seconds in a file."""


def test_only_what_is_about_dates_asks_what_time_it_is() -> None:
    found = set()
    for path in SOURCES.rglob("*.py"):
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        if any(name.removeprefix("datetime.") in CLOCKS for name in names):
            found.add(str(path.relative_to(SOURCES)))
    assert found <= set(READERS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_clock_that_is_set_changes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """An hour forward, then two back, for every process of a run."""
    library, offset = tmp_path / "set_clock.so", tmp_path / "offset"
    compiler = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-"]
    subprocess.run(compiler, input=SET_CLOCK, text=True, check=True)
    offset.write_bytes(struct.pack("q", 0))
    preloaded = ["env", f"LD_PRELOAD={library}", f"CLOCK_OFFSET={offset}"]
    asked = [*preloaded, sys.executable, "-c", "import time; print(time.time())"]
    run_dir, log, limits = tmp_path / "run", tmp_path / "log", ("--steps", "12")
    with started([*preloaded, *command(tiny_llama, run_dir, *limits)], log) as run:
        for steps, hours in ((3, 1), (7, -1)):
            wait_for_step(run, run_dir, steps, log)
            with offset.open("r+b") as file:
                file.write(struct.pack("q", 3600 * hours))
            now = float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
            assert now == pytest.approx(time.time() + 3600 * hours, abs=60)
        assert run.wait(LIMIT_S) == 0, log.read_text()
    done = finish(command(tiny_llama, tmp_path / "undisturbed", *limits))
    assert done.returncode == 0, done.stderr
    assert results(run_dir) == results(tmp_path / "undisturbed")
