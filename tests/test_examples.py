"""The files in `examples/` do what their page says, and those that a repository's services read can be read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.data.prompt_rows import PromptRow
from rlctl.methods.configuration import resolve
from rlctl.rewards.user_function import UserBatchScorer, user_scorer
from rlctl.settings.run import RunConfig
from support.hosts import made_hosts
from support.runs import LIMIT_S, REWARD, TASK, results, started

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_own_data_fits_its_reward() -> None:
    lines = (EXAMPLES / "own_data" / "questions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 48
    scorer = user_scorer(f"{EXAMPLES / 'own_data' / 'rewards.py'}:brief")
    for number, fields in enumerate(rows):
        row = PromptRow(number, f"line {number + 1}", fields["question"], fields["answer"], fields)
        assert scorer(f"It is {fields['answer']}.", row) == pytest.approx(0.97)
        assert scorer("no idea", row) == pytest.approx(-0.02)


@pytest.mark.parametrize(
    ("completion", "reward"), [("so 1,200 - 30 = 1,170", 1.0), ("The answer is 1170.0", 1.0), ("1171", 0.0), ("", 0.0)]
)
def test_the_reward_of_gsm8k_reads_the_last_number(completion: str, reward: float) -> None:
    scorer = user_scorer(f"{EXAMPLES / 'gsm8k' / 'rewards.py'}:right")
    row = PromptRow(0, "row 1", "question", "She has 1,200 and spends 30.\n#### 1,170")
    assert scorer(completion, row) == reward


PROGRAMS = {
    "Add them:\n```python\nprint(16 - 8)\n```": 1.0,
    "```python\nprint(1)\n```\nNo, rather\n```\nprint('so: 8')\n```": 1.0,
    "```python\nprint(9)\n```": 0.1,
    "```python\npass\n```": 0.1,
    "```python\nprint(8)": 0.0,
    "8": 0.0,
    "```python\nprint(8); raise SystemExit(3)\n```": 0.0,
    "```python\nprint(8)\0\n```": 0.0,
    "```python\nimport os; print(8 if os.listdir() == [] and 'HOME' not in os.environ else 9)\n```": 1.0,
    "```python\nbytearray(1 << 31); print(8)\n```": 0.0,
    "```python\nprint('x' * (1 << 20), 8)\n```": 0.0,
    "```python\nwhile True: pass\n```": 0.0,
}


def test_the_tool_runs_programs_within_its_limits() -> None:
    scorer = user_scorer(f"{EXAMPLES / 'tool' / 'rewards.py'}:solved")
    row = PromptRow(0, "row 1", "question", "8", {})
    assert isinstance(scorer, UserBatchScorer)
    assert dict(zip(PROGRAMS, scorer.score_all([*PROGRAMS], [row] * len(PROGRAMS)), strict=True)) == PROGRAMS


def test_the_configuration_of_the_tool_is_valid() -> None:
    config = resolve("1gpu", [EXAMPLES / "tool" / "tool.yaml"], environment={}).config
    assert (config.data.name, config.data.prompt_field) == ("examples/own_data/questions.jsonl", "question")


def test_the_configuration_of_gsm8k_is_valid() -> None:
    config = resolve("1node", [EXAMPLES / "gsm8k" / "gsm8k.yaml"], environment={}).config
    assert (config.data.name, config.data.prompt_field) == ("openai/gsm8k:main", "question")


def test_the_script_for_two_nodes_is_a_shell_script_with_known_flags() -> None:
    script = EXAMPLES / "two_nodes" / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    text = script.read_text().replace("\\\n", "")
    from rlctl.cli import load_command

    for name, path in (("train", ["grpo"]), ("doctor", [])):
        line = next(
            line for line in text.splitlines() if f"rlctl {name}" in line and line.startswith(("on_first", "srun"))
        )
        line = line[line.index("rlctl") :]
        command = load_command(name)
        for child in path:
            command = command.commands[child]
        known = {flag for parameter in command.params for flag in parameter.opts}
        assert {word for word in line.split() if word.startswith("--")} <= known


RECORDING_SRUN = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
if "hostname" in sys.argv[-1] and "SLURMD" not in sys.argv[-1]:
    print("127.0.1.1\\n10.0.0.7 172.17.0.1")
"""


