"""`rlctl plan`: the layout, memory, time and reasons of a run, without starting it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.commands import options, output
from rlctl.commands.output import OwnProcess, error_json, examples, message, print_json
from rlctl.commands.parsing import App
from rlctl.data.chat import Process
from rlctl.errors import ConfigError, InputError, NoPlanError, RlctlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlctl.config.load import Resolved
    from rlctl.planner.result import Plan

app = App()

ALTERNATIVES = 3

Explain = Annotated[bool, typer.Option("--explain", help="Show the arithmetic and the engines' arguments.")]
Top = Annotated[int | None, typer.Option("--top", min=1, help="Number of alternatives to list.  [default: 3]")]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="A B...",
        help="Show plans side by side; each is pins (a=1,b=2), a preset or a YAML file.",
    ),
]
Run = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Compare a run's prediction with its measurements.")
]

Calibrate = Annotated[
    Path | None,
    typer.Option("--calibrate", metavar="RUN", help="Scale plans for this machine by a run's measured phases."),
]
Table = Annotated[bool, typer.Option("--table", help="Show seconds, tokens/s and memory over a range of GPU counts.")]


@app.command(
    "plan",
    epilog=examples(
        "rlctl plan --model meta-llama/Llama-3.1-8B --preset 1node --gpu h100",
        "rlctl plan --model Qwen/Qwen3-32B --nodes 8 --gpu h100 --max-length 16384 --explain",
        "rlctl plan --preset 8nodes --model Qwen/Qwen2.5-72B --set training.tp=8 --set training.pp=2",
        "rlctl plan --preset 1node --model Qwen/Qwen3-8B --compare training.tp=1 training.tp=2",
        "rlctl plan --preset 1node --model Qwen/Qwen3-8B --gpu h100 --async",
        "rlctl plan --preset 1node --model Qwen/Qwen3-8B --gpu h100 --table",
        "rlctl plan --calibrate runs/my-run",
        "rlctl plan --config recipe.yaml policy.model_name=Qwen/Qwen3-1.7B training.tp=2",
    ),
)
@options.taking(f"method {options.TRAINING} epochs batch_size {options.of_methods()}")
def plan(
    context: typer.Context,
    preset: str | None,
    config: list[str] | None,
    set_: list[str] | None,
    explain: Explain = False,
    top: Top = None,
    compare: Compare = None,
    run: Run = None,
    calibrate: Calibrate = None,
    table: Table = False,
    json_: options.Json = False,
) -> None:
    """Plan a run: parallelism, memory, seconds per step, and the rule behind each value.

    --set pins a value and plans the rest around it. The command needs no GPU, and no download for models of the
    catalog. It takes the flags of `rlctl train` and returns the plan of that run. The exit code is 4 if no plan fits.
    """
    if run is not None:
        others = [name for name in context.params if name not in ("run", "json_")]
        refuse_with(f"--run {run} shows the plan of the run", options.given(context, others))
        show_run(run, json_)
        return
    if calibrate is not None:
        others = [name for name in context.params if name not in ("calibrate", "json_")]
        refuse_with(f"--calibrate {calibrate} takes what a run measured", options.given(context, others))
        show_calibration(calibrate, json_)
        return
    Process.reads_tokenizers_alone = OwnProcess.is_one

    def resolved_with(extra: list[str], over: str | None = None, files: list[str] | None = None) -> Resolved:
        pins, paths = [*(set_ or []), *extra], [*(config or []), *(files or [])]
        params: dict[str, Any] = {"preset": over or preset, "config": paths, "set_": pins}
        return options.resolve_config(**context.params | params)

    if compare:
        from rlctl.preparation.shown_plan import shown_plan

        refuse_with("--compare shows plans side by side and no alternatives", ["top"] if top else [])
        if len(compare) < 2:
            raise InputError(f"--compare {compare[0]} names one plan.", "Name two or more to compare.")
        once = functools.cache(message)  # common to all plans
        variants = [resolved_with(*side(text)) for text in compare]
        for text, resolved in zip(compare, variants, strict=True):
            refuse_replaced(text, resolved)
        plans = [shown_plan(resolved, ALTERNATIVES, once) for resolved in variants]
        show_comparison(plans, compare, explain, json_)
        return
    if table:
        refuse_with("--table shows one line for each machine", options.given(context, ["explain", "top"]))
        show_table(resolved_with, json_)
        return
    show_plan(resolved_with([]), explain, top or ALTERNATIVES, json_)


def refuse_with(reason: str, flags: list[str]) -> None:
    """Raise InputError naming the flag of the first parameter in `given`, if any."""
    for name in flags:
        flag = "KEY=VALUE" if name == "overrides" else options.flag(name) if name in options.FLAGS else f"--{name}"
        raise InputError(f"{reason}; {flag} would do nothing.", "Leave one of them out.")


def refuse_replaced(variant: str, resolved: Resolved) -> None:
    """Raise InputError where another argument replaces a pin of a variant, so that its column would lie."""
    import yaml

    values = dict(resolved.leaves())
    for pin in variant.split(",") if "=" in variant else ():
        key, _, pinned = pin.partition("=")
        value = values.get(key)
        if key in values and value != yaml.safe_load(pinned):
            raise InputError(
                f"--compare {variant}: another argument sets {key} to {value}.",
                f"Remove the other {key}, so that each variant has its own.",
            )


def side(text: str) -> tuple[list[str], str | None, list[str]]:
    """Parse one side of --compare: pins, a preset, or a YAML file."""
    from rlctl.config.presets import preset_names

    if "=" in text:
        return text.split(","), None, []
    if text.endswith((".yaml", ".yml")):
        return [], None, [text]
    if text not in preset_names():
        raise InputError(
            f"--compare {text}: neither pins, nor a preset, nor a YAML file.",
            f"Write section.key=value[,...], one of {', '.join(preset_names())}, or a file's name.",
        )
    return [], text, []


def show_plan(resolved: Resolved, explain: bool, top: int, json_: bool) -> None:
    """Plan and print the result; with --json also if nothing fits."""
    from rlctl.planner.views.render import no_plan_values
    from rlctl.preparation.shown_plan import shown_plan

    try:
        made = shown_plan(resolved, top, message)
    except NoPlanError as error:
        if json_:
            print_json({"model": resolved.config.model.name} | no_plan_values(error) | error_json(error))
        raise
    show(made, resolved, explain, top, json_)


def show(made: Plan, resolved: Resolved, explain: bool, top: int, json_: bool) -> None:
    from rlctl.jobs.backend_arguments import BackendArguments, differences
    from rlctl.models.quantized_base import is_only_planned
    from rlctl.planner.make_plan import refuse_unrunnable
    from rlctl.planner.views.explain import explain as arithmetic
    from rlctl.planner.views.render import plan_json, plan_text, wrapped
    from rlctl.preparation.worker_specs import planned_workers

    name = resolved.config.model.name or ""
    planned = resolved.with_plan(made)
    try:
        arguments = BackendArguments.of(planned_workers(planned.config, made.facts, made, Path(name), None))
    except ConfigError:
        if not is_only_planned(made.facts):
            refuse_unrunnable(made)  # names what each backend lacks
            raise
        arguments = BackendArguments(())
    pinned = arguments.pinned(planned)
    from rlctl.planner.views.bottlenecks import improvements, improvements_text, limits

    helpful = improvements(made)
    if json_:
        data = {"model": name} | plan_json(made)
        data |= {"limits": limits(made), "changes": [vars(improvement) for improvement in helpful]}
        data["alternatives"] = [plan_json(other) for other in made.alternatives[:top]]
        data |= {"arguments": arguments.to_json(), "pinned": pinned, "notes": list(resolved.notes)}
        if explain:
            data["explain"] = arithmetic(made).splitlines()
        print_json(data)
        return
    output.show(plan_text(made, name))
    lines = (wrapped(line, "    ", "      ") for line in improvements_text(made, helpful))
    output.show("\n".join(["", "  what limits it, and what would help", *(part for line in lines for part in line)]))
    if explain:
        output.show("\n".join(("", *folded(arithmetic(made)), "", *arguments.text())))
    for line in (*(f"pinned: {line}" for line in pinned), *differences(planned)):
        output.show("\n".join(wrapped(line, rest="  ")))


def folded(text: str) -> list[str]:
    """Return the lines of an explanation, wrapped."""
    from rlctl.planner.views.render import wrapped

    lines = [(line.strip(), " " * (len(line) - len(line.lstrip()))) for line in text.splitlines()]
    return [part for line, indent in lines for part in wrapped(line, indent, f"{indent}  ")]


def show_comparison(plans: list[Plan], names: list[str], explain: bool, json_: bool) -> None:
    from rlctl.planner.views.explain import explain as arithmetic
    from rlctl.planner.views.render import compare_text, plan_json

    if json_:
        data: dict[str, Any] = {"plans": [plan_json(plan) for plan in plans], "names": list(names)}
        if explain:
            data["explain"] = [arithmetic(plan).splitlines() for plan in plans]
        print_json(data)
        return
    output.show(compare_text(plans, names))
    for plan, name in zip(plans, names, strict=True) if explain else ():
        output.show("\n".join(("", name, "", *folded(arithmetic(plan)))))


def show_run(run: Path, json_: bool) -> None:
    from rlctl.report.run_comparison import compare_memory, compare_run, comparison_text

    rows, memory = compare_run(run), compare_memory(run)
    if json_:
        listed = {"phases": (rows, "phase"), "memory_gib": (memory, "process")}
        values = {
            key: [{"predicted": row.predicted, "measured": row.measured, "suspect": row.suspect, name: row.name,
                   "ratio": row.ratio} for row in measured]
            for key, (measured, name) in listed.items()
        }  # fmt: skip
        print_json({"run": str(run)} | values)
        return
    output.show(f"{run}\n{comparison_text(rows, 'phase', 's')}")
    missing = "  memory was not measured, because the run did not finish"
    output.show(comparison_text(memory, "process", "GiB") if memory else missing)


def show_calibration(run: Path, json_: bool) -> None:
    from rlctl.jobs.calibration import calibrate
    from rlctl.report.run_comparison import comparison_text

    path, factors, rows = calibrate(run)
    if json_:
        print_json({"run": str(run), "file": str(path), "factors": factors})
        return
    output.show(f"{run}\n{comparison_text(rows, 'phase', 's')}")
    listing = ", ".join(f"{phase} x {factor:.2f}" for phase, factor in factors.items())
    output.show(f"Plans for this machine are scaled from now on: {listing} ({path})")


MOST_NODES = 4
"""The table ends at this multiple of the requested nodes."""


def show_table(resolved_with: Callable[[list[str]], Resolved], json_: bool) -> None:
    """Print a line for each of a range of GPU counts: a part of a node, and nodes by powers of two."""
    from rlctl.planner.from_config import cluster_from_config
    from rlctl.planner.views.table import machine_row, rows_text
    from rlctl.preparation.located import ASSUMED_GPU
    from rlctl.preparation.shown_plan import shown_plan

    once = functools.cache(message)
    default = cluster_from_config(resolved_with([]).config, ASSUMED_GPU)
    if default.is_cpu:
        raise InputError("--table counts GPUs, and this plan is for a CPU.", "Name a GPU: --gpu h100.")
    sizes = [
        (1, 1 << power) for power in range(default.gpus_per_node.bit_length()) if 1 << power < default.gpus_per_node
    ]
    most = MOST_NODES * default.nodes
    sizes += [(1 << power, default.gpus_per_node) for power in range(most.bit_length()) if 1 << power <= most]
    sizes = sorted({*sizes, (default.nodes, default.gpus_per_node)}, key=lambda size: size[0] * size[1])
    rows, errors = [], list[RlctlError]()
    for nodes, gpus in sizes:
        overrides = [f"cluster.nodes={nodes}", f"cluster.gpus_per_node={gpus}"]
        try:
            rows.append(machine_row(nodes, gpus, shown_plan(resolved_with(overrides), 1, once)))
        except RlctlError as error:
            errors.append(error)
            rows.append(machine_row(nodes, gpus, error.message))
    if len(errors) == len(rows):
        raise errors[-1]
    if json_:
        print_json({"rows": rows})
        return
    output.show(rows_text(rows))
