"""A long run holds no more of anything at its end than at its beginning."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlctl.telemetry.metrics import read_metrics
from support.runs import command, started, wait_for_step, worker_name

STEPS, EARLY = 2000, 600
SLACK_BYTES = 40e6
"""What the sizes of processes vary by from one moment to the next: an engine by 38 MB in a run of 2,200 steps."""


def held(run: psutil.Popen, run_dir: Path) -> dict[str, dict[str, float]]:
    """Memory, descriptors and threads of the driver and of each worker, and the bytes in /dev/shm."""
    found = {}
    for one in (psutil.Process(run.pid), *run.children(recursive=True)):
        name = "driver" if one.pid == run.pid else worker_name(one, run_dir)
        if name is not None:
            memory = one.memory_full_info()
            found[name] = {
                "bytes": memory.uss,
                "descriptors": float(one.num_fds()),
                "threads": float(one.num_threads()),
            }
    shm = sum(path.stat().st_size for path in Path("/dev/shm").rglob("*") if path.is_file())
    return found | {"/dev/shm": {"bytes": float(shm), "descriptors": 0.0, "threads": 0.0}}


@pytest.mark.slow
def test_two_thousand_steps_hold_no_more_than_the_first(tiny_llama: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("--steps", str(STEPS), "--set", "run.checkpoint_every=20", "--set", "run.keep_last=2")
    with started(command(tiny_llama, run_dir, *more), log) as run:
        wait_for_step(run, run_dir, EARLY, log)
        early = held(run, run_dir)
        wait_for_step(run, run_dir, STEPS - 50, log)
        late = held(run, run_dir)
        assert run.wait(600) == 0, log.read_text()
    print({name: {what: (early[name][what], late[name][what]) for what in early[name]} for name in early})
    for name, values in early.items():
        assert late[name]["bytes"] <= values["bytes"] + SLACK_BYTES, (name, early, late)
        assert late[name]["descriptors"] <= values["descriptors"] + 2, (name, early, late)
        assert late[name]["threads"] <= values["threads"] + 2, (name, early, late)
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert len(read_metrics(run_dir / "metrics.jsonl")) == STEPS
