"""First stage of preparing a run: checks of the names in the configuration. Opens no model, data or package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from rlctl.backends.lookup import require_backends
from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import PLANNER, Resolved
from rlctl.config.sources import Value
from rlctl.data.mixing import source_settings
from rlctl.data.prompts import shows_images
from rlctl.errors import InputError
from rlctl.methods.available import method_from_config
from rlctl.preparation.fitting_models import what_there_is
from rlctl.preparation.places import require_places
from rlctl.preparation.start_adapter import with_base
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.loggers import wanted_loggers
from rlctl.training.method import Method

TIME, CLOCK = "model.chat_template_time", "start of the run"
"""Key of the time that chat templates write, and the origin of its default (the current time)."""


@dataclass(frozen=True)
class Named:
    """A configuration whose names exist, and its training method."""

    resolved: Resolved
    method: Method

    @property
    def config(self) -> RlctlConfig:
        return self.resolved.config


def name_run(resolved: Resolved, tell: Tell) -> Named:
    """Check the names in a configuration, and make its method. If unset, `model.images` follows from the data and
    `model.chat_template_time` is the current time.

    Raises ConfigError for values that rlctl cannot run yet, and InputError for missing backends, files, scorers,
    algorithms and packages. The model is not searched for.
    """
    resolved = with_base(resolved)
    resolved = resolved.deciding([*_images(resolved.config), *_time(resolved.config)])
    resolved.require_supported()
    config = resolved.config
    require_backends(config)
    require_places(config)
    if not config.model.name:
        missing = "No model: give --model" if config.data.name else "No model and no data: give --model and --data"
        raise InputError(f"{missing}.", what_there_is(config))
    loggers_of(resolved, tell)
    return Named(resolved, method_from_config(config))


def with_images(resolved: Resolved) -> Resolved:
    """Return the configuration with `model.images = true` if the key is unset and the data has images."""
    return resolved.deciding(_images(resolved.config))


def with_time(resolved: Resolved, time: str | None = None) -> Resolved:
    """Set `model.chat_template_time` to `time` (None: now) if it is unset."""
    return resolved.deciding(_time(resolved.config, time))


def _images(config: RlctlConfig) -> Iterator[Value]:
    if config.model.images is None and any(shows_images(dataset.data) for dataset in source_settings(config)):
        yield Value("model.images", True, PLANNER)


def _time(config: RlctlConfig, time: str | None = None) -> Iterator[Value]:
    if config.model.chat_template_time is None:
        yield Value(TIME, time or datetime.now().isoformat(timespec="seconds"), CLOCK)


def loggers_of(resolved: Resolved, tell: Tell = lambda _: None) -> tuple[str, ...]:
    """Return the names of a run's loggers, without optional loggers that are not installed."""
    return wanted_loggers(resolved.config.run, tell, optional="run.loggers" in resolved.optional)
