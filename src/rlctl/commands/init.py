"""`rlctl init`: a starter directory with a configuration, data and a reward."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlctl.commands import completion, options
from rlctl.commands.output import examples, print_json, show
from rlctl.commands.parsing import App

app = App()

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory to create or fill.")]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="SOURCE", help="Your data; without it, init writes an example.",
                 autocompletion=completion.data),
]  # fmt: skip
Reward = Annotated[
    str | None,
    typer.Option("--reward", metavar="NAME", help="Your reward; without it, init writes an example.",
                 autocompletion=completion.rewards),
]  # fmt: skip


@app.command(
    "init",
    epilog=examples(
        "rlctl init my-run",
        "rlctl init my-run --preset 1gpu --model Qwen/Qwen3-0.6B --data questions.jsonl --reward math-verify",
    ),
)
@options.taking("preset model prompt_field answer_field")
def init(
    directory: Directory,
    preset: str | None,
    model: str | None,
    prompt_field: str | None,
    answer_field: str | None,
    data: Data = None,
    reward: Reward = None,
    json_: options.Json = False,
) -> None:
    """Write a starter configuration, data file and reward.

    In a terminal, init asks for missing values. It never overwrites files.
    """
    from rlctl.jobs.new_run import CONFIG, NewRun, usual_model, usual_preset

    asks = sys.stdin.isatty() and sys.stderr.isatty() and not json_
    preset = preset or asked("Preset (`rlctl presets ls` lists them)", usual_preset(), asks)
    model = model or asked("Model: hub name or directory", usual_model(preset), asks)
    if data is None:
        data = asked("Data: a JSON, CSV or Parquet file or a hub dataset (empty: an example)", "", asks)
    if reward is None:
        reward = asked("Reward, such as exact-match or math-verify (empty: a file to edit)", "", asks)
    run = NewRun(directory, preset, model or None, data or None, reward or None, prompt_field, answer_field)
    written = run.write()
    if json_:
        print_json({"files": [str(path) for path in written]})
        return
    show("\n".join(f"wrote {path}" for path in written))
    here = "" if directory.resolve() == Path.cwd() else f"cd {shlex.quote(str(directory))} && "
    show(f"Look first, then train:\n    {here}rlctl train grpo --preset {CONFIG} --dry-run\n"
         f"    {here}rlctl train grpo --preset {CONFIG}")  # fmt: skip


def asked(question: str, usual: str, asks: bool) -> str:
    """Return the user's answer, or the default without a terminal."""
    return typer.prompt(question, default=usual, show_default=bool(usual), err=True).strip() if asks else usual
