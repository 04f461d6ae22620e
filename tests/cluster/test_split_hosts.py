"""Policy and engines on hosts of their own: which host has what, and what becomes of a run when one of them dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import Host, made_hosts
from support.runs import LIMIT_S, command, finish, host_of, results, resume, same_run, started, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
        reason="needs root, unshare, nsenter and ip to make hosts out of namespaces",
    ),
]
OPEN = {"RAY_AUTH_MODE": "disabled", "HOME": "/mnt"}
SPLIT = ("--split", "--nodes", "2", "--set", "generation.devices=1", "--set", "training.tp=1")

KEEP = """
import sys
import numpy, ray
from rlctl.cluster.ray_session import fetch, keep_here
from rlctl.cluster.ray_session import ray_session
from rlctl.errors import WorkerError
with ray_session(sys.argv[1]):
    make = ray.remote(num_cpus=1, max_retries=0)(lambda: numpy.ones(1 << 20))
    kept, lost = make.remote(), make.remote()
    ray.wait([kept, lost], num_returns=2, fetch_local=False)
    keep_here([kept])
    print("made", flush=True)
    sys.stdin.readline()
    print("kept", int(fetch(kept).sum()))
    try:
        keep_here([kept, lost])
    except WorkerError as error:
        print(error.message)
"""


def start_ray(host: Host, *arguments: str) -> None:
    tool = str(Path(sys.executable).with_name("ray"))
    more = ("--object-store-memory", "100000000", "--disable-usage-stats")
    began = host.run(tool, "start", "--node-ip-address", host.chosen, *more, *arguments, **OPEN)
    assert began.returncode == 0, began.stdout + began.stderr


def join(host: Host, head: Host) -> None:
    start_ray(host, "--address", f"{head.chosen}:6379", "--num-cpus", "1")


@pytest.fixture(scope="module")
def hosts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """The first has the driver and no device, the other three have one each."""
    try:
        stack = made_hosts(tmp_path_factory.getbasetemp(), 4)
        made = stack.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    try:
        start_ray(made[0], "--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false")
        for host in made[1:]:
            join(host, made[0])
        yield made
    finally:
        stack.__exit__(None, None, None)


def on_hosts(hosts: list[Host], model: Path, run_dir: Path, *more: str) -> list[str]:
    address = ("--ray-address", f"{hosts[0].chosen}:6379")
    return hosts[0].inside(command(model, run_dir, *SPLIT, *address, *more), **OPEN)


def test_a_lost_engine_host_is_done_without_and_taken_back(hosts, tiny_llama, tmp_path):
    """Samples are in flight all the time, and no refit finds an engine on the policy's host."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    fast = ("--async", "--set", "refit.in_flight=keep", "--set", "rollouts.order=arrival", "--steps", "100000")
    more = ("--set", "generation.engines=2", "--set", "generation.devices=2", "--set", "run.checkpoint_every=0")
    with started(on_hosts(hosts, tiny_llama, run_dir, *fast, *more), log) as run:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(results(run_dir)) >= 2, run, log)
        places = {name: host_of(hosts, name, run_dir) for name in ("policy-0", "engine-0", "engine-1")}
        assert len({host.name for host in places.values()} | {hosts[0].name}) == 4
        lost = places["engine-1"]
        lost.kill_all()
        wait_for(lambda: "going on with 1 engine(s)" in " ".join(log.read_text().split()), run, log)
        steps = len(results(run_dir))
        wait_for(lambda: len(results(run_dir)) > steps + 2, run, log)
        join(lost, hosts[0])
        wait_for(lambda: "going on with 2 engine(s)" in " ".join(log.read_text().split()), run, log)
        steps = len(results(run_dir))
        wait_for(lambda: len(results(run_dir)) > steps + 2, run, log)
        assert host_of(hosts, "engine-1", run_dir).name == lost.name
        run.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130, log.read_text()
    trained = [p for line in results(run_dir) for a, b in line["positions"] for p in range(a, b + 1)]
    assert len(trained) == len(set(trained))


def test_a_lost_policy_host_ends_the_run_which_goes_on_on_one_host(hosts, tiny_llama, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("--set", "run.checkpoint_every=1", "--steps", "100000", "--set", "cluster.policy_restarts=0")
    with started(on_hosts(hosts, tiny_llama, run_dir, *more), log) as run:
        wait_for((run_dir / "checkpoints" / "step_2").exists, run, log)
        lost = host_of(hosts, "policy-0", run_dir)
        lost.kill_all()
        assert run.wait(LIMIT_S) == 1, log.read_text()
    said = " ".join(log.read_text().split())
    assert "Traceback" not in said
    assert f"on {lost.chosen} died" in said
    assert f"rlctl train grpo --resume --run-dir {run_dir}" in said
    join(lost, hosts[0])
    steps = len(results(run_dir)) + 1
    more = ("--steps", str(steps), "--nodes", "1", "--colocated", "--set", "cluster.ray_address=null")
    done = finish(resume(run_dir, *more, "--set", "generation.devices=null"))
    assert done.returncode == 0, done.stderr
    whole = finish(command(tiny_llama, tmp_path / "whole", "--steps", str(steps)))
    assert whole.returncode == 0, whole.stderr
    same_run(results(run_dir), results(tmp_path / "whole"))


def test_rollouts_outlive_the_host_that_made_them_once_they_are_copied(hosts):
    """The last of this file: no host with a device comes back."""
    script = hosts[0].inside([sys.executable, "-c", KEEP, f"{hosts[0].chosen}:6379"], **OPEN)
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        for host in hosts[1:]:
            host.kill_all()
        said, _ = process.communicate("go on\n", timeout=300)
    assert f"kept {1 << 20}" in said
    assert "lost with the node that held them" in said
