"""`rlctl report`: the report of one or several runs."""

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
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE",
            help="Page to write; defaults to report.html in the run directory, or here for several runs.",
        ),
    ] = None,
    json_: options.Json = False,
) -> None:  # fmt: skip
    """Write the report of a run, or compare runs on one page.

    The page needs no network; open it in any browser. A running run rewrites its report.html every few steps.
    """
    from rlctl.jobs.report import compare_runs

    path = compare_runs(runs, output)
    if json_:
        print_json({"report": str(path), "runs": [str(run) for run in runs]})
    else:
        show(str(path))
