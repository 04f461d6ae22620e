"""rlctl: reinforcement-learning post-training of language models from one command line, or from Python.

The names of the Python API are imported when they are first used, so that `import rlctl` stays light. Editors and
type checkers find them in `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

API = {
    "load_config": "rlctl.api", "plan": "rlctl.api", "train": "rlctl.api", "generate": "rlctl.api",
    "evaluate": "rlctl.api", "read_metrics": "rlctl.api", "Loop": "rlctl.training.loop",
    "Algorithm": "rlctl.methods.rl.algorithm", "Method": "rlctl.training.method", "Metric": "rlctl.telemetry.metrics",
    "TokenBatch": "rlctl.backends.batching.batch", "RolloutSource": "rlctl.rollouts.source",
    "register_algorithm": "rlctl.api",
    "register_backend": "rlctl.backends.lookup", "RlctlError": "rlctl.errors",
}  # fmt: skip
"""The names of the Python API, and the module of each."""


def __getattr__(name: str) -> Any:
    if name not in API:
        raise AttributeError(f"module 'rlctl' has no attribute {name!r}")
    return getattr(import_module(API[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *API])
