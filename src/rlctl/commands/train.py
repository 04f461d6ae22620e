"""`rlctl train`: reinforcement learning, and training on texts and preferences."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import typer

from rlctl.commands import options
from rlctl.commands.output import OwnProcess, examples, message, print_json, show, show_dry_run, shows_progress
from rlctl.commands.parsing import App, CommandGroup
from rlctl.errors import EXIT_INTERRUPTED, InputError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.jobs.shown_run import DryRun
    from rlctl.training.method import Method

NAMELESS = "recipe"
"""The command of a line that names none."""


class TrainGroup(CommandGroup):
    """`rlctl train`: one command per training method. Without a command, the recipe, preset or run sets the method."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = [name for name in super().list_commands(ctx) if name != NAMELESS]
        return [*names, *(name for name in methods() if name not in names), NAMELESS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return command if command is not None or cmd_name not in methods() else _command(cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flag_or_key = bool(args) and args[0] not in ctx.help_option_names and (args[0][:1] == "-" or "=" in args[0])
        return super().parse_args(ctx, [NAMELESS, *args] if flag_or_key else args)


app = App(cls=TrainGroup)

RUN_FLAGS = "dry_run explain resume allow_changes allow_differences"
"""Flags of every command of `train`."""
TEXT_FLAGS = (
    "overrides preset model data prompt_field val_data steps epochs batch_size max_length lr lora adapter seed run_dir "
    f"wandb tensorboard tokenizer chat_template backend nodes gpus_per_node gpu ray_address config set_ {RUN_FLAGS}"
)
"""Flags of the commands of methods that read a dataset."""
RL_EXAMPLES = (
    "rlctl train grpo --preset laptop",
    "rlctl train grpo --model ./my-model --data questions.jsonl --reward exact-match --preset 1gpu",
    "rlctl train grpo --preset laptop --algorithm dapo",
    "rlctl train grpo --model Qwen/Qwen3-1.7B --algorithm distillation --teacher Qwen/Qwen3-8B --data q.jsonl",
    "rlctl train grpo --model meta-llama/Llama-3.1-8B --preset 1node --dry-run",
    "rlctl train grpo --config recipe.yaml policy.model_name=Qwen/Qwen3-1.7B ++grpo.num_prompts_per_step=8",
    "rlctl train grpo --resume --run-dir runs/my-run",
)


@app.callback(invoke_without_command=True, epilog=examples("rlctl train grpo --preset laptop"))
def train(context: typer.Context) -> None:
    """Train a model with RL, or on texts or preferences."""
    if context.invoked_subcommand is None:
        from rlctl.preparation.fitting_models import what_there_is

        there_is = what_there_is(options.resolve_config().config)
        raise InputError(f"`rlctl train` needs a command ({', '.join(methods())}) and a model.", there_is)


@app.command("grpo", epilog=examples(*RL_EXAMPLES))
@options.taking(f"{options.TRAINING} {RUN_FLAGS} completion")
def grpo(context: typer.Context, json_: options.Json = False) -> None:
    """Group relative policy optimization, or another --algorithm: sample, score, learn from the difference.

    Preset and planner choose all other values; --dry-run shows each value and its origin.
    """
    _train("grpo", context)


@app.command(
    NAMELESS,
    epilog=examples("rlctl train --config recipe.yaml", "rlctl train recipe --resume --run-dir runs/my-run"),
)
@options.taking(f"{options.TRAINING} epochs batch_size {options.of_methods()} {RUN_FLAGS} completion")
def recipe(context: typer.Context, json_: options.Json = False) -> None:
    """Train with the method of a recipe, preset or run. The word `recipe` is optional."""
    _train(None, context)


def methods() -> dict[str, type[Method]]:
    """Return the training methods by the name of their command."""
    from rlctl.methods.available import commands

    return commands()


@functools.cache
def _command(name: str) -> Any:
    method = methods()[name]
    app = App()

    @app.command(name, help=method.__doc__, epilog=examples(*method.examples))
    @options.taking(" ".join((TEXT_FLAGS, method.flags, *options.declare(method.Config))))
    def train_method(context: typer.Context, json_: options.Json = False) -> None:
        _train(name, context)

    command: Any = typer.main.get_command(app)
    command.name = name
    command.method = name
    return command


def _train(command: str | None, context: typer.Context) -> None:
    """Start, continue or dry-run a training run. A `command` of None leaves the method to recipe, preset or run."""
    params = context.params
    dry_run, explain, resume, json_ = (params[name] for name in ("dry_run", "explain", "resume", "json_"))
    allow_changes, completion = params["allow_changes"], params.get("completion")
    if completion is not None and not dry_run:
        raise InputError("--completion applies to --dry-run.", "Add --dry-run.")
    if allow_changes and not resume:
        raise InputError("--allow-changes applies to --resume.", "Leave it out.")
    options.require_dry_run(explain, dry_run)
    resolved = options.resolve_config(**params, command=command)
    if command is None and not resume and "run.algorithm" not in {value.key for value in resolved.given()}:
        resolved.require_supported()  # refuses recipes of unsupported kinds
        commands = " or ".join(f"`rlctl train {name} ...`" for name in methods())
        raise InputError("`rlctl train` does not know which method to use (run.algorithm).", f"Write {commands}.")
    resolved = resolved.allowing_differences() if params["allow_differences"] else resolved
    from rlctl.data.chat import Process

    Process.reads_tokenizers_alone = OwnProcess.is_one  # other processes load the models
    if dry_run:
        show_dry_run(dry_report(resolved, resume, allow_changes, completion), json_, explain)
        return
    from rlctl.jobs import train as launch

    summary = launch.train_grpo(
        resolved,
        resume=resume,
        quiet=not shows_progress(json_),
        allow_changes=allow_changes,
        own_process=OwnProcess.is_one,
    )
    try:
        print_json(dataclasses.asdict(summary)) if json_ else show(summary.text())
    finally:
        if summary.interrupted:  # also if the terminal is gone
            raise typer.Exit(EXIT_INTERRUPTED)


def dry_report(resolved: Resolved, resume: bool, allow_changes: bool, completion: str | None) -> DryRun:
    """Return the dry run of a new run, or with `resume` of a continued one."""
    from rlctl.jobs.dry_run import dry_train
    from rlctl.jobs.resume import dry_resume

    if resume:
        return dry_resume(resolved, message, allow_changes=allow_changes, completion=completion)
    return dry_train(resolved, completion)
