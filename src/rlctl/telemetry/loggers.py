"""Loggers next to metrics.jsonl: TensorBoard, Weights & Biases, MLflow and Trackio, with common names. Each works in a
thread, so a slow server slows no step. A failing one is reported once and switched off."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from rlctl.errors import InputError
from rlctl.settings.run import LoggerName, RunConfig
from rlctl.telemetry.metrics import Metrics, flatten

NAMES = {
    "reward_mean": "train/reward",
    "response_tokens_mean": "train/response_tokens",
    "response_tokens_max": "train/response_tokens_max",
    "prompt_tokens_mean": "train/prompt_tokens",
    "rollout_tokens": "timing/tokens",
    "tokens_per_s": "timing/tokens_per_s",
}
"""Names in loggers of values whose name in metrics.jsonl is another one."""
SECTIONS = {
    "seconds": "timing",
    "refit_seconds": "timing/refit_parts",
    "validation": "validation",
    "system": "system",
}
"""Loggers' sections of nested metrics; others are under `train`."""

TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow", "trackio": "Trackio"}
END_LIMIT_S = 30.0
"""Longest time that the end of a run waits for a logger."""
MOST_PARAMS = 100
"""Parameters in one request to MLflow."""


def logged_values(metrics: Metrics) -> dict[str, float]:
    """Return every number of a metrics line under its name in loggers."""
    found = {}
    for name, value in flatten(metrics):
        section, slash, rest = name.partition("/")
        if slash and section in SECTIONS:
            found[f"{SECTIONS[section]}/{rest}"] = value
        elif name != "step":
            found[NAMES.get(name) or f"train/{name}"] = value
    return found


class Logger(Protocol):
    """A place for the values of each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step (counted from 1)."""

    def close(self) -> None:
        """Flush and release."""


@dataclass(frozen=True)
class LoggedRun:
    """The run as a logger shows it."""

    directory: Path
    project: str
    name: str
    config: Mapping[str, Any]
    finished: int
    """The step to continue after; 0 for a new run."""

    def identity(self, logger: str) -> str | None:
        """Return the id that the logger knows this run by, if it has one. A full disk leaves an empty file."""
        path = self.directory / "loggers" / logger
        return (path.read_text().strip() or None) if path.exists() else None

    def remember(self, logger: str, identity: str) -> str:
        path = self.directory / "loggers" / logger
        path.parent.mkdir(exist_ok=True)
        path.write_text(identity + "\n")
        return identity


class TensorBoardLogger:
    """Events in `tensorboard/` of the run directory."""

    def __init__(self, run: LoggedRun) -> None:
        # TensorBoard's own format: torch's wrapper around it would bring torch into the driver, and its EventFileWriter
        # has a thread that prints a traceback of its own where the disk is full.
        # Types: generated modules of tensorboard name their classes only while they run.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = run.directory / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        place = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._writer = RecordWriter((directory / f"events.out.tfevents.{place}").open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # What earlier sessions wrote of this step and later ones is not to be shown.
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


class WandbLogger:
    """Weights & Biases. Its own variables apply: WANDB_ENTITY, WANDB_MODE=offline and others."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  # it need not be installed

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.identity("wandb") or run.remember("wandb", uuid.uuid4().hex[:12]),
            resume="allow",
            config=dict(run.config),
            dir=str(run.directory),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run.finish()
        wandb.teardown()  # its own process ends now: the end of Ray's session ends whatever processes are left


class MlflowLogger:
    """MLflow at MLFLOW_TRACKING_URI, or in `mlruns/` of the working directory."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]  # it need not be installed

        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            address = Path("mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # later versions ask for it
        self._client = MlflowClient(tracking_uri=address)
        self._run = run.identity("mlflow")
        if self._run is not None:
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        created = self._client.create_run(experiment, run_name=run.name)
        self._run = run.remember("mlflow", created.info.run_id)
        params: list[Param] = []

        def add(section: Mapping[str, Any], prefix: str = "") -> None:
            for name, value in section.items():
                if isinstance(value, Mapping) and value:
                    add(value, f"{prefix}{name}.")
                else:
                    params.append(Param(prefix + name, str(value)))

        add(run.config)
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class TrackioLogger:
    """Trackio: a local database that `trackio show` displays, or the Space that TRACKIO_SPACE_ID names."""

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
                auto_log_gpu=False,  # the run's own figures of the machine are under `system`
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


KINDS: dict[str, Callable[[LoggedRun], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}


class LoggerThread:
    """Runs a logger in a thread; `tell` reports its failure once."""

    def __init__(self, name: str, start: Callable[[], Logger], tell: Callable[[str], None]) -> None:
        self.name = name
        self._tell = tell
        self._steps: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(start,), name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        if self._thread.is_alive():
            self._steps.put((step, logged_values(metrics)))

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        self._steps.put(None)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._tell(f"{TITLES[self.name]} did not take every step within {limit_s:.0f} s of the end of the run.")

    def _work(self, start: Callable[[], Logger]) -> None:
        try:
            logger = start()
            while (entry := self._steps.get()) is not None:
                logger.log(*entry)
            logger.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a logger does, the run goes on
            why = (str(error).strip().splitlines() or [""])[0]
            self._tell(f"{TITLES[self.name]} failed and is switched off: {type(error).__name__}: {why}")


def wanted_loggers(
    config: RunConfig, tell: Callable[[str], None] = lambda _: None, *, optional: bool = False
) -> tuple[LoggerName, ...]:
    """Return a run's loggers; by default TensorBoard, and W&B with WANDB_API_KEY. Raises InputError for a missing
    package, or with `optional` leaves it out and calls `tell`."""
    default: tuple[LoggerName, ...] = ("tensorboard", "wandb") if os.environ.get("WANDB_API_KEY") else ("tensorboard",)
    found: list[LoggerName] = []
    for name in default if config.loggers is None else config.loggers:
        problem = f"run.loggers names {name}, and the package `{name}` is not installed."
        package = "mlflow-skinny" if name == "mlflow" else name
        install = f"Install it with `pip install {package}`"
        # A folder `wandb` that an earlier run left here is a package without an origin.
        if (spec := find_spec(name)) is not None and spec.origin is not None:
            found.append(name)
        elif config.loggers is None:
            if name == "wandb":
                tell(f"WANDB_API_KEY is set, but nothing goes to Weights & Biases. {install}.")
        elif optional:
            tell(f"{problem} The run goes without it. {install}.")
        else:
            raise InputError(problem, f"{install}, or leave {name} out of run.loggers.")
    return tuple(found)


def start_loggers(names: Sequence[LoggerName], run: LoggedRun, tell: Callable[[str], None]) -> list[LoggerThread]:
    return [LoggerThread(name, lambda kind=KINDS[name]: kind(run), tell) for name in names]
