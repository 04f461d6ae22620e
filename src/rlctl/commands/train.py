"""`rlctl train`: reinforcement learning, and training on texts and preferences."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.commands import options
from rlctl.commands.output import (
    OwnProcess,
    command_app,
    examples,
    message,
    print_json,
    show,
    show_dry_run,
    shows_progress,
)
from rlctl.errors import EXIT_INTERRUPTED, InputError

if TYPE_CHECKING:
    from rlctl.apps.dry_run import DryRun
    from rlctl.config.load import Resolved

app = command_app()

Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir (or the newest one).")]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="With --resume: go on though data, model or settings changed.")
]
Completion = Annotated[
    str | None,
    typer.Option("--completion", metavar="TEXT", help="With --dry-run: a completion to show the rewards of."),
]
AllowDifferences = Annotated[
    bool, typer.Option("--allow-differences", help="Go on without what a recipe asks for and rlctl lacks.")
]


@app.callback(invoke_without_command=True, epilog=examples("rlctl train grpo --preset laptop"))
def train(context: typer.Context) -> None:
    """Train a model with reinforcement learning, or on texts or preferences."""
    if context.invoked_subcommand is None:
        from rlctl.apps.open_model import what_there_is

        there_is = what_there_is(options.resolve_config().config)
        raise InputError("`rlctl train` needs a command (grpo, sft or dpo) and a model.", there_is)


@app.command(
    "grpo",
    epilog=examples(
        "rlctl train grpo --preset laptop",
        "rlctl train grpo --model ./my-model --data questions.jsonl --reward exact-match --preset 1gpu",
        "rlctl train grpo --preset laptop --algorithm dapo",
        "rlctl train grpo --model Qwen/Qwen3-1.7B --algorithm distillation --teacher Qwen/Qwen3-8B --data q.jsonl",
        "rlctl train grpo --model meta-llama/Llama-3.1-8B --preset 1node --dry-run",
        "rlctl train grpo --config recipe.yaml policy.model_name=Qwen/Qwen3-1.7B ++grpo.num_prompts_per_step=8",
        "rlctl train grpo --resume --run-dir runs/my-run",
    ),
)
@options.taking(f"{options.TRAINING} dry_run explain")
def grpo(
    context: typer.Context,
    dry_run: bool,
    explain: bool,
    resume: Resume = False,
    allow_changes: AllowChanges = False,
    allow_differences: AllowDifferences = False,
    completion: Completion = None,
    json_: options.Json = False,
) -> None:
    """Group relative policy optimization, or another --algorithm: sample, score, learn from the difference.

    Everything that is not given is decided by preset and planner; --dry-run shows each value and where it came from.
    """
    if completion is not None and not dry_run:
        raise InputError("--completion is for --dry-run, which shows its rewards.", "Add --dry-run.")
    resolved = options.resolve_config(**context.params)
    resolved = resolved.allowing_differences() if allow_differences else resolved
    _train(resolved, dry_run, explain, resume, allow_changes, json_, completion)


TEXT_FLAGS = (
    "lr lora seed run_dir wandb tensorboard tokenizer chat_template backend nodes gpus_per_node gpu ray_address config "
    "set_ dry_run explain"
)
"""Flags of the commands that train on a dataset."""


@app.command(
    "sft",
    epilog=examples(
        "rlctl train sft --preset laptop-sft",
        "rlctl train sft --model Qwen/Qwen3-1.7B --data texts.jsonl --epochs 2 --lr 1e-5 --preset 1gpu",
        "rlctl train sft --model ./my-model --data chats.jsonl --set data.train_on=last --lora",
        "rlctl train sft --resume --run-dir runs/my-run",
    ),
)
@options.taking(
    f"overrides preset model data prompt_field answer_field val_data steps epochs batch_size max_length {TEXT_FLAGS}"
)
def sft(
    context: typer.Context,
    dry_run: bool,
    explain: bool,
    resume: Resume = False,
    allow_changes: AllowChanges = False,
    allow_differences: AllowDifferences = False,
    json_: options.Json = False,
) -> None:
    """Supervised fine-tuning on texts: `prompt` and `completion`, chat `messages`, or `text`.

    The loss is on completions, on messages of the assistant, or on all tokens (data.train_on).
    """
    resolved = options.resolve_config(**context.params, command="sft")
    resolved = resolved.allowing_differences() if allow_differences else resolved
    _train(resolved, dry_run, explain, resume, allow_changes, json_)


@app.command(
    "dpo",
    epilog=examples(
        "rlctl train dpo --model Qwen/Qwen3-1.7B --data pairs.jsonl --epochs 1 --lr 5e-7 --preset 1gpu",
        "rlctl train dpo --model ./my-model --data pairs.jsonl --beta 0.3 --lora",
        "rlctl train dpo --resume --run-dir runs/my-run",
    ),
)
@options.taking(
    f"overrides preset model data prompt_field val_data steps epochs batch_size max_length beta {TEXT_FLAGS}"
)
def dpo(
    context: typer.Context,
    dry_run: bool,
    explain: bool,
    resume: Resume = False,
    allow_changes: AllowChanges = False,
    allow_differences: AllowDifferences = False,
    json_: options.Json = False,
) -> None:
    """Direct preference optimization on rows with `prompt`, `chosen` and `rejected`.

    The reference is the model that the run begins with.
    """
    resolved = options.resolve_config(**context.params, command="dpo")
    resolved = resolved.allowing_differences() if allow_differences else resolved
    _train(resolved, dry_run, explain, resume, allow_changes, json_)


def _train(
    resolved: Resolved,
    dry_run: bool,
    explain: bool,
    resume: bool,
    allow_changes: bool,
    json_: bool,
    completion: str | None = None,
) -> None:
    """Begin or continue a run, or show what it would be."""
    if allow_changes and not resume:
        raise InputError("--allow-changes is for --resume.", "Leave it out.")
    options.require_dry_run(explain, dry_run)
    if dry_run:
        show_dry_run(dry_report(resolved, resume, allow_changes, completion), json_, explain)
        return
    from rlctl.apps import train as launch

    summary = launch.train_grpo(resolved, resume=resume, quiet=not shows_progress(json_), allow_changes=allow_changes)
    try:
        print_json(dataclasses.asdict(summary)) if json_ else show(summary.text())
    finally:
        if summary.interrupted:  # also where the terminal that was to show it is what was closed
            raise typer.Exit(EXIT_INTERRUPTED)


def dry_report(resolved: Resolved, resume: bool, allow_changes: bool, completion: str | None) -> DryRun:
    """Return what a run would start with, or with `resume` what it would go on with."""
    from rlctl.apps.dry_run import dry_train
    from rlctl.apps.train import dry_resume
    from rlctl.data.chat import Process

    Process.reads_tokenizers_alone = OwnProcess.is_one
    if resume:
        return dry_resume(resolved, message, allow_changes=allow_changes, completion=completion)
    return dry_train(resolved, completion)
