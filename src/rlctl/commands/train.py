"""`rlctl train`: reinforcement learning, and training on texts and preferences."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from rlctl.commands import options
from rlctl.commands.output import OwnProcess, examples, message, print_json, show, show_dry_run, shows_progress
from rlctl.commands.parsing import App, Group
from rlctl.config.algorithm_settings import OWN_COMMANDS
from rlctl.errors import EXIT_INTERRUPTED, InputError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.jobs.dry_run import DryRun

NAMELESS = "recipe"
"""The command of a line that names none."""


class TrainGroup(Group):
    """`rlctl train`, whose command may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flag_or_key = bool(args) and args[0] not in ctx.help_option_names and (args[0][:1] == "-" or "=" in args[0])
        return super().parse_args(ctx, [NAMELESS, *args] if flag_or_key else args)


app = App(cls=TrainGroup)

RUN_FLAGS = "dry_run explain resume allow_changes allow_differences"
"""Flags of every command of `train`."""
TEXT_FLAGS = (
    "overrides preset model data val_data steps epochs batch_size max_length lr lora seed run_dir wandb tensorboard "
    f"tokenizer chat_template backend nodes gpus_per_node gpu ray_address config set_ {RUN_FLAGS}"
)
"""Flags of the commands that train on a dataset."""


@app.callback(invoke_without_command=True, epilog=examples("rlctl train grpo --preset laptop"))
def train(context: typer.Context) -> None:
    """Train a model with reinforcement learning, or on texts or preferences."""
    if context.invoked_subcommand is None:
        from rlctl.jobs.open_model import what_there_is

        there_is = what_there_is(options.resolve_config().config)
        raise InputError("`rlctl train` needs a command (grpo, sft, dpo, kto, rm or distill) and a model.", there_is)


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
@options.taking(f"{options.TRAINING} {RUN_FLAGS} completion")
def grpo(context: typer.Context, json_: options.Json = False) -> None:
    """Group relative policy optimization, or another --algorithm: sample, score, learn from the difference.

    Everything that is not given is decided by preset and planner; --dry-run shows each value and where it came from.
    """
    _train("grpo", context)


@app.command(
    "sft",
    epilog=examples(
        "rlctl train sft --preset laptop-sft",
        "rlctl train sft --model Qwen/Qwen3-1.7B --data texts.jsonl --epochs 2 --lr 1e-5 --preset 1gpu",
        "rlctl train sft --model ./my-model --data chats.jsonl --set data.train_on=last --lora",
        "rlctl train sft --resume --run-dir runs/my-run",
    ),
)
@options.taking(f"prompt_field answer_field {TEXT_FLAGS}")
def sft(context: typer.Context, json_: options.Json = False) -> None:
    """Supervised fine-tuning on texts: `prompt` and `completion`, chat `messages`, or `text`.

    The loss is on completions, on messages of the assistant, or on all tokens (data.train_on).
    """
    _train("sft", context)


@app.command(
    "dpo",
    epilog=examples(
        "rlctl train dpo --model Qwen/Qwen3-1.7B --data pairs.jsonl --epochs 1 --lr 5e-7 --preset 1gpu",
        "rlctl train dpo --model ./my-model --data pairs.jsonl --beta 0.3 --lora",
        "rlctl train dpo --resume --run-dir runs/my-run",
    ),
)
@options.taking(f"prompt_field beta {TEXT_FLAGS}")
def dpo(context: typer.Context, json_: options.Json = False) -> None:
    """Direct preference optimization on rows with `prompt`, `chosen` and `rejected`.

    The reference is the model that the run begins with.
    """
    _train("dpo", context)


@app.command(
    "distill",
    epilog=examples(
        "rlctl train distill --model Qwen/Qwen3-1.7B --teacher Qwen/Qwen3-8B --data texts.jsonl --preset 1gpu",
        "rlctl train distill --model ./my-model --teacher ./teacher --data chats.jsonl --set distillation.top_k=128",
        "rlctl train distill --resume --run-dir runs/my-run",
    ),
)
@options.taking(f"prompt_field answer_field teacher {TEXT_FLAGS}")
def distill(context: typer.Context, json_: options.Json = False) -> None:
    """Off-policy distillation: learn a teacher's probabilities on texts, as `train sft` reads them.

    `train grpo --algorithm distillation` learns from a teacher on the model's own completions.
    """
    _train("distill", context)


