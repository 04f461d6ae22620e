"""The machine of a plan: hardware constants, a cluster, and measured rates. Rates are peaks of one device in one
direction; GPUs are in `devices.yaml`."""

from __future__ import annotations

import difflib
import json
import math
import os
import platform
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rlctl.config.files import cache_directory, user_path, write_json
from rlctl.errors import InputError

GIB = 1024**3
GB = 10**9
TERA = 10**12


@dataclass(frozen=True)
class Device:
    """One GPU, or one node's processors where `is_cpu`. Bytes, bytes and floating-point operations per second."""

    name: str
    memory: float
    """Usable memory, as the driver reports it, below nominal."""
    bf16: float
    fp8: float
    """Equal to `bf16` where the part has no FP8 units."""
    memory_bandwidth: float
    link: float
    """To devices in the same NVLink domain, else PCIe."""
    link_domain: int
    """Devices that `link` joins."""
    network: float
    """To other nodes, a device."""
    host_link: float
    """Between device and host memory."""
    gpus_per_node: int
    host_memory: float
    """Bytes of one node."""
    fp4: float = 0.0
    capability: float = 0.0
    """CUDA's compute capability; 0 for a CPU."""
    cores: int = 0
    """Processor cores of a node, for a CPU."""
    host_factor: float = 1.0
    """Host time for kernel launches and Python, relative to a current x86 server."""
    source: str = ""
    note: str = ""
    """A sentence for plans on it, where its figures are estimates."""

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def has_bfloat16(self) -> bool:
        return self.is_cpu or self.capability >= 8.0

    def flops(self, precision: str) -> float:
        """Peak of a training precision: `bf16`, `fp8` (any scaling recipe), `fp4`, `float32`."""
        rates = {"fp8": self.fp8, "fp4": self.fp4 or self.fp8, "float32": self.bf16 if self.is_cpu else self.bf16 / 8}
        return rates.get(precision, self.bf16)


UNITS = {"memory": GIB, "host_memory": GIB, **dict.fromkeys(("bf16", "fp8", "fp4"), TERA)}
UNITS |= dict.fromkeys(("memory_bandwidth", "link", "network", "host_link"), GB)


def _devices() -> dict[str, Device]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    listed: dict[str, dict[str, Any]] = yaml.load(Path(__file__).with_name("devices.yaml").read_text(), loader)
    usual, devices = listed.pop("usual"), {}
    for name, rates in listed.items():
        values = usual | {"fp8": rates["bf16"]} | rates
        devices[name] = Device(name, **{key: value * UNITS.get(key, 1) for key, value in values.items()})
    return devices


DEVICES = _devices()


def cpu_device(cores: int, memory: float, flops: float | None = None, bandwidth: float | None = None) -> Device:
    """Return a node's processors as a device. Rates for all cores: 80 GFLOP/s per core in float32 (AVX2 with FMA at 3
    GHz: 96 in theory) and 10 GB/s per core up to two memory channels, unless measured."""
    return Device(
        "cpu", memory, flops or cores * 80e9, flops or cores * 80e9, bandwidth or min(10 * cores, 80) * GB,
        link=3 * GB, link_domain=1, network=1.2 * GB, host_link=8 * GB, gpus_per_node=0, host_memory=memory,
        cores=cores,
        source="default for an AVX2 processor; `rlctl doctor --calibrate` measures it",
    )  # fmt: skip


