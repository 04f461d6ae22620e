"""Loggers: their names, what they keep over a resume, and what becomes of one that fails."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlctl.errors import InputError
from rlctl.settings.run import LOGGERS, RunConfig
from rlctl.telemetry.loggers import (
    BUILT_IN,
    LoggedRun,
    LoggerThread,
    logged_values,
    logger_class,
    start_loggers,
    wanted_loggers,
)
from rlctl.telemetry.loggers.tensorboard import TensorBoardLogger

CONFIG = {"run": {"steps": 3}, "model": {"name": "tiny"}, "env": {}}
LINE = {
    "step": 1, "reward_mean": 0.5, "loss": 0.1, "logprob_diff": {"mean": 1e-6}, "reward_terms": {"task": 0.5},
    "seconds": {"generation": 2.0, "total": 3.0}, "refit_seconds": {"pack": 0.1}, "tokens_per_s": 9.0,
    "validation": {"accuracy": 0.25}, "system": {"cpu_percent": 50.0}, "label": "x",
}  # fmt: skip


def logged(directory: Path, finished: int = 0) -> LoggedRun:
    return LoggedRun(directory, "my-project", "my-run", CONFIG, finished)


def test_every_logger_has_the_names_of_one_table() -> None:
    assert logged_values(LINE) == {
        "train/reward": 0.5, "train/loss": 0.1, "train/logprob_diff/mean": 1e-6, "train/reward_terms/task": 0.5,
        "timing/generation": 2.0, "timing/total": 3.0, "timing/refit_parts/pack": 0.1, "timing/tokens_per_s": 9.0,
        "validation/accuracy": 0.25, "system/cpu_percent": 50.0,
    }  # fmt: skip
    assert set(BUILT_IN) == set(LOGGERS)
    assert all(logger_class(name).title for name in LOGGERS)  # type: ignore[attr-defined]


def test_an_id_that_could_not_be_written_is_none(tmp_path: Path) -> None:
    """A full disk leaves the file empty; a logger that took that for its id would fail in every session."""
    run = logged(tmp_path)
    assert run.remember("mlflow", "") == ""
    assert run.identity("mlflow") is None
    run.remember("mlflow", "abc")
    assert run.identity("mlflow") == "abc"


def test_tensorboard_shows_a_resumed_run_without_the_steps_that_ran_again(tmp_path: Path) -> None:
    for finished, steps in ((0, range(1, 5)), (2, range(3, 5))):
        logger = TensorBoardLogger(logged(tmp_path, finished))
        for step in steps:
            logger.log(step, {"train/reward": step + finished / 10})
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = [(event.step, round(event.value, 3)) for event in events.Scalars("train/reward")]
    assert values == [(1, 1), (2, 2), (3, 3.2), (4, 4.2)]


def test_tensorboard_on_a_full_disk_is_an_error_for_its_caller_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no thread of its own, which would print a traceback."""
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before = threading.active_count()
    logger = TensorBoardLogger(logged(tmp_path))
    monkeypatch.setattr(logger._writer, "_writer", open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device"):
        logger.log(1, {"train/reward": 0.5})
    assert threading.active_count() == before
    assert not failed


def test_unset_there_is_tensorboard_and_wandb_where_its_key_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert wanted_loggers(RunConfig(), told.append) == ("tensorboard",)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("rlctl.telemetry.loggers.find_spec", lambda name: SimpleNamespace(origin="x"))
    assert wanted_loggers(RunConfig(), told.append) == ("tensorboard", "wandb")
    assert not told
    monkeypatch.setattr(
        "rlctl.telemetry.loggers.find_spec", lambda name: SimpleNamespace(origin=None if name == "wandb" else "x")
    )
    assert wanted_loggers(RunConfig(), told.append) == ("tensorboard",)
    assert "pip install wandb" in told[0]


def test_a_logger_that_is_asked_for_and_not_installed_is_an_error_that_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlctl.telemetry.loggers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"run.loggers names mlflow.*pip install mlflow-skinny") as error:
        wanted_loggers(RunConfig(loggers=("mlflow",)))
    assert error.value.exit_code == 2
    told: list[str] = []
    assert wanted_loggers(RunConfig(loggers=("mlflow",)), told.append, optional=True) == ()
    assert "pip install mlflow-skinny" in told[0]


class Fails:
    """A logger that takes one step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        if step == 2:
            raise ConnectionError("the server is gone\nwith more lines")

    def close(self) -> None: ...


def test_a_logger_that_fails_is_said_once_and_switched_off() -> None:
    said: list[str] = []
    failing = Fails()
    thread = LoggerThread("MLflow", lambda: failing, said.append)
    for step in range(1, 6):
        thread.log(step, {})
    thread.close()
    assert failing.steps == [1, 2]
    assert said == ["MLflow failed and is switched off: ConnectionError: the server is gone"]


def test_a_logger_that_does_not_start_is_said_and_one_that_hangs_does_not_hold_the_run() -> None:
    said: list[str] = []

    def refuse() -> Any:
        raise PermissionError("bad key")

    LoggerThread("Weights & Biases", refuse, said.append).close()
    assert said == ["Weights & Biases failed and is switched off: PermissionError: bad key"]
    release = threading.Event()
    hanging = LoggerThread("Trackio", release.wait, said.append)  # type: ignore[arg-type]
    hanging.close(limit_s=0.05)
    release.set()
    assert "Trackio did not take every step" in said[1]


class FakeWandb(ModuleType):
    """The calls of Weights & Biases that are made, and with what."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.lines: list[tuple[int, dict[str, float]]] = []

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def init(self, **options: Any) -> FakeWandb:
        self.started.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None: ...

    def teardown(self) -> None:
        self.ended = True


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for finished in (0, 1):
        (thread,) = start_loggers(["wandb"], logged(tmp_path, finished), pytest.fail)
        thread.log(finished + 1, {"reward_mean": 0.5})
        thread.close()
    first, second = wandb.started
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["resume"], first["config"]) == (
        "my-project", "my-run", "allow", CONFIG,
    )  # fmt: skip
    assert wandb.ended  # its process is not left to those who end what is left
    assert wandb.lines == [(1, {"train/reward": 0.5}), (2, {"train/reward": 0.5})]


def log_two_sessions(name: str, directory: Path) -> None:
    fail: Callable[[str], Any] = pytest.fail
    for finished in (0, 2):
        (thread,) = start_loggers([name], logged(directory, finished), fail)
        for step in (finished + 1, finished + 2):
            thread.log(step, {**LINE, "reward_mean": step / 10})
        thread.close()


def test_mlflow_s_own_store_has_one_run_with_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log_two_sessions("mlflow", tmp_path)
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("my-project").experiment_id])
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert run.data.params == {"run.steps": "3", "model.name": "tiny", "env": "{}"}
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(one.step, one.value) for one in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_trackio_s_own_store_has_one_run_with_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    log_two_sessions("trackio", tmp_path)
    assert capsys.readouterr().out == ""  # stdout is the command's
    (run,) = trackio.Api().runs("my-project")
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    assert [(line["step"], line["train/reward"]) for line in storage.get_logs("my-project", run.name)] == [
        (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4),
    ]  # fmt: skip
