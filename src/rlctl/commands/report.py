"""`rlctl report`: the report of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.commands import options
from rlctl.commands.output import examples, print_json, show
from rlctl.commands.parsing import App
from rlctl.errors import InputError

app = App()


@app.command(
    epilog=examples(
        "rlctl report runs/my-run",
        "rlctl report runs/first runs/second --output comparison.html",
        "rlctl report runs/my-run --steps 22-29",
    )
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE",
            help="Page to write; defaults to report.html in the run directory, or here for several runs.",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps", metavar="A-B",
            help="Print the step times of a run, averaged over these steps, next to the plan's prediction.",
        ),
    ] = None,
    json_: options.Json = False,
) -> None:  # fmt: skip
    """Write the report of a run, or compare runs on one page.

    The page needs no network; open it in any browser. A running run rewrites its report.html every few steps.
    """
    if steps is not None:
        show_steps(runs, steps, output, json_)
        return
    from rlctl.report.run_report import compare_runs

    path = compare_runs(runs, output)
    if json_:
        print_json({"report": str(path), "runs": [str(run) for run in runs]})
    else:
        show(str(path))


def show_steps(runs: list[Path], steps: str, output: Path | None, json_: bool) -> None:
    """Print the step-time table of each run."""
    from rlctl.report.step_table import step_table, table_text

    if output is not None:
        raise InputError("--steps prints a table and writes no page; --output would do nothing.", "Leave one out.")
    tables = [step_table(run, steps) for run in runs]
    if json_:
        print_json(tables[0] if len(tables) == 1 else {"runs": tables})
        return
    show("\n\n".join(map(table_text, tables)))
