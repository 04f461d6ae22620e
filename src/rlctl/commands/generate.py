"""`rlctl generate`: sample completions from a model or a run's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.commands import options
from rlctl.commands.output import examples, message, print_json, show_dry_run
from rlctl.commands.parsing import App
from rlctl.errors import InputError

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.data.prompt_rows import PromptRow
    from rlctl.runs.directory import Checkpoint

app = App()

TRAINING_KEYS = (
    "batch.", "advantage.", "loss.", "checks.", "optimizer.", "scheduler.", "ddp.", "run.steps", "validation.",
)  # fmt: skip

Prompt = Annotated[list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Prompt to complete. Repeatable.")]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE|URL", help="Image before the text of each --prompt. Repeatable."),
]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts-file",
        metavar="FILE|-",
        help="File with one prompt per line, or a data file (.jsonl, .csv) with `prompt`; - reads stdin.",
    ),
]
Samples = Annotated[int, typer.Option("--n", "-n", min=1, help="Completions per prompt.")]
Step = Annotated[int | None, typer.Option("--step", help="Checkpoint step in --run-dir; defaults to the last.")]


@app.command(
    "generate",
    epilog=examples(
        'rlctl generate --preset laptop --prompt "What is 3 + 4?"',
        "rlctl generate --model ./my-model --prompts-file questions.txt --n 4 --temperature 0.7",
        "grep 'How many' questions.txt | rlctl generate --model ./my-model --prompts-file -",
        'rlctl generate --run-dir runs/my-run --prompt "What is 3 + 4?" --json',
        'rlctl generate --model ./my-vlm --image cat.png --prompt "What is it?"',
    ),
)
@options.taking(
    "temperature max_new_tokens seed model run_dir tokenizer chat_template max_length preset config set_ nodes "
    "gpus_per_node gpu ray_address dry_run explain"
)
def generate(
    context: typer.Context,
    dry_run: bool,
    explain: bool,
    prompt: Prompt = None,
    image: Images = None,
    prompts_file: PromptsFile = None,
    n: Samples = 1,
    step: Step = None,
    json_: options.Json = False,
) -> None:
    """Sample completions from a model, or from a checkpoint of a run (--run-dir).

    Prompts go through the model's chat template. The planner chooses number and size of the engines; --set
    generation.KEY=VALUE overrides it. --json prints one JSON object per prompt (JSON Lines).
    """
    resolved, checkpoint = model_or_checkpoint(context, "completions", "reward.")
    from rlctl.jobs.given_prompts import read_prompts
    from rlctl.settings.run import MOST_ROLLOUTS

    rows = read_prompts(prompt or [], prompts_file, resolved.config.data, image or [])
    if resolved.config.model.images is None and any(row.images for row in rows):
        resolved = resolved.with_values({"model.images": True})
    if len(rows) * n > MOST_ROLLOUTS:
        raise InputError(
            f"--n {n} with {len(rows)} prompts exceeds the limit of {MOST_ROLLOUTS:,} completions.", "Lower --n."
        )
    options.require_dry_run(explain, dry_run)
    if dry_run:
        from rlctl.jobs.dry_run import dry_generate

        show_dry_run(dry_generate(resolved, n, checkpoint, len(rows)), json_, explain)
    else:
        sample(resolved, checkpoint, rows, n, json_)


def model_or_checkpoint(context: typer.Context, command: str, *unread: str) -> tuple[Resolved, Checkpoint | None]:
    """Return the configuration and, with --run-dir, the checkpoint. Raises InputError for keys without effect."""
    run_dir, step = context.params["run_dir"], context.params["step"]
    if step is not None and run_dir is None:
        raise InputError(f"--step {step} needs a run.", "Give --run-dir.")
    from rlctl.jobs.run_configuration import of_run

    resolved = options.resolve_config(**context.params | {"run_dir": None})
    refuse_training_keys(resolved, command, *unread)
    return (resolved, None) if run_dir is None else of_run(Path(run_dir), step, resolved)


def refuse_training_keys(resolved: Resolved, command: str, *unread: str) -> None:
    """Raise InputError for --set of a key that only training reads, or that starts with one of `unread`. `what` names
    the command's output. Presets and files may have such keys, because commands share them."""
    for key, value in resolved.leaves():
        if resolved.origin[key] == "--set" and key.startswith(TRAINING_KEYS + unread):
            raise InputError(f"--set {key}={value} has no effect on {command}.", "Leave it out.")


def sample(resolved: Resolved, checkpoint: Checkpoint | None, rows: list[PromptRow], n: int, json_: bool) -> None:
    """Open the model, plan, generate, and print each prompt's completions."""
    from rlctl.jobs.completion_job import completion_job
    from rlctl.jobs.generate import complete

    job = completion_job(resolved, n, checkpoint, len(rows), message)
    if job.model.files.note:
        message(job.model.files.note)
    for record in complete(job, rows, message):
        print_json(record, lines=True) if json_ else print(text_of(record), flush=True)


def text_of(record: dict[str, Any]) -> str:
    """Return a prompt and its completions as text."""
    prompt = record["prompt"] if isinstance(record["prompt"], str) else record["prompt"][-1]["content"]
    if not isinstance(prompt, str):
        prompt = " ".join(part.get("text") or "[image]" for part in prompt)
    lines, several = [f"> {prompt}"], len(record["completions"]) > 1
    for number, completion in enumerate(record["completions"], 1):
        cut = "" if completion["finish_reason"] == "stop" else " [cut off at the length limit]"
        lines.append(f"{number}. " * several + completion["text"].strip() + cut)
    return "\n".join([*lines, ""])