@app.command(
    "kto",
    epilog=examples(
        "rlctl train kto --model Qwen/Qwen3-1.7B --data labels.jsonl --epochs 1 --lr 5e-7 --preset 1gpu",
        "rlctl train kto --resume --run-dir runs/my-run",
    ),
)
@options.taking(f"prompt_field answer_field beta {TEXT_FLAGS}")
def kto(context: typer.Context, json_: options.Json = False) -> None:
    """Kahneman-Tversky optimization on rows with `prompt`, `completion` and `label`, true for good and false for bad.

    The reference is the model that the run begins with.
    """
    _train("kto", context)


@app.command(
    "rm",
    epilog=examples(
        "rlctl train rm --model Qwen/Qwen3-1.7B --data pairs.jsonl --epochs 1 --lr 2e-6 --preset 1gpu",
        "rlctl train rm --model ./my-model --data pairs.jsonl --val-data others.jsonl --gpu cpu",
        "rlctl train rm --resume --run-dir runs/my-run",
    ),
)
@options.taking(f"prompt_field {TEXT_FLAGS}")
def rm(context: typer.Context, json_: options.Json = False) -> None:
    """A reward model on rows with `prompt`, `chosen` and `rejected`: a scalar head, and the loss of Bradley and Terry.

    `rlctl convert megatron-to-hf RUN DIR` exports it, and `--reward model:DIR` of `train grpo` scores with it.
    """
    _train("rm", context)


@app.command(
    NAMELESS,
    epilog=examples("rlctl train --config recipe.yaml", "rlctl train recipe --resume --run-dir runs/my-run"),
)
@options.taking(f"{options.TRAINING} epochs batch_size beta {RUN_FLAGS} completion")
def recipe(context: typer.Context, json_: options.Json = False) -> None:
    """Train as a recipe, a preset or a run says itself: the word `recipe` can be left out."""
    _train(None, context)


def _train(command: str | None, context: typer.Context) -> None:
    """Begin or continue a run, or show what it would be. `command`: its name; None: what is given says it."""
    params = context.params
    dry_run, explain, resume, json_ = (params[name] for name in ("dry_run", "explain", "resume", "json_"))
    allow_changes, completion = params["allow_changes"], params.get("completion")
    if completion is not None and not dry_run:
        raise InputError("--completion is for --dry-run, which shows its rewards.", "Add --dry-run.")
    if allow_changes and not resume:
        raise InputError("--allow-changes is for --resume.", "Leave it out.")
    options.require_dry_run(explain, dry_run)
    resolved = options.resolve_config(**params, command=command if command in OWN_COMMANDS else None)
    if command is None and not resume and "run.algorithm" not in {value.key for value in resolved.given()}:
        resolved.require_supported()  # a recipe of another kind is told so
        commands = " or ".join(f"`rlctl train {name} ...`" for name in ("grpo", *OWN_COMMANDS))
        raise InputError("`rlctl train`: nothing given says what is trained (run.algorithm).", f"Write {commands}.")
    resolved = resolved.allowing_differences() if params["allow_differences"] else resolved
    if dry_run:
        show_dry_run(dry_report(resolved, resume, allow_changes, completion), json_, explain)
        return
    from rlctl.jobs import train as launch

    summary = launch.train_grpo(resolved, resume=resume, quiet=not shows_progress(json_), allow_changes=allow_changes)
    try:
        print_json(dataclasses.asdict(summary)) if json_ else show(summary.text())
    finally:
        if summary.interrupted:  # also where the terminal that was to show it is what was closed
            raise typer.Exit(EXIT_INTERRUPTED)


def dry_report(resolved: Resolved, resume: bool, allow_changes: bool, completion: str | None) -> DryRun:
    """Return what a run would start with, or with `resume` what it would go on with."""
    from rlctl.data.chat import Process
    from rlctl.jobs.dry_run import dry_train
    from rlctl.jobs.train import dry_resume

    Process.reads_tokenizers_alone = OwnProcess.is_one
    if resume:
        return dry_resume(resolved, message, allow_changes=allow_changes, completion=completion)
    return dry_train(resolved, completion)
