"""`rlctl watch`: the report of a run as a page that keeps itself up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.commands.output import examples, show
from rlctl.commands.parsing import App

app = App()


@app.command(epilog=examples("rlctl watch runs/my-run", "rlctl watch runs/my-run --port 8000"))
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.", show_default=False)],
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port; by default 8642, or a free one next to others."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Others who reach it can read the run's samples.")
    ] = "127.0.0.1",
) -> None:
    """Serve the report of a run on this machine, and keep the page up to date while the run trains.

    Open the address in a browser; Ctrl-C ends it. It may be started before the run has finished a step, and reads the
    run's files alone. From another machine, forward the port: ssh -L 8642:localhost:8642 HOST.
    """
    from rlctl.jobs.watch import PageServer

    with PageServer(run, host, port) as server:
        show(server.address)
        server.serve_forever()
