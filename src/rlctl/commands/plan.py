"""`rlctl plan`: how a model trains on a machine, with memory, seconds and reasons, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.commands import options
from rlctl.commands.output import command_app, examples, message, print_json
from rlctl.errors import InputError, NoPlanError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.planner.plan import Plan

app = command_app()

ALTERNATIVES = 3

Colocated = Annotated[
    bool | None, typer.Option("--colocated/--split", help="Generate on the training devices, or on others.")
]
Goal = Annotated[str | None, typer.Option("--goal", metavar="fast|safe|frugal", help="What to aim for.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show the arithmetic, and the engines' exact arguments.")]
Top = Annotated[int | None, typer.Option("--top", min=1, help="List this many alternatives.  [default: 3]")]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--compare", metavar="A B", help="Two plans side by side; each is pins (a=1,b=2) or a preset or YAML file."
    ),
]
Run = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="A run's prediction beside what it measured.")]


@app.command(
    "plan",
    epilog=examples(
        "rlctl plan --model meta-llama/Llama-3.1-8B --preset 1node --gpu h100",
        "rlctl plan --model Qwen/Qwen3-32B --nodes 8 --gpu h100 --max-length 16384 --explain",
        "rlctl plan --preset 8nodes --model Qwen/Qwen2.5-72B --set training.tp=8 --set training.pp=2",
        "rlctl plan --preset 1node --model Qwen/Qwen3-8B --compare training.tp=1 training.tp=2",
    ),
)
def plan(
    model: options.Model = None,
    preset: options.Preset = None,
    nodes: options.Nodes = None,
    gpus_per_node: options.GpusPerNode = None,
    gpu: options.Gpu = None,
    max_length: options.MaxLength = None,
    max_new_tokens: options.MaxNewTokens = None,
    mean_length: options.MeanLength = None,
    prompts: options.Prompts = None,
    generations: options.Generations = None,
    backend: options.Backend = None,
    colocated: Colocated = None,
    goal: Goal = None,
    explain: Explain = False,
    top: Top = None,
    compare: Compare = None,
    run: Run = None,
    config: options.Config = None,
    set_: options.Set = None,
    json_: options.Json = False,
) -> None:
    """Work out how a model trains on a machine: parallelism, memory, seconds, and the rule behind each value.

    Any value can be pinned with --set; the rest is planned around it. Needs neither GPU nor download for the models of
    the catalog. Exit 4: no plan fits.
    """
    flags = {
        "model": model, "nodes": nodes, "gpus_per_node": gpus_per_node, "gpu": gpu, "max_length": max_length,
        "max_new_tokens": max_new_tokens, "mean_length": mean_length, "prompts": prompts, "generations": generations,
        "backend": backend, "goal": goal, "colocated": colocated,
    }  # fmt: skip
    if run is not None:
        others = {options.FLAGS[name][0]: value for name, value in flags.items()}
        others |= {"--preset": preset, "--config": config, "--set": set_, "--compare": compare, "--top": top}
        others["--explain"] = explain or None
        refuse_beside(f"--run {run} shows the plan that the run was made with", others)
        show_run(run, json_)
        return

    def resolved_with(extra: list[str], over: str | None = None, files: list[str] | None = None) -> Resolved:
        lengths = {
            "max_length": length(max_length, max_new_tokens),
            "max_new_tokens": new_tokens(max_length, max_new_tokens),
        }
        pins, paths = [*(set_ or []), *extra], [*(config or []), *(files or [])]
        return options.resolve_config(preset=over or preset, config=paths, set_=pins, **flags | lengths)

    if compare is not None:
        refuse_beside("--compare shows two plans and no alternatives", {"--top": top})
        plans = [planned(resolved_with(*side(text)), ALTERNATIVES)[0] for text in compare]
        show_comparison(plans, compare, explain, json_)
        return
    show_plan(resolved_with([]), explain, top or ALTERNATIVES, json_)


def refuse_beside(reason: str, flags: dict[str, object]) -> None:
    """Raises InputError naming the first of `flags` that was given (is not None)."""
    for flag in (flag for flag, value in flags.items() if value is not None):
        raise InputError(f"{reason}; {flag} would do nothing.", "Leave one of them out.")


def length(max_length: int | None, max_new_tokens: int | None) -> int | None:
    """`--max-length` counts prompt and completion."""
    if max_length is not None and max_length < 2:
        raise InputError(f"--max-length {max_length} leaves no room for a prompt and a completion.", "Raise it.")
    if max_length is not None and max_new_tokens is not None and max_new_tokens >= max_length:
        raise InputError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in --max-length {max_length}.",
            "Give a longer --max-length.",
        )
    return max_length


def new_tokens(max_length: int | None, max_new_tokens: int | None) -> int | None:
    """With `--max-length` alone, completions take what a prompt of 256 tokens (or an eighth) leaves."""
    if max_new_tokens is None and max_length is not None:
        return max(1, max_length - min(256, max_length // 8))
    return max_new_tokens


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


def planned(resolved: Resolved, top: int) -> tuple[Plan, str]:
    """The plan of a configuration and what to call its model."""
    from rlctl.planner.from_config import local_gpus, plan_from_config
    from rlctl.rl.planned import ASSUMED_GPU, published_facts, refuse_without_effect

    section = resolved.config
    facts = published_facts(section.model, message)
    refuse_without_effect(resolved, facts)
    made = plan_from_config(section, facts, assume=ASSUMED_GPU, top=top)
    if section.cluster.gpu == "auto" and not made.cluster.is_cpu and not local_gpus():
        message(f"This machine has no GPU; planned for {ASSUMED_GPU.upper()}. Another type: --gpu.")
    return replace(made, blocked=(*resolved.unsupported, *too_long(made, resolved))), section.model.name or ""


def too_long(made: Plan, resolved: Resolved) -> list[str]:
    """Why `train` refuses the plan's length, where it does."""
    length, limit = resolved.config.model.max_length, made.facts.max_length
    return [f"model.max_length = {length}: the model takes {limit}"] if length and length > limit else []


