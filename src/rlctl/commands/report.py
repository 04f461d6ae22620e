"""`rlctl report`: the report of a run, or of several runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.commands import options
from rlctl.commands.output import examples, print_json, show
from rlctl.commands.parsing import App

app = App()


@app.command(
    epilog=examples("rlctl report runs/my-run", "rlctl report runs/first runs/second --output comparison.html")
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Directories of runs.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE",
            help="Page to write; by default report.html in the run's directory, and of several runs here.",
        ),
    ] = None,
    json_: options.Json = False,
) -> None:  # fmt: skip
    """Write the report of a run again, or compare runs on one page.

    The page needs no network: open it in any browser. A run that trains rewrites its own report.html every few steps.
    """
    from rlctl.jobs.report import compare_runs

    path = compare_runs(runs, output)
    if json_:
        print_json({"report": str(path), "runs": [str(run) for run in runs]})
    else:
        show(str(path))
