"""`rlctl sweep`: several runs over one base model, each with its own adapter."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from rlctl.commands import options
from rlctl.commands.output import OwnProcess, examples, print_json, show, show_dry_run, shows_progress
from rlctl.commands.parsing import App, CommandGroup
from rlctl.commands.train import TEXT_FLAGS, methods
from rlctl.config.yaml_values import parse_value
from rlctl.errors import EXIT_INTERRUPTED, InputError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved

EXAMPLES = (
    "rlctl sweep grpo --preset laptop --lora --vary optimizer.lr=1e-5,1e-4",
    "rlctl sweep sft --model Qwen/Qwen3-1.7B --data chats.jsonl --lora --vary optimizer.lr=1e-5,1e-4",
)


class SweepGroup(CommandGroup):
    """`rlctl sweep`: one command per training method."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(methods())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in methods() else None


app = App(cls=SweepGroup)


@app.callback(epilog=examples(*EXAMPLES))
def sweep() -> None:
    """Train several adapters over one base model in turns, and compare the runs."""


@functools.cache
def _command(name: str) -> Any:
    method = methods()[name]
    shared = options.TRAINING if name == "grpo" else " ".join((TEXT_FLAGS, method.flags))
    declared = () if name == "grpo" else options.declare(method.Config)
    flags = [flag for flag in (*shared.split(), *declared, "dry_run", "explain") if flag not in NOT_SWEPT]
    app = App()

    @app.command(name, help=HELP.format(name), epilog=examples(*EXAMPLES))
    @options.taking(" ".join(dict.fromkeys((*flags, "vary"))))
    def sweep_method(context: typer.Context, json_: options.Json = False) -> None:
        _sweep(name, context.params)

    command: Any = typer.main.get_command(app)
    command.name = name
    return command


def _sweep(command: str, params: Mapping[str, Any]) -> None:
    options.require_dry_run(params["explain"], params["dry_run"])
    runs = variants(command, params)
    if params["dry_run"]:
        from rlctl.jobs.dry_run import dry_sweep

        show_dry_run(dry_sweep(runs), params["json_"], params["explain"])
        return
    from rlctl.jobs.sweep import run_sweep

    summary = run_sweep(runs, quiet=not shows_progress(params["json_"]), own_process=OwnProcess.is_one)
    try:
        print_json(dataclasses.asdict(summary)) if params["json_"] else show(summary.text())
    finally:
        if summary.interrupted:  # also if the terminal is gone
            raise typer.Exit(EXIT_INTERRUPTED)


def variants(command: str, params: Mapping[str, Any]) -> list[tuple[str, Resolved]]:
    """Return the label and the configuration of each run: all combinations of the values of `--vary`."""
    varied = [varied_key(text) for text in params["vary"] or ()]
    if not varied:
        raise InputError("A sweep needs the values that its runs differ in.", f"Add --vary {EXAMPLE}.")
    keys = [key for key, _ in varied]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise InputError(f"--vary names {repeated} twice.", f"Write its values in one: --vary {repeated}=A,B.")
    given, rest = list(params["set_"] or ()), {k: v for k, v in params.items() if k not in ("set_", "vary")}
    combinations = itertools.product(*(values for _, values in varied))
    labels = [[f"{key}={value}" for key, value in zip(keys, values, strict=True)] for values in combinations]
    return [(",".join(sets), options.resolve_config(**rest, set_=[*given, *sets], command=command)) for sets in labels]


def varied_key(text: str) -> tuple[str, Sequence[str]]:
    """Return the key and the values of a `--vary KEY=VALUE,VALUE`. Raises InputError for another form."""
    key, equals, values = text.partition("=")
    parsed = parse_value(f"[{values}]") if "[" in values or "{" in values else values.split(",")
    if not isinstance(parsed, list) or len(parsed) < 2 or not key or not equals:
        raise InputError(f"--vary {text}: it takes a key and at least two values.", f"Write --vary {EXAMPLE}.")
    texts = [value.strip() if isinstance(value, str) else json.dumps(value) for value in parsed]
    if len({*texts}) < len(texts):
        raise InputError(f"--vary {text} names a value twice.", "Name each value once.")
    return key, texts


EXAMPLE = "optimizer.lr=1e-5,1e-4"
NOT_SWEPT = {"resume", "allow_changes", "allow_differences", "completion"}
"""Flags of `train` that a sweep lacks: the same command continues it."""
HELP = "Train several adapters over one base model with `train {}`, in turns. The same command continues the sweep."
