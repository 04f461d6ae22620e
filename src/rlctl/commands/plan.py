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
from rlctl.errors import InputError, NoPlanError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.planner.result import Plan

app = App()

ALTERNATIVES = 3

Explain = Annotated[bool, typer.Option("--explain", help="Show the arithmetic and the engines' arguments.")]
Top = Annotated[int | None, typer.Option("--top", min=1, help="Number of alternatives to list.  [default: 3]")]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--compare",
        metavar="A B",
        help="Show two plans side by side; each is pins (a=1,b=2), a preset or a YAML file.",
    ),
]
Run = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Compare a run's prediction with its measurements.")
]


@app.command(
    "plan",
    epilog=examples(
        "rlctl plan --model meta-llama/Llama-3.1-8B --preset 1node --gpu h100",
        "rlctl plan --model Qwen/Qwen3-32B --nodes 8 --gpu h100 --max-length 16384 --explain",
        "rlctl plan --preset 8nodes --model Qwen/Qwen2.5-72B --set training.tp=8 --set training.pp=2",
        "rlctl plan --preset 1node --model Qwen/Qwen3-8B --compare training.tp=1 training.tp=2",
        "rlctl plan --preset 1node --model Qwen/Qwen3-8B --gpu h100 --async",
        "rlctl plan --config recipe.yaml policy.model_name=Qwen/Qwen3-1.7B training.tp=2",
    ),
)
@options.taking(f"{options.TRAINING} epochs batch_size beta")
def plan(
    context: typer.Context,
    preset: str | None,
    config: list[str] | None,
    set_: list[str] | None,
    explain: Explain = False,
    top: Top = None,
    compare: Compare = None,
    run: Run = None,
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
    Process.reads_tokenizers_alone = OwnProcess.is_one

    def resolved_with(extra: list[str], over: str | None = None, files: list[str] | None = None) -> Resolved:
        pins, paths = [*(set_ or []), *extra], [*(config or []), *(files or [])]
        given: dict[str, Any] = {"preset": over or preset, "config": paths, "set_": pins}
        return options.resolve_config(**context.params | given)

    if compare is not None:
        from rlctl.jobs.prepare import shown_plan

        refuse_with("--compare shows two plans and no alternatives", ["top"] if top else [])
        once = functools.cache(message)  # messages that apply to both plans
        plans = [shown_plan(resolved_with(*side(text)), ALTERNATIVES, once) for text in compare]
        show_comparison(plans, compare, explain, json_)
        return
    show_plan(resolved_with([]), explain, top or ALTERNATIVES, json_)


def refuse_with(reason: str, given: list[str]) -> None:
    """Raise InputError naming the flag of the first parameter in `given`, if any."""
    for name in given:
        flag = "KEY=VALUE" if name == "overrides" else options.flag(name) if name in options.FLAGS else f"--{name}"
        raise InputError(f"{reason}; {flag} would do nothing.", "Leave one of them out.")


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
    from rlctl.jobs.prepare import shown_plan
    from rlctl.planner.views.render import no_plan_values

    try:
        made = shown_plan(resolved, top, message)
    except NoPlanError as error:
        if json_:
            print_json({"model": resolved.config.model.name} | no_plan_values(error) | error_json(error))
        raise
    show(made, resolved, explain, top, json_)


def show(made: Plan, resolved: Resolved, explain: bool, top: int, json_: bool) -> None:
    from rlctl.jobs.backend_arguments import BackendArguments, differences
    from rlctl.jobs.run_workers import planned_workers
    from rlctl.planner.views.explain import explain as arithmetic
    from rlctl.planner.views.render import plan_json, plan_text, wrapped

    name = resolved.config.model.name or ""
    planned = resolved.with_values(made.config_values())
    arguments = BackendArguments.of(planned_workers(planned.config, made.facts, made, Path(name), None))
    pinned = arguments.pinned(planned)
    if json_:
        data = {"model": name} | plan_json(made)
        data["alternatives"] = [plan_json(other) for other in made.alternatives[:top]]
        data |= {"arguments": arguments.to_json(), "pinned": pinned, "notes": list(resolved.notes)}
        if explain:
            data["explain"] = arithmetic(made).splitlines()
        print_json(data)
        return
    output.show(plan_text(made, name))
    if explain:
        output.show("\n".join(("", *folded(arithmetic(made)), "", *arguments.text())))
    for line in (*(f"pinned: {line}" for line in pinned), *differences(planned)):
        output.show("\n".join(wrapped(line, rest="  ")))


def folded(text: str) -> list[str]:
    """Return the lines of an explanation, wrapped."""
    from rlctl.planner.views.render import wrapped

    lines = [(line.strip(), " " * (len(line) - len(line.lstrip()))) for line in text.splitlines()]
    return [part for line, indent in lines for part in wrapped(line, indent, f"{indent}  ")]


def show_comparison(plans: list[Plan], names: tuple[str, str], explain: bool, json_: bool) -> None:
    from rlctl.planner.views.explain import explain as arithmetic
    from rlctl.planner.views.render import compare_text, plan_json

    if json_:
        data: dict[str, Any] = {"plans": [plan_json(plan) for plan in plans], "names": list(names)}
        if explain:
            data["explain"] = [arithmetic(plan).splitlines() for plan in plans]
        print_json(data)
        return
    output.show(compare_text(plans[0], plans[1], names))
    for plan, name in zip(plans, names, strict=True) if explain else ():
        output.show("\n".join(("", name, "", *folded(arithmetic(plan)))))


def show_run(run: Path, json_: bool) -> None:
    from rlctl.jobs.run_comparison import compare_memory, compare_run, comparison_text

    rows, memory = compare_run(run), compare_memory(run)
    if json_:
        listed = {"phases": (rows, "phase"), "memory_gib": (memory, "process")}
        values = {
            key: [{"predicted": row.predicted, "measured": row.measured, "suspect": row.suspect, name: row.name,
                   "ratio": row.ratio} for row in found]
            for key, (found, name) in listed.items()
        }  # fmt: skip
        print_json({"run": str(run)} | values)
        return
    output.show(f"{run}\n{comparison_text(rows, 'phase', 's')}")
    missing = "  memory was not measured, because the run did not finish"
    output.show(comparison_text(memory, "process", "GiB") if memory else missing)
