"""Sandboxes of programs: limits that cost one episode, and nothing that stays behind. Kills and processes are real."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.environment_plan import plan_environment
from rlctl.environments.gateway.exchange import Answer, Question
from rlctl.environments.gateway.server import Gateway
from rlctl.environments.interface import ModelAddress
from rlctl.environments.process import EnvironmentHost, EpisodeFailedError
from rlctl.environments.running_episode import Reply, RunningEpisode
from rlctl.environments.sandboxes import descendants
from rlctl.errors import InputError, MachineError
from rlctl.settings.rewards import EnvironmentConfig

PROGRAM = Path(__file__).parents[1] / "support" / "wild_program.py"
NOWHERE = ModelAddress("http://127.0.0.1:9/key", "key")
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
LOCAL = ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)]
RUN = """
import asyncio, sys
from environments.test_sandboxes import hosting, played
with hosting(sys.argv[1], mark=sys.argv[2]) as host:
    print("begun", flush=True)
    asyncio.run(played(host, "hang"))
"""
"""A run that plays one episode, and waits."""
LIMITS = {"memory_gib": 0.5, "processes": 40, "disk_gib": 0.05}


@contextmanager
def hosting(sandbox: str | None, mark: str = "", **settings: Any) -> Iterator[EnvironmentHost]:
    params = {"command": [sys.executable, str(PROGRAM), mark]}
    config = EnvironmentConfig(name="program", params=params, sandbox=sandbox, **settings)
    with closing(EnvironmentHost(plan_environment(config))) as host:
        host.start()
        yield host


@pytest.fixture(scope="module", params=LOCAL)
def host(request: pytest.FixtureRequest) -> Iterator[EnvironmentHost]:
    with hosting(request.param, **LIMITS) as host:
        yield host


async def played(
    host: EnvironmentHost, how: str, model: ModelAddress = NOWHERE, timeout_s: float = 60.0, port: int = 0
) -> Reply:
    session = host.begin()
    try:
        row = PromptRow(4, "row 4", "What?", "7", {"how": how, "port": port})
        await session.ask(RunningEpisode.reset, row, 1, timeout_s=timeout_s)
        return await session.ask(RunningEpisode.run, model, timeout_s=timeout_s)
    finally:
        session.close()


def nothing_is_left(host: EnvironmentHost, before: set[Path]) -> bool:
    """Return whether only the host's server is left, below its two supervisors."""
    assert host._server.process is not None
    server = host._server.process.pid
    return within(20, lambda: len(descendants(server)) <= 2 and folders() == before)


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("rlctl-episodes-*/*"))


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not (answer := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return answer


def running(words: str) -> list[int]:
    """Return the processes with `words` in their command that are not zombies."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and words in " ".join(process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return found


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize(
    ("how", "reason", "words"),
    [
        ("eat", "memory", r"uses \d+\.\d GiB, more than environment.memory_gib = 0.5"),
        ("fork", "processes", r"more than environment.processes = 40 processes"),
        ("fill", "disk", r"environment.disk_gib"),
        ("fill many", "disk", r"environment.disk_gib is 0.05"),
        ("print", "disk", r"environment.disk_gib"),
        ("die", "died", "something killed the program"),
        ("hang", "timeout", "run took longer than 2 s"),
    ],
)
def test_a_program_that_breaks_a_limit_costs_its_episode(
    host: EnvironmentHost, how: str, reason: str, words: str
) -> None:
    before = folders()
    with pytest.raises(EpisodeFailedError, match=words) as failed:
        asyncio.run(played(host, how, timeout_s=2.0 if how == "hang" else 60.0))
    assert failed.value.reason == reason
    assert nothing_is_left(host, before)


def test_what_a_program_leaves_ends_with_its_episode(host: EnvironmentHost) -> None:
    before = folders()
    assert asyncio.run(played(host, "leave")).reward == 1.0
    assert nothing_is_left(host, before)


@pytest.mark.parametrize("sandbox", LOCAL)
@pytest.mark.parametrize("group", [False, True])
def test_nothing_stays_behind_a_run_that_is_killed(sandbox: str, group: bool, tmp_path: Path) -> None:
    before, mark = folders(), f"{tmp_path}-mark"
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", RUN, sandbox, mark],
        env={**os.environ, "PYTHONPATH": tests}, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as run:  # fmt: skip
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "begun\n"
            assert within(30, lambda: len(running(mark)) >= 5 and folders() != before)  # the program and 3 others
            time.sleep(0.5)
        finally:
            os.killpg(run.pid, signal.SIGKILL) if group else run.kill()
    assert within(20, lambda: not running(mark))
    assert within(20, lambda: folders() == before)


@contextmanager
def other_server() -> Iterator[int]:
    class Quiet(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Silent:
    """An episode that is asked nothing."""

    def asked(self, question: Question) -> asyncio.Future[Sequence[Answer]]:
        raise AssertionError(question)

    def tokens_of(self, question: Question) -> int:
        return 1


async def looked(host: EnvironmentHost, port: int) -> dict[str, float]:
    gateway = Gateway()
    try:
        return dict((await played(host, "look", await gateway.open(Silent()), port=port)).metrics)
    finally:
        gateway.close()


@pytest.mark.parametrize(
    ("sandbox", "network", "expected"),
    [
        ("none", "full", {"secret": 1, "home": 1, "writes": 1}),
        ("env -u RLCTL_TEST_SECRET", "full", {"secret": 0, "home": 1, "writes": 1}),
        ("sh -c {command}", "full", {"secret": 1, "home": 1, "writes": 1}),
        pytest.param("bubblewrap", "full", {"secret": 0, "home": 1, "writes": 0}, marks=needs_bubblewrap),
        pytest.param(
            "bubblewrap", "model", {"secret": 0, "home": 1, "writes": 0, "refused": 1}, marks=needs_bubblewrap
        ),
    ],
)
def test_what_a_program_sees(
    sandbox: str, network: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLCTL_TEST_SECRET", "secret")
    monkeypatch.chdir(tmp_path)
    with other_server() as port, hosting(sandbox, network=network) as host:
        seen = asyncio.run(looked(host, port))
    assert seen.pop("models") == 1
    processes = seen.pop("processes")
    assert (processes < 5) == (sandbox == "bubblewrap")
    assert seen == expected


@needs_bubblewrap
@pytest.mark.parametrize("network", ["full", "model"])
def test_a_program_that_the_sandbox_does_not_show_is_named(network: str) -> None:
    params = {"command": ["absent-program"]}
    config = EnvironmentConfig(name="program", params=params, sandbox="bubblewrap", network=network)
    with closing(EnvironmentHost(plan_environment(config))) as host:
        host.start()
        with pytest.raises(EpisodeFailedError, match="absent-program"):
            asyncio.run(looked(host, 0))


def test_a_sandbox_that_this_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for sandbox, words in {
        "bubblewrap": "bwrap is not installed",
        "docker": "docker is not installed", "podman": "podman is not installed",
        "firejail --quiet": "environment.sandbox = firejail: there is no such command",
    }.items():  # fmt: skip
        with pytest.raises(MachineError, match=words) as failed, hosting(sandbox):
            pass
        assert failed.value.exit_code == 3
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho 'ERROR: Cannot connect to the Docker daemon at unix:///var/run/docker.sock.'\n")
    client.chmod(0o755)
    with (
        pytest.raises(MachineError, match=r"docker does not run: .*Cannot connect to the Docker daemon"),
        hosting("docker"),
    ):
        pass


def test_settings_that_do_not_go_together_are_refused() -> None:
    for settings, words in {
        ("none", "model"): "environment.network = 'model', and environment.sandbox=none knows full",
        ("docker", "model"): "docker network create --internal NAME",
        ("bubblewrap", "host"): "environment.sandbox=bubblewrap knows full, model",
        ("firejail 'a", "full"): "No closing quotation",
    }.items():
        with pytest.raises(InputError) as failed, hosting(settings[0], network=settings[1]):
            pass
        assert words in f"{failed.value.message} {failed.value.hint}"
    with pytest.raises(InputError, match=r"environment.sandbox = none is for programs, and environment 'wordle'"):
        plan_environment(EnvironmentConfig(name="wordle", sandbox="none")).load()
