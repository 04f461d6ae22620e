"""`rlctl generate`: sample completions from a model or a run's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.commands import options
from rlctl.commands.output import command_app, examples, message, print_json

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.runs.checkpoints import Checkpoint

app = command_app()


@app.command(
    "generate",
    epilog=examples(
        'rlctl generate --preset laptop --prompt "What is 3 + 4?"',
        "rlctl generate --model ./my-model --prompts-file questions.txt --n 4 --temperature 0.7",
        'rlctl generate --run-dir runs/my-run --prompt "What is 3 + 4?" --json',
    ),
)
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt. Repeat it for several.")
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option("--prompts-file", metavar="FILE", help="One prompt a line, or a .jsonl file with `prompt`."),
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Completions a prompt.")] = 1,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 takes the most likely token each time.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    seed: options.Seed = None,
    model: options.Model = None,
    run_dir: options.RunDir = None,
    step: Annotated[int | None, typer.Option("--step", help="Checkpoint of --run-dir; by default the last.")] = None,
    tokenizer: options.Tokenizer = None,
    chat_template: options.ChatTemplate = None,
    max_length: options.MaxLength = None,
    preset: options.Preset = None,
    config: options.Config = None,
    set_: options.Set = None,
    gpu: options.Gpu = None,
    ray_address: options.RayAddress = None,
    json_: options.Json = False,
) -> None:
    """Sample completions from a model, or from a checkpoint of a run (--run-dir).

    Prompts go through the model's chat template. With --json, one JSON object a prompt (JSON Lines).
    """
    sets = [*(set_ or []), *([f"generation.temperature={temperature}"] if temperature is not None else [])]
    flags: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        "max_length": max_length,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "gpu": gpu,
        "ray_address": ray_address,
    }
    resolved = options.resolve_config(preset=preset, config=config, set_=sets, **flags)
    checkpoint = None
    if run_dir is not None:
        resolved, checkpoint = of_run(Path(run_dir), step, resolved)
    sample(resolved, checkpoint, prompt or [], prompts_file, n, json_)


def sample(
    resolved: Resolved, checkpoint: Checkpoint | None, prompts: list[str], prompts_file: str | None, n: int, json_: bool
) -> None:
    """Open prompts and model, generate, and print each prompt's completions as they come."""
    from rlctl.checkpoints.source import read_object, resolve_model
    from rlctl.errors import InputError
    from rlctl.models.registry import facts_from_hf_config
    from rlctl.planner.from_config import cluster_from_config
    from rlctl.rl.completions import CompletionJob, complete, read_prompts

    settings = resolved.config
    rows = read_prompts(prompts, prompts_file, settings.data.prompt_field)
    if not settings.model.name:
        raise InputError("No model to generate with.", "Give --model, --run-dir, or start from --preset laptop.")
    source = resolve_model(settings.model.name, settings.model.revision, tell=message)
    if source.note:
        message(source.note)
    facts = facts_from_hf_config(read_object(source.directory, "config.json", ""))
    device = "cpu" if cluster_from_config(settings).is_cpu else "cuda"
    job = CompletionJob(settings, source, facts, device, n, checkpoint)
    for record in complete(job, rows, message):
        print_json(record, lines=True) if json_ else print(text_of(record), flush=True)


def of_run(directory: Path, step: int | None, asked: Resolved) -> tuple[Resolved, Checkpoint]:
    """The configuration a run was made with, under what this command line sets, and the checkpoint wanted of it."""
    from rlctl.config.load import DEFAULT, Value, build
    from rlctl.errors import InputError
    from rlctl.runs.directory import RunDirectory

    run = RunDirectory(directory)
    stored = run.manifest()
    checkpoints = run.checkpoints()
    found = [one for one in checkpoints if step is None or one.step == step]
    if not found:
        have = ", ".join(str(one.step) for one in checkpoints) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise InputError(f"--run-dir {directory} has not {wanted} (it has: {have}).", "Choose another with --step.")
    values = {
        key: Value(key, entry["value"], entry["origin"])
        for key, entry in stored["config"].items()
        if entry["origin"] != DEFAULT
    }
    values |= {
        key: Value(key, value, asked.origin[key]) for key, value in asked.leaves() if asked.origin[key] != DEFAULT
    }
    return build(values), found[-1]


def text_of(record: dict[str, Any]) -> str:
    """One prompt and its completions for a reader at the terminal."""
    prompt = record["prompt"] if isinstance(record["prompt"], str) else record["prompt"][-1]["content"]
    lines = [f"> {prompt}"]
    for completion in record["completions"]:
        cut = "" if completion["finish_reason"] == "stop" else " [cut off at the length limit]"
        lines.append(completion["text"].strip() + cut)
    return "\n".join([*lines, ""])
