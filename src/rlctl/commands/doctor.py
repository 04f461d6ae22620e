"""`rlctl doctor` checks this machine and names a fix for each problem."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.commands import options, output
from rlctl.commands.output import examples, message, print_json
from rlctl.commands.parsing import App
from rlctl.config.files import user_path
from rlctl.errors import InputError, MachineError
from rlctl.telemetry.terminal import colored

if TYPE_CHECKING:
    from rlctl.doctor.examine import Wanted
    from rlctl.doctor.finding import Check
    from rlctl.planner.result import Plan
    from rlctl.settings.config import RlctlConfig

app = App()
UNUSED_BY_DEEP = (
    "calibrate", "fix", "quick", "preset", "model", "gpus_per_node", "config", "set_",
)  # fmt: skip
MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@app.command(
    "doctor",
    epilog=examples(
        "rlctl doctor",
        "rlctl doctor --preset 1node --model meta-llama/Llama-3.1-8B",
        "rlctl doctor --fix",
        "rlctl doctor --json",
        "rlctl doctor --calibrate",
        "rlctl doctor --deep",
        "rlctl doctor --deep --only cuda-ipc",
        "rlctl doctor --deep --ray-address HEAD:6379",
    ),
)
@options.taking("preset model gpu gpus_per_node run_dir ray_address config set_")
def doctor(
    context: typer.Context,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's speeds for the planner instead.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Make safe repairs.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip checks that start processes.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Probe every layer instead, from kernels to tiny training runs.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="With --deep: run this probe. Repeatable.")
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit", min=1, metavar="SECONDS", help="With --deep: stop after this time.  [default: 480; 300 on CPUs]"
        ),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Check this machine and print a fix for each problem. The exit code is 3 when a check fails.

    Without --preset, doctor checks what the laptop preset needs. With --deep, probes run bottom-up in separate
    processes: speeds, Triton, NCCL, CUDA IPC, vLLM and Megatron alone, then tiny runs. With --ray-address, the checks
    of GPUs and NCCL run on every node too, and --deep measures the speeds of every node and GPU, slowest first.
    """
    if deep:
        for name in options.given(context, UNUSED_BY_DEEP):
            raise InputError(
                f"--deep runs probes of the machine; --{name.rstrip('_').replace('_', '-')} would do nothing.",
                "Leave one of them out.",
            )
        run_probes(options.resolve_config(**context.params).config, only or [], limit, json_)
        return
    for flag, value in (("--only", only), ("--limit", limit)):
        if value:
            raise InputError(f"{flag} applies to `rlctl doctor --deep`.", f"Add --deep, or drop {flag}.")
    if calibrate:
        measure(json_)
        return
    from rlctl.doctor.examine import examine

    resolved = options.resolve_config(**context.params)
    requested = wanted(resolved.config)
    checks = []
    for check in examine(requested, quick=quick):
        if fix and check.repair is not None:
            check = repaired(check)
        checks.append(check)
        if not json_:
            show(check)
    if json_:
        print_json({"checks": [check.to_json() for check in checks]})
    if requested.gpus_per_node and requested.model is None:
        message("Memory and disk were checked for a small model; name yours with --model.")
    require_passed(checks)
    message("All required checks passed.")


def require_passed(checks: Sequence[Check]) -> None:
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        problems = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        raise MachineError(
            f"{len(failed)} of {len(checks)} checks failed; a run would fail on this machine ({problems}).",
            "Each failed check names its fix.",
        )


def run_probes(config: RlctlConfig, only: list[str], limit_s: float | None, json_: bool) -> None:
    """Run the probes on the GPUs, or on the CPU with `--gpu cpu` or without any. Raises MachineError if one fails."""
    from rlctl.config.files import temporary_folder
    from rlctl.doctor import deep

    directory = user_path(config.run.dir or "runs")
    if config.cluster.ray_address:
        measure_nodes(config, only, directory, json_)
        return
    with temporary_folder("deep", message) as folder:
        show_line = (lambda _: None) if json_ else (lambda outcome: output.show(deep.line_of(outcome)))
        outcomes = deep.deep(config.cluster.gpu, only, limit_s, folder, show_line, directory)
        failed = [outcome for outcome in outcomes if outcome.status == "fail"]
        if json_:
            print_json({"passed": not failed, "probes": [vars(outcome) for outcome in outcomes]})
        else:
            output.show(deep.summary(outcomes))
        if failed:
            names = ", ".join(outcome.name for outcome in failed)
            raise MachineError(
                f"{len(failed)} of {len(outcomes)} probes failed: {names}.", "Each failed probe names its fix."
            )


