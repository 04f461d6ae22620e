"""Checks of what rlctl talks to: a Ray cluster, its nodes, and the model hub."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path

from rlctl.doctor.check import Check
from rlctl.errors import RlctlError

HUB = "https://huggingface.co"
WAIT_S = 5.0


def check_ray(address: str | None = None) -> Check:
    """Ray can be started here, or the cluster at `address` (`HOST:PORT`; `auto`: one on this machine) answers."""
    if address in (None, "auto", "local"):
        return check_loopback(socket.gethostname())
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return Check("ray", "fail", f"--ray-address {address} is not HOST:PORT", "Give for example 10.0.0.1:6379.")
    try:
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    except OSError as error:
        fix = "Start it with `ray start --head`, check the address, or leave it out to run on this machine."
        return Check("ray", "fail", f"no answer from {address}: {error}", fix)
    return Check("ray", "ok", f"{address} answers")


def check_loopback(host: str) -> Check:
    """Workers on one machine find each other under its own name."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return Check("ray", "fail", f"this machine's name {host} has no address ({error})", "Add it to /etc/hosts.")
    return Check("ray", "ok", f"runs on this machine ({host}, {address})")


def check_hub(url: str = HUB, environment: Mapping[str, str] | None = None) -> Check:
    """The model hub answers. Without it there are local models and the laptop preset's."""
    environment = os.environ if environment is None else environment
    fix = "Give --model a local directory; the laptop preset's model comes from PyPI."
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Check("hub", "warn", "HF_HUB_OFFLINE is set: only models in the cache", f"{fix} Or unset it.")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=WAIT_S):
            return Check("hub", "ok", f"{url} answers")
    except (urllib.error.URLError, OSError) as error:
        return Check("hub", "warn", f"{url} cannot be reached ({error})", fix)


def check_nodes(address: str, directory: Path) -> Check:
    """Every node of the Ray cluster sees one and the same `directory`: a file written here is looked for on each."""
    from rlctl.cluster.session import ray_session

    try:
        token = write_token(directory)
    except OSError as error:
        return Check("nodes", "fail", f"{directory}: {error.strerror}", "Choose a directory that can be written.")
    try:
        with ray_session(address):
            return compare_nodes(directory, nodes_that_see(token))
    except RlctlError as error:
        return Check("nodes", "fail", error.message, error.hint)
    finally:
        token.unlink()


def write_token(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / f".rlctl-doctor-{uuid.uuid4().hex}"
    token.touch()
    return token


def nodes_that_see(token: Path) -> dict[str, bool]:
    """Node address -> whether `token` exists there, asked of each living node by a task that runs on it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def sees(path: str) -> bool:
        return os.path.exists(path)

    def ask(node: str) -> ray.ObjectRef:
        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return ray.remote(sees).options(num_cpus=0, scheduling_strategy=place).remote(str(token))

    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    try:
        return dict(zip(nodes, ray.get([ask(node) for node in nodes.values()], timeout=60), strict=True))
    except ray.exceptions.RayError as error:
        raise RlctlError(f"not every node of {', '.join(nodes)} answered: {error}.", "Check `ray status`.") from error


def compare_nodes(directory: Path, sees: Mapping[str, bool]) -> Check:
    blind = [node for node, seen in sees.items() if not seen]
    if blind:
        fix = "Set RLCTL_MEGATRON_CHECKPOINT_DIR to a directory on a file system that all nodes mount."
        return Check("nodes", "fail", f"{directory} on {', '.join(blind)} is another directory than here", fix)
    return Check("nodes", "ok", f"{len(sees)} node(s) see the same {directory}")
