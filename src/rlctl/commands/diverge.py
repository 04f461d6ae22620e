"""`rlctl diverge`: find the first sub-layer where trainer or engine compute something else than transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.commands import options
from rlctl.commands.output import examples, message, print_json
from rlctl.commands.parsing import App
from rlctl.errors import InputError

if TYPE_CHECKING:
    from rlctl.divergence.report import DivergenceReport

app = App()
EXIT_PARTED = 5

Step = Annotated[int | None, typer.Option("--step", help="Checkpoint step in --run-dir; defaults to the last.")]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", metavar="N", help="Tokens of the longer of two sequences; defaults to 96 or the window."),
]


@app.command(
    "diverge",
    epilog=examples(
        "rlctl diverge --model ./my-model",
        "rlctl diverge --model ./my-model --tp 2 --set model.dtype=float32",
        "rlctl diverge --run-dir runs/my-run --step 20 --json",
    ),
)
@options.taking("model run_dir preset config set_ backend tp dp generation_tp nodes gpus_per_node gpu ray_address")
def diverge(
    context: typer.Context,
    run_dir: str | None,
    step: Step = None,
    tokens: Tokens = None,
    json_: options.Json = False,
) -> None:
    """Find the first sub-layer where trainer or engine compute something else than transformers.

    Runs the same tokens through the trainer (with the run's layout), the engine and transformers, and compares what
    each sub-layer makes of the same input with the noise of the number format. Names the place, the operation and the
    likely cause. The exit code is 5 if a difference exceeds the noise.
    """
    if step is not None and run_dir is None:
        raise InputError(f"--step {step} needs a run.", "Give --run-dir.")
    from rlctl.jobs.diverge import run_diverge
    from rlctl.jobs.diverge_job import diverge_job
    from rlctl.jobs.run_configuration import processes_of_run

    resolved, checkpoint = options.resolve_config(**context.params | {"run_dir": None}), None
    if run_dir is not None:
        resolved, checkpoint = processes_of_run(Path(run_dir), step, resolved)
    _show(run_diverge(diverge_job(resolved, checkpoint, tokens, message), message), json_)


def _show(report: DivergenceReport, json_: bool) -> None:
    print_json(report.to_json()) if json_ else print("\n".join(report.lines()))
    if report.parted:
        raise typer.Exit(EXIT_PARTED)
