"""`rlctl watch`: the live report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.commands.output import examples, show
from rlctl.commands.parsing import App

app = App()


@app.command(epilog=examples("rlctl watch runs/my-run", "rlctl watch runs/my-run --port 8000"))
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port; defaults to 8642, or the next free one."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Anyone who can reach it can read the run's samples.")
    ] = "127.0.0.1",
) -> None:
    """Serve the report of a run and update the page while the run trains.

    Open the address in a browser; Ctrl-C stops the server. It only reads the run's files, and may start before the
    first step. /metrics has the last step in Prometheus' format. From another machine, forward the port:
    ssh -L 8642:localhost:8642 HOST.
    """
    from rlctl.report.watch import PageServer

    with PageServer(run, host, port) as server:
        show(server.address)
        server.serve_forever()
