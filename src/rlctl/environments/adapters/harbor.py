"""Tasks of Harbor and of terminal-bench, each in a container of its own image, with the tests as the reward.

Read after harbor 0.26.0 (models/task/config.py, verifier/verifier.py, mappers/terminal_bench.py) and terminal-bench
0.2.18 (handlers/trial_handler.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlctl.data.task_folders import HARBOR, TERMINAL_BENCH, folder_digest
from rlctl.environments.interface import MODEL, Agent, ModelAddress
from rlctl.environments.sandboxes import Container, SandboxError
from rlctl.errors import InputError

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the container of the task. Returns its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "A command of bash."}},
            "required": ["command"],
        },
    },
}
REWARDS = "/logs/verifier/reward"
PREPARE = f"mkdir -p /logs/verifier /logs/agent && chmod 777 /logs/* && rm -f {REWARDS}.txt {REWARDS}.json"
GIB_MB = 1024
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class AgentTask:
    """What a task's folder says of its container and its tests."""

    context: Path
    """Folder with the Dockerfile."""
    tests: Sequence[Path]
    """Files, and folders of files, that go to /tests of the container."""
    test: str
    """The command of the tests there."""
    writes_reward: bool
    """Whether the tests write a reward, as Harbor's do; else their exit code is one."""
    image: str | None = None
    build_s: float = 600.0
    agent_s: float | None = None
    verifier_s: float = 600.0
    variables: Mapping[str, str] = field(default_factory=dict)
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    agent_user: str | None = None
    verifier_user: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: bool = True


class Harbor(Agent):
    """Plays the row's `task`. Without `command` the model calls the tool `bash`, and a message without a call ends its
    work. `command` is an agent inside of the container, such as a harness in the image: it gets the instruction on its
    input, and the model's address in its variables. `command_s` limits a call of bash, and `characters` its output."""

    sandboxed = True
    containers = True

    def __init__(
        self, command: str | Sequence[str] | None = None, command_s: float = 120.0, characters: int = 10_000
    ) -> None:
        self.command = shlex.split(command) if isinstance(command, str) else command
        self.command_s, self.characters = command_s, characters

    async def run(self, row: Mapping[str, Any], seed: int, model: ModelAddress) -> Mapping[str, Any]:
        """Have the model work on the task, then run the tests."""
        if not row.get("task"):
            raise InputError("The row has no field `task`.", "Name a folder of tasks with --data.")
        task, box = read_task(Path(row["task"])), self.sandbox
        assert isinstance(box, Container)  # `containers`
        self._ready = False
        if self.command is not None and not task.network:
            raise InputError(f"{row['task']} has no network, and an agent in its container needs the model's address.")
        work = (self._bash_calls if self.command is None else self._program)(row["prompt"], model, task, box)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(work, task.agent_s)  # as in Harbor, the tests then judge unfinished work
        await self._prepare(task, box)
        return await verified(task, box)

    async def _prepare(self, task: AgentTask, box: Container) -> None:
        """Start the container, once: the model is asked first, so that a trial before a run needs none."""
        if self._ready:
            return
        plan = box.plan
        memory_gib = task.memory_mb / GIB_MB if task.memory_mb else plan.memory_gib
        disk_gib = task.storage_mb / GIB_MB if task.storage_mb else plan.disk_gib
        network = plan.network if task.network else "none"
        box.plan = replace(plan, image=task.image, memory_gib=memory_gib, disk_gib=disk_gib, network=network)
        box.run_arguments = ["--cpus", f"{task.cpus:g}"] if task.cpus else []
        if task.image is None:
            await box.built(task.context, f"rlctl-task-{folder_digest(task.context)[:16]}", task.build_s)
        box.user, box.workdir = "0", None
        await box.run(["sh", "-c", PREPARE])
        box.user, box.workdir = task.agent_user, task.workdir
        self._ready = True

    async def _program(self, prompt: Any, model: ModelAddress, task: AgentTask, box: Container) -> None:
        await self._prepare(task, box)
        variables = {**task.variables, **replace(model, url=box.address(model.url)).variables()}
        instruction = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        await box.run(list(self.command or ()), str(instruction).encode(), variables)

    async def _bash_calls(self, prompt: Any, model: ModelAddress, task: AgentTask, box: Container) -> None:
        from aiohttp import ClientSession, ClientTimeout

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        headers = {"Authorization": f"Bearer {model.key}"}
        async with ClientSession(headers=headers, timeout=ClientTimeout(total=None)) as session:
            while True:
                body = {"model": MODEL, "messages": messages, "tools": [BASH]}
                async with session.post(f"{model.url}/v1/chat/completions", json=body) as reply:
                    if reply.status == 400:  # a limit of the episode: the tests judge unfinished work
                        return
                    reply.raise_for_status()
                    answer = (await reply.json())["choices"][0]["message"]
                messages.append(answer)
                if not (calls := answer.get("tool_calls")):
                    return
                await self._prepare(task, box)
                for call in calls:
                    text = await self._called(call["function"], task, box)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    async def _called(self, call: Mapping[str, Any], task: AgentTask, box: Container) -> str:
        try:
            command = json.loads(call["arguments"])["command"]
        except (ValueError, TypeError, KeyError):
            command = None
        if call["name"] != "bash" or not isinstance(command, str):
            return 'Error: the tool is bash, and its arguments are {"command": "..."}.'
        outcome = await box.run(["bash", "-c", command], variables=task.variables, limit_s=self.command_s)
        text = (outcome.output + outcome.errors).strip()
        if len(text) > self.characters:
            half = self.characters // 2
            text = f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
        if outcome.code is None:
            return f"{text}\nError: the command took longer than {self.command_s:g} s, and goes on.".strip()
        return f"{text}\n(exit code {outcome.code})".strip() if outcome.code or not text else text


