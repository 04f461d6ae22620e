"""A policy over two hosts that loses one: it goes on on a spare host, and then on the host that is left."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.hosts import Host, made_hosts
from support.runs import command, host_of, results, same_run, started, wait_for, wait_for_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
        reason="needs root, unshare, nsenter and ip to make hosts out of namespaces",
    ),
]
OPEN = {"RAY_AUTH_MODE": "disabled", "HOME": "/mnt"}
OF_RECOVERY = ("policy_restarts", "policy_failure", "lost_ranks")
POLICY = ("--backend", "dtensor", "--set", "training.dp=2", "--set", "training.tp=1", "--set", "run.checkpoint_every=0")
STEPS = 4000


def start_ray(host: Host, *arguments: str) -> None:
    tool = str(Path(sys.executable).with_name("ray"))
    more = ("--object-store-memory", "100000000", "--disable-usage-stats")
    began = host.run(tool, "start", "--node-ip-address", host.chosen, *more, *arguments, **OPEN)
    assert began.returncode == 0, began.stdout + began.stderr


@pytest.fixture(scope="module")
def hosts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """The first has the driver and no device, the other four have one each."""
    try:
        stack = made_hosts(tmp_path_factory.getbasetemp(), 5)
        made = stack.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    try:
        start_ray(made[0], "--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false")
        for host in made[1:]:
            start_ray(host, "--address", f"{made[0].chosen}:6379", "--num-cpus", "1")
        yield made
    finally:
        stack.__exit__(None, None, None)


def said_in(log: Path) -> str:
    return " ".join(log.read_text().split())


def lose_host(hosts: list[Host], run: psutil.Popen, run_dir: Path, log: Path, restarts: int) -> str:
    """Kill the host of the second policy rank after some steps, wait for more, and return its name."""
    wait_for_step(run, run_dir, len(results(run_dir)) + 40, log)  # a checkpoint in memory is complete by then
    lost = host_of(hosts, "policy-1", run_dir)
    lost.kill_all()
    wait_for(lambda: said_in(log).count("the policy is back") == restarts, run, log)
    wait_for_step(run, run_dir, len(results(run_dir)) + 2, log)
    return lost.name


def test_a_lost_policy_host_is_replaced_by_a_spare_one_and_then_done_without(hosts, tiny_llama, tmp_path):
    """No checkpoint is on disk: the state comes from the memory of the host that is left."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    places = ("--ray-address", f"{hosts[0].chosen}:6379", "--split", "--nodes", "4")
    more = ("--set", "cluster.spare_nodes=1", "--set", "generation.devices=1", "--set", "run.memory_checkpoint_every=1")
    arguments = command(tiny_llama, run_dir, *POLICY, *places, *more, "--steps", str(STEPS))
    with started(hosts[0].inside(arguments, **OPEN), log) as run:
        wait_for_step(run, run_dir, 2, log)
        engine, spare = host_of(hosts, "engine-0", run_dir).name, {host.name for host in hosts[1:]}
        spare -= {engine} | {host_of(hosts, name, run_dir).name for name in ("policy-0", "policy-1")}
        assert len(spare) == 1
        lose_host(hosts, run, run_dir, log, restarts=1)
        assert {host_of(hosts, name, run_dir).name for name in ("policy-0", "policy-1")} & spare
        same = len(results(run_dir))
        lose_host(hosts, run, run_dir, log, restarts=2)
        lines = results(run_dir)
        assert host_of(hosts, "engine-0", run_dir).name == engine
    said = said_in(log)
    assert "Traceback" not in said
    assert len(re.findall(r"continues from its checkpoint in memory, of step \d+", said)) == 2
    assert "a host of the policy is lost: continuing with" in said
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    steps = ("--steps", str(STEPS), "--set", "run.save_final=false", "--set", "cluster.ray_address=null")
    whole = tmp_path / "whole"
    with started(command(tiny_llama, whole, *POLICY, *steps), tmp_path / "whole.log") as run:
        wait_for_step(run, whole, len(lines), tmp_path / "whole.log")
    undisturbed = results(whole)[: len(lines)]
    found = [{name: value for name, value in line.items() if name not in OF_RECOVERY} for line in lines]
    assert found[:same] == undisturbed[:same]
    same_run(found, undisturbed)
