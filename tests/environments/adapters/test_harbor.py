"""Task folders of Harbor and terminal-bench: as rows, and played in containers.

The containers are those of a stand-in of Docker's client (`support/docker_stand_in.py`), and of Podman where it runs.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.prompts import open_prompts, shows_images
from rlctl.environments.adapters.harbor import read_task, rewards_in
from rlctl.environments.environment_plan import plan_environment
from rlctl.environments.gateway.exchange import Answer, Question, ToolCall
from rlctl.environments.gateway.server import Gateway
from rlctl.environments.process import EnvironmentHost, EpisodeFailedError
from rlctl.environments.running_episode import Reply, RunningEpisode
from rlctl.environments.sandboxes import Podman
from rlctl.errors import InputError, MachineError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes
from rlctl.settings.data import DataConfig
from rlctl.settings.rewards import EnvironmentConfig
from rlctl.telemetry.metrics import read_metrics

STAND_IN = Path(__file__).parents[2] / "support" / "docker_stand_in.py"
HARBOR = """
schema_version = "1.4"
[task]
name = "org/sum"
[environment]
cpus = 1
memory_mb = 512
network_mode = "no-network"
env = { GREETING = "${RLCTL_TEST_GREETING:-hello}" }
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 30.0
"""
PROGRAM = """
import json, os, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
ask = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                             {"content-type": "application/json"})
urllib.request.urlopen(ask).read()
print(json.dumps({"reward": 1.0}))
"""
TEST = """#!/bin/sh
reward=0
if [ "$(cat /app/answer.txt)" = "42 hello" ]; then reward=1; fi
echo $reward > /logs/verifier/reward.txt
"""
COMPOSE = """
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment: ["TEST_DIR=${T_BENCH_TEST_DIR}", "GREETING=hello"]
    volumes: ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task of Harbor and one of terminal-bench, of the forms that their own templates have."""
    files = {
        "sum/task.toml": HARBOR,
        "sum/instruction.md": "<!-- benchmark canary GUID 1 -->\n\nWrite 42 and the greeting to answer.txt.\n",
        "sum/environment/Dockerfile": "FROM rlctl-test\nWORKDIR /app\nCOPY . /app\n",
        "sum/tests/test.sh": TEST,
        "words/task.yaml": "instruction: Write 42 and the greeting to answer.txt.\ndifficulty: easy\n",
        "words/Dockerfile": "FROM rlctl-test\nWORKDIR /app\n",
        "words/docker-compose.yaml": COMPOSE,
        "words/run-tests.sh": 'sh "$TEST_DIR/check.sh"\n',
        "words/tests/check.sh": '[ "$(cat /app/answer.txt)" = "42 hello" ]\n',
        "README.md": "no task",
    }
    for name, text in files.items():
        (tmp_path / "tasks" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tasks" / name).write_text(text)
    return tmp_path / "tasks"


def test_a_folder_of_tasks_is_data(tasks: Path) -> None:
    data = DataConfig(name=str(tasks))
    rows = open_prompts(data)
    assert [row.prompt for row in map(rows.__getitem__, range(len(rows)))] == [
        "Write 42 and the greeting to answer.txt.\n", "Write 42 and the greeting to answer.txt.",
    ]  # fmt: skip
    assert rows[0].fields == {"name": "sum", "task": str(tasks / "sum")}
    assert not shows_images(data)
    assert len(open_prompts(DataConfig(name=str(tasks / "sum")))) == 1
    (tasks / "sum" / "tests" / "test.sh").write_text("exit 1")
    assert open_prompts(data).fingerprint() != rows.fingerprint()
    (tasks / "words" / "task.yaml").write_text("difficulty: easy")
    with pytest.raises(InputError, match="words has no readable instruction"):
        open_prompts(data)


class Working:
    """An episode whose answers are scripted: calls of bash, and a last message."""

    def __init__(self, *commands: str) -> None:
        self.commands, self.read = list(commands), list[str]()

    def asked(self, question: Question) -> asyncio.Future[Sequence[Answer]]:
        self.read.append(str(question.messages[-1]["content"]))
        calls = (ToolCall(f"call{len(self.read)}", "bash", self.commands.pop(0)),) if self.commands else ()
        answer = Answer("" if calls else "Done.", calls, [1], [2], [-0.5], cut=False)
        future = asyncio.get_running_loop().create_future()
        future.set_result([answer])
        return future

    def tokens_of(self, question: Question) -> int:
        return 1


async def played(host: EnvironmentHost, task: Path, episode: Working) -> Reply:
    gateway, session = Gateway(), host.begin()
    row = replace(open_prompts(DataConfig(name=str(task)))[0])
    try:
        await session.ask(RunningEpisode.reset, row, 1, timeout_s=60.0)
        return await session.ask(RunningEpisode.run, await gateway.open(episode), timeout_s=120.0)
    finally:
        session.close()
        gateway.close()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    client = tmp_path / "bin" / "docker"
    client.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_STAND_IN", str(tmp_path))


@pytest.fixture(params=["docker", "podman"])
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param == "docker":
        request.getfixturevalue("docker")
    else:
        busybox = Path("/bin/busybox")
        if Podman.problem() or not busybox.exists():
            pytest.skip("Podman does not run here, or there is no static busybox")
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(busybox, "bin/busybox")
            for name in ("sh", "cat", "mkdir", "chmod", "rm", "kill", "echo", "sleep"):
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
            script = b'#!/bin/sh\nexec sh "$@"\n'  # stands for bash
            bash = tarfile.TarInfo("bin/bash")
            bash.mode, bash.size = 0o755, len(script)
            tar.addfile(bash, io.BytesIO(script))
        subprocess.run(
            ["podman", "import", "-", "rlctl-test"], input=archive.getvalue(), check=True, capture_output=True
        )
        trial = ["podman", "run", "--rm", "--network", "none", "rlctl-test", "echo"]
        if subprocess.run(trial, check=False, capture_output=True).returncode:
            pytest.skip("Podman starts no container here")
    return request.param


def containers(runtime: str, place: Path) -> list[Any]:
    if runtime == "docker":
        return list((place / "containers").iterdir())
    found = subprocess.run(
        ["podman", "ps", "--all", "--quiet", "--filter", "label=rlctl"], capture_output=True, check=True
    )
    return found.stdout.split()


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("name", ["sum", "words"])
def test_a_task_is_played_in_a_container_and_its_tests_give_the_reward(
    runtime: str, name: str, tasks: Path, tmp_path: Path
) -> None:
    write = json.dumps({"command": 'echo "42 $GREETING" > answer.txt; cat answer.txt'})
    broken = '{"command": 4'
    slow = json.dumps({"command": "sleep 5"})
    config = EnvironmentConfig(name="harbor", sandbox=runtime, params={"command_s": 2})
    with closing(EnvironmentHost(plan_environment(config))) as host:
        host.start()
        episode = Working(write, broken, slow)
        assert asyncio.run(played(host, tasks / name, episode)).reward == 1.0
        assert episode.read[1] == "42 hello"
        assert episode.read[2] == 'Error: the tool is bash, and its arguments are {"command": "..."}.'
        assert episode.read[3] == "Error: the command took longer than 2 s, and goes on."
        cheat = json.dumps({"command": "echo 1 > /logs/verifier/reward.txt"})
        assert asyncio.run(played(host, tasks / name, Working(cheat))).reward == 0.0
        assert not containers(runtime, tmp_path)
        (tasks / "sum" / "tests" / "test.sh").write_text("#!/bin/sh\necho no file\n")
        if name == "sum":
            with pytest.raises(
                EpisodeFailedError, match=r"the tests wrote no /logs/verifier/reward.txt or .json: no file"
            ):
                asyncio.run(played(host, tasks / name, Working()))
    if runtime == "docker":
        lines = map(json.loads, (tmp_path / "commands.jsonl").read_text().splitlines())
        (run, *_) = [line for line in lines if line[0] == "run"]
        limits = ["--memory", f"{(512 if name == 'sum' else 4096) << 20}b"]
        assert run[run.index("--memory") :][:2] == limits
        assert ("none" in run) == (name == "sum")


def test_a_machine_without_containers_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = plan_environment(EnvironmentConfig(name="harbor"))
    with pytest.raises(MachineError, match="no container runtime: docker is not installed; podman is not installed"):
        plan.load()
    with pytest.raises(InputError, match=r"environment.sandbox = bubblewrap: these tasks run in containers"):
        plan_environment(EnvironmentConfig(name="harbor", sandbox="bubblewrap")).load()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("task.toml", "[[steps]]\nname = 'one'", "several steps"),
        ("task.toml", "[environment]\nmcp_servers = [{name = 'a'}]", "MCP servers"),
        ("task.toml", "[environment]\nos = 'windows'", "the system windows"),
        ("task.toml", "[environment]\nnetwork_mode = 'allowlist'", "the network allowlist"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'", "a separate container for its tests"),
        ("task.toml", "[environment]\nenv = { KEY = '${RLCTL_TEST_UNSET}' }", "RLCTL_TEST_UNSET, which is not set"),
        ("task.toml", "[environment", "cannot be read as a task"),
        ("environment/docker-compose.yaml", "services: {}", "several containers"),
    ],
)
def test_tasks_that_rlctl_does_not_play_are_named(tasks: Path, name: str, text: str, words: str) -> None:
    (tasks / "sum" / name).write_text(text)
    with pytest.raises(InputError, match=words):
        read_task(tasks / "sum")


def test_rewards_are_numbers() -> None:
    assert rewards_in("0.5\n", "txt") == {"reward": 0.5}
    assert rewards_in('{"reward": 1, "style": 0.5}', "json") == {"reward": 1.0, "style": 0.5}
    assert rewards_in('{"passed": 0.25}', "json")["reward"] == 0.25
    for text, suffix in (
        ("", "txt"),
        ("nan", "txt"),
        ('{"reward": "1"}', "json"),
        ("{}", "json"),
        ('{"a": 1, "b": 2}', "json"),
    ):
        with pytest.raises(RuntimeError, match="the tests wrote"):
            rewards_in(text, suffix)


@pytest.mark.parametrize("name", ["sum", "words"])
def test_tests_that_take_too_long_are_no_reward(runtime: str, name: str, tasks: Path) -> None:
    (tasks / "words" / "task.yaml").write_text("instruction: Write.\nmax_test_timeout_sec: 1\n")
    (tasks / "words" / "run-tests.sh").write_text("sleep 20\n")
    (tasks / "sum" / "task.toml").write_text(HARBOR.replace("timeout_sec = 30.0", "timeout_sec = 1.0"))
    (tasks / "sum" / "tests" / "test.sh").write_text("sleep 20\n")
    config = EnvironmentConfig(name="harbor", sandbox=runtime)
    with closing(EnvironmentHost(plan_environment(config))) as host:
        host.start()
        with pytest.raises(EpisodeFailedError, match="the tests took longer than 1 s") as failure:
            asyncio.run(played(host, tasks / name, Working()))
        assert failure.value.reason == "timeout"


@pytest.mark.slow
def test_a_run_trains_on_the_rewards_of_tasks_in_containers(
    runtime: str, tasks: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """The tests give hundredths of the machine's clock as the reward, and the run trains on these numbers. Its
    processes are of its own, to find the stand-in in the PATH."""
    clock = '#!/bin/sh\nread up rest < /proc/uptime\necho "0.${up#*.}" > /logs/verifier/reward.txt\n'
    (tasks / "sum" / "tests" / "test.sh").write_text(clock)
    words = [
        sys.executable, "-m", "rlctl", "train", "grpo", "--model", str(tiny_llama),
        "--data", str(tasks / "sum"), "--env", "harbor",
        "--gpu", "cpu", "--steps", "2", "--prompts", "1", "--generations", "4", "--max-new-tokens", "6",
        "--run-dir", str(tmp_path / "run"), "--set", "training.dp=1", "--set", "run.log_rollouts=8",
        "--set", f"environment.sandbox={runtime}", "--set", "environment.turns=2",
    ]  # fmt: skip
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    for step, line in enumerate(read_metrics(tmp_path / "run" / "metrics.jsonl"), start=1):
        logged = (tmp_path / "run" / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        rewards = [json.loads(sample)["reward"] for sample in logged]
        assert len(rewards) == 4
        assert all(0 <= reward < 1 for reward in rewards)
        assert line["reward_mean"] == pytest.approx(sum(rewards) / 4)
        assert (line["optimizer_steps"], line["skipped_steps"]) == (1, 0)
        assert line["grad_norm"] > 0
        assert line["environment"]["gateway/requests"] >= 1
    assert not containers(runtime, tmp_path)


@pytest.mark.parametrize("listen", ["0.0.0.0", "127.0.0.1"])
def test_a_trial_before_the_run_asks_from_the_container_at_the_chosen_address(
    tiny_llama: Path, tmp_path: Path, docker: None, listen: str
) -> None:
    """The image has Python; its program asks the address in its variables."""
    image = tmp_path / "image"
    image.mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "agent").write_text(str(image))
    (image / "agent.py").write_text(PROGRAM)
    environment = {
        "name": "program", "params": {"command": [sys.executable, "agent.py"]}, "sandbox": "docker", "image": "agent",
        "listen": listen,
    }  # fmt: skip
    config = RlConfig.model_validate({"environment": environment})
    encoder = PromptEncoder.build(load_tokenizer(tiny_llama, config.model), config.model, config.data, tiny_llama)
    row = PromptRow(0, "row 0", "2 + 3?", "5")
    if listen == "127.0.0.1":
        with pytest.raises(InputError, match=r"The model is at 127.0.0.1:\d+, a loopback address \(environment.listen"):
            EnvironmentEpisodes.open(config, encoder, row)
    else:
        play = EnvironmentEpisodes.open(config, encoder, row)
        assert play is not None
        assert play.opening.ask is not None
        assert [*play.opening.ask.messages] == [{"role": "user", "content": "What is 2 + 3?"}]