async def verified(task: AgentTask, box: Container) -> dict[str, Any]:
    """Run the tests; return `reward` and the other rewards. Raises RuntimeError for tests without a reward."""
    box.user, box.workdir = "0", None
    await box.run(["sh", "-c", PREPARE])  # no reward that the agent wrote
    for path in filter(Path.exists, task.tests):
        await box.copy_in(path, "/tests")
    box.user, box.workdir = task.verifier_user, task.workdir
    outcome = await box.run(["bash", "-c", task.test], variables=task.verifier_variables, limit_s=task.verifier_s)
    if outcome.code is None:  # a machine that is slow says nothing of the model's work
        raise SandboxError("timeout", f"the tests took longer than {task.verifier_s:g} s")
    if not task.writes_reward:
        return {"reward": float(outcome.code == 0)}
    for suffix in ("json", "txt"):
        written = await box.run(["cat", f"{REWARDS}.{suffix}"])
        if written.code == 0:
            return rewards_in(written.output, suffix)
    last = (f"{outcome.output}\n{outcome.errors}".strip().splitlines() or ["they wrote nothing"])[-1]
    raise RuntimeError(f"the tests wrote no {REWARDS}.txt or .json: {last}")


def rewards_in(text: str, suffix: str) -> dict[str, Any]:
    """Read a reward file: a number, or numbers by name with `reward` or one alone. Raises RuntimeError for others."""
    try:
        value = json.loads(text) if suffix == "json" else float(text)
    except ValueError:
        value = None
    rewards = value if isinstance(value, dict) else {"reward": value}
    numbers = {name: number for name, number in rewards.items() if isinstance(number, int | float)}
    if not rewards or numbers.keys() != rewards.keys() or not all(map(math.isfinite, numbers.values())):
        raise RuntimeError(f"the tests wrote {text.strip()!r:.80}, and a reward is a finite number, or several by name")
    if "reward" not in numbers and len(numbers) > 1:
        raise RuntimeError(f"the tests wrote the rewards {', '.join(numbers)}, and none is named `reward`")
    return {**numbers, "reward": float(numbers.get("reward", next(iter(numbers.values()))))}


