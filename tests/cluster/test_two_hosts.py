"""A Ray cluster of two hosts that have two networks: a run over both, what it opens, and who is let in."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.hosts import Host, made_hosts
from support.runs import LIMIT_S, command, results, started, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip", "ss"))),
        reason="needs root, unshare, nsenter, ip and ss to make hosts out of namespaces",
    ),
]
HOME, SESSIONS = "/mnt/home", "/tmp/own/ray"
"""On each host: where the token is, and Ray's sessions below a folder that its user keeps closed."""
TOKEN = {"HOME": HOME, "RAY_AUTH_MODE": "token"}
NO_TOKEN = {"HOME": "/mnt", "RAY_AUTH_MODE": "disabled"}
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
OF_RAY = {"gcs_server", "raylet", "python", "ray::RuntimeEnv"}
JOIN = """
import sys
from rlctl.cluster.ray_session import ray_session
with ray_session(sys.argv[1], tell=print):
    pass
"""
ALL_NETWORKS = {"*", "0.0.0.0", "::"}


@dataclass(frozen=True)
class Cluster:
    first: Host
    second: Host
    shared: Path

    @property
    def address(self) -> str:
        return f"{self.first.chosen}:6379"


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def start_ray(host: Host, *arguments: str, **variables: str) -> None:
    memory = ("--object-store-memory", "100000000", "--disable-usage-stats", "--temp-dir", SESSIONS)
    began = host.run(tool("ray"), "start", "--node-ip-address", host.chosen, *memory, *arguments, **variables)
    assert began.returncode == 0, began.stdout + began.stderr


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Started as docs/runs.md says. Each host offers one device, so that a run of two needs both."""
    shared = tmp_path_factory.getbasetemp()
    try:
        stack = made_hosts(shared, 2)
        first, second = stack.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    try:
        for host in (first, second):
            host.run("mkdir", "-m", "700", "/tmp/own")
            host.run("mkdir", "-p", f"{HOME}/.ray")
        assert first.run(tool("ray"), "get-auth-token", "--generate", HOME=HOME).returncode == 0
        token = first.run("cat", f"{HOME}/.ray/auth_token").stdout
        second.run("sh", "-c", f"umask 077; printf %s {token} > {HOME}/.ray/auth_token")
        start_ray(first, "--head", "--port", "6379", "--num-cpus", "1", "--include-dashboard", "false", **TOKEN)
        start_ray(second, "--address", f"{first.chosen}:6379", "--num-cpus", "1", **TOKEN)
        yield Cluster(first, second, shared)
    finally:
        stack.__exit__(None, None, None)


def over_both(model: Path, cluster: Cluster, run_dir: Path) -> list[str]:
    more = ("--nodes", "2", "--ray-address", cluster.address, "--steps", "2", "--set", "training.dp=2")
    return command(model, run_dir, *more, "--set", "generation.engines=2")


def test_a_run_over_two_hosts_listens_on_the_chosen_network_alone(cluster, tiny_llama, tmp_path):
    """Ray itself listens on all networks: each of its processes, of its workers and the driver at one port, behind the
    token. Everything else of a run is at the address that Ray was started with."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments, found = over_both(tiny_llama, cluster, run_dir), {}
    with started(cluster.first.inside(arguments, **TOKEN), log) as run:
        deadline = time.monotonic() + LIMIT_S
        while run.poll() is None and time.monotonic() < deadline:
            for host in (cluster.first, cluster.second):
                for process, address in host.listening():
                    found.setdefault((host, process), []).append(address)
            time.sleep(0.5)
        assert run.wait(60) == 0, log.read_text()
    assert [line["step"] for line in results(run_dir)] == [1, 2]
    assert "asks for no token" not in log.read_text()
    of_run = {key: set(places) for key, places in found.items() if key[1].split(":")[0] not in OF_RAY}
    for host in (cluster.first, cluster.second):
        own = [places for (at, _), places in of_run.items() if at == host]
        assert any(host.chosen in places for places in own), f"no rank of {host.name} was seen"
        assert set.union(*own) <= {host.chosen, "127.0.0.1", *ALL_NETWORKS}, own


def test_files_of_ray_are_their_users_alone(cluster):
    token = f"{HOME}/.ray/auth_token"
    joined = cluster.first.run(sys.executable, "-c", JOIN, cluster.address, **TOKEN)
    assert joined.returncode == 0, joined.stderr
    for host in (cluster.first, cluster.second):
        for path in (token, f"{SESSIONS}/ray_current_cluster"):
            assert host.run("test", "-r", path).returncode == 0
            assert host.run(*AS_NOBODY, "cat", path).returncode != 0


def test_who_has_no_token_is_refused(cluster, tiny_llama, tmp_path):
    refused = cluster.second.run(*over_both(tiny_llama, cluster, tmp_path / "run"), **NO_TOKEN)
    assert refused.returncode == 3, refused.stderr
    assert f"--ray-address {cluster.address} did not answer" in " ".join(refused.stderr.split())
    assert "the token must be the one of its head node" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr


def test_a_cluster_that_asks_for_no_token_is_told_by_runs_and_doctor(cluster):
    start_ray(cluster.second, "--head", "--port", "6390", "--include-dashboard", "false", **NO_TOKEN)
    address = f"{cluster.second.chosen}:6390"
    stranger = cluster.first.run(sys.executable, "-c", JOIN, address, **TOKEN)
    assert f"This machine is not a node of the Ray cluster at {address}" in stranger.stderr
    joined = cluster.second.run(sys.executable, "-c", JOIN, address, **TOKEN)
    assert f"warning: the Ray cluster at {address} asks for no token" in joined.stdout, joined.stderr
    asked = cluster.second.run(tool("rlctl"), "doctor", "--quick", "--ray-address", address, **NO_TOKEN)
    assert "anyone who reaches the cluster's ports can run programs on it" in " ".join(asked.stdout.split())
    asked = cluster.first.run(tool("rlctl"), "doctor", "--quick", "--ray-address", cluster.address, **TOKEN)
    assert "the cluster requires a token" in " ".join(asked.stdout.split())


def test_a_network_that_is_lost_between_hosts_ends_the_run(cluster, tiny_llama, tmp_path):
    """The last of this file: the second host does not come back."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    limits = ("--steps", "300", "--set", "cluster.step_timeout_s=30", "--set", "refit.timeout_s=20")
    limits += ("--set", "cluster.policy_restarts=0")
    with started(cluster.first.inside([*over_both(tiny_llama, cluster, run_dir), *limits], **TOKEN), log) as run:
        wait_for((run_dir / "checkpoints" / "step_2").exists, run, log)
        assert cluster.second.run("ip", "link", "set", "eth1", "down").returncode == 0
        assert run.wait(LIMIT_S) == 1, log.read_text()
    said = " ".join(log.read_text().split())
    assert "Traceback" not in said
    assert f"rlctl train grpo --resume --run-dir {run_dir}" in said
