"""`rlctl rehearse`: a small run of any configuration, without GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.commands import options
from rlctl.commands.output import (
    OwnProcess,
    error_json,
    examples,
    message,
    print_json,
    show,
    shows_progress,
)
from rlctl.commands.parsing import App

app = App()


@app.command(
    "rehearse",
    epilog=examples(
        "rlctl rehearse --config recipe.yaml",
        "rlctl rehearse --config recipe.yaml --gpu h100 --data questions.jsonl",
        "rlctl rehearse --model Qwen/Qwen3-8B --data questions.jsonl --reward rewards.py:reward --preset 1node",
        "rlctl rehearse --config recipe.yaml --keep ./rehearsal --json",
    ),
)
@options.taking(f"method {options.TRAINING} epochs {options.of_methods()} allow_differences")
def rehearse(
    context: typer.Context,
    allow_differences: bool,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep the tiny model, rows, run and export in this directory."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Try a configuration without GPUs before the cluster is booked: two steps with a tiny model of the same family.

    The rehearsal covers data, prompts, rewards, algorithm, parallelism, saves, a kill, a resume and an export. Its
    table lists what was rehearsed, what was shrunk, and what could not be rehearsed.
    """
    resolved = options.resolve_config(**context.params)
    resolved = resolved.allowing_differences() if allow_differences else resolved
    from rlctl.data.chat import Process
    from rlctl.rehearsal.rehearse import rehearse as rehearsed

    Process.reads_tokenizers_alone = OwnProcess.is_one
    result = rehearsed(resolved, message, quiet=not shows_progress(json_), keep=keep)
    if json_:
        print_json(result.to_json() | (error_json(result.error) if result.error else {}))
    else:
        show(result.text())
    if result.error is not None:
        raise result.error