def no_plan_json(model: str | None, error: NoPlanError) -> dict[str, Any]:
    """What --json prints where nothing fits."""
    from rlctl.planner.render import no_plan_values

    detail = {"kind": "NoPlanError", "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    return {"model": model} | no_plan_values(error) | {"error": detail}


def show_plan(resolved: Resolved, explain: bool, top: int, json_: bool) -> None:
    """Plan and show it; with --json also what there is to say where nothing fits."""
    try:
        made, _ = planned(resolved, top)
    except NoPlanError as error:
        if json_:
            print_json(no_plan_json(resolved.config.model.name, error))
        raise
    show(made, resolved, explain, top, json_)


def show(made: Plan, resolved: Resolved, explain: bool, top: int, json_: bool) -> None:
    from rlctl.planner.explain import explain as arithmetic
    from rlctl.planner.render import plan_json, plan_text
    from rlctl.rl.arguments import EngineArguments, differences
    from rlctl.rl.job import planned_crew

    name = resolved.config.model.name or ""
    planned = resolved.with_values(made.config_values())
    arguments = EngineArguments.of_plan(made, planned_crew(planned.config, made.facts, made, Path(name), None))
    pinned = arguments.pinned(planned)
    if json_:
        data = {"model": name} | plan_json(made)
        data["alternatives"] = [plan_json(other) for other in made.alternatives[:top]]
        data |= {"arguments": arguments.to_json(), "pinned": pinned, "changed": list(resolved.changed)}
        if explain:
            data["explain"] = arithmetic(made).splitlines()
        print_json(data)
        return
    typer.echo(plan_text(made, name))
    if explain:
        typer.echo("\n".join(("", arithmetic(made), "", *arguments.text())))
    for line in (*(f"pinned: {line}" for line in pinned), *differences(planned)):
        typer.echo(line)


def show_comparison(plans: list[Plan], names: tuple[str, str], explain: bool, json_: bool) -> None:
    from rlctl.planner.explain import explain as arithmetic
    from rlctl.planner.render import compare_text, plan_json

    if json_:
        data: dict[str, Any] = {"plans": [plan_json(plan) for plan in plans], "names": list(names)}
        if explain:
            data["explain"] = [arithmetic(plan).splitlines() for plan in plans]
        print_json(data)
        return
    typer.echo(compare_text(plans[0], plans[1], names))
    for plan, name in zip(plans, names, strict=True) if explain else ():
        typer.echo(f"\n{name}\n\n{arithmetic(plan)}")


def show_run(run: Path, json_: bool) -> None:
    from rlctl.planner.against import compare_memory, compare_run, comparison_text, memory_text

    rows, memory = compare_run(run), compare_memory(run)
    if json_:
        listed = {
            "phases": [vars(row) | {"ratio": row.ratio} for row in rows],
            "memory_gib": [vars(row) | {"ratio": row.ratio} for row in memory],
        }
        print_json({"run": str(run)} | listed)
    else:
        typer.echo(comparison_text(rows, run))
        typer.echo(memory_text(memory) if memory else "  memory was not measured: the run did not come to its end")
