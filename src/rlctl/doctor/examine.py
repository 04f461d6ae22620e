"""Runs all checks that a run of the given size needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlctl.checkpoints.locations import converted_directory
from rlctl.doctor import gpus, host, network, nodes, software
from rlctl.doctor.finding import Check


@dataclass(frozen=True)
class Wanted:
    """The run to check the machine for; by default the laptop preset's."""

    gpus_per_node: int = 0
    gpu: str = "auto"
    parameters: int = 0
    """Parameters of the model; 0 if unknown."""
    host_memory: float = 0.0
    """Planned bytes of a node's memory; 0 without a plan."""
    no_plan: str = ""
    """The reason why no plan fits this machine."""
    run_directory: Path = Path("runs")
    ray_address: str | None = None
    model: str | None = None
    tensors: tuple[str, ...] = ()
    """Names of the model's tensors, where its class lists them."""


def examine(wanted: Wanted, *, quick: bool = False) -> Iterator[Check]:
    """Yield each check as soon as it is done; `quick` leaves out what starts processes."""
    found = gpus.list_gpus()
    versions = software.installed_versions()
    yield software.check_python(len(found))
    yield software.check_engines(versions)
    yield software.check_packages(versions)
    yield software.check_torch_companions(versions)
    yield software.check_transformer_engine(len(found), versions, None if quick else software.why_not_imported)
    if found and wanted.tensors and (check := software.check_delta_rule(len(found), wanted.tensors, versions)):
        yield check
    yield gpus.check_vllm_platform(found, versions)
    yield host.check_cpu(len(found))
    split = gpus.check_whole(wanted.gpus_per_node, wanted.gpu)
    yield split or gpus.check_gpus(found, wanted.gpus_per_node, wanted.gpu)
    if found:
        yield from nodes.gpu_checks(found, versions, quick=quick)
    if wanted.no_plan:
        yield Check("plan", "fail", wanted.no_plan, "`rlctl plan` with the same flags has the arithmetic.")
    else:
        yield host.check_memory(wanted.parameters, wanted.gpus_per_node, planned=wanted.host_memory)
    yield host.check_shared_memory(0 if wanted.gpus_per_node else 4 * wanted.parameters)
    yield host.check_left_over()
    yield host.check_locked_memory(len(found))
    yield host.check_run_directory(wanted.parameters, wanted.run_directory)
    yield host.check_converted_models(wanted.parameters)
    yield host.check_ray_directory()
    yield network.check_ray(wanted.ray_address)
    if wanted.ray_address:
        needed = wanted.parameters * host.CONVERTED_BYTES_PER_PARAMETER
        count = max(wanted.gpus_per_node, len(found))  # a plan assumes the same number on each node
        directory = converted_directory()
        kind = wanted.gpu if wanted.gpus_per_node else "auto"
        more = partial(nodes.checks_of_nodes, wanted.gpus_per_node, kind, quick=quick)
        yield from network.check_nodes(wanted.ray_address, directory, needed, count, wanted.host_memory, more)
    yield network.check_hub()
    yield network.check_token(wanted.model)
    if not quick:
        yield host.check_sandbox()
        yield network.check_ranks(len(found))
