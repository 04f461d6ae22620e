"""Events for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from rlctl.telemetry.loggers import LoggedRun


class TensorBoardLogger:
    """Events in `tensorboard/` of the run directory."""

    title = "TensorBoard"
    package = "tensorboard"
    install = "tensorboard"

    def __init__(self, run: LoggedRun) -> None:
        # TensorBoard's own writer: torch's wrapper would import torch into the driver, and EventFileWriter has a thread
        # that prints a traceback on a full disk. Types: tensorboard's generated modules name their classes only at run
        # time.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = run.directory / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        place = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._writer = RecordWriter((directory / f"events.out.tfevents.{place}").open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # Hide what earlier sessions wrote for this step and later ones.
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=run.finished + 1, session_log=start))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()
