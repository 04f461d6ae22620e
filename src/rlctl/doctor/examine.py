"""Runs all checks for what is wanted of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlctl.backends.vllm.interfaces import installed_package
from rlctl.checkpoints.places import converted_directory
from rlctl.doctor import communication, gpus, hardware, host, network, places, software
from rlctl.doctor.check import Check


@dataclass(frozen=True)
class Wanted:
    """What the machine should be fit for; the defaults are the laptop preset's needs."""

    gpus_per_node: int = 0
    gpu: str = "auto"
    parameters: int = 0
    """Parameters of the model; 0: not known."""
    run_directory: Path = Path("runs")
    ray_address: str | None = None
    model: str | None = None


def examine(wanted: Wanted, *, quick: bool = False) -> Iterator[Check]:
    """All checks, each as soon as it is done; `quick` leaves out the one that starts processes."""
    found = hardware.list_gpus()
    versions = software.installed_versions()
    yield software.check_python()
    yield software.check_engines(versions)
    yield software.check_packages(versions)
    yield software.check_vllm_interfaces(installed_package(), "cuda" if found else "cpu")
    yield software.check_torch_companions(versions)
    yield software.check_bytecode()
    yield software.check_transformer_engine(len(found), versions)
    yield gpus.check_vllm_platform(found, versions)
    yield hardware.check_cpu()
    yield hardware.check_gpus(wanted.gpus_per_node, wanted.gpu, found)
    if found:
        yield gpus.check_driver(found, versions)
        yield gpus.check_ecc(found)
        yield gpus.check_other_programs(found)
        yield gpus.check_links(found)
    yield from examine_host(wanted, len(found))
    yield network.check_ray(wanted.ray_address)
    if wanted.ray_address:
        needed = wanted.parameters * places.CONVERTED_BYTES_PER_PARAMETER
        yield from network.check_nodes(wanted.ray_address, converted_directory(), needed, wanted.gpus_per_node)
    yield network.check_hub()
    yield host.check_token(wanted.model)
    if not quick:
        yield communication.check_ranks(len(found))


def examine_host(wanted: Wanted, gpus_found: int) -> Iterator[Check]:
    """Memory, limits and directories of this node."""
    yield hardware.check_memory(wanted.parameters, wanted.gpus_per_node)
    yield hardware.check_shared_memory(0 if wanted.gpus_per_node else 4 * wanted.parameters)
    yield host.check_left_over()
    yield hardware.check_open_files()
    yield host.check_locked_memory(gpus_found)
    yield host.check_ports()
    yield host.check_clock()
    yield places.check_run_directory(wanted.parameters, wanted.run_directory)
    yield places.check_converted_models(wanted.parameters)
    yield places.check_cache()
    yield places.check_ray_directory()
