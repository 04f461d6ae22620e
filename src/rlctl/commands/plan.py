"""`rlctl plan`: how a model trains on a machine, with memory, seconds and reasons, before anything starts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.commands import options, output
from rlctl.commands.output import command_app, error_json, examples, message, print_json
from rlctl.errors import InputError, NoPlanError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.planner.result import Plan

app = command_app()

ALTERNATIVES = 3

Explain = Annotated[bool, typer.Option("--explain", help="Show the arithmetic, and the engines' exact arguments.")]
Top = Annotated[int | None, typer.Option("--top", min=1, help="List this many alternatives.  [default: 3]")]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--compare",
        metavar="A B",
        help="Show two plans side by side. Each is given as pins (a=1,b=2), a preset or a YAML file.",
    ),
]
Run = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Compare the prediction for a run with its measurements.")
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
@options.taking(
    "overrides model preset nodes gpus_per_node gpu max_length max_new_tokens mean_length prompts generations "
    "algorithm teacher backend colocated async_ max_staleness goal config set_"
)
def plan(
    context: typer.Context,
    overrides: list[str] | None,
    preset: str | None,
    max_length: int | None,
    max_new_tokens: int | None,
    config: list[str] | None,
    set_: list[str] | None,
    explain: Explain = False,
    top: Top = None,
    compare: Compare = None,
    run: Run = None,
    json_: options.Json = False,
) -> None:
    """Work out how a model trains on a machine: parallelism, memory, seconds, and the rule behind each value.

    Any value can be pinned with --set, and the rest is planned around it. The command needs no GPU, and no download for
    the models of the catalog. It ends with exit code 4 if no plan fits.
    """
    if run is not None:
        flags = {"--preset": preset, "--config": config, "--set": set_, "--compare": compare, "--top": top}
        others = {options.flag(name): value for name, value in context.params.items() if name in options.KEYS}
        others |= {"KEY=VALUE": overrides or None, **flags, "--explain": explain or None}
        refuse_with(f"--run {run} shows the plan that the run was made with", others)
        show_run(run, json_)
        return

    def resolved_with(extra: list[str], over: str | None = None, files: list[str] | None = None) -> Resolved:
        pins, paths = [*(set_ or []), *extra], [*(config or []), *(files or [])]
        given: dict[str, Any] = {"preset": over or preset, "config": paths, "set_": pins}
        require_room(max_length, max_new_tokens)
        resolved = options.resolve_config(**context.params | given)
        return resolved if max_length is None else resolved.with_values(completions_of(max_length), "with --max-length")

    if compare is not None:
        from rlctl.apps.prepare import shown_plan

        refuse_with("--compare shows two plans and no alternatives", {"--top": top})
        once = functools.cache(message)  # what is true of both plans
        plans = [shown_plan(resolved_with(*side(text)), ALTERNATIVES, once) for text in compare]
        show_comparison(plans, compare, explain, json_)
        return
    show_plan(resolved_with([]), explain, top or ALTERNATIVES, json_)


def refuse_with(reason: str, flags: dict[str, object]) -> None:
    """Raises InputError naming the first of `flags` that was given (is not None)."""
    for flag in (flag for flag, value in flags.items() if value is not None):
        raise InputError(f"{reason}; {flag} would do nothing.", "Leave one of them out.")


def require_room(max_length: int | None, max_new_tokens: int | None) -> None:
    """Raise InputError where --max-length leaves no room for a prompt."""
    if max_length is not None and max_length < 2:
        raise InputError(f"--max-length {max_length} leaves no room for a prompt and a completion.", "Raise it.")
    if max_length is not None and max_new_tokens is not None and max_new_tokens >= max_length:
        raise InputError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in --max-length {max_length}.",
            "Give a longer --max-length.",
        )


def completions_of(max_length: int) -> dict[str, int]:
    """With `--max-length`, where nothing else sets it, completions take what a prompt of 256 tokens (or an eighth)
    leaves of it."""
    return {"generation.max_new_tokens": max(1, max_length - min(256, max_length // 8))}


def side(text: str) -> tuple[list[str], str | None, list[str]]:
    """One side of --compare: pins, a preset, or a YAML file."""
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
    """Plan and show it; with --json also what there is to say where nothing fits."""
    from rlctl.apps.prepare import shown_plan
    from rlctl.planner.views.render import no_plan_values

    try:
        made = shown_plan(resolved, top, message)
    except NoPlanError as error:
        if json_:
            print_json({"model": resolved.config.model.name} | no_plan_values(error) | error_json(error))
        raise
    show(made, resolved, explain, top, json_)


def show(made: Plan, resolved: Resolved, explain: bool, top: int, json_: bool) -> None:
    from rlctl.apps.backend_arguments import BackendArguments, differences
    from rlctl.apps.planned_crew import planned_crew
    from rlctl.planner.views.explain import explain as arithmetic
    from rlctl.planner.views.render import plan_json, plan_text, wrapped

    name = resolved.config.model.name or ""
    planned = resolved.with_values(made.config_values())
    arguments = BackendArguments.of(planned_crew(planned.config, made.facts, made, Path(name), None))
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
    """Return the lines of an explanation, those that are too long in several."""
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
    from rlctl.planner.views.run_comparison import compare_memory, compare_run, comparison_text

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
    missing = "  memory was not measured: the run did not come to its end"
    output.show(comparison_text(memory, "process", "GiB") if memory else missing)
