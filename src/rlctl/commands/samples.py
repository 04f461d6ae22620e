"""`rlctl samples`: the completions that a run has logged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.commands import options
from rlctl.commands.output import examples, print_json, show
from rlctl.commands.parsing import App
from rlctl.config.files import write_json
from rlctl.errors import InputError
from rlctl.telemetry.terminal import shows_colors

app = App()


@app.command(
    "samples",
    epilog=examples(
        "rlctl samples runs/my-run",
        "rlctl samples runs/my-run --step 10 --best --worst -n 1",
        "rlctl samples runs/my-run --worst --json",
        "rlctl samples runs/my-run --best --atif trajectories",
    ),
)
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Step to show, counted from 1; defaults to the last.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Show the highest rewards, from all steps unless --step is given.")
    ] = False,
    worst: Annotated[
        bool, typer.Option("--worst", help="Show the lowest rewards, from all steps unless --step is given.")
    ] = False,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of samples to show.")] = 4,
    atif: Annotated[
        Path | None,
        typer.Option(
            "--atif",
            help="Write each sample to this folder as a trajectory in Harbor's format (ATIF).",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Show completions that a run sampled: the prompt as the model saw it, the completion, and each reward.

    A run logs some completions per step (run.log_rollouts), the best and the worst by reward included. Images are
    drawn in a terminal; --json has them as data URLs. The requests of a program are shown as a tree with times, tokens,
    rewards and tool calls.
    """
    from rlctl.runs.request_tree import trajectory
    from rlctl.runs.samples import kept_steps, read_samples, sample_text

    last = max(kept_steps(run), default=None)
    stored = read_samples(run, last if step is None and not (best or worst) else step)
    ranked = sorted(stored, key=lambda sample: -(sample.get("reward") or 0.0))
    selection: list[dict[str, Any]] = [*(ranked[:n] if best else ()), *(ranked[-n:] if worst else ())]
    selection = selection if best or worst else stored[:n]
    if atif is not None:
        try:
            atif.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--atif {atif}: {error.strerror}.", "Name a folder that can be written.") from error
        for sample in selection:
            name = f"step_{sample['step']}_prompt_{sample.get('position')}_sample_{sample.get('sample')}.json"
            write_json(atif / name, trajectory(sample, run.name))
    if json_:
        print_json({"run": str(run), "rollouts": selection})
    else:
        draws = shows_colors(sys.stdout)
        show("\n\n".join(sample_text(sample, draws=draws) for sample in selection))