@dataclass(frozen=True)
class ClusterFacts:
    """Nodes of equal devices. On a CPU a node is one device whose cores the processes share."""

    device: Device
    nodes: int = 1
    gpus_per_node: int = 8
    origin: str = "table"
    """The source of the rates: `table` or the name of a measured profile."""
    factors: tuple[tuple[str, float], ...] = ()
    """Measured over predicted seconds of a phase in a run on this machine (`rlctl plan --calibrate`)."""
    notes: tuple[str, ...] = field(default=())

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def is_cpu(self) -> bool:
        return self.device.is_cpu

    @property
    def devices(self) -> int:
        """The number of devices that a plan divides: GPUs, or the cores of a CPU's nodes."""
        return max(1, self.device.cores * self.nodes) if self.is_cpu else self.gpus

    @property
    def link_domain(self) -> int:
        """Devices joined by the fast link: a node's, or more where NVLink spans nodes."""
        wide = self.device.link_domain > self.device.gpus_per_node
        return min(self.device.link_domain, self.gpus) if wide else min(self.device.link_domain, self.gpus_per_node)

    @property
    def near_devices(self) -> int:
        """Devices of a node, or of an NVLink domain where that spans nodes."""
        return max(self.link_domain, self.gpus_per_node)

    def nodes_of(self, ranks: int) -> int:
        """The nodes over which `ranks` neighboring ranks are spread; on a CPU each has a core."""
        return -(-ranks // max(1, self.device.cores if self.is_cpu else self.gpus_per_node))

    def bandwidth(self, ranks: int) -> float:
        """Bytes a second out of each of `ranks` neighboring devices that talk to each other."""
        device = self.device
        if self.is_cpu:
            return device.link
        if ranks <= max(1, self.link_domain):
            return device.link
        return min(device.link, device.network) if self.nodes > 1 else device.link

    def describe(self) -> str:
        if self.is_cpu:
            return f"{self.nodes} x CPU, {self.device.cores} cores, {self.device.memory / GIB:.0f} GiB"
        return (
            f"{self.nodes} x {self.gpus_per_node} {self.device.name.upper()}, {self.device.memory / GIB:.0f} GiB each"
        )


def device_named(name: str) -> Device:
    """A device of the table. Raises InputError for an unknown name, with the nearest known names."""
    key = name.lower().replace("_", "-").removeprefix("nvidia-")
    if key in DEVICES:
        return DEVICES[key]
    inside = [name for name in DEVICES if key in name or name in key]
    meant = (inside or difflib.get_close_matches(key, DEVICES, 1, 0.8))[:1]
    hint = f"Did you mean {meant[0]}? " if meant else ""
    raise InputError(f"--gpu {name}: no such device in the table.", f"{hint}Known: {', '.join(DEVICES)}, cpu, auto.")


def make_cluster(gpu: str, nodes: int | None = None, gpus_per_node: int | None = None) -> ClusterFacts:
    """The cluster that flags describe. `gpu` is a device of the table or `cpu` (then this machine's processors)."""
    if gpu == "cpu":
        return ClusterFacts(local_cpu(), nodes or 1, 0)
    device = device_named(gpu)
    return ClusterFacts(device, nodes or 1, gpus_per_node or device.gpus_per_node)


def local_cpu() -> Device:
    """Return this machine's processors: usable cores, and memory within control group limits."""
    return cpu_device(len(os.sched_getaffinity(0)), granted_memory())


CGROUPS = Path("/sys/fs/cgroup")


def granted_memory(cgroups: Path = CGROUPS, cgroup_file: Path = Path("/proc/self/cgroup")) -> float:
    """Return this process's usable bytes: the machine's, or fewer by its control groups (version 1 or 2)."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    places = [cgroups / "memory.max", cgroups / "memory" / "memory.limit_in_bytes"]
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else ():
        _, controllers, path = line.split(":", 2)
        parts = Path(path.lstrip("/"))
        for group in (parts, *parts.parents):
            if not controllers:
                places.append(cgroups / group / "memory.max")
            elif "memory" in controllers.split(","):
                places.append(cgroups / "memory" / group / "memory.limit_in_bytes")
    texts = (place.read_text().strip() for place in places if place.is_file())
    return min([memory, *(float(text) for text in texts if text.isdigit())])


def match_device(reported: str) -> str | None:
    """Return the table's name of a driver's GPU name (`NVIDIA H100 80GB HBM3` -> `h100`); None: unknown."""
    text = reported.lower().replace(" ", "-")
    if "laptop" in text or "max-q" in text:  # another chip under the name of a larger one
        return None
    if "a100" in text and "40gb" in text:
        return "a100-40gb"
    if "h100-nvl" in text:
        return "h100-nvl"
    words = text.split("-")
    # RTX 4090 is two words, and RTX 6000 Ada three.
    phrases = {"".join(words[first : first + count]) for count in (1, 2, 3) for first in range(len(words))}
    # An L40 is not an L4.
    matches = [
        name for name in DEVICES if any(re.match(rf"{name.replace('-', '')}(?!\d)", phrase) for phrase in phrases)
    ]
    return max(matches, key=len, default=None)


def device_reported(reported: str, memory: float | None = None, capability: float | None = None) -> Device:
    """Return a driver-reported device: the table's, or one with the slowest rates of its (or the nearest lower) compute
    capability. `memory` in bytes."""
    if (name := match_device(reported)) is not None:
        return DEVICES[name]
    older = [device for device in DEVICES.values() if device.capability <= (capability or 8.9)]
    newest = max((device.capability for device in older), default=min(device.capability for device in DEVICES.values()))
    like = min(
        (device for device in DEVICES.values() if device.capability == newest),
        key=lambda device: (device.bf16, device.memory_bandwidth),
    )
    words = re.sub(r"[^a-z0-9]+", "-", reported.lower()).strip("-").split("-")
    name = "-".join(word for word in words if word not in ("nvidia", "geforce", "gpu")) or "gpu"
    note = f"{reported} is planned with the rates of {like.name.upper()}; `rlctl doctor --calibrate` measures its own."
    return replace(
        like, name=name, memory=memory - DRIVER_BYTES if memory else like.memory, gpus_per_node=1,
        capability=capability or like.capability, source=note, note=note,
    )  # fmt: skip


DRIVER_BYTES = 0.45 * GIB
"""Memory of a GPU that the driver counts (`memory.total`) and programs do not get."""


def measured(cluster: ClusterFacts, memory: float | None) -> ClusterFacts:
    """Return the cluster with less memory if measured: `memory` (bytes, least of its GPUs) and the control group's
    limit."""
    device = cluster.device
    least = min(device.memory, memory - DRIVER_BYTES) if memory else device.memory
    return replace(cluster, device=replace(device, memory=least, host_memory=min(device.host_memory, granted_memory())))


@dataclass(frozen=True)
class MachineProfile:
    """Measured rates of one machine: operations or bytes a second. None: not measured, or not there."""

    host: str
    device: str
    """`cpu`, or the table's name of its GPUs."""
    measured: str
    """Date and time, UTC."""
    devices: int
    """GPUs, or processor cores."""
    matmul: float
    """Large matrices in the training dtype (bfloat16 on a GPU, float32 on a CPU, with all its cores)."""
    memory_bandwidth: float
    """Reading and writing device memory."""
    all_reduce: float | None = None
    """Bus bandwidth of an all-reduce between the local devices (processes, on a CPU)."""
    point_to_point: float | None = None
    host_to_device: float | None = None
    device_to_host: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None


def calibration_path() -> Path:
    """The file with this machine's factors of phases, next to its profile."""
    return profile_path().with_name(f"{profile_path().stem}-phases.json")


def save_calibration(device: str, run: str, factors: dict[str, float]) -> Path:
    """Write the factors of phases that a run on this machine's `device` has shown."""
    path = calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps({"device": device, "run": run, "factors": factors}, indent=2) + "\n")
    aside.replace(path)
    return path


