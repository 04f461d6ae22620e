"""Former name of `rlctl.jobs.tiny_model`."""

from rlctl.jobs.tiny_model import *  # noqa: F403
