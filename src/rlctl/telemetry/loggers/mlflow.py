"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.telemetry.loggers import LoggedRun

MOST_PARAMS = 100
"""Parameters in one request to MLflow."""


class MlflowLogger:
    """MLflow at MLFLOW_TRACKING_URI, or in `mlruns/` of the working directory."""

    title = "MLflow"
    package = "mlflow"
    install = "mlflow-skinny"

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
        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
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
