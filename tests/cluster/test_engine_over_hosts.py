"""An engine whose ranks are on several hosts: a run with it, and the loss of one of its hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import Host, made_hosts
from support.runs import LIMIT_S, command, results, started, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
        reason="needs root, unshare, nsenter and ip to make hosts out of namespaces",
    ),
]
OPEN = {"RAY_AUTH_MODE": "disabled", "HOME": "/mnt"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts with one device each."""
    try:
        stack = made_hosts(tmp_path_factory.getbasetemp(), 2)
        made = stack.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    tool = str(Path(sys.executable).with_name("ray"))
    memory = ("--num-cpus", "1", "--object-store-memory", "100000000", "--disable-usage-stats")
    head = ("--head", "--port", "6379", "--include-dashboard", "false")
    try:
        for host, role in zip(made, (head, ("--address", f"{made[0].chosen}:6379")), strict=True):
            began = host.run(tool, "start", "--node-ip-address", host.chosen, *memory, *role, **OPEN)
            assert began.returncode == 0, began.stdout + began.stderr
        yield made
    finally:
        stack.__exit__(None, None, None)


def over_hosts(hosts: list[Host], model: Path, run_dir: Path, *more: str) -> list[str]:
    """A run with one engine, whose two ranks are on both hosts."""
    address = ("--ray-address", f"{hosts[0].chosen}:6379", "--nodes", "2", "--set", "generation.engines=1")
    return hosts[0].inside(command(model, run_dir, *address, *more), **OPEN)


@pytest.mark.parametrize(
    "sizes",
    [
        ("generation.tp=2", "training.dp=2", "refit.mover=shared-memory"),
        ("generation.pp=2", "training.dp=1", "refit.mover=collective"),
        ("generation.tp=2", "training.tp=2", "refit.mover=disk", "refit.directory={}"),
    ],
    ids=["tp", "pp", "tp-disk"],
)
def test_each_rank_of_an_engine_gets_its_weights_on_its_host(sizes: tuple[str, ...], hosts, tiny_llama, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = [word for size in sizes for word in ("--set", size.format(tmp_path))]
    with started(over_hosts(hosts, tiny_llama, run_dir, *more, "--steps", "2"), log) as run:
        assert run.wait(LIMIT_S) == 0, log.read_text()
    assert (run_dir / "logs" / "engine-0-other-0.log").exists()
    lines = results(run_dir)
    assert [line["step"] for line in lines] == [1, 2]
    assert "21 tensors compared, all equal" in log.read_text()
    assert max(line["logprob_diff"]["max"] for line in lines) < 1e-5


def test_a_lost_host_of_an_engine_is_named(hosts, tiny_llama, tmp_path):
    """The last of this file: the second host does not come back."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("--set", "generation.tp=2", "--set", "training.dp=1", "--steps", "100000")
    with started(over_hosts(hosts, tiny_llama, run_dir, *more), log) as run:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(results(run_dir)) >= 2, run, log)
        hosts[1].kill_all()
        wait_for(lambda: "engine 0 is lost" in " ".join(log.read_text().split()), run, log)
    said = " ".join(log.read_text().split())
    assert f"Engine 0 has lost its host {hosts[1].chosen}" in said
