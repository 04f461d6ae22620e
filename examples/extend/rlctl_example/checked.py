"""A backend: FSDP2 with a limit on the model's size, as a template for a training engine of your own."""

from dataclasses import replace

from rlctl.backends.base import PolicySpec
from rlctl.backends.dtensor.backend import BACKEND as DTENSOR
from rlctl.errors import ConfigError
from rlctl.planner.costs.parameters import count

LARGEST = 10**10


def refuse(spec: PolicySpec) -> None:
    """Raise ConfigError for models above the limit, and for what FSDP2 cannot run."""
    if (found := count(spec.facts).total) > LARGEST:
        raise ConfigError(f"--backend checked trains up to {LARGEST:,} parameters; this model has {found:,}.")
    DTENSOR.refuse(spec)


BACKEND = replace(DTENSOR, name="checked", refuse=refuse)
