"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from rlctl.telemetry.loggers import LoggedRun


class WandbLogger:
    """Weights & Biases. Its variables apply: WANDB_ENTITY, WANDB_MODE=offline and others."""

    title = "Weights & Biases"
    package = "wandb"
    install = "wandb"

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
        wandb.teardown()  # end its process now: the end of Ray's session kills remaining processes
