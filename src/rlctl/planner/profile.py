"""What was measured of a machine: a file per host, which the planner reads instead of the table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from rlctl.config.paths import user_path
from rlctl.errors import InputError
from rlctl.planner.cluster import ClusterFacts

VERSION = 1


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
    version: int = VERSION


def profile_path(environment: Mapping[str, str] | None = None) -> Path:
    """Where this machine's profile is: `RLCTL_MACHINE_PROFILE`, or a file named after the host in rlctl's cache."""
    environment = os.environ if environment is None else environment
    if environment.get("RLCTL_MACHINE_PROFILE"):
        return user_path(environment["RLCTL_MACHINE_PROFILE"])
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "rlctl"
    return user_path(environment.get("RLCTL_CACHE_DIR") or cache) / f"machine-{platform.node() or 'local'}.json"


def save_profile(profile: MachineProfile, path: Path) -> None:
    """Writes the profile, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(asdict(profile), indent=2) + "\n")
    aside.replace(path)


def load_profile(path: Path | None = None) -> MachineProfile | None:
    """This machine's profile; None: not calibrated. Raises InputError for a file that is no profile."""
    path = path or profile_path()
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
        known = {field.name for field in fields(MachineProfile)}
        profile = MachineProfile(**{key: value for key, value in values.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not a machine profile: {error}.", ("Remove it, or run `rlctl doctor --calibrate`.")
        ) from error
    return profile if profile.version == VERSION else None


def with_profile(cluster: ClusterFacts, profile: MachineProfile | None) -> ClusterFacts:
    """The cluster with measured rates, where the profile is of such a device; peak rates are scaled to what a large
    matmul reaches, so that the model's own efficiencies still apply on top of a GPU's peak."""
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
"""Share of the data sheet's BF16 peak that a large matmul reaches where nothing is wrong (planner/constants.py)."""
REACHED_BANDWIDTH = 0.9
LINK_REACHED = 0.8
"""Share of NVLink's peak that nccl-tests report as bus bandwidth of a large all-reduce."""
