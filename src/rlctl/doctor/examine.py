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


def examine(requested: Wanted, *, quick: bool = False) -> Iterator[Check]:
    """Yield each check as soon as it is done; `quick` leaves out what starts processes."""
    gpu_list = gpus.list_gpus()
    versions = software.installed_versions()
    yield software.check_python(len(gpu_list))
    yield software.check_engines(versions)
    yield software.check_packages(versions)
    yield software.check_torch_companions(versions)
    yield software.check_transformer_engine(len(gpu_list), versions, None if quick else software.why_not_imported)
    if (
        gpu_list
        and requested.tensors
        and (check := software.check_delta_rule(len(gpu_list), requested.tensors, versions))
    ):
        yield check
    yield gpus.check_vllm_platform(gpu_list, versions)
    yield host.check_cpu(len(gpu_list))
    split = gpus.check_whole(requested.gpus_per_node, requested.gpu)
    yield split or gpus.check_gpus(gpu_list, requested.gpus_per_node, requested.gpu)
    if gpu_list:
        yield from nodes.gpu_checks(gpu_list, versions, quick=quick)
    if requested.no_plan:
        yield Check("plan", "fail", requested.no_plan, "`rlctl plan` with the same flags has the arithmetic.")
    else:
        yield host.check_memory(requested.parameters, requested.gpus_per_node, planned=requested.host_memory)
    yield host.check_shared_memory(0 if requested.gpus_per_node else 4 * requested.parameters)
    yield host.check_left_over()
    yield host.check_locked_memory(len(gpu_list))
    yield host.check_run_directory(requested.parameters, requested.run_directory)
    yield host.check_converted_models(requested.parameters)
    yield host.check_ray_directory()
    yield network.check_ray(requested.ray_address)
    if requested.ray_address:
        needed = requested.parameters * host.CONVERTED_BYTES_PER_PARAMETER
        count = max(requested.gpus_per_node, len(gpu_list))  # a plan assumes the same number on each node
        directory = converted_directory()
        kind = requested.gpu if requested.gpus_per_node else "auto"
        more = partial(nodes.checks_of_nodes, requested.gpus_per_node, kind, quick=quick)
        yield from network.check_nodes(requested.ray_address, directory, needed, count, requested.host_memory, more)
    yield network.check_hub()
    yield network.check_token(requested.model)
    if not quick:
        yield host.check_sandbox()
        yield network.check_ranks(len(gpu_list))