def test_the_script_for_two_nodes_passes_on_what_slurm_gives_and_what_containers_need(tmp_path: Path) -> None:
    """On nodes of four GPUs whose own name means the loopback. What the steps would do is not done."""
    log = tmp_path / "steps"
    (tmp_path / "srun").write_text(RECORDING_SRUN.format(python=sys.executable, log=str(log)))
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17", "SLURM_GPUS_ON_NODE": "4"}
    job |= {"SLURM_CPUS_ON_NODE": "144", "CONTAINER": "rlctl.sqsh", "MOUNTS": "/shared:/shared", "USER": "someone"}
    job |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(EXAMPLES / "two_nodes" / "train.sbatch"), "Qwen/Qwen3-32B", "--steps", "5"]
    subprocess.run(script, env=job, cwd=tmp_path, check=True, timeout=60)
    deadline = time.monotonic() + 60  # the script does not wait for the steps that start Ray
    while not all(word in log.read_text() for word in ("--head", "--exclude=n1")) and time.monotonic() < deadline:
        time.sleep(0.05)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    needed = {"--overlap", "--mem=0", "--cpus-per-task=144", "--container-image=rlctl.sqsh", "--container-name=rlctl"}
    assert all(needed | {"--container-mounts=/shared:/shared"} <= set(step) for step in steps)
    said = [" ".join(word for word in step if not word.startswith("--container")) for step in steps]
    (head,) = [step for step in said if "--head" in step]
    assert "--num-gpus=4" in head
    assert "--node-ip-address=10.0.0.7 --port=6379" in head
    (other,) = [step for step in said if "--exclude=n1" in step]
    assert other.endswith("--num-gpus=4 --temp-dir=/tmp/someone/ray --address=10.0.0.7:6379")
    run = "--preset 2nodes --model Qwen/Qwen3-32B --gpus-per-node 4 --ray-address 10.0.0.7:6379"
    assert any(step.endswith(f"rlctl doctor {run}") for step in said)
    assert any(step.endswith(f"rlctl train grpo {run} --nodes 2 --run-dir runs/17 --steps 5") for step in said)