def read_task(folder: Path) -> AgentTask:
    """Read a task. Raises InputError for what rlctl does not do, such as a task of several containers."""
    try:
        if (folder / HARBOR).is_file():
            return _harbor(folder, tomllib.loads((folder / HARBOR).read_text(encoding="utf-8")))
        return _terminal_bench(folder, yaml.safe_load((folder / TERMINAL_BENCH).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{folder} cannot be read as a task: {error!r:.200}.", "Leave it out, or mend it.") from error


def _harbor(folder: Path, config: Mapping[str, Any]) -> AgentTask:
    machine, agent, verifier = (config.get(name) or {} for name in ("environment", "agent", "verifier"))
    context, network = folder / "environment", machine.get("network_mode", "public")
    if machine.get("allow_internet") is False:  # before schema 1.4
        network = "no-network"
    odd = {
        "several steps": config.get("steps"),
        "several containers (docker-compose.yaml)": (context / "docker-compose.yaml").exists(),
        "a separate container for its tests": verifier.get("environment")
        or verifier.get("environment_mode") == "separate",
        "a start in the middle (trajectory.json)": (folder / "trajectory.json").exists(),
        "MCP servers": machine.get("mcp_servers"),
        "a health check": machine.get("healthcheck"),
        "GPUs or TPUs": machine.get("gpus") or machine.get("tpu"),
        f"the system {machine.get('os')}": machine.get("os", "linux").lower() != "linux",
        f"the network {network}": network not in ("public", "no-network"),
        "another network for the agent or the tests": {agent.get("network_mode"), verifier.get("network_mode")}
        - {None, network},
    }
    _refuse(folder, odd)
    if not (folder / "tests" / "test.sh").is_file():
        raise InputError(f"{folder} has no tests/test.sh.", "Leave it out, or mend it.")
    return AgentTask(
        context, [folder / "tests"], "chmod +x /tests/test.sh 2> /dev/null; /tests/test.sh", writes_reward=True,
        image=machine.get("docker_image"), build_s=float(machine.get("build_timeout_sec", 600)),
        agent_s=agent.get("timeout_sec"), verifier_s=float(verifier.get("timeout_sec", 600)),
        variables=_filled(machine.get("env"), folder),
        verifier_variables=_filled({**(machine.get("env") or {}), **(verifier.get("env") or {})}, folder),
        agent_user=_text(agent.get("user")), verifier_user=_text(verifier.get("user")),
        workdir=machine.get("workdir"), cpus=machine.get("cpus"), memory_mb=machine.get("memory_mb"),
        storage_mb=machine.get("storage_mb"), network=network == "public",
    )  # fmt: skip


SERVICE = {"build", "image", "container_name", "command", "environment", "volumes", "working_dir"}
"""Keys of a service that terminal-bench's template has, and that the container of rlctl stands for."""


def _terminal_bench(folder: Path, config: Mapping[str, Any]) -> AgentTask:
    compose = folder / "docker-compose.yaml"
    services = yaml.safe_load(compose.read_text(encoding="utf-8"))["services"] if compose.is_file() else {"client": {}}
    service = next(iter(services.values()))
    build = service.get("build") or "."
    variables = dict(_pairs(service.get("environment") or []))
    own_volumes = [volume for volume in service.get("volumes") or () if not str(volume).startswith("${T_BENCH_")]
    _refuse(folder, {
        "several containers": len(services) > 1,
        f"{', '.join(map(str, set(service) - SERVICE))} in docker-compose.yaml": set(service) - SERVICE,
        "volumes": own_volumes,
        "tests in the agent's shell": config.get("run_tests_in_same_shell"),
    })  # fmt: skip
    context = folder / (build if isinstance(build, str) else build.get("context", "."))
    return AgentTask(
        context, [folder / "run-tests.sh", folder / "tests"], "bash /tests/run-tests.sh", writes_reward=False,
        agent_s=float(config.get("max_agent_timeout_sec", 360)),
        verifier_s=float(config.get("max_test_timeout_sec", 60)), variables=variables,
        verifier_variables={**variables, "TEST_DIR": "/tests"}, workdir=service.get("working_dir"),
    )  # fmt: skip


def _pairs(environment: Any) -> Iterator[tuple[str, str]]:
    """Yield the variables of a service, without those that terminal-bench sets."""
    items = environment.items() if isinstance(environment, dict) else (str(o).partition("=")[::2] for o in environment)
    return ((str(name), str(value)) for name, value in items if "${T_BENCH_" not in str(value))


def _refuse(folder: Path, odd: Mapping[str, Any]) -> None:
    if reasons := [reason for reason, holds in odd.items() if holds]:
        raise InputError(f"{folder} has {' and '.join(reasons)}, which rlctl does not play.", "Leave the task out.")


def _filled(variables: Mapping[str, Any] | None, folder: Path) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` replaced. Raises InputError for an unset one."""

    def value(match: re.Match[str]) -> str:
        value_set = os.environ.get(match[1], match[2])
        if value_set is None:
            raise InputError(f"{folder} needs the variable {match[1]}, which is not set.", f"Set {match[1]}.")
        return value_set

    return {name: VARIABLE.sub(value, str(text)) for name, text in (variables or {}).items()}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