def calibrated(cluster: ClusterFacts) -> ClusterFacts:
    """Return the cluster with calibrated phase factors of such a device, if any. Raises InputError for an invalid
    file."""
    path = calibration_path()
    if not path.exists():
        return cluster
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        factors = tuple(sorted((str(phase), float(factor)) for phase, factor in values["factors"].items()))
        if any(not 0 < factor < math.inf for _, factor in factors):
            raise ValueError("a factor is not a positive number")
        device, run = str(values["device"]), str(values["run"])
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        hint = "Remove it, or run `rlctl plan --calibrate RUN` again."
        raise InputError(f"{path} is not a calibration: {error}.", hint) from error
    if device != cluster.device.name:
        return cluster
    return replace(cluster, factors=factors, origin=f"{cluster.origin}, phases calibrated by {run}")


RATES = ("matmul", "memory_bandwidth")
MORE_RATES = ("all_reduce", "point_to_point", "host_to_device", "device_to_host")
"""Rates of a profile that every machine has, and rates that some machines lack (absent or None)."""


def profile_path() -> Path:
    """This machine's profile: `RLCTL_MACHINE_PROFILE`, or a file named after the host in rlctl's cache."""
    if path := os.environ.get("RLCTL_MACHINE_PROFILE"):
        return user_path(path)
    return cache_directory() / f"machine-{platform.node() or 'local'}.json"


def save_profile(profile: MachineProfile, path: Path) -> None:
    """Writes the profile, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(profile))


def load_profile(path: Path | None = None) -> MachineProfile | None:
    """This machine's profile; None: not calibrated. Raises InputError for a file that is not a profile."""
    path = path or profile_path()
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known_fields = {field.name for field in fields(MachineProfile)}
        profile = MachineProfile(**{key: value for key, value in values.items() if key in known_fields})
        for rate in (*RATES, *filter(values.get, MORE_RATES)):
            if not (isinstance(values[rate], int | float) and 0 < values[rate] < math.inf):
                raise ValueError(f"its `{rate}` is {values[rate]!r}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        hint = "Remove it, or run `rlctl doctor --calibrate`."
        raise InputError(f"{path} is not a machine profile: {error}.", hint) from error
    return profile


def with_profile(cluster: ClusterFacts, profile: MachineProfile | None) -> ClusterFacts:
    """Return the cluster with rates from a profile of such a device. Peaks are scaled to a large matmul's rate; model
    efficiencies still apply."""
    if profile is None or profile.device != cluster.device.name:
        return cluster
    device = cluster.device
    changes: dict[str, float] = {"memory_bandwidth": profile.memory_bandwidth}
    if cluster.is_cpu:
        if profile.devices != device.cores:
            return cluster
        changes |= {"bf16": profile.matmul, "fp8": profile.matmul}
    else:
        scale = profile.matmul / (REACHED * device.bf16)
        changes |= {"bf16": device.bf16 * scale, "fp8": device.fp8 * scale, "fp4": device.fp4 * scale}
        # A copy reaches about nine tenths of the peak that the model's efficiency is a share of.
        changes["memory_bandwidth"] = profile.memory_bandwidth / REACHED_BANDWIDTH
    if profile.all_reduce:
        changes["link"] = profile.all_reduce / (1.0 if cluster.is_cpu else LINK_REACHED)
    if profile.host_to_device and profile.device_to_host:
        changes["host_link"] = min(profile.host_to_device, profile.device_to_host)
    return replace(cluster, device=replace(device, **changes), origin=f"measured on {profile.host}, {profile.measured}")


REACHED = 0.72
"""Share of the data sheet's BF16 peak that a large matmul reaches on a healthy device (see `constants.py`)."""
REACHED_BANDWIDTH = 0.9
LINK_REACHED = 0.8
"""Share of NVLink's peak that nccl-tests report as bus bandwidth of a large all-reduce."""
