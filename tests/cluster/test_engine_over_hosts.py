"""An engine whose ranks are on several hosts: a run with it, and the loss of one of its hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.hosts import Host, made_hosts
from support.runs import LIMIT_S, command, host_of, results, started, wait_for, worker_name

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
    """Four hosts with one device each."""
    try:
        stack = made_hosts(tmp_path_factory.getbasetemp(), 4)
        made = stack.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    tool = str(Path(sys.executable).with_name("ray"))
    memory = ("--num-cpus", "1", "--object-store-memory", "100000000", "--disable-usage-stats")
    head = ("--head", "--port", "6379", "--include-dashboard", "false")
    try:
        for host in made:
            role = head if host == made[0] else ("--address", f"{made[0].chosen}:6379")
            began = host.run(tool, "start", "--node-ip-address", host.chosen, *memory, *role, **OPEN)
            assert began.returncode == 0, began.stdout + began.stderr
        yield made
    finally:
        stack.__exit__(None, None, None)


def over_hosts(hosts: list[Host], model: Path, run_dir: Path, steps: int, *sizes: str) -> list[str]:
    """A run with one engine, each rank of which has a host of its own."""
    address = ("--ray-address", f"{hosts[0].chosen}:6379", "--nodes", "4", "--steps", str(steps))
    more = [word for size in ("generation.engines=1", *sizes) for word in ("--set", size)]
    return hosts[0].inside(command(model, run_dir, *address, *more), **OPEN)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tiny_llama", ("generation.tp=2", "training.dp=2", "refit.mover=shared-memory")),
        ("tiny_llama", ("generation.pp=2", "training.dp=1", "refit.mover=collective")),
        ("tiny_llama", ("generation.tp=2", "training.tp=2", "refit.mover=disk", "refit.directory={}")),
        ("tiny_qwen3_moe", ("generation.tp=2", "generation.dp=2", "training.dp=1", "refit.mover=collective")),
    ],
    ids=["tp", "pp", "tp-disk", "tp-dp"],
)
def test_each_rank_of_an_engine_gets_its_weights_on_its_host(
    model: str, sizes: tuple[str, ...], hosts, request, tmp_path
):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    own = [size.format(tmp_path) for size in sizes]
    with started(over_hosts(hosts, request.getfixturevalue(model), run_dir, 2, *own), log) as run:
        assert run.wait(LIMIT_S) == 0, log.read_text()
    assert (run_dir / "logs" / "engine-0-other-0.log").exists()
    lines = results(run_dir)
    assert [line["step"] for line in lines] == [1, 2]
    assert "tensors compared, all equal" in log.read_text()
    assert max(line["logprob_diff"]["max"] for line in lines) < 1e-5


def test_ranks_that_do_not_start_are_named_with_their_host(hosts, tiny_llama, tmp_path):
    """The other ranks wait for them, and would do so until the time to start is over."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = over_hosts(hosts, tiny_llama, run_dir, 2, "generation.tp=2", "training.dp=1")
    with started(arguments, log) as run:
        own = run_dir / "logs" / "engine-0-other-0.log"
        wait_for(lambda: own.exists() and "vllm" in own.read_text(), run, log)
        place = host_of(hosts, own.stem, run_dir)
        for process in psutil.process_iter():
            if worker_name(process, run_dir) == own.stem:
                process.kill()
        assert run.wait(LIMIT_S) == 1, log.read_text()
    said = " ".join(log.read_text().split())
    assert f"on {place.chosen} died during `start`" in said
    assert "Traceback" not in said


def test_a_lost_host_of_an_engine_is_named(hosts, tiny_llama, tmp_path):
    """The last of this file: the host does not come back."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = over_hosts(hosts, tiny_llama, run_dir, 100_000, "generation.tp=2", "training.dp=1")
    with started(arguments, log) as run:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(results(run_dir)) >= 2, run, log)
        lost = host_of(hosts, "engine-0-other-0", run_dir)
        lost.kill_all()
        wait_for(lambda: "engine 0 is lost" in " ".join(log.read_text().split()), run, log)
    assert f"Engine 0 has lost its host {lost.chosen}" in " ".join(log.read_text().split())
