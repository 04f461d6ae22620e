"""`rlctl eval`: accuracy of models and checkpoints on tasks, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.commands import options
from rlctl.commands.generate import refuse_training_keys
from rlctl.commands.output import examples, message, print_json, show
from rlctl.commands.parsing import GIVEN, App

if TYPE_CHECKING:
    from rlctl.config.load import Resolved
    from rlctl.jobs.encoded_tasks import Evaluation
    from rlctl.jobs.evaluate import Result

app = App()

Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", metavar="NAME|DIR", help="Hub name or local directory. Repeatable."),
]
Runs = Annotated[
    list[str] | None,
    typer.Option("--run-dir", metavar="DIR", help="Run to evaluate. Repeatable."),
]
Steps = Annotated[
    list[int] | None,
    typer.Option("--step", help="Checkpoint step in --run-dir; defaults to the last. Repeatable."),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        "-t",
        metavar="TASK",
        help="reasoning-gym:<task>[:key=value,...], gsm8k, math-500, aime24, aime25, gpqa-diamond, mmlu-pro, ifeval, a "
        "JSON, CSV or Parquet file, or a Hugging Face dataset; by default the sources and environments of the run. "
        "Repeatable.",
    ),
]
Samples = Annotated[int, typer.Option("--n", "-n", min=1, max=10_000, help="Samples per prompt.")]
Ks = Annotated[
    list[int] | None,
    typer.Option("--k", "-k", min=1, help="k of pass@k; defaults to the powers of two up to --n. Repeatable."),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Prompts per task; defaults to 200 for reasoning-gym, else all."),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="Sampling temperature; defaults to 0 with --n 1, else to 1."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write every sample to this JSON Lines file; samples that it already has are reused.",
    ),
]


@app.command(
    "eval",
    epilog=examples(
        "rlctl eval --model Qwen/Qwen3-0.6B --task gsm8k --task math-500 -n 4",
        "rlctl eval --run-dir runs/my-run --model Qwen/Qwen3-0.6B --task reasoning-gym:chain_sum",
        "rlctl eval --run-dir runs/tools --model Qwen/Qwen3-0.6B",
        "rlctl eval --run-dir runs/my-run --step 50 --step 100 --task questions.jsonl --output samples.jsonl --json",
    ),
)
@options.taking(
    "prompt_field answer_field top_p max_new_tokens seed reward env tool tokenizer chat_template max_length preset "
    "config set_ nodes gpus_per_node gpu ray_address dry_run explain"
)
def evaluate(
    context: typer.Context,
    reward: list[str] | None,
    dry_run: bool,
    explain: bool,
    task: Tasks = None,
    model: Models = None,
    run_dir: Runs = None,
    step: Steps = None,
    n: Samples = 1,
    k: Ks = None,
    limit: Limit = None,
    output: Output = None,
    temperature: Temperature = None,
    json_: options.Json = False,
) -> None:
    """Measure the accuracy of models on tasks: pass@k, mean@n and majority@n with standard errors.

    A run (--run-dir) is evaluated without conversion. Several models get the same prompts and seeds; the table lists
    them in the order of the command line and marks significant differences from the first. Settings that
    the command line leaves open come from the first run.
    """
    options.require_dry_run(explain, dry_run)
    from rlctl.jobs.candidates import candidates
    from rlctl.jobs.evaluate import evaluation
    from rlctl.jobs.tasks import refuse_idle_reward
    from rlctl.rewards.statistics import default_ks

    def resolved(name: str | None) -> Resolved:
        candidate = options.resolve_config(**context.params | {"run_dir": None, "model": name})
        refuse_training_keys(candidate, "an evaluation", "data.name", "data.size", "data.shuffle")
        return candidate

    refuse_idle_reward(reward or [], task or [])
    values = {"model": iter(model or ()), "run_dir": map(Path, run_dir or ())}
    step_options = [next(values[name]) for name in context.meta[GIVEN] if name in values]
    models = candidates(step_options, step or [], resolved, n)
    job = evaluation(models, task or [], n, k or default_ks(n), limit)
    if dry_run:
        if output is not None:
            from rlctl.runs.evaluation_file import require_place

            require_place(output)
        show_plans(job, json_, explain)
    else:
        measure(job, output, json_)


def show_plans(job: Evaluation, json_: bool, explain: bool) -> None:
    """Print the plan of each model's engines."""
    from rlctl.jobs.dry_run import dry_generate

    prompts = sum(len(task.rows) for task in job.tasks)
    plans = {
        candidate.label: dry_generate(candidate.resolved, job.samples, candidate.checkpoint, prompts)
        for candidate in job.candidates
    }
    if json_:
        print_json({"models": [{"model": label, **plan.to_json()} for label, plan in plans.items()]})
        return
    for task in job.tasks:
        how = "; ".join(task.rewards.describe()) if task.rewards else "the reward of the environment"
        place = task.environment
        played = f"; environment {place.name or 'of tools alone'}" if place is not None and place.wanted else ""
        show(f"{task.label}: {len(task.rows)} prompts x {job.samples} samples; {how}{played}")
        if task.note:
            message(task.note)
    for label, plan in plans.items():
        show(f"\n{label}\n{plan.text(explain)}")


def measure(job: Evaluation, output: Path | None, json_: bool) -> None:
    """Sample, score, and print the metrics."""
    from rlctl.jobs.evaluate import evaluate as run_evaluation
    from rlctl.runs.evaluation_file import SampleFile

    with SampleFile(output) as file:
        try:
            results = run_evaluation(job, file, message)
        except KeyboardInterrupt:
            if output is not None:
                message(f"{output} holds the samples so far; the same command continues from there.")
            raise
    print_json({"tasks": [result.to_json() for result in results]}) if json_ else show(table(results))


def table(results: list[Result]) -> str:
    """Return the metrics by task, one column per model, followed by each model's difference from the first."""
    blocks = []
    for task in dict.fromkeys(result.task for result in results):
        task_results = [result for result in results if result.task == task]
        first, *others = task_results
        names = list(dict.fromkeys(name for result in task_results for name in result.metrics))
        rows = [["", *(result.model for result in task_results)]]
        rows += [[name, *(_shown(result, name) for result in task_results)] for name in names]
        per_prompt = first.samples // first.prompts
        head = f"{task}: {first.prompts} prompts x {per_prompt} sample{'s' * (per_prompt > 1)}"
        blocks.append("\n".join([head, *_aligned(rows), *(_compared(first, other) for other in others)]))
    return "\n\n".join(blocks)


def _shown(result: Result, name: str) -> str:
    metric = result.metrics.get(name)
    if metric is None:
        return "-"
    return f"{metric.value:.4f}" + (f" ± {metric.stderr:.4f}" if metric.stderr is not None else "")


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip


def _compared(first: Result, other: Result) -> str:
    from rlctl.rewards.statistics import paired_difference

    name = next(iter(first.metrics))
    difference = paired_difference(first.metrics[name], other.metrics[name])
    error = f" ± {difference.stderr:.4f}" if difference.stderr is not None else ""
    verdict = "more than noise" if difference.beyond_noise else "not more than noise"
    return f"  {other.model} - {first.model}: {name} {difference.value:+.4f}{error}, p = {difference.p:.2g}: {verdict}"
