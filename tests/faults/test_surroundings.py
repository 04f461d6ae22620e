"""What surrounds a run fails: a small disk fills up, permission is taken away, the network goes down."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.runs import LIMIT_S, command, finish, results, resume, started, wait_for, wait_until_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount, to make namespaces and to drop rights"),
]
AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
"""Without these rights of root's, the modes of files hold as they do for an ordinary user."""


def step_of(name: str) -> int:
    return int(name.removeprefix("step_"))


@pytest.mark.parametrize("place", ["run", "shm", "tmp"])
def test_a_disk_that_fills_up_is_named_and_nothing_saved_is_lost(tiny_llama, tmp_path, place):
    """A file system of a few megabytes in place of the run directory, of /dev/shm, or of the temporary directory."""
    small = tmp_path / "small"
    small.mkdir()
    run_dir = small / "run" if place == "run" else tmp_path / "run"
    target, size = {"run": (small, "24m"), "shm": (Path("/dev/shm"), "1m"), "tmp": (small, "1m")}[place]
    more = ("--steps", "40", "--set", "run.keep_last=100", "--set", "run.checkpoint_every=1")
    script = f'mount -t tmpfs -o size={size} tmpfs {target} && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", "env"]
    words += [f"TMPDIR={small}"] if place == "tmp" else []
    # What the mount holds is seen in its own namespace alone: it lists what is left before it ends.
    listing = f'"$@"; code=$?; ls {run_dir}/checkpoints > {tmp_path}/left; exit $code'
    done = finish([*words, "sh", "-c", listing, "sh", *command(tiny_llama, run_dir, *more)])
    said = " ".join(done.stderr.split())
    assert "Traceback" not in said
    if place == "run":
        assert done.returncode == 1, said
        assert "No space left on device" in said
        left = (tmp_path / "left").read_text().split()
        assert left
        assert all(name.startswith("step_") for name in left)
        assert f"Resume from step {max(map(step_of, left))}" in said
    else:  # it goes without, or says which place is too small
        assert done.returncode == 0 or "/dev/shm" in said or str(small) in said, said


def test_a_place_without_permission_is_named_before_anything_starts(tiny_llama, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    done = finish([*AS_A_USER, *command(tiny_llama, locked / "run")])
    assert done.returncode == 2, done.stderr
    assert f"--run-dir {locked / 'run'} cannot be made: {locked} cannot be written to." in done.stderr


def test_weights_without_permission_are_named(tiny_llama, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_llama.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "model.safetensors").chmod(0)
    done = finish([*AS_A_USER, *command(model, tmp_path / "run")])
    assert done.returncode in (1, 2), done.stderr
    assert "model.safetensors" in done.stderr
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_permission_that_is_taken_away_during_a_run_loses_no_save(tiny_llama, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("--steps", "300", "--set", "run.checkpoint_every=2")
    with started([*AS_A_USER, *command(tiny_llama, run_dir, *more)], log) as run:
        wait_for((run_dir / "checkpoints" / "step_2").exists, run, log)
        (run_dir / "checkpoints").chmod(0o555)
        assert run.wait(LIMIT_S) == 1, log.read_text()
    (run_dir / "checkpoints").chmod(0o755)
    said = " ".join(log.read_text().split())
    assert "Permission denied" in said
    assert "Free space" not in said
    assert "Traceback" not in said
    assert f"rlctl train grpo --resume --run-dir {run_dir}" in said
    newest = max(step_of(path.name) for path in (run_dir / "checkpoints").glob("step_*"))
    done = finish(resume(run_dir, "--steps", str(newest + 1)))
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {newest}" in done.stderr


def test_a_run_whose_directory_is_removed_ends(tiny_llama, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(command(tiny_llama, run_dir, "--steps", "300"), log) as run:
        wait_for((run_dir / "checkpoints" / "step_2").exists, run, log)
        shutil.rmtree(run_dir, ignore_errors=True)  # which may find it full again at its end
        assert run.wait(LIMIT_S) == 1, log.read_text()
    assert f"The run directory {run_dir} is gone" in " ".join(log.read_text().split())
    assert "Traceback" not in log.read_text()


def test_a_network_that_goes_down_ends_the_run_and_it_can_be_resumed(tiny_llama, tmp_path):
    """In a network namespace of its own, where even the loopback is taken down under it."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    limits = ("--set", "cluster.step_timeout_s=30", "--set", "refit.timeout_s=30")
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    arguments = command(tiny_llama, run_dir, "--steps", "300", *limits)
    with started([*inside, *arguments], log) as run:
        wait_for((run_dir / "checkpoints" / "step_2").exists, run, log)
        family = run.family()
        subprocess.run(["nsenter", "-t", str(run.pid), "-n", "ip", "link", "set", "lo", "down"], check=True)
        assert run.wait(LIMIT_S) != 0
        wait_until_gone(family)
    said = " ".join(log.read_text().split())
    assert "Traceback" not in said
    assert "did not finish" in said or "cannot" in said or "gone or gave up" in said, said
    assert f"rlctl train grpo --resume --run-dir {run_dir}" in said  # Ray has not ended the process in its own words
    done = finish(resume(run_dir, "--steps", str(len(results(run_dir)) + 1)))
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stderr