SRUN = """#!{python}
import os, subprocess, sys
hosts, words, flags = {hosts}, sys.argv[1:], {{}}
while words[0].startswith("--"):
    flag, _, value = words.pop(0).lstrip("-").partition("=")
    flags[flag] = value
wanted = [flags["nodelist"]] if "nodelist" in flags else [name for name in hosts if name != flags.get("exclude")]
assert len(wanted) == int(flags["nodes"]) == int(flags["ntasks"])
words = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *words]
inside = [["nsenter", "-t", str(hosts[name]), "--net", "--mount", "--uts", *words] for name in wanted]
started = [subprocess.Popen(one) for one in inside]
sys.exit(max(one.wait() for one in started))
"""
"""Stands in for Slurm's srun: it runs a command on the named hosts, or on all but one."""


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
    reason="needs root, unshare, nsenter and ip to make hosts out of namespaces",
)
def test_the_script_for_two_nodes_trains_over_two_hosts(tiny_llama: Path, tmp_path_factory) -> None:
    """On CPUs, in the order and with the words of the script; srun and scontrol alone are not Slurm's."""
    shared = tmp_path_factory.getbasetemp()
    place = tmp_path_factory.mktemp("job")
    (place / "reward.py").write_text(REWARD)
    try:
        stack = made_hosts(shared, 2)
        hosts = stack.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    try:
        (place / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{h.chosen} {h.name}\n" for h in hosts))
        for host in hosts:
            host.run("mount", "--bind", str(place / "hosts"), "/etc/hosts")
        tools = {"srun": SRUN.format(python=sys.executable, hosts={host.name: host.pid for host in hosts})}
        tools["scontrol"] = "#!/bin/sh\nprintf 'host-a\\nhost-b\\n'\n"
        for name, text in tools.items():
            (place / name).write_text(text)
            (place / name).chmod(0o755)
        flags = [*TASK, "--reward", "reward.py:even", "--nodes", "2", "--steps", "2", "--prompts", "2", "--generations",
                 "2", "--max-new-tokens", "4", "--set", "training.dp=2", "--set", "generation.engines=2"]  # fmt: skip
        job = {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17", "USER": "someone"}
        job |= {"SLURM_GPUS_ON_NODE": "0", "PRESET": "laptop", "HOME": str(place)}
        job["PATH"] = f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        script = ["sh", "-c", f'cd {place} && exec bash "$@"', "sh", str(EXAMPLES / "two_nodes" / "train.sbatch")]
        log = place / "log"
        with started(hosts[0].inside([*script, str(tiny_llama), *flags], **job), log) as run:
            assert run.wait(LIMIT_S) == 0, log.read_text()
    finally:
        stack.__exit__(None, None, None)
    assert "2 node(s) see the same" in log.read_text()
    assert [line["step"] for line in results(place / "runs" / "17")] == [1, 2]
    assert (place / ".ray" / "auth_token").stat().st_mode & 0o077 == 0


SLURM = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'echo "scontrol $*" >> said; printf "host-a\\nhost-b\\n"',
    "ray": 'case $1 in status) printf " node_a\\n node_b\\n";; start) exec sleep 300;; esac',
    "rlctl": """echo "$*" >> said
        case "$*" in doctor*|*--resume*) exit 0;; esac
        trap 'exit 130' USR1
        mkdir -p runs/17; echo > runs/17/manifest.json
        while :; do sleep 0.1; done""",
}
"""Stand-ins for a test of the script's signals alone. Training goes on until it gets USR1."""


def test_a_job_that_slurm_warns_saves_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17", "USER": tmp_path.name}
    job |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    codes = []
    for _ in range(2):
        script = ["bash", str(EXAMPLES / "two_nodes" / "train.sbatch"), "m", "--steps", "9"]
        process = subprocess.Popen(script, cwd=tmp_path, env=job, start_new_session=True)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if (tmp_path / "runs" / "17" / "manifest.json").exists() and not codes:
                process.send_signal(signal.SIGUSR1)
                codes.append(process.wait(60))
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        codes.append(process.wait(60))
    shutil.rmtree(Path("/tmp") / tmp_path.name, ignore_errors=True)
    said = (tmp_path / "said").read_text().splitlines()
    assert codes == [130, 130, 0]
    assert "scontrol requeue 17" in said
    trained = [line for line in said if line.startswith("train")]
    assert ["--resume" in line for line in trained] == [False, True]
    assert all("--run-dir runs/17" in line and line.endswith("--steps 9") for line in trained)


@pytest.mark.parametrize(
    ("address", "before", "restarts", "said"),
    [
        ("10.0.0.2", "(null)", 0, ["requeue 17", "update JobId=17 ExcNodeList=host-b"]),
        ("10.0.0.1", "host-x", 2, ["requeue 17", "update JobId=17 ExcNodeList=host-x,host-a"]),
        ("192.0.2.9", "(null)", 0, ["requeue 17"]),
        ("10.0.0.2", "(null)", 3, []),
        ("", "(null)", 0, []),
    ],
)
def test_a_job_whose_node_fails_is_queued_again_without_it(
    tmp_path: Path, address: str, before: str, restarts: int, said: list[str]
) -> None:
    """Stand-ins for Slurm and rlctl; the run ends with code 1, and names a node's address or none."""
    tools = SLURM | {
        "srun": """case "$*" in *SLURMD_NODENAME*) printf '10.0.0.1 host-a\\n10.0.0.2 host-b\\n'; exit;; esac
            while [ "${1#--}" != "$1" ]; do shift; done; exec "$@\"""",
        "scontrol": f"""case $1 in
            show) [ "$2" = job ] && echo "  ReqNodeList=(null) ExcNodeList={before}" || printf "host-a\\nhost-b\\n";;
            *) echo "$*" >> said;; esac""",
        "rlctl": f"""case "$*" in train*) mkdir -p runs/17; echo '{address}' > runs/17/fault-node
            [ '{address}' ] || rm runs/17/fault-node; exit 1;; esac""",
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17", "USER": tmp_path.name}
    job |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": str(restarts)}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    (tmp_path / "said").touch()
    script = ["bash", str(EXAMPLES / "two_nodes" / "train.sbatch"), "m"]
    process = subprocess.Popen(script, cwd=tmp_path, env=job, start_new_session=True)
    assert process.wait(120) == 1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    shutil.rmtree(Path("/tmp") / tmp_path.name, ignore_errors=True)
    assert (tmp_path / "said").read_text().splitlines() == said


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_images_copy_files_and_install_extras_that_there_are(kind: str) -> None:
    lines = (ROOT / "docker" / f"{kind}.Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert len(copied) > 5
    assert [word for word in copied if not (ROOT / word).exists()] == []
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {extra for line in lines for named in re.findall(r"'\.\[(.+?)\]'", line) for extra in named.split(",")}
    assert installed == {"cpu": {"cpu", "demo"}, "gpu": {"cuda", "transformer-engine"}}[kind]
    assert installed <= known.keys()


def test_the_files_that_services_read_are_yaml() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["checks"]["steps"] if "run" in step] == [".ci/run"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)


def kubernetes_pods() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Head and workers: the parameters of `ray start`, and the pod."""
    cluster = yaml.safe_load((EXAMPLES / "kubernetes" / "raycluster.yaml").read_text())
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    return [(group["rayStartParams"], group["template"]["spec"]) for group in groups]


def test_pods_of_the_kubernetes_example_are_alike_and_probed_without_a_dashboard() -> None:
    """KubeRay adds its own probes, which need the extra ray[default] and wget, where a container has none."""
    ports = ("port", "node-manager-port")
    for (parameters, pod), port in zip(kubernetes_pods(), ports, strict=True):
        (container,) = pod["containers"]
        assert {"shared", "memory"} == {one["name"] for one in pod["volumes"]}
        assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        assert pod["terminationGracePeriodSeconds"] >= RunConfig().stop_within_s + 15
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["tcpSocket"] == {"port": int(parameters[port])}
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert any(name.startswith("rdma/") for name in container["resources"]["limits"])
        variables = {one["name"]: one for one in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "rlctl-ray", "key": "token"}
    head, worker = ({key: value for key, value in pod.items() if key != "containers"} for _, pod in kubernetes_pods())
    assert head == worker


def test_the_run_of_the_kubernetes_example_resumes_by_itself(tmp_path: Path) -> None:
    """Its script with recorded commands: the first attempt fails after a checkpoint, the second one ends well."""
    commands = {
        "ray": "printf ' node_a\n node_b\n'",
        "sleep": "exit 0",
        "rlctl": 'echo "$@" >> calls; [ -e runs/first/manifest.json ] || { mkdir -p runs/first; '
        "touch runs/first/manifest.json; exit 1; }",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RLCTL_ADDRESS": "10.0.0.1", "KUBERAY_GEN_RAY_START_CMD": "true"}
    _, pod = kubernetes_pods()[0]
    (container,) = pod["containers"]
    done = subprocess.run(
        [*container["command"], *container["args"]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == "train grpo --preset 2nodes --model MODEL --ray-address 10.0.0.1:6379 --run-dir runs/first"
    assert second == f"{first} --resume"
    assert "rlctl ended with code 1 (attempt 1)" in done.stderr
