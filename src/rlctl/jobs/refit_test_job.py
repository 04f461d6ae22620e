"""The model of a refit test, and the plan that `train` would use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlctl.backends.base import resolve_dtype
from rlctl.backends.lookup import engine_backend
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.config.load import Resolved
from rlctl.methods.available import method_from_config
from rlctl.models.facts import ModelFacts
from rlctl.planner.result import Plan
from rlctl.preparation.open_model import open_model
from rlctl.preparation.planned import require_devices, runnable_plan
from rlctl.preparation.worker_specs import RunWorkersSpec, device_of, planned_workers
from rlctl.refit.session import Receive
from rlctl.settings.config import RolloutConfig

MAX_LENGTH = 256


@dataclass(frozen=True)
class RefitTestJob:
    """The model to test, and the plan that `train` would use."""

    config: RolloutConfig
    """The configuration, with the values of `plan`."""
    base_model: ModelFiles
    facts: ModelFacts
    plan: Plan
    """How `train` would lay out policy and engines."""
    receive: Receive = "auto"
    repeat: int = 2
    longest: int = MAX_LENGTH
    """Most tokens of a sequence where model.max_length is not set."""

    @property
    def dtype(self) -> str:
        return resolve_dtype(self.config.model.dtype, device_of(self.plan))

    def workers(self) -> RunWorkersSpec:
        """Return the workers of a training run, with room for the test's short completions only."""
        directory, empty = self.base_model.directory, self.base_model.megatron is not None
        return planned_workers(
            self.config, self.facts, self.plan, directory, None,
            max_length=self.max_length, dummy_weights=empty,
        )  # fmt: skip

    @property
    def max_length(self) -> int:
        return min(self.config.model.max_length or self.longest, self.facts.max_length)


def refit_test_job(resolved: Resolved, receive: Receive, repeat: int, tell: Callable[[str], None]) -> RefitTestJob:
    """Return the test of the configured model with the plan that `train` would use. The plan is checked before the
    weights are fetched."""
    resolved.require_supported()
    model = open_model(resolved.config.model, weights=False)
    planned, plan = runnable_plan(resolved, model.facts, method_from_config(resolved.config, tries_loss=False))
    engine_backend(planned.config.generation.backend).refuse(planned.config, model.facts, device_of(plan))
    require_devices(plan, resolved.config)
    model = open_model(planned.config.model, tell)
    if model.files.note:
        tell(model.files.note)
    return RefitTestJob(planned.config, model.files, model.facts, plan, receive, repeat)
