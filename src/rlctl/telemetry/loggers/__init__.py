"""Loggers next to metrics.jsonl, with common names of metrics; one file per logger.

Each works in a thread, so a slow server slows no step. A failing one is reported once and switched off.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rlctl.config.plugins import load_named
from rlctl.errors import InputError
from rlctl.settings.run import RunConfig
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

PLACE = "rlctl.telemetry.loggers"
BUILT_IN = {
    "tensorboard": f"{PLACE}.tensorboard:TensorBoardLogger",
    "wandb": f"{PLACE}.wandb:WandbLogger",
    "mlflow": f"{PLACE}.mlflow:MlflowLogger",
    "trackio": f"{PLACE}.trackio:TrackioLogger",
}
"""`module:Class` of each; an installed package adds loggers in the entry-point group `rlctl.loggers`."""
END_LIMIT_S = 30.0
"""Longest time that the end of a run waits for a logger."""


def logged_values(metrics: Metrics) -> dict[str, float]:
    """Return every number of a metrics line under its name in loggers."""
    values = {}
    for name, value in flatten(metrics):
        section, slash, rest = name.partition("/")
        if slash and section in SECTIONS:
            values[f"{SECTIONS[section]}/{rest}"] = value
        elif name != "step":
            values[NAMES.get(name) or f"train/{name}"] = value
    return values


class Logger(Protocol):
    """A place for the values of each step. A class of it starts with the run: `Logger(LoggedRun)`."""

    title: str
    """The logger's name in messages."""
    package: str
    """The module that it imports."""
    install: str
    """The package that brings the module, for pip."""

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


class LoggerThread:
    """Runs a logger in a thread. `tell` receives its failure once."""

    def __init__(self, title: str, start: Callable[[], Logger], tell: Callable[[str], None]) -> None:
        self.title = title
        self._tell = tell
        self._steps: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(start,), name=f"logger {title}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        if self._thread.is_alive():
            self._steps.put((step, logged_values(metrics)))

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        self._steps.put(None)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._tell(f"{self.title} did not take every step within {limit_s:.0f} s of the end of the run.")

    def _work(self, start: Callable[[], Logger]) -> None:
        try:
            logger = start()
            while (entry := self._steps.get()) is not None:
                logger.log(*entry)
            logger.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a logger does, the run goes on
            reason = (str(error).strip().splitlines() or [""])[0]
            self._tell(f"{self.title} failed and is switched off: {type(error).__name__}: {reason}")


def logger_class(name: str) -> Callable[[LoggedRun], Logger]:
    """Import the class of a logger. Raises InputError for an unknown name."""
    return load_named("rlctl.loggers", name, BUILT_IN)


def wanted_loggers(
    config: RunConfig, tell: Callable[[str], None] = lambda _: None, *, optional: bool = False
) -> tuple[str, ...]:
    """Return a run's loggers; by default TensorBoard, and W&B with WANDB_API_KEY. Raises InputError for a missing
    package; with `optional` it calls `tell` and leaves the logger out."""
    default = ("tensorboard", "wandb") if os.environ.get("WANDB_API_KEY") else ("tensorboard",)
    names: list[str] = []
    for name in default if config.loggers is None else config.loggers:
        logger: Any = logger_class(name)
        problem = f"run.loggers names {name}, and the package `{logger.package}` is not installed."
        install = f"Install it with `pip install {logger.install}`"
        # A folder `wandb` that an earlier run left here is a package without an origin.
        if (spec := find_spec(logger.package)) is not None and spec.origin is not None:
            names.append(name)
        elif config.loggers is None:
            if name == "wandb":
                tell(f"WANDB_API_KEY is set, but nothing goes to Weights & Biases. {install}.")
        elif optional:
            tell(f"{problem} The run goes without it. {install}.")
        else:
            raise InputError(problem, f"{install}, or leave {name} out of run.loggers.")
    return tuple(names)


def start_loggers(names: Sequence[str], run: LoggedRun, tell: Callable[[str], None]) -> list[LoggerThread]:
    classes: list[Any] = [logger_class(name) for name in names]
    return [LoggerThread(logger_class.title, lambda start=logger_class: start(run), tell) for logger_class in classes]