def measure_nodes(config: RlctlConfig, only: list[str], directory: Path, json_: bool) -> None:
    """Measure the nodes of the cluster, the slowest first. Raises MachineError if a probe fails on one."""
    from rlctl.doctor.nodes import rates_of_nodes

    assert config.cluster.ray_address is not None  # it names the cluster
    rates = rates_of_nodes(config.cluster.ray_address, only, directory, cpu=config.cluster.gpu == "cpu")
    if json_:
        print_json({"nodes": [rate.to_json() for rate in rates]})
    else:
        output.show("\n".join(rate.line() for rate in rates))
    if failed := [rate for rate in rates if rate.problem]:
        where = ", ".join(f"{rate.probe} on {rate.node} {rate.place}".strip() for rate in failed)
        raise MachineError(
            f"{len(failed)} of {len(rates)} probes failed: {where}.", "Leave these nodes out of the cluster."
        )
    if slow := [rate for rate in rates if rate.status == "slow"]:
        message(
            f"{slow[0].node} {slow[0].place} is slow: every rank of a run waits for it in each step.".replace("  ", " ")
        )


def repaired(check: Check) -> Check:
    """Repair a finding and return it as ok, or with the reason why the repair failed."""
    from rlctl.doctor.finding import Check

    assert check.repair is not None
    try:
        return Check(check.name, "ok", f"{check.detail}; fixed: {check.repair()}")
    except OSError as error:
        return Check(check.name, check.status, f"{check.detail}; could not be fixed: {error}", check.fix)


def measure(json_: bool) -> None:
    """Measure the machine and store its profile for the planner."""
    from rlctl.checkpoints.locations import converted_directory
    from rlctl.doctor.calibrate import calibrate, profile_text
    from rlctl.planner.inputs.cluster import profile_path, save_profile

    profile = calibrate(converted_directory(), tell=lambda part: message(f"measuring {part}"))
    save_profile(profile, profile_path())
    if json_:
        print_json({"profile": vars(profile), "path": str(profile_path())})
    else:
        output.show(profile_text(profile))
    message(f"The planner now uses these speeds; remove {profile_path()} to restore the built-in tables.")


def show(check: Check) -> None:
    mark = colored(MARKS[check.status], check.status, sys.stdout)
    output.show(f"{mark}  {check.name:<19} {check.detail}")
    if check.fix:
        output.show(f"{'':26}-> {check.fix}")


def wanted(config: RlctlConfig) -> Wanted:
    """Return what this configuration needs from the machine. A GPU type or a number of nodes needs at least one GPU.
    Raises InputError for an unknown GPU type."""
    from rlctl.checkpoints.hf.model_facts import known_facts
    from rlctl.doctor.examine import Wanted
    from rlctl.planner.inputs.cluster import device_named

    facts = known_facts(config.model.name) if config.model.name else None
    kind, count = config.cluster.gpu, config.cluster.gpus_per_node
    is_gpu = kind not in ("auto", "cpu")
    if count is None and kind != "cpu":
        count = int(is_gpu or config.cluster.nodes is not None)
    plan, no_plan = planned(config)
    if plan is not None and config.cluster.gpus_per_node is None:
        count = plan.cluster.gpus_per_node
    return Wanted(
        gpus_per_node=count or 0,
        host_memory=plan.host_memory if plan is not None else 0.0,
        no_plan=no_plan,
        gpu=device_named(kind).name if is_gpu else kind,
        parameters=parameters(config.model.name, config.model.revision),
        run_directory=Path(config.run.dir or "runs"),
        ray_address=config.cluster.ray_address,
        model=config.model.name,
        tensors=tuple(tensor.name for tensor in facts.listed) if facts is not None else (),
    )


def planned(config: RlctlConfig) -> tuple[Plan | None, str]:
    """Return the plan, or the reason against it. Unknown models and runs without GPUs have neither. On a machine
    without GPUs the plan is for H100s, like `rlctl plan`'s."""
    from rlctl.checkpoints.hf.model_facts import known_facts
    from rlctl.errors import ConfigError, InputError, NoPlanError
    from rlctl.jobs.dry_run import ASSUMED_GPU
    from rlctl.methods.available import method_from_config
    from rlctl.planner.from_config import plan_from_config

    facts = known_facts(config.model.name) if config.model.name else None
    if facts is None:
        return None, ""
    try:
        workload = method_from_config(config, tries_loss=False).workload(facts)
        sized_by_user = config.cluster.nodes is not None and config.cluster.gpu == "auto"
        plan = plan_from_config(config, facts, workload, top=1, assume=ASSUMED_GPU if sized_by_user else None)
    except (ConfigError, NoPlanError) as error:
        return None, error.message
    except (InputError, MachineError):  # other checks and the run report these
        return None, ""
    if not plan.runnable:
        return None, f"{'; '.join(plan.not_runnable_because)}."
    return (None if plan.cluster.is_cpu else plan), ""


def parameters(name: str | None, revision: str | None) -> int:
    """Return the number of parameters of a model from the catalog or a local directory; 0 if unknown. Raises InputError
    for a missing directory."""
    from rlctl.checkpoints.hf.model_facts import known_facts
    from rlctl.checkpoints.model_files import require_name_or_directory, stored_parameters
    from rlctl.planner.costs.parameters import count

    if name is None:
        return 0
    require_name_or_directory(name)
    facts = known_facts(name)
    return count(facts).total if facts is not None else stored_parameters(user_path(name))
