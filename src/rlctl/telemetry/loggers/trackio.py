"""Trackio."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO, cast

from rlctl.telemetry.loggers import LoggedRun


class TrackioLogger:
    """Trackio: a local database that `trackio show` displays, or the Space that TRACKIO_SPACE_ID names."""

    title = "Trackio"
    package = "trackio"
    install = "trackio"

    def __init__(self, run: LoggedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]  # it need not be installed

        before = run.identity("trackio")
        with _StdoutOfOthers():
            self._run = trackio.init(
                project=run.project,
                name=before or run.name,
                resume="never" if before is None else "allow",
                config=dict(run.config),
                embed=False,
                auto_log_gpu=False,  # the run's machine metrics are under `system`
                auto_log_cpu=False,
            )
        run.remember("trackio", self._run.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with _StdoutOfOthers():
            self._run.finish()


class _StdoutOfOthers(contextlib.redirect_stdout):
    """Send what this thread prints to stderr: stdout is for the command's result, which another thread may print."""

    def __init__(self) -> None:
        self._stdout, self._thread = sys.stdout, threading.get_ident()
        super().__init__(cast(TextIO, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if threading.get_ident() == self._thread else self._stdout, name)
